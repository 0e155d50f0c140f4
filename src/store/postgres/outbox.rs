//! The statements of the outbox.

use super::schema::statements;

statements! {
    /// Locks the stream until the transaction ends. The events of the statement get the
    /// last positions, in their order.
    stage = "
WITH stream AS (
    INSERT INTO {streams} AS stream (topic, aggregate, last_position)
    VALUES ($1, $2, $5)
    ON CONFLICT (topic, aggregate) DO UPDATE SET last_position = stream.last_position + $5
    RETURNING last_position
), event AS (
    INSERT INTO {events} (topic, aggregate, position, id, payload, staged_at)
    SELECT $1, $2, stream.last_position - $5 + staged.place, staged.id, staged.payload, clock.now
    FROM stream,
         unnest($3::text[], $4::bytea[]) WITH ORDINALITY AS staged (id, payload, place), {clock}
    ON CONFLICT (topic, aggregate, id) DO NOTHING
    RETURNING id
), turn AS (
    INSERT INTO {turns} (topic, aggregate, due_at)
    SELECT $1, $2, clock.now
    FROM stream, {clock}
    ON CONFLICT (topic, aggregate) DO NOTHING
)
SELECT id FROM event";

    /// The same for one event, with fewer steps.
    stage_one = "
WITH stream AS (
    INSERT INTO {streams} AS stream (topic, aggregate, last_position)
    VALUES ($1, $2, 1)
    ON CONFLICT (topic, aggregate) DO UPDATE SET last_position = stream.last_position + 1
    RETURNING last_position
), turn AS (
    INSERT INTO {turns} (topic, aggregate, due_at)
    SELECT $1, $2, {now}
    FROM stream
    ON CONFLICT (topic, aggregate) DO NOTHING
)
INSERT INTO {events} (topic, aggregate, position, id, payload, staged_at)
SELECT $1, $2, last_position, $3, $4, {now}
FROM stream
ON CONFLICT (topic, aggregate, id) DO NOTHING";

    /// How many of the ids are staged, and whether each has the same payload.
    found = "
SELECT count(DISTINCT event.id) AS ids,
       COALESCE(bool_and(event.payload = staged.payload), true) AS is_same
FROM {events} AS event
    JOIN unnest($3::text[], $4::bytea[]) AS staged (id, payload) ON staged.id = event.id
WHERE event.topic = $1 AND event.aggregate = $2";

    due = "
SELECT turn.aggregate
FROM {turns} AS turn, {clock}
WHERE turn.topic = $1 AND turn.due_at <= clock.now
ORDER BY turn.due_at
LIMIT $2{skip_turns}";

    /// Counts the attempt before it is made: it may end its process.
    take = "
UPDATE {turns} AS turn
SET due_at = clock.now + $3,
    token = $4,
    attempts = turn.attempts + 1,
    failing_since = COALESCE(turn.failing_since, clock.now)
FROM {clock}
WHERE turn.topic = $1 AND turn.aggregate = ANY($2) AND turn.due_at <= clock.now
RETURNING turn.aggregate, turn.attempts::bigint AS attempts,
          clock.now - turn.failing_since AS failing_for";

    /// The lengths of the first payloads of each aggregate.
    sizes = "
SELECT due.aggregate, event.position, event.bytes
FROM unnest($2::text[]) AS due (aggregate) CROSS JOIN LATERAL (
    SELECT position, octet_length(payload)::bigint AS bytes
    FROM {events}
    WHERE topic = $1 AND aggregate = due.aggregate
    ORDER BY position
    LIMIT $3) AS event", "
SELECT aggregate, position, bytes
FROM (
    SELECT aggregate, position, octet_length(payload)::bigint AS bytes,
           row_number() OVER (PARTITION BY aggregate ORDER BY position) AS place
    FROM {events}
    WHERE topic = $1 AND aggregate = ANY($2)) AS event
WHERE place <= $3";

    /// The events of each aggregate, up to a position. There are at most `$4`, which a plan
    /// cannot know otherwise.
    events = "
SELECT taken.aggregate, event.position, event.id, event.payload
FROM unnest($2::text[], $3::bigint[]) AS taken (aggregate, through) CROSS JOIN LATERAL (
    SELECT position, id, payload
    FROM {events}
    WHERE topic = $1 AND aggregate = taken.aggregate AND position <= taken.through
    ORDER BY position
    LIMIT $4) AS event", "
SELECT event.aggregate, event.position, event.id, event.payload
FROM {events} AS event
    JOIN unnest($2::text[], $3::bigint[]) AS taken (aggregate, through)
        ON event.aggregate = taken.aggregate AND event.position <= taken.through
WHERE event.topic = $1 AND $4::bigint > 0";

    settle = "
UPDATE {turns} AS turn
SET token = NULL,
    due_at = clock.now + ended.pause,
    attempts = ended.attempts,
    failing_since = CASE
        WHEN ended.attempts = 0 THEN NULL
        WHEN ended.through > 0 THEN clock.now
        ELSE turn.failing_since
    END
FROM unnest($2::text[], $3::bytea[], $4::bigint[], $5::bigint[], $6::bigint[])
         AS ended (aggregate, token, pause, attempts, through), {clock}
WHERE turn.topic = $1 AND turn.aggregate = ended.aggregate AND turn.token = ended.token
RETURNING turn.aggregate, ended.token";

    remove_events = "
DELETE FROM {events} AS event
USING unnest($2::text[], $3::bigint[]) AS published (aggregate, through)
WHERE event.topic = $1 AND event.aggregate = published.aggregate
  AND event.position <= published.through";

    /// Waits for no transaction that stages an event.
    lock = "
SELECT aggregate
FROM {streams}
WHERE topic = $1 AND aggregate = ANY($2)
FOR UPDATE SKIP LOCKED";

    remove_turns = "
DELETE FROM {turns} AS turn
WHERE turn.topic = $1 AND turn.aggregate = ANY($2)
  AND NOT EXISTS (
      SELECT FROM {events} AS event
      WHERE event.topic = turn.topic AND event.aggregate = turn.aggregate)
RETURNING turn.aggregate";

    remove_streams = "
DELETE FROM {streams}
WHERE topic = $1 AND aggregate = ANY($2)";

    /// The first events of the aggregates that wait for an operator, or the one with the id
    /// `$2`.
    dead = "
SELECT turn.aggregate, turn.attempts::bigint AS attempts,
       COALESCE(clock.now - turn.failing_since, 0) AS failing_for,
       event.position, event.id, event.payload
FROM {turns} AS turn
    JOIN {events} AS event
        ON event.topic = turn.topic AND event.aggregate = turn.aggregate, {clock}
WHERE turn.topic = $1 AND turn.due_at IS NULL AND ($2 IS NULL OR event.id = $2)
  AND NOT EXISTS (
      SELECT FROM {events} AS earlier
      WHERE earlier.topic = event.topic AND earlier.aggregate = event.aggregate
        AND earlier.position < event.position)
ORDER BY turn.aggregate
LIMIT $3";

    revive = "
UPDATE {turns}
SET due_at = clock.now, token = NULL, attempts = 0, failing_since = NULL
FROM {clock}
WHERE topic = $1 AND aggregate = $2 AND due_at IS NULL";

    remove_event = "
DELETE FROM {events}
WHERE topic = $1 AND aggregate = $2 AND position = $3 AND id = $4";

    lag = "
SELECT count(*) AS events, COALESCE(max(clock.now) - min(staged_at), 0) AS oldest
FROM {events}, {clock}
WHERE topic = $1";

    /// A prepared transaction has no backend.
    oldest_snapshot = "
SELECT (extract(epoch FROM clock_timestamp() - min(began)) * 1000000)::bigint AS age
FROM (
    SELECT xact_start AS began
    FROM pg_catalog.pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
      AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
    UNION ALL
    SELECT prepared
    FROM pg_catalog.pg_prepared_xacts
    WHERE database = current_database()
) AS transactions";

    dead_turns = "
SELECT count(*) AS dead
FROM {turns}
WHERE topic = $1 AND due_at IS NULL";
}
