-- Fences: every claim takes a larger number, over the removal of its record too.
CREATE SEQUENCE idempotency_fences AS bigint;

-- Removals: each removal of records draws a number before it is done, so that a
-- claim can tell whether any was done while it was on its way. The first number
-- is drawn here, since a sequence looks the same before and after it.
CREATE SEQUENCE idempotency_removals AS bigint;
SELECT nextval('idempotency_removals');

-- One row for each key of each scope.
--
-- state: 1 in progress, 2 completed, 3 unknown, 4 released for the same
-- request, 5 released for any request.
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
    claimed_at  timestamptz      NOT NULL,
    lease_until timestamptz      NOT NULL,
    expires_at  timestamptz      NOT NULL,
    operation   bytea            NOT NULL,
    token       bytea            NOT NULL,
    fingerprint bytea            NOT NULL,
    response    bytea,
    -- Set in state 3, and NULL in every other.
    unknown_since timestamptz,
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
