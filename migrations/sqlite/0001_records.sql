-- One row for each key of each scope.
--
-- state: 1 in progress, 2 completed, 3 unknown, 4 released for the same
-- request, 5 released for any request.
--
-- The fence is the moment of the claim, or the one after the last fence. Moments are
-- microseconds since 1970. lease_until is kept in every state, so
-- that no row is ever without an owner because of a missing lease.
CREATE TABLE idempotency_records (
    scope       TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    state       INTEGER NOT NULL CHECK (state BETWEEN 1 AND 5),
    attempt     INTEGER NOT NULL CHECK (attempt >= 1),
    takeovers   INTEGER NOT NULL CHECK (takeovers >= 0),
    fence       INTEGER NOT NULL CHECK (fence >= 1),
    claimed_at  INTEGER NOT NULL,
    lease_until INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL,
    operation   BLOB    NOT NULL CHECK (length(operation) = 16),
    token       BLOB    NOT NULL CHECK (length(token) = 16),
    fingerprint BLOB    NOT NULL CHECK (length(fingerprint) = 84),
    response    BLOB,
    CHECK ((state = 2) = (response IS NOT NULL)),
    PRIMARY KEY (scope, key)
) STRICT;

CREATE INDEX idempotency_records_expires_at ON idempotency_records (expires_at);

-- For lists of unknown outcomes.
CREATE INDEX idempotency_records_unknown ON idempotency_records (scope, key)
    WHERE state = 3;
