//! The statements of the outbox in an SQLite file.

pub(super) const PAYLOAD: &str = "
SELECT payload
FROM idempotency_events
WHERE topic = ?1 AND aggregate = ?2 AND id = ?3";

pub(super) const NEXT_POSITION: &str = "
INSERT INTO idempotency_streams (topic, aggregate, last_position)
VALUES (?1, ?2, 1)
ON CONFLICT (topic, aggregate) DO UPDATE SET last_position = last_position + 1
RETURNING last_position";

pub(super) const STAGE: &str = "
INSERT INTO idempotency_events (topic, aggregate, position, id, payload, staged_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6)";

pub(super) const ADD_TURN: &str = "
INSERT INTO idempotency_turns (topic, aggregate, due_at)
VALUES (?1, ?2, ?3)
ON CONFLICT (topic, aggregate) DO NOTHING";

pub(super) const IS_DUE: &str = "
SELECT 1
FROM idempotency_turns
WHERE topic = ?1 AND due_at <= ?2
LIMIT 1";

pub(super) const DUE: &str = "
SELECT aggregate
FROM idempotency_turns
WHERE topic = ?1 AND due_at <= ?2
ORDER BY due_at
LIMIT ?3";

/// Reads no payload: the length of a BLOB is beside it.
pub(super) const SIZES: &str = "
SELECT position, length(payload)
FROM idempotency_events
WHERE topic = ?1 AND aggregate = ?2
ORDER BY position
LIMIT ?3";

/// Counts the attempt before it is made: it may end its process.
pub(super) const TAKE: &str = "
UPDATE idempotency_turns
SET due_at = ?4,
    token = ?5,
    attempts = attempts + 1,
    failing_since = COALESCE(failing_since, ?3)
WHERE topic = ?1 AND aggregate = ?2
RETURNING attempts, failing_since";

pub(super) const EVENTS: &str = "
SELECT position, id, payload
FROM idempotency_events
WHERE topic = ?1 AND aggregate = ?2 AND position <= ?3
ORDER BY position";

pub(super) const SETTLE: &str = "
UPDATE idempotency_turns
SET token = NULL,
    due_at = ?4,
    attempts = ?5,
    failing_since = CASE
        WHEN ?5 = 0 THEN NULL
        WHEN ?6 > 0 THEN ?7
        ELSE failing_since
    END
WHERE topic = ?1 AND aggregate = ?2 AND token = ?3";

pub(super) const REMOVE_EVENTS: &str = "
DELETE FROM idempotency_events
WHERE topic = ?1 AND aggregate = ?2 AND position <= ?3";

pub(super) const REMOVE_TURN: &str = "
DELETE FROM idempotency_turns
WHERE topic = ?1 AND aggregate = ?2
  AND NOT EXISTS (SELECT * FROM idempotency_events WHERE topic = ?1 AND aggregate = ?2)";

pub(super) const REMOVE_STREAM: &str = "
DELETE FROM idempotency_streams
WHERE topic = ?1 AND aggregate = ?2";

/// The first events of the aggregates that wait for an operator, or the one with the id
/// `?2`.
pub(super) const DEAD: &str = "
SELECT turn.aggregate, turn.attempts, turn.failing_since,
       event.position, event.id, event.payload
FROM idempotency_turns AS turn
    JOIN idempotency_events AS event
        ON event.topic = turn.topic AND event.aggregate = turn.aggregate
WHERE turn.topic = ?1 AND turn.due_at IS NULL AND (?2 IS NULL OR event.id = ?2)
  AND NOT EXISTS (
      SELECT *
      FROM idempotency_events AS earlier
      WHERE earlier.topic = event.topic AND earlier.aggregate = event.aggregate
        AND earlier.position < event.position)
ORDER BY turn.aggregate
LIMIT ?3";

pub(super) const REVIVE: &str = "
UPDATE idempotency_turns
SET due_at = ?3, token = NULL, attempts = 0, failing_since = NULL
WHERE topic = ?1 AND aggregate = ?2";

pub(super) const LAG: &str = "
SELECT count(*), min(staged_at),
       (SELECT count(*) FROM idempotency_turns WHERE topic = ?1 AND due_at IS NULL)
FROM idempotency_events
WHERE topic = ?1";
