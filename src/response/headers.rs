//! Which headers of a response are kept.

use std::collections::HashSet;

use http::{
    HeaderMap, HeaderName,
    header::{self, HeaderValue},
};

use crate::body::grpc;

/// Which headers of a response are kept and replayed.
///
/// These describe one message, not the response, and no setting keeps them:
/// hop-by-hop headers and those that `Connection` names (RFC 9110 §7.6.1), `Date`,
/// `Age`, `Content-Length`, `Transfer-Encoding`, `Trailer`, `Idempotent-Recorded`
/// and the replay marker. `Set-Cookie` is kept only by
/// [`with_cookies`](Self::with_cookies).
///
/// Trailers pass the same rules. In addition, a trailer that belongs into the
/// header section (RFC 9110 §6.5.1) is never kept: `Set-Cookie`, `Location`,
/// `Cache-Control`, `Content-Type` and others that control the request or the
/// response.
///
/// The rules apply when a response is recorded, and once more when it is
/// replayed. So they hold for the response of an operator or of a
/// [`Reconciler`](crate::Reconciler) too, and a change of these settings applies
/// to the records that are there.
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
/// let most = KeptHeaders::all_but_transient().with(SERVER);
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
    /// Keeps all headers but those of one caller or one exchange. This is the
    /// default of a layer.
    ///
    /// Those are `Set-Cookie`, `WWW-Authenticate`, `Authentication-Info`,
    /// `Proxy-*`, `Server-Timing`, `Alt-Svc`, `Via`, `Server`, `X-Request-Id`,
    /// `traceparent`, `tracestate`, `RateLimit*`, `X-RateLimit-*`, and
    /// `Access-Control-*`, which outer layers set anew.
    pub fn all_but_transient() -> Self {
        Self {
            allowed: None,
            added: HashSet::new(),
            dropped: HashSet::new(),
            cookies: false,
        }
    }

    /// Keeps these headers and trailers only. `Content-Type`, `Content-Encoding` and
    /// those of gRPC are kept too, since the body means nothing without them.
    pub fn only(names: impl IntoIterator<Item = HeaderName>) -> Self {
        let mut allowed: HashSet<_> = names.into_iter().collect();
        allowed.extend([header::CONTENT_TYPE, header::CONTENT_ENCODING]);
        allowed.extend(grpc::RESULT);
        Self {
            allowed: Some(allowed),
            ..Self::all_but_transient()
        }
    }

    /// Keeps this header too. Defaults to none.
    pub fn with(mut self, name: HeaderName) -> Self {
        self.dropped.remove(&name);
        self.added.insert(name);
        self
    }

    /// Does not keep this header. Defaults to none.
    pub fn without(mut self, name: HeaderName) -> Self {
        self.added.remove(&name);
        self.dropped.insert(name);
        self
    }

    /// Keeps `Set-Cookie`. The cookies are stored, and each replay sends them. Defaults to
    /// leaving them out.
    pub fn with_cookies(mut self) -> Self {
        self.cookies = true;
        self
    }

    /// The rules for the response with these headers.
    pub(crate) fn of<'a>(&'a self, headers: &HeaderMap, marker: &'a HeaderName) -> KeptLines<'a> {
        KeptLines {
            kept: self,
            marker,
            hops: named_by_connection(headers),
        }
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

/// Which lines of one response are kept.
pub(crate) struct KeptLines<'a> {
    kept: &'a KeptHeaders,
    marker: &'a HeaderName,
    hops: Vec<HeaderName>,
}

impl KeptLines<'_> {
    pub(crate) fn header(&self, name: &HeaderName) -> bool {
        name != self.marker && !self.hops.contains(name) && self.kept.keeps(name)
    }

    pub(crate) fn trailer(&self, name: &HeaderName) -> bool {
        !HEADER_ONLY.contains(name) && self.header(name)
    }
}

/// Removes the headers that no layer keeps, whatever its settings.
pub(crate) fn remove_message_headers(headers: &mut HeaderMap) {
    let hops = named_by_connection(headers);
    retain(headers, |name| {
        !MESSAGE_ONLY.contains(name) && !hops.contains(name)
    });
}

/// Removes the lines that are not kept.
pub(crate) fn retain(lines: &mut HeaderMap, keeps: impl Fn(&HeaderName) -> bool) {
    let removed: Vec<_> = lines.keys().filter(|name| !keeps(name)).cloned().collect();
    for name in removed {
        lines.remove(name);
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

/// The header that says that a response was not recorded.
pub(crate) const RECORDED: HeaderName = HeaderName::from_static("idempotent-recorded");

/// About one message and its hop; RFC 9110 §7.6.1, RFC 9112 §6, RFC 9111 §5.1.
#[rustfmt::skip]
const MESSAGE_ONLY: [HeaderName; 11] = [
    header::AGE, header::CONNECTION, header::CONTENT_LENGTH, header::DATE, RECORDED,
    HeaderName::from_static("keep-alive"), HeaderName::from_static("proxy-connection"), header::TE,
    header::TRAILER, header::TRANSFER_ENCODING, header::UPGRADE,
];

/// Without effect or harmful behind the content; RFC 9110 §6.5.1.
#[rustfmt::skip]
const HEADER_ONLY: [HeaderName; 23] = [
    header::AUTHORIZATION, header::CACHE_CONTROL, header::CONTENT_ENCODING, header::CONTENT_RANGE,
    header::CONTENT_TYPE, header::COOKIE, header::EXPECT, header::EXPIRES, header::HOST,
    header::IF_MATCH, header::IF_MODIFIED_SINCE, header::IF_NONE_MATCH, header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE, header::LOCATION, header::MAX_FORWARDS, header::PRAGMA,
    header::RANGE, header::RETRY_AFTER, header::SET_COOKIE, header::VARY, header::WARNING,
    header::WWW_AUTHENTICATE,
];

#[rustfmt::skip]
const TRANSIENT: [HeaderName; 9] = [
    header::ALT_SVC, HeaderName::from_static("authentication-info"), header::SERVER,
    HeaderName::from_static("server-timing"), HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"), header::VIA, header::WWW_AUTHENTICATE,
    HeaderName::from_static("x-request-id"),
];

const TRANSIENT_PREFIXES: [&str; 4] = ["access-control-", "proxy-", "ratelimit", "x-ratelimit-"];
