//! Why a request was refused, as problem details (RFC 9457).

mod exceeded;
mod grpc;
mod kind;
mod refusals;
mod render;

use std::{borrow::Cow, fmt, sync::Arc};

use http::StatusCode;
use serde_json::json;

pub use self::kind::RejectionKind;
pub(crate) use self::{
    exceeded::{Numbers, QuotaExceeded},
    refusals::Callback,
    render::{Renderer, RequestHead, custom},
};
use crate::{
    error::StoreError,
    fingerprint::{Mismatch, RequestPart},
    key::OperationId,
    telemetry::log::Warnings,
};

/// The reason for a response of the layer instead of the handler's. A refusal is
/// never recorded.
///
/// Its text names headers, settings and limits, and shows nothing of the key,
/// the stored request or the stored response.
#[derive(Clone, Debug)]
pub struct Rejection {
    kind: RejectionKind,
    status: StatusCode,
    detail: Cow<'static, str>,
    retry_after: Option<u64>,
    operation: Option<OperationId>,
    /// What an operator finds in the log, where the text for the client would say
    /// too much.
    warning: Option<&'static str>,
    cause: Option<Box<StoreError>>,
    exceeded: Option<Box<Numbers>>,
    mismatch: Option<Box<Mismatch>>,
    /// What the problem type begins with.
    types: Option<Arc<str>>,
}

impl Rejection {
    pub(crate) fn about(mut self, operation: impl Into<Option<OperationId>>) -> Self {
        self.operation = operation.into();
        self
    }

    fn new(kind: RejectionKind, detail: fmt::Arguments<'_>) -> Self {
        Self {
            kind,
            status: kind.status(),
            detail: match detail.as_str() {
                Some(detail) => detail.into(),
                None => detail.to_string().into(),
            },
            retry_after: None,
            operation: None,
            warning: None,
            cause: None,
            exceeded: None,
            mismatch: None,
            types: None,
        }
    }

    fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    fn warning(mut self, warning: &'static str) -> Self {
        self.warning = Some(warning);
        self
    }

    fn caused(mut self, cause: &StoreError) -> Self {
        self.cause = Some(Box::new(cause.clone()));
        self
    }

    /// Adds the numbers of a limit to its warning.
    pub(crate) fn exceeding(mut self, numbers: Numbers) -> Self {
        self.exceeded = Some(Box::new(numbers));
        self
    }

    #[cfg(feature = "guard")]
    pub(crate) fn cause(&self) -> Option<&StoreError> {
        self.cause.as_deref()
    }

    /// Logs its warning, if it has one.
    pub(crate) fn log(&self, warnings: &Warnings) {
        match (self.warning, &self.exceeded) {
            (Some(warning), Some(exceeded)) => warnings.warn_exceeded(warning, exceeded),
            (Some(warning), None) => {
                warnings.warn(warning, self.cause.as_deref(), self.operation);
            }
            (None, _) => {}
        }
    }

    fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }

    /// Returns the `type` of the problem, such as
    /// `urn:tower-idempotency:problem:key-reused`. It begins with what
    /// [`problem_types`](crate::IdempotencyBuilder::problem_types) sets.
    #[must_use]
    pub fn problem_type(&self) -> String {
        let base = self.types.as_deref().unwrap_or(render::PROBLEM_TYPES);
        format!("{base}{}", self.kind.slug())
    }

    /// Returns the title of the problem, which is the same for all refusals of a kind.
    #[must_use]
    pub fn title(&self) -> &'static str {
        self.kind.title()
    }

    /// Returns the problem details (RFC 9457) that the default renderer sends.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut problem = json!({
            "type": self.problem_type(),
            "title": self.title(),
            "status": self.status.as_u16(),
            "detail": self.detail,
            "retryable": self.retry_after.is_some(),
        });
        if let Some(seconds) = self.retry_after {
            problem["retry_after"] = seconds.into();
        }
        if let Some(mismatch) = &self.mismatch {
            let names = |parts: &[RequestPart]| -> Vec<String> {
                parts.iter().map(ToString::to_string).collect()
            };
            problem["compared"] = names(&mismatch.compared).into();
            problem["differs"] = names(&mismatch.differs).into();
        }
        problem
    }

    /// Which kind of refusal it is.
    #[must_use]
    pub fn kind(&self) -> RejectionKind {
        self.kind
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// What happened and whether the same key may be sent again, for people.
    #[must_use]
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// After how many seconds the same request may be sent again, if waiting
    /// can change the answer.
    #[must_use]
    pub fn retry_after_seconds(&self) -> Option<u64> {
        self.retry_after
    }

    /// The operation that the key belongs to, if it is the caller's own and the
    /// same request.
    #[must_use]
    pub fn operation(&self) -> Option<OperationId> {
        self.operation
    }

    /// The parts of the request that were compared with the request that the key
    /// belongs to. Empty unless the kind is
    /// [`KeyReused`](RejectionKind::KeyReused).
    #[must_use]
    pub fn compared(&self) -> &[RequestPart] {
        self.mismatch
            .as_ref()
            .map_or(&[], |mismatch| &mismatch.compared)
    }

    /// Those of the [`compared`](Self::compared) parts that differ. The rejection
    /// shows no other part of the recorded request.
    #[must_use]
    pub fn differs(&self) -> &[RequestPart] {
        self.mismatch
            .as_ref()
            .map_or(&[], |mismatch| &mismatch.differs)
    }
}
