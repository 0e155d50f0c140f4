//! Is this request ignored, refused or guarded? All that its head tells.

use http::{Method, request};
use http_body::Body;
use tokio::time::Instant;

use crate::{
    RecordName, Rejection, Store, config::Config, flow::shared::Host, policy::Requirement,
};

/// What the layer has to do with a request, before its body is read.
pub(crate) enum Admission {
    Ignored,
    Refused(Rejection),
    Guarded(Admitted),
}

/// A request that is guarded.
pub(crate) struct Admitted {
    pub(crate) name: RecordName,
    /// From when on its key may start no run, if that is bounded.
    pub(crate) stale_from: Option<Instant>,
}

/// Marks a request that a layer has taken charge of: a second one on the same
/// request passes.
#[derive(Clone, Copy)]
pub(crate) struct Noticed;

impl<S: Store> Host<S> {
    /// Is this request ignored, refused or guarded? All that can be told from
    /// its head, so that a client which waits for `100 Continue` learns of a
    /// refusal first.
    pub(crate) fn admit<B: Body>(&self, parts: &request::Parts, body: &B) -> Admission {
        let config = &self.config;
        if !config.guards(parts) || parts.extensions.get::<Noticed>().is_some() {
            return Admission::Ignored;
        }
        let parsed = match config.syntax.read(&parts.headers, &config.header) {
            Ok(Some(parsed)) => parsed,
            Ok(None) if config.requirement == Requirement::Optional => return Admission::Ignored,
            Ok(None) => return Admission::Refused(Rejection::key_missing(&config.header)),
            Err(fault) => return Admission::Refused(Rejection::key(&config.header, &fault)),
        };
        let Some(scope) = (config.scope)(parts) else {
            return Admission::Refused(Rejection::caller_unknown());
        };
        if body.size_hint().lower() > config.max_request_body as u64 {
            return Admission::Refused(Rejection::body_too_large(config.max_request_body));
        }
        if self.is_draining() {
            return Admission::Refused(Rejection::draining());
        }
        if tokio::runtime::Handle::try_current().is_err() {
            return Admission::Refused(Rejection::runtime_missing());
        }
        Admission::Guarded(Admitted {
            name: RecordName::new(scope, parsed.key),
            stale_from: parsed.stale_from,
        })
    }
}

impl Config {
    /// Told from the method alone, so that most requests are not taken apart.
    pub(crate) fn never_guards(&self, method: &Method) -> bool {
        match &self.guard_if {
            None => !self.methods.contains(method),
            Some(_) => method.is_safe(),
        }
    }

    fn guards(&self, parts: &request::Parts) -> bool {
        !self.never_guards(&parts.method)
            && self.guard_if.as_ref().is_none_or(|guards| guards(parts))
    }
}
