//! The inbox in PostgreSQL.

use std::{sync::Arc, time::Duration};

use sqlx::{
    AssertSqlSafe, Connection as _, PgConnection, Postgres, SqlSafeStr as _, Transaction, query,
    query_as, query_scalar,
};

use super::{
    Inbox, SeenMessage,
    sealed::{InboxBackend, Marked, Unseen},
};
use crate::{
    messages::{MessageError, MessageErrorKind},
    store::{
        PostgresStore, StoreError, Token,
        postgres::{
            Inner,
            error::failure,
            parameters::micros,
            session::{Session, column},
            units::INBOX,
        },
        sql::{columns::duration, detached},
    },
    transaction::error::CommitError,
};

impl PostgresStore {
    /// Returns the inbox of `consumer`, in the schema of the store's tables.
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

impl Inbox<PostgresStore> {
    /// Checks that the table of the inbox is as this version needs it, and that the
    /// store's role may use it.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached. If a table, column, index or privilege is missing
    /// or differs; the error names each, with a remedy.
    pub async fn check_schema(&self) -> Result<(), StoreError> {
        self.store.check_units(&[&INBOX]).await
    }

    /// Returns the GRANT statements for a role that uses the inbox and makes no table, one
    /// in each line. `role` is quoted as an identifier.
    #[must_use]
    pub fn grants_for(&self, role: &str) -> String {
        self.store.grants(role, &[&INBOX])
    }
}

impl InboxBackend for PostgresStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        self.migrate_units(&[&INBOX]).await
    }

    fn schema_sql(&self) -> String {
        self.inner.connector.schema.definitions(&INBOX)
    }

    fn begin(
        &self,
        token: Token,
    ) -> impl Future<Output = Result<Transaction<'static, Postgres>, CommitError>> + Send + 'static
    {
        let store = self.clone();
        let begin = self.inner.transactions.begin.as_str();
        let token = hex::encode(token.as_bytes());
        let begin = format!("{begin}; SET LOCAL tower_idempotency.completes = '{token}'");
        async move { store.begin_with(AssertSqlSafe(begin).into_sql_str()).await }
    }

    async fn mark(
        &self,
        on: &mut PgConnection,
        consumer: &str,
        ids: &[&str],
        retention: Duration,
    ) -> Result<Marked, MessageError> {
        let Inner {
            transactions,
            inbox: sql,
            ..
        } = &*self.inner;
        if let [id] = ids {
            let seen_at: Option<i64> = query_scalar(sql.mark_one.clone())
                .persistent(transactions.persistent)
                .bind(consumer)
                .bind(*id)
                .bind(micros(retention))
                .fetch_optional(&mut *on)
                .await
                .map_err(|error| self.explained(error, &INBOX))?;
            if let Some(seen_at) = seen_at {
                let unseen = Unseen::All;
                return Ok(Marked { seen_at, unseen });
            }
            // The statement for several ids finds out why.
        }
        let (isolation, seen_at, count, marked): (String, i64, i64, Option<Vec<String>>) =
            query_as(sql.mark.clone())
                .persistent(transactions.persistent)
                .bind(consumer)
                .bind(ids)
                .bind(micros(retention))
                .fetch_one(on)
                .await
                .map_err(|error| self.explained(error, &INBOX))?;
        if isolation != "read committed" {
            return Err(MessageError::new(
                MessageErrorKind::Transaction,
                format!(
                    "the transaction is {}, where a concurrent delivery cannot be seen: \
                     begin it with `BEGIN ISOLATION LEVEL READ COMMITTED`",
                    isolation.to_uppercase()
                ),
            ));
        }
        let unseen = match count == ids.len() as i64 {
            true => Unseen::All,
            false => Unseen::Only(marked.into_iter().flatten().collect()),
        };
        Ok(Marked { seen_at, unseen })
    }

    async fn is_open(
        &self,
        on: &mut Transaction<'static, Postgres>,
        token: Token,
    ) -> Result<bool, CommitError> {
        Ok(on.is_in_transaction() && self.is_still_open(on, token).await?)
    }

    async fn seen_at(&self, consumer: &str, id: &str) -> Result<Option<i64>, StoreError> {
        let inner = Arc::clone(&self.inner);
        let (consumer, id) = (consumer.to_owned(), id.to_owned());
        detached(async move {
            let sql = &inner.inbox;
            let look = async |session: &mut Session<'_>| {
                // A mark of its own waits until the transaction has ended.
                let mark = session
                    .query(&sql.mark)
                    .bind(&consumer)
                    .bind(vec![id.clone()])
                    .bind(0_i64);
                let mut probe = session.connection.begin().await.map_err(failure)?;
                let marked = mark.fetch_one(&mut *probe).await.map_err(failure)?;
                let count: i64 = column(&marked, "count")?;
                probe.rollback().await.map_err(failure)?;
                if count > 0 {
                    return Ok(None);
                }
                let read = session.query(&sql.seen_at).bind(&consumer).bind(&id);
                let row = session.row(read).await?;
                row.map(|row| column(&row, "seen_at")).transpose()
            };
            inner.transactions.lookup_pool.run(look).await
        })
        .await
    }

    async fn list(
        &self,
        consumer: &str,
        after: &str,
        limit: u32,
    ) -> Result<Vec<SeenMessage>, StoreError> {
        let (consumer, after) = (consumer.to_owned(), after.to_owned());
        let list = async move |inner: &Inner, session: &mut Session<'_>| {
            let list = session.query(&inner.inbox.list);
            let list = list.bind(consumer).bind(after).bind(i64::from(limit));
            let rows = session.rows(list).await?;
            let seen = rows.iter().map(|row| {
                let age: i64 = column(row, "age")?;
                Ok(SeenMessage {
                    id: column(row, "message")?,
                    age: duration(age),
                })
            });
            seen.collect()
        };
        detached(self.clone().operate(list)).await
    }

    async fn forget(&self, consumer: &str, id: &str) -> Result<bool, StoreError> {
        let (consumer, id) = (consumer.to_owned(), id.to_owned());
        let forget = async move |inner: &Inner, session: &mut Session<'_>| {
            let forget = session.query(&inner.inbox.forget);
            session.changes(forget.bind(consumer).bind(id)).await
        };
        detached(self.clone().operate(forget)).await
    }

    async fn sweep(&self, limit: u32) -> Result<u64, StoreError> {
        let sweep = async move |inner: &Inner, session: &mut Session<'_>| {
            let due = session.query(&inner.inbox.due).persistent(false);
            let due = session.rows(due.bind(i64::from(limit))).await?;
            let (mut consumers, mut ids) = (Vec::new(), Vec::new());
            for row in &due {
                consumers.push(column::<&str>(row, "consumer")?);
                ids.push(column::<&str>(row, "message")?);
            }
            let remove = query(inner.inbox.remove.clone())
                .persistent(session.persistent)
                .bind(consumers)
                .bind(ids);
            let removed = remove.execute(&mut *session.connection).await;
            Ok(removed.map_err(failure)?.rows_affected())
        };
        detached(self.clone().operate(sweep)).await
    }
}
