//! Messages that are processed once, on PostgreSQL and SQLite.

mod batches;
mod crashes;
#[path = "../databases/mod.rs"]
mod databases;
mod deliveries;
mod kept;
mod limits;
mod lost;
#[path = "../transactions/proxy.rs"]
mod proxy;
mod received;
mod shop;
