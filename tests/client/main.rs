//! The client's side: its keys, its retries, and both against a real service.

mod example;
mod keys;
mod retries;
mod sockets;
mod service;
