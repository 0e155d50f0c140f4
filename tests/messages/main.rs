//! Messages that are processed once, and events that are published, on PostgreSQL and
//! SQLite.

mod citus;
#[path = "../databases/mod.rs"]
mod databases;
mod inbox;
mod outbox;
mod pooler;
#[path = "../transactions/proxy.rs"]
mod proxy;
mod shop;
