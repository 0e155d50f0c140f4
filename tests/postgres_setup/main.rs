//! How the PostgreSQL store finds its place on a server: tables, schemas, roles,
//! poolers, and servers that are not there.

mod availability;
mod database;
mod errors;
mod log;
mod poolers;
mod schemas;
mod tables;
// Not every binary uses all of it.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod server;
#[allow(dead_code)]
#[path = "../chaos/proxy.rs"]
mod proxy;
