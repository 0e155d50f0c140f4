//! Messages that are processed once.

mod batches;
mod crashes;
mod deliveries;
mod kept;
mod limits;
mod lost;
mod received;
