//! What the layer did with a request: for outer layers, logs and metrics.

use crate::{key::OperationId, rejection::RejectionKind};

/// What the layer did with a guarded request, as an extension of its response.
///
/// Requests that are not guarded have none. Each outcome is one event at DEBUG
/// (feature `tracing`) and one count of the metric `idempotency_requests_total`
/// with the label `outcome` (feature `metrics`). Neither shows a key or a scope.
/// The crate's documentation lists all
/// [events and metrics](crate#logs-and-metrics).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The handler ran and its response is recorded.
    Recorded,
    /// The handler ran and its key is free again.
    Released,
    /// The handler ran, or began to, and its effects are not known.
    Unknown,
    /// The handler ran and its response was streamed, because it was too large,
    /// too slow or of a streamed type.
    Streamed,
    /// The handler ran, but its response could not be recorded yet.
    Unrecorded,
    /// The handler ran without a claim, because the store could not answer or the
    /// request's body is too large.
    Unguarded,
    /// A recorded response was replayed.
    Replayed,
    /// The client left while it waited for another request to end, or while its
    /// own ran under [`Disconnect::Cancel`](crate::Disconnect::Cancel).
    Left,
    /// The inner service failed before it could be called.
    Unready,
    /// The layer answered instead of the handler.
    Refused(RejectionKind),
}

impl Outcome {
    /// Its name in metrics and logs; one of a fixed set.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Recorded => "recorded",
            Self::Released => "released",
            Self::Unknown => "unknown",
            Self::Streamed => "streamed",
            Self::Unrecorded => "unrecorded",
            Self::Unguarded => "unguarded",
            Self::Replayed => "replayed",
            Self::Left => "left",
            Self::Unready => "unready",
            Self::Refused(kind) => kind.slug(),
        }
    }

    /// The one event and the one count of a guarded request.
    /// `key_id` is the id that `LogIds` give the key.
    pub(crate) fn tell(self, operation: Option<OperationId>, key_id: Option<&str>) {
        #[cfg(feature = "tracing")]
        tracing::debug!(
            target: "tower_idempotency",
            outcome = self.name(),
            operation = operation.map(tracing::field::display),
            key_id,
            "idempotent request"
        );
        #[cfg(feature = "metrics")]
        metrics::counter!(crate::telemetry::metrics::REQUESTS, "outcome" => self.name())
            .increment(1);
        let _ = (operation, key_id);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn documentation_lists_every_outcome_and_notice() {
        let source = concat!(
            include_str!("outcome.rs"),
            include_str!("../telemetry/notice.rs")
        );
        let documentation = include_str!("../lib.rs");
        let names: Vec<_> = source
            .lines()
            .filter_map(|line| line.split_once(" => \"")?.1.strip_suffix("\","))
            .filter(|name| !name.contains(' '))
            .collect();
        assert!(names.len() > 20, "{names:?}");
        for name in names {
            assert!(documentation.contains(&format!("`{name}`")), "{name}");
        }
    }
}
