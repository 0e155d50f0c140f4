//! The turns of relays in PostgreSQL.

use std::{collections::HashMap, time::Duration};

use super::{Work, duration, event, texts, unsigned};
use crate::{
    messages::{
        outbox::sealed::{Turn, events_each},
        selection::{Candidate, select},
    },
    store::{
        StoreError, Token,
        postgres::{error::failure, parameters::micros, session::column},
    },
};

impl Work<'_> {
    /// Takes up to `limit` due turns, with payloads of up to `max_bytes` or one event.
    pub(super) async fn take(
        &mut self,
        topic: &str,
        token: Token,
        limit: u32,
        max_bytes: u64,
        lease: Duration,
    ) -> Result<Vec<Turn>, StoreError> {
        let due = self.query(|sql| &sql.due, topic).bind(i64::from(limit));
        let due = due.persistent(false).fetch_all(&mut *self.on).await;
        let due = texts(&due.map_err(failure)?)?;
        if due.is_empty() {
            return Ok(Vec::new());
        }
        let each = events_each(limit, due.len());
        let candidates = self.candidates(topic, &due, each).await?;
        let selected = select(due, candidates, each, max_bytes);

        let aggregates: Vec<String> = selected.iter().map(|of| of.aggregate.clone()).collect();
        let take = self
            .query(|sql| &sql.take, topic)
            .bind(aggregates)
            .bind(micros(lease))
            .bind(token.as_bytes().as_slice());
        let mut turns = HashMap::new();
        for row in take.fetch_all(&mut *self.on).await.map_err(failure)? {
            let aggregate: String = column(&row, "aggregate")?;
            let turn = Turn {
                aggregate: aggregate.clone(),
                attempts: unsigned(column(&row, "attempts")?),
                failing_for: duration(column(&row, "failing_for")?),
                events: Vec::new(),
                is_whole: true,
            };
            turns.insert(aggregate, turn);
        }
        let (mut aggregates, mut through) = (Vec::new(), Vec::new());
        for selected in selected {
            if let Some(turn) = turns.get_mut(&selected.aggregate) {
                turn.is_whole = selected.is_whole;
                aggregates.push(selected.aggregate);
                through.push(selected.through);
            }
        }
        let events = self.query(|sql| &sql.events, topic);
        let events = events.bind(aggregates).bind(through).bind(each as i64);
        for row in events.fetch_all(&mut *self.on).await.map_err(failure)? {
            let aggregate: &str = column(&row, "aggregate")?;
            if let Some(turn) = turns.get_mut(aggregate) {
                let event = event(column(&row, "id")?, aggregate, column(&row, "payload")?);
                turn.events.push((column(&row, "position")?, event));
            }
        }
        let mut turns: Vec<Turn> = turns.into_values().collect();
        for turn in &mut turns {
            turn.events.sort_by_key(|(position, _)| *position);
        }
        Ok(turns)
    }

    /// Returns the first `each` events of the aggregates, without reading a payload.
    async fn candidates(
        &mut self,
        topic: &str,
        aggregates: &[String],
        each: usize,
    ) -> Result<Vec<Candidate>, StoreError> {
        let sizes = self.query(|sql| &sql.sizes, topic);
        let sizes = sizes.bind(aggregates.to_vec()).bind(each as i64);
        let rows = sizes.fetch_all(&mut *self.on).await.map_err(failure)?;
        let candidates = rows.iter().map(|row| {
            Ok(Candidate {
                aggregate: column(row, "aggregate")?,
                position: column(row, "position")?,
                bytes: column::<i64>(row, "bytes")?.unsigned_abs(),
            })
        });
        candidates.collect()
    }
}
