-- The events that relays have to publish. All three tables are empty once all events
-- are published.
--
-- Moments are microseconds since 1970, as in the table of records. Names have byte
-- order, since other collations can treat two of them as equal. Keys begin with the column
-- that differs most, so that a comparison ends early.
--
-- Citus: distribute all three by aggregate, the second and third colocated with the
-- first.

-- One row for each aggregate with events. Its lock orders the transactions that stage
-- events of one aggregate, from the statement to COMMIT.
CREATE TABLE idempotency_streams (
    topic         text COLLATE "C" NOT NULL,
    aggregate     text COLLATE "C" NOT NULL,
    last_position bigint           NOT NULL,
    PRIMARY KEY (aggregate, topic)
);

-- Rows are only inserted and deleted.
CREATE TABLE idempotency_events (
    topic     text COLLATE "C" NOT NULL,
    aggregate text COLLATE "C" NOT NULL,
    position  bigint           NOT NULL,
    id        text COLLATE "C" NOT NULL,
    payload   bytea            NOT NULL,
    staged_at bigint           NOT NULL,
    PRIMARY KEY (aggregate, topic, position),
    UNIQUE (aggregate, topic, id)
);

-- One row for each aggregate with events: when a relay may take it. Relays never lock
-- a stream while a transaction that stages events holds it.
CREATE TABLE idempotency_turns (
    topic         text COLLATE "C" NOT NULL,
    aggregate     text COLLATE "C" NOT NULL,
    -- The end of the lease while a relay has the turn. NULL if the first event is dead.
    due_at        bigint,
    -- Of the relay that has the turn.
    token         bytea,
    -- Of the first event, with the one under way.
    attempts      integer          NOT NULL DEFAULT 0,
    -- The first of these attempts.
    failing_since bigint,
    PRIMARY KEY (aggregate, topic)
);

CREATE INDEX idempotency_turns_due_at ON idempotency_turns (topic, due_at);
