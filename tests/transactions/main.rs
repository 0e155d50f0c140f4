//! Effects that a handler commits with its response, on PostgreSQL and SQLite,
//! through the layer.
//!
//! Each test checks that an order exists if and only if its record was completed
//! by the same claim (I5).

mod answer;
mod commit;
#[path = "../databases/mod.rs"]
mod databases;
mod disconnect;
mod failures;
mod fence;
mod foreign;
mod gone;
mod locked;
mod log;
mod mounted;
mod process;
mod proxy;
mod readme;
mod response;
mod rollback;
#[path = "../scan/mod.rs"]
mod scan;
mod sealed;
mod service;
mod shop;
mod tenants;
mod uncommitted;
