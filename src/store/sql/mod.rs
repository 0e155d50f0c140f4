//! The parts that the SQL stores have in common.

pub(crate) mod batcher;
pub(crate) mod calls;
pub(crate) mod columns;
pub(crate) mod commit;
pub(crate) mod commit_error;
mod detached;
pub(crate) mod error;
pub(crate) mod pages;
pub(crate) mod reads;
pub(crate) mod single;
pub(crate) mod transaction;

pub(crate) use self::detached::detached;
