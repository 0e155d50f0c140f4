//! Warnings for operators, at most one of a kind in [`INTERVAL`].

use std::{
    collections::HashMap,
    error::Error,
    sync::{
        Arc, Mutex, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use crate::{OperationId, StoreError};

/// Limits how often one kind of event is logged.
///
/// The first event is logged at once. Later ones within [`INTERVAL`] are counted,
/// and the next one that is logged says how many those were.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    /// Milliseconds since the first event of the process, plus one; zero if
    /// nothing was logged yet.
    logged: AtomicU64,
    suppressed: AtomicU64,
}

impl LogLimit {
    pub(crate) const fn new() -> Self {
        Self {
            logged: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
        }
    }

    /// Returns how many events were suppressed since the last one, or `None` if
    /// this one is suppressed.
    pub(crate) fn permit(&self) -> Option<u64> {
        static START: OnceLock<Instant> = OnceLock::new();
        let now = START.get_or_init(Instant::now).elapsed().as_millis();
        let now = u64::try_from(now).unwrap_or(u64::MAX - 1) + 1;
        let logged = self.logged.load(Ordering::Relaxed);
        let is_due = logged == 0 || now >= logged + INTERVAL.as_millis() as u64;
        // Of several threads that find it due, one logs.
        let permitted = is_due
            && self
                .logged
                .compare_exchange(logged, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if permitted {
            Some(self.suppressed.swap(0, Ordering::Relaxed))
        } else {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            None
        }
    }
}

/// The warnings of one layer: each message is limited apart from the others, and
/// so is each kind of its cause.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Mutex<HashMap<(&'static str, &'static str), Arc<LogLimit>>>);

impl Warnings {
    pub(crate) fn warn(
        &self,
        message: &'static str,
        error: Option<&StoreError>,
        operation: Option<OperationId>,
    ) {
        let kind = error.map_or("", |error| error.kind().name());
        let limit = {
            let mut limits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(limits.entry((message, kind)).or_default())
        };
        warn(&limit, message, error.map(|error| error as _), operation);
    }
}

/// An error with its sources, in one line. A source whose text the line ends with
/// already is not repeated.
fn chain(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !line.ends_with(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        source = error.source();
    }
    line
}

/// Logs `message` at WARN with its cause, unless `limit` suppresses it.
///
/// The message names what failed and what follows from it; the remedy stands in
/// the error's text where there is one.
pub(crate) fn warn(
    limit: &LogLimit,
    message: &str,
    error: Option<&(dyn Error + 'static)>,
    operation: Option<OperationId>,
) {
    let Some(suppressed) = limit.permit() else {
        return;
    };
    let error = error.map(chain);
    #[cfg(feature = "tracing")]
    tracing::warn!(
        target: "tower_idempotency",
        error,
        operation = operation.map(tracing::field::display),
        suppressed,
        "{message}"
    );
    let _ = (message, error, operation, suppressed);
}

const INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::fmt;

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
    fn chain_names_each_cause_once() {
        let refused = Failure("connection refused", None);
        let named = Failure(
            "cannot connect: connection refused",
            Some(Box::new(refused)),
        );
        let error = Failure("the store is unavailable", Some(Box::new(named)));
        assert_eq!(
            chain(&error),
            "the store is unavailable: cannot connect: connection refused"
        );
    }

    #[test]
    fn limit_permits_the_first_event_and_counts_the_rest() {
        let limit = LogLimit::new();
        assert_eq!(limit.permit(), Some(0));
        assert_eq!(limit.permit(), None);
        assert_eq!(limit.permit(), None);
        // As if the interval had passed.
        limit.logged.store(0, Ordering::Relaxed);
        assert_eq!(limit.permit(), Some(2));
    }
}
