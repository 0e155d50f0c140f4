//! The parts that the SQL stores have in common.

pub(crate) mod batcher;
pub(crate) mod calls;
pub(crate) mod columns;
pub(crate) mod commit;
pub(crate) mod commit_error;
mod detached;
pub(crate) mod error;
pub(crate) mod pages;
#[cfg(feature = "postgres")]
mod parameters;
pub(crate) mod reads;
pub(crate) mod single;
pub(crate) mod transaction;

pub(crate) use self::detached::detached;
#[cfg(feature = "postgres")]
pub(crate) use self::{
    columns::{
        COMPLETED, GrantColumns, IN_PROGRESS, NamedColumns, RecordColumns, UNKNOWN, name, released,
    },
    error::failure,
    pages::{MAX_EXAMINED, first_name, page, page_limit},
    parameters::{Resolved, claim_status, fence, micros, reclaim_as, repeated},
};
