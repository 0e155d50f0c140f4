//! The inbox in an SQLite file.

use std::time::Duration;

use sqlx::{Sqlite, SqliteConnection, Transaction, query, query_as, query_scalar};

use super::{
    Inbox, SeenMessage,
    sealed::{InboxBackend, Marked, Unseen},
};
use crate::{
    messages::{
        MessageError,
        sqlite::{ensure_open, of_transaction},
    },
    store::{
        SqliteStore, StoreError, Token,
        sql::{columns::duration, detached},
        sqlite::{
            error::failure,
            statements::{column, json, now},
        },
    },
    transaction::{error::CommitError, sqlite::has_ended},
};

impl SqliteStore {
    /// Returns the inbox of `consumer`, in the store's file.
    ///
    /// All processes that share the work of a consumer give the same name. Two consumers
    /// of one message each process it.
    ///
    /// # Errors
    ///
    /// If the name is empty, longer than 255 bytes, or has a NUL.
    pub fn inbox(&self, consumer: &str) -> Result<Inbox<Self>, MessageError> {
        Inbox::new(self.clone(), consumer)
    }
}

impl InboxBackend for SqliteStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        self.make_tables_of("inbox", DEFINITIONS).await
    }

    fn schema_sql(&self) -> String {
        DEFINITIONS.to_owned()
    }

    fn begin(
        &self,
        _: Token,
    ) -> impl Future<Output = Result<Transaction<'static, Sqlite>, CommitError>> + Send + 'static
    {
        self.begin_transaction()
    }

    async fn mark(
        &self,
        on: &mut SqliteConnection,
        consumer: &str,
        ids: &[&str],
        retention: Duration,
    ) -> Result<Marked, MessageError> {
        ensure_open(on).await?;
        let now = now();
        let marked: Vec<String> = query_scalar(MARK)
            .bind(consumer)
            .bind(json(&ids)?)
            .bind(column(now))
            .bind(column(now.saturating_add(retention)))
            .fetch_all(on)
            .await
            .map_err(of_transaction)?;
        Ok(Marked {
            seen_at: column(now),
            unseen: match marked.len() == ids.len() {
                true => Unseen::All,
                false => Unseen::Only(marked.into_iter().collect()),
            },
        })
    }

    async fn is_open(
        &self,
        on: &mut Transaction<'static, Sqlite>,
        _: Token,
    ) -> Result<bool, CommitError> {
        Ok(!has_ended(on).await?)
    }

    async fn seen_at(&self, consumer: &str, id: &str) -> Result<Option<i64>, StoreError> {
        let (consumer, id) = (consumer.to_owned(), id.to_owned());
        // Once this has the write lock, every other transaction has ended.
        let read = async move |on: &mut SqliteConnection| {
            let read = query_scalar(SEEN_AT).bind(consumer).bind(id);
            read.fetch_optional(on).await.map_err(failure)
        };
        detached(self.writer.clone().write_owned(read)).await
    }

    async fn list(
        &self,
        consumer: &str,
        after: &str,
        limit: u32,
    ) -> Result<Vec<SeenMessage>, StoreError> {
        let readers = self.readers.clone();
        let (consumer, after) = (consumer.to_owned(), after.to_owned());
        detached(async move {
            let mut connection = readers.acquire().await.map_err(failure)?;
            let rows: Vec<(String, i64)> = query_as(LIST)
                .bind(consumer)
                .bind(after)
                .bind(i64::from(limit))
                .fetch_all(&mut *connection)
                .await
                .map_err(failure)?;
            let now = column(now());
            let seen = rows.into_iter().map(|(id, seen_at)| SeenMessage {
                id,
                age: duration(now.saturating_sub(seen_at)),
            });
            Ok(seen.collect())
        })
        .await
    }

    async fn forget(&self, consumer: &str, id: &str) -> Result<bool, StoreError> {
        let (consumer, id) = (consumer.to_owned(), id.to_owned());
        let forget = async move |on: &mut SqliteConnection| {
            let forgotten = query(FORGET).bind(consumer).bind(id).execute(on).await;
            Ok(forgotten.map_err(failure)?.rows_affected() > 0)
        };
        detached(self.writer.clone().write_owned(forget)).await
    }

    async fn sweep(&self, limit: u32) -> Result<u64, StoreError> {
        let sweep = async move |on: &mut SqliteConnection| {
            let sweep = query(SWEEP).bind(column(now())).bind(i64::from(limit));
            let swept = sweep.execute(on).await.map_err(failure)?;
            Ok(swept.rows_affected())
        };
        detached(self.writer.clone().write_owned(sweep)).await
    }
}

const DEFINITIONS: &str = include_str!("../../../migrations/sqlite/0002_inbox.sql");

const MARK: &str = "
INSERT INTO idempotency_messages (consumer, message, seen_at, expires_at)
SELECT ?1, value, ?3, ?4
FROM json_each(?2)
WHERE true
ON CONFLICT DO NOTHING
RETURNING message";

const SEEN_AT: &str = "
SELECT seen_at
FROM idempotency_messages
WHERE consumer = ?1 AND message = ?2";

const LIST: &str = "
SELECT message, seen_at
FROM idempotency_messages
WHERE consumer = ?1 AND message > ?2
ORDER BY message
LIMIT ?3";

const FORGET: &str = "
DELETE FROM idempotency_messages
WHERE consumer = ?1 AND message = ?2";

const SWEEP: &str = "
DELETE FROM idempotency_messages
WHERE (consumer, message) IN (
    SELECT consumer, message
    FROM idempotency_messages
    WHERE expires_at < ?1
    ORDER BY expires_at
    LIMIT ?2)";
