//! The statements of the inbox.

use super::schema::statements;

statements! {
    /// Marks no message in a transaction that is not READ COMMITTED. A message that an
    /// open transaction has marked is waited for. Returns the ids unless all were marked.
    mark = "
WITH marked AS (
    INSERT INTO {messages} (consumer, message, seen_at, expires_at)
    SELECT $1, message, (SELECT {now}), (SELECT {now}) + $3
    FROM unnest($2::text[]) AS message
    WHERE current_setting('transaction_isolation') = 'read committed'
    ON CONFLICT (message, consumer) DO NOTHING
    RETURNING message
)
SELECT current_setting('transaction_isolation') AS isolation, {now} AS seen_at, count(*) AS count,
       CASE WHEN count(*) < cardinality($2) THEN array_agg(message) END AS ids
FROM marked";

    /// The same for one message, with fewer steps. Returns no row if it marked none.
    mark_one = "
INSERT INTO {messages} (consumer, message, seen_at, expires_at)
SELECT $1, $2, {now}, {now} + $3
WHERE current_setting('transaction_isolation') = 'read committed'
ON CONFLICT (message, consumer) DO NOTHING
RETURNING seen_at";

    seen_at = "
SELECT seen_at
FROM {messages}
WHERE consumer = $1 AND message = $2";

    list = "
SELECT message, clock.now - seen_at AS age
FROM {messages}, {clock}
WHERE consumer = $1 AND message > $2
ORDER BY message
LIMIT $3";

    forget = "
DELETE FROM {messages}
WHERE consumer = $1 AND message = $2";

    due = "
SELECT consumer, message
FROM {messages}, {clock}
WHERE expires_at < clock.now
ORDER BY expires_at
LIMIT $1";

    /// A message may have been marked again since it was found.
    remove = "
DELETE FROM {messages} AS seen
USING unnest($1::text[], $2::text[]) AS due (consumer, message), {clock}
WHERE seen.consumer = due.consumer AND seen.message = due.message
  AND seen.expires_at < clock.now";
}
