//! The outbox in an SQLite file.

mod statements;

use std::time::Duration;

use sqlx::{SqliteConnection, query, query_as, query_scalar};

use self::statements::{
    ADD_TURN, DEAD, DUE, EVENTS, IS_DUE, LAG, NEXT_POSITION, PAYLOAD, REMOVE_EVENTS, REMOVE_STREAM,
    REMOVE_TURN, REVIVE, SETTLE, SIZES, STAGE, TAKE,
};
use super::{
    Outbox,
    sealed::{OutboxBackend, Settlement, Turn, events_each},
};
use crate::{
    messages::{
        DeadEvent, Event, Lag, MessageError,
        selection::{Candidate, select},
        sqlite::{ensure_open, of_transaction},
    },
    store::{
        SqliteStore, StoreError, Token,
        sql::{columns::duration, detached, wake::Wake},
        sqlite::{
            error::failure,
            statements::{column, now},
        },
    },
};

impl SqliteStore {
    /// Returns the outbox of `topic`, in the store's file.
    ///
    /// # Errors
    ///
    /// If the name is empty, longer than 255 bytes, or has a NUL.
    pub fn outbox(&self, topic: &str) -> Result<Outbox<Self>, MessageError> {
        Outbox::new(self.clone(), topic)
    }
}

impl OutboxBackend for SqliteStore {
    async fn migrate(&self) -> Result<(), StoreError> {
        self.make_tables_of("outbox", DEFINITIONS).await
    }

    fn schema_sql(&self) -> String {
        DEFINITIONS.to_owned()
    }

    async fn stage(
        &self,
        on: &mut SqliteConnection,
        topic: &str,
        aggregate: &str,
        events: &[Event],
    ) -> Result<u64, MessageError> {
        ensure_open(on).await?;
        let now = column(now());
        let mut staged = 0;
        for event in events {
            let payload: Option<Vec<u8>> = query_scalar(PAYLOAD)
                .bind(topic)
                .bind(aggregate)
                .bind(event.id())
                .fetch_optional(&mut *on)
                .await
                .map_err(of_transaction)?;
            match payload {
                Some(payload) if payload == *event.payload() => continue,
                Some(_) => return Err(MessageError::conflict()),
                None => staged += 1,
            }
            let position: i64 = query_scalar(NEXT_POSITION)
                .bind(topic)
                .bind(aggregate)
                .fetch_one(&mut *on)
                .await
                .map_err(of_transaction)?;
            query(STAGE)
                .bind(topic)
                .bind(aggregate)
                .bind(position)
                .bind(event.id())
                .bind(&event.payload()[..])
                .bind(now)
                .execute(&mut *on)
                .await?;
            let turn = query(ADD_TURN).bind(topic).bind(aggregate).bind(now);
            turn.execute(&mut *on).await?;
        }
        Ok(staged)
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
        // An idle relay leaves the write lock to others.
        let is_due: Option<i64> = query_scalar(IS_DUE)
            .bind(&topic)
            .bind(column(now()))
            .fetch_optional(&self.readers)
            .await
            .map_err(failure)?;
        if is_due.is_none() {
            return Ok(Vec::new());
        }
        let writer = self.writer.clone();
        let take = async move {
            let take = async |on: &mut SqliteConnection| {
                take(on, &topic, token, limit, max_bytes, lease)
                    .await
                    .map_err(failure)
            };
            writer.write(take).await
        };
        detached(take).await
    }

    async fn settle(
        &self,
        topic: &str,
        settlements: &[Settlement],
    ) -> Result<Vec<String>, StoreError> {
        let topic = topic.to_owned();
        let settlements = settlements.to_vec();
        let settle = async move |on: &mut SqliteConnection| {
            let mut settled = Vec::new();
            for settlement in settlements {
                if settle(on, &topic, &settlement).await.map_err(failure)? {
                    settled.push(settlement.aggregate);
                }
            }
            Ok(settled)
        };
        detached(self.writer.clone().write_owned(settle)).await
    }

    async fn dead(&self, topic: &str, limit: u32) -> Result<Vec<DeadEvent>, StoreError> {
        let rows: Vec<DeadRow> = query_as(DEAD)
            .bind(topic)
            .bind(None::<String>)
            .bind(i64::from(limit))
            .fetch_all(&self.readers)
            .await
            .map_err(failure)?;
        let now = column(now());
        let dead = rows.into_iter().map(
            |(aggregate, attempts, failing_since, _, id, payload): DeadRow| DeadEvent {
                event: Event::new(id, aggregate, payload),
                attempts,
                failing_for: failing_since.map_or(Duration::ZERO, |since| age(now, since)),
            },
        );
        Ok(dead.collect())
    }

    async fn revive(&self, topic: &str, id: &str, discards: bool) -> Result<bool, StoreError> {
        let (topic, id) = (topic.to_owned(), id.to_owned());
        let revive = async move |on: &mut SqliteConnection| {
            let revived = revive(on, &topic, &id, discards).await;
            revived.map_err(failure)
        };
        detached(self.writer.clone().write_owned(revive)).await
    }

    async fn lag(&self, topic: &str) -> Result<Lag, StoreError> {
        let (events, oldest, dead): (i64, Option<i64>, i64) = query_as(LAG)
            .bind(topic)
            .fetch_one(&self.readers)
            .await
            .map_err(failure)?;
        let now = column(now());
        Ok(Lag {
            events: events.unsigned_abs(),
            oldest: oldest.map_or(Duration::ZERO, |oldest| age(now, oldest)),
            dead: dead.unsigned_abs(),
            oldest_snapshot: None,
        })
    }

    fn wake(&self) -> &Wake {
        &self.wake
    }
}

async fn take(
    on: &mut SqliteConnection,
    topic: &str,
    token: Token,
    limit: u32,
    max_bytes: u64,
    lease: Duration,
) -> Result<Vec<Turn>, sqlx::Error> {
    let (now, lease_end) = (now(), now().saturating_add(lease));
    let due: Vec<String> = query_scalar(DUE)
        .bind(topic)
        .bind(column(now))
        .bind(i64::from(limit))
        .fetch_all(&mut *on)
        .await?;
    let each = events_each(limit, due.len());
    let mut candidates = Vec::new();
    for aggregate in &due {
        let sizes: Vec<(i64, i64)> = query_as(SIZES)
            .bind(topic)
            .bind(aggregate)
            .bind(each as i64)
            .fetch_all(&mut *on)
            .await?;
        let candidate = |(position, bytes): (i64, i64)| Candidate {
            aggregate: aggregate.clone(),
            position,
            bytes: bytes.unsigned_abs(),
        };
        candidates.extend(sizes.into_iter().map(candidate));
    }
    let mut turns = Vec::new();
    for selected in select(due, candidates, each, max_bytes) {
        let aggregate = selected.aggregate;
        let (attempts, failing_since): (u32, i64) = query_as(TAKE)
            .bind(topic)
            .bind(&aggregate)
            .bind(column(now))
            .bind(column(lease_end))
            .bind(token.as_bytes().as_slice())
            .fetch_one(&mut *on)
            .await?;
        let rows: Vec<(i64, String, Vec<u8>)> = query_as(EVENTS)
            .bind(topic)
            .bind(&aggregate)
            .bind(selected.through)
            .fetch_all(&mut *on)
            .await?;
        let event = |(position, id, payload): (i64, String, Vec<u8>)| {
            (position, Event::new(id, &*aggregate, payload))
        };
        turns.push(Turn {
            attempts,
            failing_for: age(column(now), failing_since),
            events: rows.into_iter().map(event).collect(),
            is_whole: selected.is_whole,
            aggregate,
        });
    }
    Ok(turns)
}

/// Returns false if the turn has another token.
async fn settle(
    on: &mut SqliteConnection,
    topic: &str,
    settlement: &Settlement,
) -> Result<bool, sqlx::Error> {
    let Settlement {
        aggregate,
        token,
        through,
        attempts,
        pause,
        is_all,
    } = settlement;
    let now = now();
    let settled = query(SETTLE)
        .bind(topic)
        .bind(aggregate)
        .bind(token.as_bytes().as_slice())
        .bind(pause.map(|pause| column(now.saturating_add(pause))))
        .bind(attempts)
        .bind(through)
        .bind(column(now))
        .execute(&mut *on)
        .await?;
    if settled.rows_affected() == 0 {
        return Ok(false);
    }
    query(REMOVE_EVENTS)
        .bind(topic)
        .bind(aggregate)
        .bind(through)
        .execute(&mut *on)
        .await?;
    if *is_all {
        let remove = query(REMOVE_TURN).bind(topic).bind(aggregate);
        if remove.execute(&mut *on).await?.rows_affected() > 0 {
            let remove = query(REMOVE_STREAM).bind(topic).bind(aggregate);
            remove.execute(&mut *on).await?;
        }
    }
    Ok(true)
}

async fn revive(
    on: &mut SqliteConnection,
    topic: &str,
    id: &str,
    discards: bool,
) -> Result<bool, sqlx::Error> {
    let dead: Option<DeadRow> = query_as(DEAD)
        .bind(topic)
        .bind(id)
        .bind(1)
        .fetch_optional(&mut *on)
        .await?;
    let Some((aggregate, _, _, position, ..)) = dead else {
        return Ok(false);
    };
    if discards {
        query(REMOVE_EVENTS)
            .bind(topic)
            .bind(&aggregate)
            .bind(position)
            .execute(&mut *on)
            .await?;
    }
    let revive = query(REVIVE).bind(topic).bind(&aggregate);
    revive.bind(column(now())).execute(on).await?;
    Ok(true)
}

/// Aggregate, attempts and the first of them, position, id, payload.
type DeadRow = (String, u32, Option<i64>, i64, String, Vec<u8>);

fn age(now: i64, then: i64) -> Duration {
    duration(now.saturating_sub(then))
}

const DEFINITIONS: &str = include_str!("../../../../migrations/sqlite/0003_outbox.sql");
