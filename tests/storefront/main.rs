//! The example `storefront`: its page in a browser, and its load.

#![cfg(unix)]

mod browser;
#[path = "../databases/mod.rs"]
mod databases;
mod faults;
mod load;
mod process;
mod timeline;
