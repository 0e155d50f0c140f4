-- One row for each message that a consumer has processed. Rows are only inserted and
-- deleted. Moments are microseconds since 1970.
CREATE TABLE idempotency_messages (
    consumer   TEXT    NOT NULL,
    message    TEXT    NOT NULL,
    seen_at    INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (consumer, message)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_messages_expires_at ON idempotency_messages (expires_at);
