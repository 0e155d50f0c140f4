//! The database's part in an inbox.

use std::{collections::HashSet, time::Duration};

use sqlx::Transaction;

use super::SeenMessage;
use crate::{
    messages::{Connection, MessageError, sealed::MessageBackend},
    store::{StoreError, Token},
    transaction::error::CommitError,
};

/// The database's part in an inbox.
pub trait InboxBackend: MessageBackend {
    fn migrate(&self) -> impl Future<Output = Result<(), StoreError>> + Send;

    fn schema_sql(&self) -> String;

    /// Begins a transaction, which [`is_open`](Self::is_open) knows by `token`.
    fn begin(
        &self,
        token: Token,
    ) -> impl Future<Output = Result<Transaction<'static, Self::Sql>, CommitError>> + Send + 'static;

    /// Marks the ids that have no mark, in their order. Each stands there once.
    fn mark(
        &self,
        on: &mut Connection<Self>,
        consumer: &str,
        ids: &[&str],
        retention: Duration,
    ) -> impl Future<Output = Result<Marked, MessageError>> + Send;

    /// Returns whether the transaction has not ended.
    fn is_open(
        &self,
        on: &mut Transaction<'static, Self::Sql>,
        token: Token,
    ) -> impl Future<Output = Result<bool, CommitError>> + Send;

    /// Returns when the message was marked, once no transaction can change that.
    fn seen_at(
        &self,
        consumer: &str,
        id: &str,
    ) -> impl Future<Output = Result<Option<i64>, StoreError>> + Send;

    fn list(
        &self,
        consumer: &str,
        after: &str,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<SeenMessage>, StoreError>> + Send;

    fn forget(
        &self,
        consumer: &str,
        id: &str,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Removes up to `limit` expired marks of all consumers.
    fn sweep(&self, limit: u32) -> impl Future<Output = Result<u64, StoreError>> + Send;
}

/// What a call has marked.
#[derive(Debug)]
pub struct Marked {
    pub(crate) seen_at: i64,
    pub(crate) unseen: Unseen,
}

/// The ids that had no mark.
#[derive(Debug)]
pub(crate) enum Unseen {
    /// All of the call, so that no id has to be read.
    All,
    Only(HashSet<String>),
}

impl Unseen {
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Only(ids) if ids.is_empty())
    }
}
