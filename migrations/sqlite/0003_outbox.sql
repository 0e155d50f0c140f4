-- The events that relays have to publish. All three tables are empty once all events
-- are published. Moments are microseconds since 1970.

-- One row for each aggregate with events.
CREATE TABLE idempotency_streams (
    topic         TEXT    NOT NULL,
    aggregate     TEXT    NOT NULL,
    last_position INTEGER NOT NULL,
    PRIMARY KEY (topic, aggregate)
) STRICT, WITHOUT ROWID;

-- Rows are only inserted and deleted.
CREATE TABLE idempotency_events (
    topic     TEXT    NOT NULL,
    aggregate TEXT    NOT NULL,
    position  INTEGER NOT NULL,
    id        TEXT    NOT NULL,
    payload   BLOB    NOT NULL,
    staged_at INTEGER NOT NULL,
    PRIMARY KEY (topic, aggregate, position),
    UNIQUE (topic, aggregate, id)
) STRICT;

-- One row for each aggregate with events: when a relay may take it.
CREATE TABLE idempotency_turns (
    topic         TEXT    NOT NULL,
    aggregate     TEXT    NOT NULL,
    -- The end of the lease while a relay has the turn. NULL if the first event is dead.
    due_at        INTEGER,
    -- Of the relay that has the turn.
    token         BLOB,
    -- Of the first event, with the one under way.
    attempts      INTEGER NOT NULL DEFAULT 0,
    -- The first of these attempts.
    failing_since INTEGER,
    PRIMARY KEY (topic, aggregate)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_turns_due_at ON idempotency_turns (topic, due_at);
