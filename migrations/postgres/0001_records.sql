-- One row for each key of each scope.
--
-- state: 1 in progress, 2 completed, 3 unknown, 4 released for the same
-- request, 5 released for any request.
--
-- Moments are microseconds since 1970, since their arithmetic gives the same result on
-- every node of a distributed table. The fence is the moment of the claim, or the one
-- after the last fence.
--
-- The name has byte order, since other collations can treat two keys as equal.
-- lease_until is set in every state, so that no row lacks an owner for want of a
-- lease. There are no CHECKs: they would cost each statement more than an index
-- does, and the store checks each row that it reads.
CREATE TABLE idempotency_records (
    scope       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    state       smallint         NOT NULL,
    attempt     integer          NOT NULL,
    takeovers   integer          NOT NULL,
    fence       bigint           NOT NULL,
    claimed_at  bigint           NOT NULL,
    lease_until bigint           NOT NULL,
    expires_at  bigint           NOT NULL,
    operation   bytea            NOT NULL,
    token       bytea            NOT NULL,
    fingerprint bytea            NOT NULL,
    response    bytea,
    -- Set in state 3, and NULL in every other.
    unknown_since bigint,
    -- Whether another process waits for the end of the claim.
    awaited     boolean          NOT NULL DEFAULT false,
    PRIMARY KEY (scope, key)
    -- Most of each page stays free for the completed versions of its rows, which
    -- then need no new index entries; enough for responses of 500 bytes.
) WITH (fillfactor = 20);

-- An index over a column that a heartbeat or a completion changes would make each
-- of them write to every index. expires_at is set by the claim.
CREATE INDEX idempotency_records_expires_at ON idempotency_records (expires_at);

-- For lists of unknown outcomes. One over the state would be changed by each
-- completion; unknown_since stays NULL.
CREATE INDEX idempotency_records_unknown ON idempotency_records (scope, key)
    WHERE unknown_since IS NOT NULL;
