//! Which headers of a response are kept.

use std::collections::HashSet;

use http::{
    HeaderMap, HeaderName,
    header::{self, HeaderValue},
};

/// Which headers of a response are kept and replayed.
///
/// Never kept, whatever is configured: hop-by-hop headers and those that
/// `Connection` names (RFC 9110 §7.6.1), `Date`, `Age`, `Content-Length`,
/// `Transfer-Encoding`, `Trailer` and the replay marker; those describe one
/// message, not the response. `Set-Cookie` is kept only by
/// [`cookies`](Self::cookies).
///
/// ```
/// # use axum::{Router, body::Body, http::Request, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use http::header::{LOCATION, SERVER};
/// use tower_idempotency::KeptHeaders;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let most = KeptHeaders::all_but_transient().and(SERVER);
/// let few = KeptHeaders::only([LOCATION]);
/// # for (headers, is_most) in [(most, true), (few, false)] {
/// #     let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// #     let layer = layer.kept_headers(headers).build()?;
/// #     let handler = async || [("location", "/1"), ("etag", "\"1\""), ("server", "s")];
/// #     let app = Router::new().route("/", post(handler).layer(layer));
/// #     for replayed in [false, true] {
/// #         let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #         let response = app.clone().oneshot(request).await?;
/// #         assert!(response.headers().contains_key("location"));
/// #         assert_eq!(response.headers().contains_key("etag"), is_most || !replayed);
/// #         assert_eq!(response.headers().contains_key("server"), is_most || !replayed);
/// #     }
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct KeptHeaders {
    allowed: Option<HashSet<HeaderName>>,
    added: HashSet<HeaderName>,
    dropped: HashSet<HeaderName>,
    cookies: bool,
}

impl KeptHeaders {
    /// Keeps all headers but those that belong to one caller or one exchange:
    /// `Set-Cookie`, `WWW-Authenticate`, `Authentication-Info`, `Proxy-*`,
    /// `Server-Timing`, `Alt-Svc`, `Via`, `Server`, `X-Request-Id`,
    /// `traceparent`, `tracestate`, `RateLimit*`, `X-RateLimit-*` and
    /// `Access-Control-*`, which outer layers set anew. This is the default of
    /// a layer.
    pub fn all_but_transient() -> Self {
        Self {
            allowed: None,
            added: HashSet::new(),
            dropped: HashSet::new(),
            cookies: false,
        }
    }

    /// Keeps these headers only. `Content-Type` and `Content-Encoding` are kept
    /// too, since the body means nothing without them.
    pub fn only(names: impl IntoIterator<Item = HeaderName>) -> Self {
        let mut allowed: HashSet<_> = names.into_iter().collect();
        allowed.extend([header::CONTENT_TYPE, header::CONTENT_ENCODING]);
        Self {
            allowed: Some(allowed),
            ..Self::all_but_transient()
        }
    }

    /// Keeps this header too. Defaults to none.
    pub fn and(mut self, name: HeaderName) -> Self {
        self.dropped.remove(&name);
        self.added.insert(name);
        self
    }

    /// Does not keep this header. Defaults to none.
    pub fn but(mut self, name: HeaderName) -> Self {
        self.added.remove(&name);
        self.dropped.insert(name);
        self
    }

    /// Keeps `Set-Cookie`: whoever may replay a response receives its cookies,
    /// and they are stored. Defaults to not.
    pub fn cookies(mut self) -> Self {
        self.cookies = true;
        self
    }

    /// Whether a header of the response with these headers is kept.
    pub(crate) fn of<'a>(
        &'a self,
        headers: &HeaderMap,
        marker: &'a HeaderName,
    ) -> impl Fn(&HeaderName) -> bool + 'a {
        let hops = named_by_connection(headers);
        move |name| name != marker && !hops.contains(name) && self.keeps(name)
    }

    fn keeps(&self, name: &HeaderName) -> bool {
        if MESSAGE_ONLY.contains(name) {
            return false;
        }
        if name == header::SET_COOKIE {
            return self.cookies;
        }
        if self.dropped.contains(name) {
            return false;
        }
        self.added.contains(name)
            || match &self.allowed {
                Some(allowed) => allowed.contains(name),
                None => !is_transient(name),
            }
    }
}

impl Default for KeptHeaders {
    fn default() -> Self {
        Self::all_but_transient()
    }
}

fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .map(HeaderValue::as_bytes)
        .flat_map(|value| value.split(|&byte| byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

fn is_transient(name: &HeaderName) -> bool {
    TRANSIENT.contains(name) || {
        let name = name.as_str();
        TRANSIENT_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix))
    }
}

/// About one message and its hop; RFC 9110 §7.6.1, RFC 9112 §6, RFC 9111 §5.1.
const MESSAGE_ONLY: [HeaderName; 10] = [
    header::AGE,
    header::CONNECTION,
    header::CONTENT_LENGTH,
    header::DATE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

const TRANSIENT: [HeaderName; 10] = [
    header::ALT_SVC,
    HeaderName::from_static("authentication-info"),
    header::SERVER,
    HeaderName::from_static("server-timing"),
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
    header::VIA,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("idempotent-recorded"),
];

const TRANSIENT_PREFIXES: [&str; 4] = ["access-control-", "proxy-", "ratelimit", "x-ratelimit-"];
