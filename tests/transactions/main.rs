//! What a handler commits in a transaction of its own: with PostgreSQL and with
//! SQLite, through the layer.
//!
//! After each story the books are compared: an order is there if and only if the
//! record was completed by the same claim (I5).

mod answer;
mod commit;
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
mod service;
mod shop;
mod tenants;
mod uncommitted;
