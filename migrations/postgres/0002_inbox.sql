-- One row for each message that a consumer has processed. Rows are only inserted and
-- deleted.
--
-- Moments are microseconds since 1970, as in the table of records. Ids have byte order,
-- since other collations can treat two of them as equal.
--
-- Citus: distribute the table by message.
CREATE TABLE idempotency_messages (
    consumer   text COLLATE "C" NOT NULL,
    message    text COLLATE "C" NOT NULL,
    seen_at    bigint           NOT NULL,
    expires_at bigint           NOT NULL,
    PRIMARY KEY (message, consumer)
);

CREATE INDEX idempotency_messages_expires_at ON idempotency_messages (expires_at);
