//! Settings of records: the kept parts of a response, and their retention.

use std::time::Duration;

use http::{HeaderName, HeaderValue, StatusCode};

use super::IdempotencyBuilder;
use crate::{operation::disposition::Dispositions, response::headers::KeptHeaders, store::Store};

/// Settings of records: the kept parts of a response, and their retention.
impl<S: Store> IdempotencyBuilder<S> {
    /// Sets which responses are recorded. Defaults to [`Dispositions::standard`].
    pub fn dispositions(mut self, dispositions: Dispositions) -> Self {
        self.settings.config.dispositions = dispositions;
        self
    }

    /// Sets the header that marks a replay, with the value `true`. Defaults to
    /// `Idempotent-Replayed`.
    pub fn replay_marker(mut self, name: HeaderName) -> Self {
        self.settings.responses().marker = name;
        self
    }

    /// Sets which headers of a response are kept. Defaults to
    /// [`KeptHeaders::all_but_transient`].
    pub fn kept_headers(mut self, headers: KeptHeaders) -> Self {
        self.settings.responses().kept_headers = headers;
        self
    }

    /// Sets how long a record is kept, counted from its claim. A retry after that runs
    /// again. Defaults to 24 hours.
    ///
    /// A response is kept for at least one lease from its recording.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.responses().retention = retention;
        self
    }

    /// Sets how long responses with one status are kept, counted from the claim.
    /// Defaults to [`retention`](Self::retention). A [gRPC](crate#grpc) error has the status
    /// as which it counts.
    pub fn retention_for(mut self, status: StatusCode, retention: Duration) -> Self {
        self.settings
            .responses()
            .retention_by_status
            .insert(status, retention);
        self
    }

    /// Sets how long an unknown outcome is shown, counted from the moment at which it
    /// became unknown. Defaults to 7 days.
    pub fn unknown_retention(mut self, retention: Duration) -> Self {
        self.settings.config.unknown_retention = retention;
        self
    }

    /// Sets the largest response body that is kept, in bytes. Defaults to 1 MiB.
    ///
    /// A larger one is streamed to the client and leaves a tombstone: retries receive
    /// 409 `response-not-replayable`.
    pub fn max_response_body(mut self, bytes: usize) -> Self {
        self.settings.responses().max_body = bytes;
        self
    }

    /// Sets how long a response body may take to end. After that it is streamed, as one
    /// over [`max_response_body`](Self::max_response_body). Defaults to 5 s.
    pub fn response_body_timeout(mut self, timeout: Duration) -> Self {
        self.settings.responses().body_timeout = timeout;
        self
    }

    /// Sets the media types whose responses are streamed and never kept. Defaults to
    /// `text/event-stream`.
    pub fn streamed_types(mut self, media_types: impl IntoIterator<Item = HeaderValue>) -> Self {
        self.settings.responses().streamed_types = media_types.into_iter().collect();
        self
    }

    /// Sets how long the layer tries to record an outcome in the background, after the
    /// client was answered. Defaults to 15 minutes.
    pub fn late_recording_timeout(mut self, timeout: Duration) -> Self {
        self.settings.config.late_recording_timeout = timeout;
        self
    }

    /// Sets how many bytes of responses may be held for late recording, over all
    /// requests. Outcomes beyond it stay unknown. Defaults to 64 MiB.
    pub fn max_late_recording_bytes(mut self, bytes: usize) -> Self {
        self.settings.config.max_late_recording_bytes = bytes;
        self
    }
}
