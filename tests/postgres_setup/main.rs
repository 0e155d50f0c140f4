//! How the PostgreSQL store finds its place on a server: schemas, roles and
//! poolers.

mod database;
mod poolers;
mod schemas;
// Not every binary uses all of it.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod server;
