//! Fuzz targets: functions that take any bytes and panic if a promise is broken.
//!
//! Each target compares the crate with a reference that is slow and obvious, through the
//! public interface. `tests/fuzz/libfuzzer` runs a target with libFuzzer, and the test
//! `targets` of this package runs all of them for a short time on stable Rust.

mod json;
mod key;
mod media_type;
mod multipart;
mod probe;
mod problem;
mod record;
mod record_store;
mod sealed;
mod sequence;

pub use self::{
    json::json, key::key, media_type::media_type, multipart::multipart, problem::problem,
    record::record, sealed::sealed, sequence::sequence,
};
