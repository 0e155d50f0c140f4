//! Messages that are processed once, and events that are published, on PostgreSQL and
//! SQLite.

mod citus;
#[path = "../databases/mod.rs"]
mod databases;
mod inbox;
mod outbox;
#[path = "../transactions/proxy.rs"]
mod proxy;
mod shop;
