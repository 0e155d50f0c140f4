//! The HTTP contract, rule by rule: the number in a test's name is that of the
//! rule it holds the layer to.

mod api;
mod client;
mod faulty;
mod probe;
mod server;
mod stores;
mod told;

mod availability;
mod bodies;
mod concurrency;
mod extractors;
mod faults;
mod fidelity;
mod identity;
mod headers;
mod layers;
mod keys;
mod life;
mod logs;
mod operator;
// Not every binary uses all of it.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod postgres_server;
mod processes;
mod redirects;
mod sameness;
mod service;
mod standby;
mod syntax;
