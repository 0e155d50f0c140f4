//! Events that are published if and only if their transaction commits.

mod crashes;
mod dead;
mod ordered;
mod relay;
mod relayed;
mod staged;
mod tables;
