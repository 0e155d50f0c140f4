//! What is recorded, released or unknown; and what happens when things fail.

use std::{collections::BTreeMap, fmt, sync::Arc};

use http::{StatusCode, response};

use crate::{Operation, Reconciler, Word, operation::Verdict, store::Release};

/// Whether a request without a key is refused or passes unguarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requirement {
    Required,
    Optional,
}

/// What becomes of the record when the handler has answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The response is kept, and replayed to retries.
    Record,
    /// A retry runs. After a 3xx or 4xx any request may use the key, after any
    /// other status the same request only.
    Release,
    /// Nobody knows whether it happened; [`Recovery`] says what retries get.
    Unknown,
}

/// Which responses are recorded, which free the key for a retry, and which
/// leave the outcome unknown.
///
/// ```
/// # use axum::{Router, body::Body, http::Request, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Outcome, Scope};
/// use http::StatusCode;
/// use tower_idempotency::{Disposition, Dispositions};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let correctable = Dispositions::standard()
///     .status(StatusCode::BAD_REQUEST, Disposition::Release)
///     .status(StatusCode::CONFLICT, Disposition::Release);
/// # let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// # let layer = layer.dispositions(correctable).build()?;
/// # let app = Router::new().route("/", post(StatusCode::CONFLICT).layer(layer));
/// # let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// # let response = app.oneshot(request).await?;
/// # assert_eq!(response.extensions().get(), Some(&Outcome::Released));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Dispositions {
    preset: Preset,
    by_status: BTreeMap<StatusCode, Disposition>,
    predicate: Option<Predicate>,
}

#[derive(Clone, Copy, Debug)]
enum Preset {
    Standard,
    Everything,
    Success,
}

type Predicate = Arc<dyn Fn(&response::Parts) -> Option<Disposition> + Send + Sync>;

impl Dispositions {
    /// Records 2xx, 3xx and 4xx, with these exceptions:
    ///
    /// - 307 and 308 release the key for any request. The client sends the same
    ///   request to the new address, and nothing was done at this one.
    /// - 401, 407, 413, 415, 421, 425 and 429 release the key for any request. A
    ///   corrected request may use it.
    /// - 500, 501, 503 and 505 upwards release the key for the same request.
    /// - 408, 502 and 504 leave the outcome unknown: a party in between gave up
    ///   waiting.
    ///
    /// After [`Operation::effects_started`] each of the released responses leaves
    /// the outcome unknown. This is the default of a layer.
    ///
    /// A panic that a layer inside of this one turned into a 500 counts as that
    /// 500. See [where the layer stands](crate#where-the-layer-stands).
    pub fn standard() -> Self {
        Self::preset(Preset::Standard)
    }

    /// Records every response, whatever its status.
    pub fn everything() -> Self {
        Self::preset(Preset::Everything)
    }

    /// Records 2xx, releases the rest; 408, 502 and 504 leave the outcome
    /// unknown.
    pub fn only_success() -> Self {
        Self::preset(Preset::Success)
    }

    /// Decides for one status. Defaults to the preset.
    pub fn status(mut self, status: StatusCode, disposition: Disposition) -> Self {
        self.by_status.insert(status, disposition);
        self
    }

    /// Decides for a response, before its status does; `None` leaves it to the
    /// status. Defaults to none.
    pub fn by(
        mut self,
        decide: impl Fn(&response::Parts) -> Option<Disposition> + Send + Sync + 'static,
    ) -> Self {
        self.predicate = Some(Arc::new(decide));
        self
    }

    fn preset(preset: Preset) -> Self {
        Self {
            preset,
            by_status: BTreeMap::new(),
            predicate: None,
        }
    }

    fn of(&self, response: &response::Parts) -> Disposition {
        let status = response.status;
        self.predicate
            .as_ref()
            .and_then(|decide| decide(response))
            .or_else(|| self.by_status.get(&status).copied())
            .unwrap_or_else(|| self.preset.of(status))
    }

    /// What the response means: the handler's word first, then the tables.
    pub(crate) fn conclude(
        &self,
        response: &response::Parts,
        word: Word,
        operation: &Operation,
    ) -> Conclusion {
        match word.verdict() {
            Some(Verdict::Record) => return Conclusion::Record,
            Some(Verdict::Release) => return Conclusion::Release(Release::AnyRequest),
            Some(Verdict::Unknown) => return Conclusion::Unknown,
            None => {}
        }
        match self.of(response) {
            Disposition::Record => Conclusion::Record,
            Disposition::Unknown => Conclusion::Unknown,
            Disposition::Release if operation.have_effects_started() => Conclusion::Unknown,
            Disposition::Release => Conclusion::Release(released_by(response.status)),
        }
    }
}

/// A redirection or a client error asks for another request; a server error asks
/// for the same one again.
fn released_by(status: StatusCode) -> Release {
    match status.is_redirection() || status.is_client_error() {
        true => Release::AnyRequest,
        false => Release::SameRequest,
    }
}

impl Preset {
    fn of(self, status: StatusCode) -> Disposition {
        match (self, status.as_u16()) {
            (Self::Everything, _) => Disposition::Record,
            (_, 408 | 502 | 504) => Disposition::Unknown,
            (_, 200..=299) => Disposition::Record,
            (Self::Success, _) => Disposition::Release,
            (Self::Standard, 307 | 308 | 401 | 407 | 413 | 415 | 421 | 425 | 429 | 500..) => {
                Disposition::Release
            }
            (Self::Standard, _) => Disposition::Record,
        }
    }
}

impl Default for Dispositions {
    fn default() -> Self {
        Self::standard()
    }
}

impl fmt::Debug for Dispositions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dispositions")
            .field("preset", &self.preset)
            .field("by_status", &self.by_status)
            .field("predicate", &self.predicate.is_some())
            .finish()
    }
}

/// What is to be done with the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conclusion {
    Record,
    Release(Release),
    Unknown,
}

/// What a retry gets when nobody knows whether the operation happened: after a
/// panic, an error of the inner service, a broken response body, a dead process.
///
/// A panic reaches the layer only if no layer inside catches it before. See
/// [where the layer stands](crate#where-the-layer-stands).
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// 409 `outcome-unknown`, until an operator or the late owner ends it.
    #[default]
    Refuse,
    /// The handler runs again, with the next attempt and a larger fence.
    ///
    /// Only for handlers whose effects are keyed by
    /// [`Operation::derive`](crate::Operation::derive) or otherwise harmless
    /// when repeated: a handler that charged and then crashed charges again.
    Rerun,
    /// A hook is asked what became of it, and its word decides: replay, run
    /// again, or 409 `outcome-unknown`.
    Reconcile(Reconciler),
}

/// What happens to a running handler when its client leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disconnect {
    /// It runs on to its end, and its response is recorded for the retry.
    #[default]
    Finish,
    /// It is stopped where it stands, and the outcome is unknown.
    Cancel,
}

/// What happens to a request when the store cannot answer its claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// 503 with `Retry-After`; the handler does not run.
    #[default]
    Refuse,
    /// **The handler runs unguarded**, without an [`Operation`], and the
    /// response says `Idempotent-Recorded: false`. A retry runs it again. Not
    /// while a store is only [too busy](crate::StoreErrorKind::Overloaded). A
    /// request that had seen a record of its key before the store broke does not
    /// run, since the work may have been done.
    RunUnguarded,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_table_is_the_documented_one() {
        use Disposition::{Record, Release, Unknown};
        let of = |status| Preset::Standard.of(StatusCode::from_u16(status).unwrap());
        for status in [
            200, 201, 204, 299, 301, 302, 303, 304, 400, 403, 404, 409, 412, 414, 416, 422, 451,
        ] {
            assert_eq!(of(status), Record, "{status}");
        }
        for status in [
            307, 308, 401, 407, 413, 415, 421, 425, 429, 500, 501, 503, 505, 507, 511, 599, 999,
        ] {
            assert_eq!(of(status), Release, "{status}");
        }
        for status in [408, 502, 504] {
            assert_eq!(of(status), Unknown, "{status}");
        }
    }
}
