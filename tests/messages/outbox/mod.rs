//! Events that are published if and only if their transaction commits.

mod buffered;
mod committed;
mod crashes;
mod dead;
mod notified;
mod ordered;
pub(crate) mod relay;
mod relayed;
mod staged;
mod tables;
mod told;
