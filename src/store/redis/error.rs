//! The errors of Redis.

use redis::{ErrorKind, ParsingError, RedisError, ServerErrorKind};

use crate::store::StoreError;

/// Returns the store's error for one of the client, with its remedy.
pub(super) fn failure(error: RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::timed_out().because(TIMED_OUT);
    }
    match error.code() {
        Some("OOM") => StoreError::full(FULL),
        Some("UNREADABLE") => StoreError::corrupt("record: version or length"),
        Some("WRONGTYPE") => StoreError::corrupt("a key of the store holds another type"),
        Some("NOREPLICAS") => StoreError::unavailable(NO_REPLICAS),
        Some("NOPERM") => StoreError::unavailable(NO_PERMISSION),
        _ if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) => {
            StoreError::unavailable(READ_ONLY)
        }
        _ => StoreError::unavailable(error),
    }
}

/// An answer that no script gives.
pub(super) fn unexpected(error: ParsingError) -> StoreError {
    StoreError::unavailable(error)
}

const TIMED_OUT: &str = "no answer within `response_timeout`";
const FULL: &str = "`maxmemory` of the Redis server: raise it, or shorten the retention";
const NO_REPLICAS: &str = "fewer replicas are connected than `min-replicas-to-write` of the \
    Redis server asks for";
const NO_PERMISSION: &str = "the user may not call EVAL, EVALSHA, INFO, WAIT, SPUBLISH, SSUBSCRIBE, SUNSUBSCRIBE, or the \
    commands of strings and sorted sets: grant them with ACL SETUSER";
pub(super) const READ_ONLY: &str =
    "the server is a replica: name its primary, a Sentinel or the cluster";
