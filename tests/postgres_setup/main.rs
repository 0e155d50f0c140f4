//! How the PostgreSQL store finds its place on a server: schemas, roles and
//! poolers.

mod database;
mod poolers;
mod schemas;
// What it starts is of use to more tests than those of one binary.
#[allow(dead_code)]
#[path = "../chaos/server.rs"]
mod server;
