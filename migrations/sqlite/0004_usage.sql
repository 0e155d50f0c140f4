-- What each scope keeps of records that expire in one period, for quotas. Empty without a
-- quota. expires_at is the end of the period, in microseconds since 1970.
CREATE TABLE idempotency_usage (
    scope      TEXT    NOT NULL,
    expires_at INTEGER NOT NULL,
    records    INTEGER NOT NULL,
    bytes      INTEGER NOT NULL,
    PRIMARY KEY (scope, expires_at)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_usage_expires_at ON idempotency_usage (expires_at);
