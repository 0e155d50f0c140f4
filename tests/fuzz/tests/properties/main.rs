//! Names and fingerprints are injective. Responses and records come back unchanged.

mod fingerprints;
mod names;
mod records;
mod responses;
