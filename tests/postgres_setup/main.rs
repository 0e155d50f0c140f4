//! The PostgreSQL store on its server: tables, schemas, roles, poolers, and
//! servers that do not answer.

mod availability;
mod database;
#[path = "../databases/mod.rs"]
mod databases;
mod errors;
mod log;
mod poolers;
mod schemas;
mod tables;
#[path = "../ports/mod.rs"]
mod ports;
// Not every test binary uses all of it.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod server;
#[allow(dead_code)]
#[path = "../chaos/proxy.rs"]
mod proxy;
