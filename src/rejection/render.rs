//! Renders refusals: as problem details (RFC 9457), as errors of gRPC, or as a custom
//! renderer has it.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header, request};

use super::{Rejection, grpc::trailers_only};
use crate::{
    body::{grpc, whole::WholeBody},
    response::attributes::Attributes,
    telemetry::log::Warnings,
};

/// The settings for refusals.
#[derive(Clone)]
pub(crate) struct Renderer {
    /// What the `type` of a problem begins with.
    pub(crate) types: Arc<str>,
    pub(crate) documentation: Option<HeaderValue>,
    pub(crate) custom: Option<RenderFn>,
}

/// Returns `None` where the default is to be used, and a response without a body where its
/// body is not whole.
pub(crate) type RenderFn =
    Arc<dyn Fn(&Rejection, &request::Parts) -> Option<Response<Option<Bytes>>> + Send + Sync>;

/// Returns a renderer of refusals for one with any body.
pub(crate) fn custom<B: WholeBody>(
    render: impl Fn(&Rejection, &request::Parts) -> Option<Response<B>> + Send + Sync + 'static,
) -> RenderFn {
    let whole = |body: B| {
        let (data, trailers) = body.into_whole()?;
        trailers
            .is_none_or(|trailers| trailers.is_empty())
            .then_some(data)
    };
    Arc::new(move |rejection, parts| Some(render(rejection, parts)?.map(whole)))
}

/// What refusals and replays need of the request.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestHead {
    /// For a custom renderer and a `ReplayAuthorizer` only, since copying the parts takes
    /// time.
    kept: Option<Arc<KeptHead>>,
    is_grpc: bool,
}

#[derive(Debug)]
struct KeptHead {
    parts: request::Parts,
    attributes: Attributes,
}

impl RequestHead {
    pub(crate) fn new(parts: &request::Parts, renderer: &Renderer) -> Self {
        let is_grpc = grpc::is_grpc(&parts.headers);
        let is_rendered = renderer.custom.is_some() && !is_grpc;
        match is_rendered {
            true => Self::with_attributes(parts, Attributes::new()),
            false => Self {
                kept: None,
                is_grpc,
            },
        }
    }

    /// The head of a request whose response is kept with these attributes.
    pub(crate) fn with_attributes(parts: &request::Parts, attributes: Attributes) -> Self {
        let kept = KeptHead {
            parts: parts.clone(),
            attributes,
        };
        Self {
            kept: Some(Arc::new(kept)),
            is_grpc: grpc::is_grpc(&parts.headers),
        }
    }

    pub(crate) fn parts(&self) -> Option<&request::Parts> {
        self.kept.as_deref().map(|kept| &kept.parts)
    }

    /// Returns the attributes to keep with the response.
    pub(crate) fn attributes(&self) -> &Attributes {
        const NONE: &Attributes = &Attributes::NONE;
        self.kept.as_deref().map_or(NONE, |kept| &kept.attributes)
    }

    pub(crate) fn is_grpc(&self) -> bool {
        self.is_grpc
    }

    /// The default form of a refusal.
    fn standard(&self, rejection: &Rejection) -> Response<Bytes> {
        match self.is_grpc {
            true => trailers_only(rejection),
            false => problem(rejection),
        }
    }
}

impl Renderer {
    pub(crate) fn standard() -> Self {
        Self {
            types: PROBLEM_TYPES.into(),
            documentation: None,
            custom: None,
        }
    }

    pub(crate) fn render(
        &self,
        rejection: &Rejection,
        head: &RequestHead,
        warnings: &Warnings,
    ) -> Response<Bytes> {
        let mut rejection = rejection.clone();
        rejection.types = Some(Arc::clone(&self.types));
        let mut response = self
            .render_custom(&rejection, head, warnings)
            .unwrap_or_else(|| head.standard(&rejection));
        let headers = response.headers_mut();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Clients try again exactly where it is set, whatever a custom renderer says.
        match rejection.retry_after {
            Some(seconds) => headers.insert(header::RETRY_AFTER, seconds.into()),
            None => headers.remove(header::RETRY_AFTER),
        };
        if let Some(link) = &self.documentation {
            headers.append(header::LINK, link.clone());
        }
        response
    }

    fn render_custom(
        &self,
        rejection: &Rejection,
        head: &RequestHead,
        warnings: &Warnings,
    ) -> Option<Response<Bytes>> {
        let (Some(render), Some(parts)) = (&self.custom, head.parts()) else {
            return None;
        };
        // Its client reads no HTTP response.
        if head.is_grpc {
            return None;
        }
        let rendered = catch_unwind(AssertUnwindSafe(|| render(rejection, parts)));
        let Ok(rendered) = rendered else {
            let panicked = Rejection {
                retry_after: rejection.retry_after,
                types: rejection.types.clone(),
                ..Rejection::renderer_panicked()
            };
            panicked.log(warnings);
            return Some(head.standard(&panicked));
        };
        let (parts, body) = rendered?.into_parts();
        let unfit = match body {
            Some(body) if is_fit(parts.status, rejection) => {
                return Some(Response::from_parts(parts, body));
            }
            Some(_) => UNFIT,
            None => NOT_WHOLE,
        };
        warnings.warn(unfit, None, rejection.operation);
        None
    }
}

fn problem(rejection: &Rejection) -> Response<Bytes> {
    let mut response = Response::new(rejection.to_json().to_string().into());
    *response.status_mut() = rejection.status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/problem+json"),
    );
    response
}

impl fmt::Debug for Renderer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renderer")
            .field("types", &self.types)
            .field("documentation", &self.documentation)
            .field("custom", &self.custom.is_some())
            .finish()
    }
}

/// Whether a custom response can be sent. An interim status breaks the connection, and
/// 425 and 429 mean something else to generic clients, unless the refusal itself has 429.
fn is_fit(status: StatusCode, rejection: &Rejection) -> bool {
    let is_other = matches!(status.as_u16(), 425 | 429) && status != rejection.status;
    !status.is_informational() && !is_other
}

pub(super) const PROBLEM_TYPES: &str = "urn:tower-idempotency:problem:";
const UNFIT: &str = "response of `render` not used, since its status is below 200, or 425 or 429: the \
    refusal is sent in the default form";
const NOT_WHOLE: &str = "response of `render` not used, since its body is not ready as a whole, or has \
    trailers: the refusal is sent in the default form";
