//! The outbox in PostgreSQL.

mod turns;

use std::{collections::HashSet, time::Duration};

use bytes::Bytes;
use sqlx::{
    Connection as _, PgConnection, Postgres, Row as _, SqlStr, postgres::PgArguments, query,
    query::Query, query_scalar,
};

use super::{
    Outbox,
    sealed::{OutboxBackend, Settlement, Turn},
};
use crate::{
    messages::{DeadEvent, Event, Lag, MessageError},
    store::{
        PostgresEngine, PostgresStore, StoreError, Token,
        postgres::{
            Inner,
            error::failure,
            outbox::Statements,
            parameters::micros,
            session::{Session, column},
            units::OUTBOX,
        },
        sql::{columns::duration, detached, wake::Wake},
    },
};

impl PostgresStore {
    /// Returns the outbox of `topic`, in the schema of the store's tables.
    ///
    /// # Errors
    ///
    /// If the name is empty, longer than 255 bytes, or has a NUL.
    pub fn outbox(&self, topic: &str) -> Result<Outbox<Self>, MessageError> {
        Outbox::new(self.clone(), topic)
    }
}

impl Outbox<PostgresStore> {
    /// Checks that the tables of the outbox are as this version needs them, and that the
    /// store's role may use them.
    ///
    /// # Errors
    ///
    /// If the server cannot be reached. If a table, column, index or privilege is missing
    /// or differs; the error names each, with a remedy.
    pub async fn check_schema(&self) -> Result<(), StoreError> {
        self.store.check_units(&[&OUTBOX]).await
    }

    /// Returns the GRANT statements for a role that stages or publishes events and makes no
    /// table, one in each line. `role` is quoted as an identifier.
    #[must_use]
    pub fn grants_for(&self, role: &str) -> String {
        self.store.grants(role, &[&OUTBOX])
    }

    /// Sets whether the relays of other processes are notified of events. Defaults to
    /// false: they find events by [polling](crate::messages::Relay::poll), and those of
    /// this process are woken in any case.
    ///
    /// Set it where events are staged, and where they are relayed. The store's own `commit`
    /// then sends a notification, and so does [`wake`](Outbox::wake). It is sent within 5
    /// milliseconds, once for all commits of that time. A relay keeps a connection of its
    /// own to listen. It polls too, since a notification may be lost with its connection.
    ///
    /// Nothing is sent on Citus, or behind a pooler in transaction mode.
    #[must_use]
    pub fn notifications(mut self, notifies: bool) -> Self {
        self.notifies = notifies;
        self
    }
}

impl OutboxBackend for PostgresStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        self.migrate_units(&[&OUTBOX]).await
    }

    fn schema_sql(&self) -> String {
        self.inner.connector.schema.definitions(&OUTBOX)
    }

    async fn stage(
        &self,
        on: &mut PgConnection,
        topic: &str,
        aggregate: &str,
        events: &[Event],
    ) -> Result<u64, MessageError> {
        let bound = |statement: &SqlStr| {
            query(statement.clone())
                .persistent(self.inner.transactions.persistent)
                .bind(topic.to_owned())
                .bind(aggregate.to_owned())
                .bind(events.iter().map(Event::id).collect::<Vec<_>>())
                .bind(
                    events
                        .iter()
                        .map(|event| &event.payload()[..])
                        .collect::<Vec<_>>(),
                )
        };
        let explained = |error| self.explained(error, &OUTBOX);
        let sql = &self.inner.outbox;
        let mut all_staged = 0;
        loop {
            let staged = match events {
                [event] => {
                    let stage = query(sql.stage_one.clone())
                        .persistent(self.inner.transactions.persistent)
                        .bind(topic)
                        .bind(aggregate)
                        .bind(event.id())
                        .bind(&event.payload()[..]);
                    let staged = stage.execute(&mut *on).await;
                    staged.map_err(explained)?.rows_affected() as usize
                }
                _ => {
                    let stage = bound(&sql.stage).bind(events.len() as i64);
                    stage.fetch_all(&mut *on).await.map_err(explained)?.len()
                }
            };
            all_staged += staged as u64;
            if staged == events.len() {
                return Ok(all_staged);
            }
            let found = bound(&sql.found).fetch_one(&mut *on).await;
            let found = found.map_err(explained)?;
            if !column::<bool>(&found, "is_same")? {
                return Err(MessageError::conflict());
            }
            // A relay may have published one that was staged before. The next pass stages it.
            // No other transaction can: the stream is locked.
            let ids: HashSet<_> = events.iter().map(Event::id).collect();
            if column::<i64>(&found, "ids")? == ids.len() as i64 {
                return Ok(all_staged);
            }
        }
    }

    async fn take(
        &self,
        topic: &str,
        token: Token,
        limit: u32,
        max_bytes: u64,
        lease: Duration,
    ) -> Result<Vec<Turn>, StoreError> {
        let topic = topic.to_owned();
        detached(self.clone().work(async move |work: &mut Work<'_>| {
            work.take(&topic, token, limit, max_bytes, lease).await
        }))
        .await
    }

    async fn settle(
        &self,
        topic: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<String>, StoreError> {
        let topic = topic.to_owned();
        let columns = Columns::of(settlements);
        detached(self.clone().work(async move |work: &mut Work<'_>| {
            let settle = columns.bind(work.query(|sql| &sql.settle, &topic));
            let settled = settle.fetch_all(&mut *work.on).await.map_err(failure)?;
            let settled = settled.iter().map(|row| {
                let aggregate: String = column(row, "aggregate")?;
                Ok((aggregate, column(row, "token")?))
            });
            let settled: HashSet<(String, Vec<u8>)> = settled.collect::<Result<_, _>>()?;
            let (aggregates, through) = columns.published(&settled);
            if !aggregates.is_empty() {
                let publish = work.query(|sql| &sql.remove_events, &topic);
                let publish = publish.bind(aggregates).bind(through);
                publish.execute(&mut *work.on).await.map_err(failure)?;
            }
            let empty = columns.emptied(&settled);
            if !empty.is_empty() {
                work.remove(&topic, empty).await?;
            }
            Ok(settled
                .into_iter()
                .map(|(aggregate, _)| aggregate)
                .collect())
        }))
        .await
    }

    async fn dead(&self, topic: &str, limit: u32) -> Result<Vec<DeadEvent>, StoreError> {
        let topic = topic.to_owned();
        detached(self.clone().work(async move |work: &mut Work<'_>| {
            let dead = work.query(|sql| &sql.dead, &topic).bind(None::<String>);
            let dead = dead.bind(i64::from(limit)).fetch_all(&mut *work.on).await;
            let dead = dead.map_err(failure)?;
            let dead = dead.iter().map(|row| {
                let aggregate: &str = column(row, "aggregate")?;
                Ok(DeadEvent {
                    event: event(column(row, "id")?, aggregate, column(row, "payload")?),
                    attempts: unsigned(column(row, "attempts")?),
                    failing_for: duration(column(row, "failing_for")?),
                })
            });
            dead.collect()
        }))
        .await
    }

    async fn revive(&self, topic: &str, id: &str, discards: bool) -> Result<bool, StoreError> {
        let (topic, id) = (topic.to_owned(), id.to_owned());
        detached(self.clone().work(async move |work: &mut Work<'_>| {
            let discarded = id.clone();
            let dead = work.query(|sql| &sql.dead, &topic).bind(id).bind(1_i64);
            let dead = dead.fetch_optional(&mut *work.on).await.map_err(failure)?;
            let Some(dead) = dead else {
                return Ok(false);
            };
            let aggregate: String = column(&dead, "aggregate")?;
            // The guard is checked again: another operator may have done so since.
            let revive = work.query(|sql| &sql.revive, &topic).bind(&aggregate);
            let revived = revive.execute(&mut *work.on).await.map_err(failure)?;
            let is_revived = revived.rows_affected() > 0;
            if is_revived && discards {
                let position: i64 = column(&dead, "position")?;
                let discard = work.query(|sql| &sql.remove_event, &topic);
                // Positions begin again: another operator may have requeued it since.
                let discard = discard.bind(aggregate).bind(position).bind(discarded);
                discard.execute(&mut *work.on).await.map_err(failure)?;
            }
            Ok(is_revived)
        }))
        .await
    }

    async fn lag(&self, topic: &str) -> Result<Lag, StoreError> {
        let topic = topic.to_owned();
        detached(self.clone().work(async move |work: &mut Work<'_>| {
            let lag = work.query(|sql| &sql.lag, &topic);
            let lag = lag.fetch_one(&mut *work.on).await.map_err(failure)?;
            let dead = work.query(|sql| &sql.dead_turns, &topic);
            let dead = dead.fetch_one(&mut *work.on).await.map_err(failure)?;
            let oldest = query_scalar(work.sql.oldest_snapshot.clone());
            let oldest = oldest.persistent(work.persistent).fetch_one(&mut *work.on);
            let oldest: Option<i64> = oldest.await.map_err(failure)?;
            Ok(Lag {
                events: column::<i64>(&lag, "events")?.unsigned_abs(),
                oldest: duration(column(&lag, "oldest")?),
                dead: column::<i64>(&dead, "dead")?.unsigned_abs(),
                oldest_snapshot: oldest.map(duration),
            })
        }))
        .await
    }

    fn wake(&self) -> &Wake {
        &self.inner.wake
    }

    fn notify_others(&self) {
        self.notify_relays();
    }

    async fn listen(self) {
        self.listen_for_events().await;
    }
}

/// The statements of one call, in one transaction.
struct Work<'c> {
    on: &'c mut PgConnection,
    sql: &'c Statements,
    persistent: bool,
    engine: PostgresEngine,
}

impl PostgresStore {
    /// Runs `work` in a transaction on one of the connections for operators.
    async fn work<T>(
        self,
        work: impl AsyncFnOnce(&mut Work<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let run = async |inner: &Inner, session: &mut Session<'_>| {
            let persistent = session.persistent;
            let begun = session.connection.begin().await;
            let mut transaction = begun.map_err(failure)?;
            let answer = work(&mut Work {
                on: &mut transaction,
                sql: &inner.outbox,
                persistent,
                engine: inner.connector.schema.engine,
            })
            .await?;
            transaction.commit().await.map_err(failure)?;
            Ok(answer)
        };
        self.operate(run).await
    }
}

impl Work<'_> {
    /// Returns a query about the topic.
    fn query(
        &self,
        statement: fn(&Statements) -> &SqlStr,
        topic: &str,
    ) -> Query<'static, Postgres, PgArguments> {
        query(statement(self.sql).clone())
            .persistent(self.persistent)
            .bind(topic.to_owned())
    }

    /// Removes the turns of these aggregates that have no event.
    ///
    /// An event that is being staged holds the lock of its stream. Its turn stays.
    async fn remove(&mut self, topic: &str, aggregates: Vec<String>) -> Result<(), StoreError> {
        // Citus locks the rows of one shard in a statement.
        let groups = match self.engine {
            PostgresEngine::Postgres => vec![aggregates],
            _ => aggregates
                .into_iter()
                .map(|aggregate| vec![aggregate])
                .collect(),
        };
        for aggregates in groups {
            let lock = self.query(|sql| &sql.lock, topic).bind(aggregates);
            let locked = lock.fetch_all(&mut *self.on).await.map_err(failure)?;
            // In a statement of its own, which sees what was staged before the lock.
            let remove = self.query(|sql| &sql.remove_turns, topic);
            let remove = remove.bind(texts(&locked)?).fetch_all(&mut *self.on);
            let removed = texts(&remove.await.map_err(failure)?)?;
            let remove = self.query(|sql| &sql.remove_streams, topic).bind(removed);
            remove.execute(&mut *self.on).await.map_err(failure)?;
        }
        Ok(())
    }
}

/// Settlements as arrays of a statement.
struct Columns {
    aggregates: Vec<String>,
    tokens: Vec<Vec<u8>>,
    pauses: Vec<Option<i64>>,
    attempts: Vec<i64>,
    through: Vec<i64>,
    is_all: Vec<bool>,
}

impl Columns {
    fn of(settlements: &[Settlement]) -> Self {
        let settlements = || settlements.iter();
        Self {
            aggregates: settlements().map(|of| of.aggregate.clone()).collect(),
            tokens: settlements()
                .map(|of| of.token.as_bytes().to_vec())
                .collect(),
            pauses: settlements().map(|of| of.pause.map(micros)).collect(),
            attempts: settlements().map(|of| of.attempts.into()).collect(),
            through: settlements().map(|of| of.through).collect(),
            is_all: settlements().map(|of| of.is_all).collect(),
        }
    }

    fn bind<'q>(
        &self,
        query: Query<'q, Postgres, PgArguments>,
    ) -> Query<'q, Postgres, PgArguments> {
        query
            .bind(self.aggregates.clone())
            .bind(self.tokens.clone())
            .bind(self.pauses.clone())
            .bind(self.attempts.clone())
            .bind(self.through.clone())
    }

    /// Returns up to which position the events of the settled turns are published.
    fn published(&self, settled: &HashSet<(String, Vec<u8>)>) -> (Vec<String>, Vec<i64>) {
        self.settled(settled)
            .map(|index| (self.aggregates[index].clone(), self.through[index]))
            .filter(|(_, through)| *through > 0)
            .unzip()
    }

    /// Returns the aggregates of the settled turns all of whose events are published.
    fn emptied(&self, settled: &HashSet<(String, Vec<u8>)>) -> Vec<String> {
        self.settled(settled)
            .filter(|index| self.is_all[*index])
            .map(|index| self.aggregates[index].clone())
            .collect()
    }

    /// Returns the places of the settlements whose turns were settled.
    ///
    /// Positions begin again after all events of an aggregate were published. A settlement
    /// of an earlier turn says nothing about the events of a later one.
    fn settled(&self, settled: &HashSet<(String, Vec<u8>)>) -> impl Iterator<Item = usize> {
        let turns = self.aggregates.iter().zip(&self.tokens).enumerate();
        turns
            .filter(|(_, (aggregate, token))| {
                settled.contains(&((*aggregate).clone(), (*token).clone()))
            })
            .map(|(index, _)| index)
    }
}

/// Returns the first column of each row.
fn texts(rows: &[sqlx::postgres::PgRow]) -> Result<Vec<String>, StoreError> {
    let texts = rows.iter().map(|row| row.try_get(0).map_err(failure));
    texts.collect()
}

fn event(id: &str, aggregate: &str, payload: Vec<u8>) -> Event {
    Event::new(id, aggregate, Bytes::from(payload))
}

fn unsigned(attempts: i64) -> u32 {
    attempts.try_into().unwrap_or_default()
}
