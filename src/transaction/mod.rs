//! Completion inside the handler's own transaction: its business writes and its
//! response are committed together, or neither is.

#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod commit;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod error;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
mod open;

use bytes::Bytes;

#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub use self::{
    commit::{CommitFuture, CommitResponse, Committed},
    error::{CommitError, CommitErrorKind},
    open::OperationTransaction,
};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use self::{
    commit::{Desk, ENDED, Verdict, commit},
    open::Transactions,
};

/// Marks the response that the layer need not look up in the record.
#[derive(Clone, Copy)]
pub(crate) struct AsCommitted;

/// How the operation's own transaction ended, as the layer knows it whatever
/// the handler makes of it.
#[derive(Clone, Debug, Default)]
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    expect(dead_code, reason = "only the SQL stores have transactions")
)]
pub(crate) enum Transacted {
    /// There was none.
    #[default]
    Not,
    /// It is on its way.
    Pending,
    Committed {
        response: Bytes,
    },
    Aborted,
    Superseded,
    Unknown,
}
