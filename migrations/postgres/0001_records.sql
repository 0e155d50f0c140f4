-- Fences: every claim takes a larger number, over the removal of its record too.
CREATE SEQUENCE idempotency_fences AS bigint;

-- One row for each key of each scope.
--
-- state: 1 in progress, 2 completed, 3 unknown, 4 released for the same
-- request, 5 released for any request.
--
-- Byte order for the name, since other collations can hold two keys equal.
-- lease_until is kept in every state, so that no row is ever without an owner
-- because of a missing lease.
CREATE TABLE idempotency_records (
    scope       text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    state       smallint         NOT NULL CHECK (state BETWEEN 1 AND 5),
    attempt     integer          NOT NULL CHECK (attempt >= 1),
    takeovers   integer          NOT NULL CHECK (takeovers >= 0),
    fence       bigint           NOT NULL CHECK (fence >= 1),
    claimed_at  timestamptz      NOT NULL,
    lease_until timestamptz      NOT NULL,
    expires_at  timestamptz      NOT NULL,
    operation   bytea            NOT NULL CHECK (octet_length(operation) = 16),
    token       bytea            NOT NULL CHECK (octet_length(token) = 16),
    fingerprint bytea            NOT NULL CHECK (octet_length(fingerprint) = 40),
    response    bytea,
    CHECK ((state = 2) = (response IS NOT NULL)),
    PRIMARY KEY (scope, key)
    -- Half of each page stays free for the completed versions of its rows, which
    -- then need no new index entries.
) WITH (fillfactor = 50);

-- The only other index. One over a column that a heartbeat or a completion
-- changes would make each of them write to every index.
CREATE INDEX idempotency_records_expires_at ON idempotency_records (expires_at);
