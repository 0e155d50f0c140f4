//! Names and fingerprints are injective, and what is recorded comes back unchanged.

mod fingerprints;
mod names;
mod records;
mod responses;
