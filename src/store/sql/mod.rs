//! The parts that the SQL stores have in common.

pub(crate) mod batcher;
pub(crate) mod calls;
pub(crate) mod columns;
mod detached;
pub(crate) mod error;
pub(crate) mod pages;
pub(crate) mod reads;
pub(crate) mod single;
#[cfg(feature = "outbox")]
pub(crate) mod wake;

pub(crate) use self::detached::detached;
