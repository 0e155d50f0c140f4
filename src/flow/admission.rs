//! Decides from a request's head whether it passes, is refused, or is guarded.

use http::{Method, request};
use http_body::Body;
use tokio::{runtime::Handle, time::Instant};

use super::{
    IsGuarded,
    config::{Config, Oversized},
};
use crate::{
    body::digests::{DeclaredDigests, DigestInvalid},
    key::RecordName,
    operation::request_name::RequestName,
    policy::{ContentDigest, Requirement},
    rejection::Rejection,
    response::attributes::Attributes,
};

pub(crate) enum Admission {
    /// The request is not guarded.
    Pass,
    Refuse(Rejection),
    Guard(Admitted),
}

/// A request that is guarded.
pub(crate) struct Admitted {
    pub(super) name: RequestName,
    /// From this moment on its key may start no run, if that is limited.
    pub(super) stale_from: Option<Instant>,
    pub(super) runtime: Handle,
    /// To be kept with the response.
    pub(super) attributes: Attributes,
    /// Those that the body has to have.
    pub(super) digests: Option<Box<DeclaredDigests>>,
    pub(super) oversized: Oversized,
}

/// Whether no request with this method is guarded, so that most requests are not taken
/// apart.
pub(crate) fn never_guards(config: &Config, method: &Method) -> bool {
    match &config.guard_if {
        None => !config.methods.contains(method),
        Some(_) => method.is_safe(),
    }
}

/// Decides from the head alone, so that a client that waits for `100 Continue` learns of
/// a refusal first.
pub(crate) fn admit<B: Body>(
    config: &Config,
    is_draining: bool,
    parts: &request::Parts,
    body: &B,
) -> Admission {
    let is_chosen = config.guard_if.as_ref().is_none_or(|guards| guards(parts));
    if !is_chosen || parts.extensions.get::<IsGuarded>().is_some() {
        return Admission::Pass;
    }
    let parsed = match config.syntax.read(&parts.headers, &config.header) {
        Ok(Some(parsed)) => parsed,
        Ok(None) if config.requirement == Requirement::Optional => return Admission::Pass,
        Ok(None) => return Admission::Refuse(Rejection::key_missing(&config.header)),
        Err(fault) => return Admission::Refuse(Rejection::key(&config.header, &fault)),
    };
    let Some(scope) = (config.scope)(parts) else {
        return Admission::Refuse(Rejection::caller_unknown());
    };
    let digests = match config.content_digest {
        ContentDigest::Ignore => None,
        ContentDigest::Verify | ContentDigest::Stream { .. } => {
            match DeclaredDigests::of(&parts.headers) {
                Ok(digests) => digests.map(Box::new),
                Err(DigestInvalid) => return Admission::Refuse(Rejection::digest_invalid()),
            }
        }
    };
    let oversized = config.oversized(digests.is_some());
    let max = oversized.max(config);
    if body.size_hint().lower() > max {
        return Admission::Refuse(Rejection::body_too_large(max));
    }
    if is_draining {
        return Admission::Refuse(Rejection::draining());
    }
    let Ok(runtime) = Handle::try_current() else {
        return Admission::Refuse(Rejection::runtime_missing());
    };
    Admission::Guard(Admitted {
        name: config.name(RecordName::new(scope, parsed.key)),
        stale_from: parsed.stale_from,
        runtime,
        attributes: attributes_of(config, parts),
        digests,
        oversized,
    })
}

fn attributes_of(config: &Config, parts: &request::Parts) -> Attributes {
    let Some(authorizer) = &config.authorizer else {
        return Attributes::new();
    };
    authorizer.attributes_of(parts).unwrap_or_else(|| {
        config.warnings().warn(ATTRIBUTES_TOO_LARGE, None, None);
        Attributes::new()
    })
}

const ATTRIBUTES_TOO_LARGE: &str = "attributes of a `ReplayAuthorizer` exceed 4 KiB, none are kept with \
    the response: a hook that compares them refuses its replays";
