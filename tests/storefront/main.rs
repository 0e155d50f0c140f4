//! The example `storefront`: its page in a browser, and its load.

#![cfg(unix)]

mod browser;
#[path = "../databases/mod.rs"]
mod databases;
mod faults;
mod load;
#[path = "../../examples/storefront/outcome.rs"]
mod outcome;
mod process;
#[cfg(target_os = "linux")]
mod stops;
mod timeline;
