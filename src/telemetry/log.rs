//! Warnings for operators, at most one of a kind in [`INTERVAL`].

use std::{
    collections::HashMap,
    error::Error,
    fmt,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::time::Instant;

use crate::{
    error::{StoreError, StoreErrorKind},
    key::OperationId,
};

/// Limits how often one kind of event is logged.
///
/// The first event is logged at once. Later ones within [`INTERVAL`] are counted,
/// and the next one that is logged says how many those were.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Option<Logged>>);

#[derive(Debug)]
struct Logged {
    last: Instant,
    suppressed: u64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// Returns how many events were suppressed since the last one, or `None` if
    /// this one is suppressed.
    pub(crate) fn permit(&self) -> Option<u64> {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let suppressed = match &mut *logged {
            Some(logged) if logged.last.elapsed() < INTERVAL => {
                logged.suppressed += 1;
                return None;
            }
            Some(logged) => logged.suppressed,
            None => 0,
        };
        *logged = Some(Logged {
            last: Instant::now(),
            suppressed: 0,
        });
        Some(suppressed)
    }
}

/// Runs the work of a background task to its end, and logs a panic of it: nothing else would
/// show why the task has ended. Returns `None` after a panic.
pub(crate) async fn catch_panic<T>(work: impl Future<Output = T>, message: &str) -> Option<T> {
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    if ended.is_err() {
        warn(&LogLimit::new(), message, None, None);
    }
    ended.ok()
}

/// The warnings of one layer: each message is limited apart from the others, and
/// so is each kind of its cause.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings(Arc<Mutex<Limits>>);

type Limits = HashMap<(&'static str, &'static str), Arc<LogLimit>>;

impl Warnings {
    pub(crate) fn warn(
        &self,
        message: &'static str,
        error: Option<&StoreError>,
        operation: Option<OperationId>,
    ) {
        let kind = error.map_or("", |error| error.kind().name());
        let limit = self.limit(message, kind);
        warn(&limit, message, error.map(|error| error as _), operation);
    }

    /// As [`warn`](Self::warn), with the numbers of a limit that is exceeded.
    pub(crate) fn warn_exceeded(&self, message: &'static str, numbers: impl fmt::Display) {
        let Some(suppressed) = self.permit(message, "") else {
            return;
        };
        let event = Event {
            message: &format!("{message} ({numbers})"),
            notice: None,
            kind: None,
            error: None,
            hint: None,
            operation: None,
            suppressed,
        };
        event.log();
    }

    /// As [`LogLimit::permit`], of the events with this name and cause.
    pub(crate) fn permit(&self, name: &'static str, kind: &'static str) -> Option<u64> {
        self.limit(name, kind).permit()
    }

    fn limit(&self, name: &'static str, kind: &'static str) -> Arc<LogLimit> {
        let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(limits.entry((name, kind)).or_default())
    }
}

/// An error with its sources, in one line.
pub(crate) fn chain(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        line.push_str(": ");
        line.push_str(&error.to_string());
        source = error.source();
    }
    line
}

/// Logs `message` at WARN with its cause, unless `limit` suppresses it.
///
/// The message names the failure and its effect. The remedy is in the error's
/// text, in the message, or in `hint`.
pub(crate) fn warn(
    limit: &LogLimit,
    message: &str,
    error: Option<&(dyn Error + 'static)>,
    operation: Option<OperationId>,
) {
    let Some(suppressed) = limit.permit() else {
        return;
    };
    let kind = error
        .and_then(|error| error.downcast_ref())
        .map(StoreError::kind);
    let event = Event {
        message,
        notice: None,
        kind: kind.map(StoreErrorKind::name),
        error: error.map(chain),
        hint: kind.and_then(remedy),
        operation,
        suppressed,
    };
    event.log();
}

/// An event at WARN.
pub(crate) struct Event<'a> {
    pub(crate) message: &'a str,
    pub(crate) notice: Option<&'static str>,
    pub(crate) kind: Option<&'static str>,
    pub(crate) error: Option<String>,
    pub(crate) hint: Option<&'static str>,
    pub(crate) operation: Option<OperationId>,
    pub(crate) suppressed: u64,
}

impl Event<'_> {
    pub(crate) fn log(self) {
        let Self {
            message,
            notice,
            kind,
            error,
            hint,
            operation,
            suppressed,
        } = self;
        #[cfg(feature = "tracing")]
        tracing::warn!(
            target: "tower_idempotency",
            notice,
            kind,
            error,
            hint,
            operation = operation.map(tracing::field::display),
            suppressed,
            "{message}"
        );
        let _ = (message, notice, kind, error, hint, operation, suppressed);
    }
}

/// The remedy of a failure that the store does not know.
fn remedy(kind: StoreErrorKind) -> Option<&'static str> {
    match kind {
        StoreErrorKind::Full => Some(
            "give the store more room, run a `Sweeper`, or shorten `retention`: nothing is evicted",
        ),
        StoreErrorKind::Corrupt => Some(
            "the record is damaged, a newer version wrote it, or its sealing key is another one: \
             its work may be done, so `forget` it only if the next request may run",
        ),
        StoreErrorKind::Overloaded => Some(
            "the store is slower than its callers: find out what it waits for, or raise \
             `max_waiting_calls` of a PostgreSQL store",
        ),
        StoreErrorKind::Unavailable | StoreErrorKind::TimedOut => None,
    }
}

const INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Failure(&'static str, Option<Box<Self>>);

    impl fmt::Display for Failure {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|source| source as _)
        }
    }

    #[test]
    fn chain_of_a_store_error_names_each_cause_once() {
        let refused = Failure("connection refused", None);
        let cannot = Failure("cannot connect", Some(Box::new(refused)));
        assert_eq!(
            chain(&StoreError::unavailable(cannot)),
            "the idempotency store is unavailable: cannot connect: connection refused"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn limit_permits_the_first_event_and_counts_the_rest() {
        let limit = LogLimit::new();
        assert_eq!(limit.permit(), Some(0));
        assert_eq!(limit.permit(), None);
        tokio::time::advance(INTERVAL - Duration::from_millis(1)).await;
        assert_eq!(limit.permit(), None);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(limit.permit(), Some(2));
        tokio::time::advance(INTERVAL).await;
        assert_eq!(limit.permit(), Some(0));
    }
}
