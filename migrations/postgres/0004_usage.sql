-- What each scope keeps of records that expire in one period, for quotas. Empty without a
-- quota.
--
-- expires_at is the end of the period, in microseconds since 1970. Scopes have byte order,
-- as in the table of records.
--
-- Citus: the table may stay on the coordinator, or be distributed by scope.
CREATE TABLE idempotency_usage (
    scope      text COLLATE "C" NOT NULL,
    expires_at bigint           NOT NULL,
    records    bigint           NOT NULL,
    bytes      bigint           NOT NULL,
    PRIMARY KEY (scope, expires_at)
    -- Each change of a period is a HOT update.
) WITH (fillfactor = 50);

CREATE INDEX idempotency_usage_expires_at ON idempotency_usage (expires_at);
