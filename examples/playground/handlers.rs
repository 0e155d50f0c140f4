//! The endpoints. Each shows one behaviour of a handler.

use std::{collections::HashMap, fmt, future::ready, io, str::FromStr, time::Duration};

use axum::{
    Extension, Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, Query, Request, State},
    middleware,
    response::{AppendHeaders, IntoResponse, Response},
    routing::{get, post},
};
use futures_util::{Stream, stream};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, ETAG, LINK, LOCATION, SET_COOKIE, TRAILER,
        VARY,
    },
};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::json;
use tokio::time;
use tower::{Service, ServiceExt as _};
use tower_idempotency::{Disposition, KeepFor, Operation, OrRelease, Release, RequestBody};

use crate::{
    caller::Account,
    orders::{self, Orders},
    runs::{self, Run, Runs},
};

/// Counts its runs, at `/count` and at each `/count/{id}`.
pub(crate) fn counters(runs: Runs) -> Router {
    let counter = get(count).post(count).patch(count).put(count);
    Router::new()
        .route("/count", counter.clone())
        .route("/count/{id}", counter)
        .route_layer(middleware::from_fn_with_state(runs, runs::note))
}

/// All endpoints, as a service that fails at `/error`. (A `Router` cannot.)
pub(crate) fn fallible(
    runs: Runs,
    orders: Orders,
) -> impl Service<Request<RequestBody<Body>>, Response = Response, Error = Failed, Future: Send>
+ Clone
+ Send
+ Sync
+ 'static {
    let router = router(runs.clone(), orders);
    tower::service_fn(move |request: Request<RequestBody<Body>>| {
        let (runs, router) = (runs.clone(), router.clone());
        async move {
            if request.method() != Method::POST || request.uri().path() != "/error" {
                return Ok(router
                    .oneshot(request)
                    .await
                    .unwrap_or_else(|never| match never {}));
            }
            match runs.add("/error", Account::name(request.extensions())) {
                Ok(_) => Err(Failed),
                Err(error) => Ok(runs::unwritable(&error).into_response()),
            }
        }
    })
}

/// The error of the inner service.
#[derive(Debug)]
pub(crate) struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the inner service failed")
    }
}

impl std::error::Error for Failed {}

fn router(runs: Runs, orders: Orders) -> Router {
    Router::new()
        .route("/slow", post(slow))
        .route("/seq/{id}", post(seq))
        .route("/echo", post(echo))
        .route("/bin", post(bin))
        .route("/headers", post(many_headers))
        .route("/status/{code}", post(status))
        .route("/stream", post(streamed))
        .route("/big", post(big))
        .route("/panic", post(panics))
        .route("/effect-then-panic", post(panics_after_an_effect))
        .route("/say/{word}", post(say))
        .route("/order", post(orders::order).layer(Extension(orders)))
        .route("/operation", post(operation))
        .route_layer(middleware::from_fn_with_state(runs.clone(), runs::note))
        .merge(counters(runs.clone()))
        .merge(documents(runs))
        // The layer's limit is the one under test.
        .layer(DefaultBodyLimit::disable())
}

async fn count(Extension(Run(n)): Extension<Run>) -> Response {
    let headers = [
        (LOCATION, format!("/things/{n}")),
        (HeaderName::from_static("x-run"), n.to_string()),
    ];
    (StatusCode::CREATED, headers, Json(json!({ "n": n }))).into_response()
}

async fn slow(run: Extension<Run>, wishes: Wishes) -> Result<Response, Mistake> {
    time::sleep(Duration::from_millis(wishes.number("ms", 0)?)).await;
    Ok(count(run).await)
}

/// Answers the n-th run with the n-th status of the script, and later ones with
/// the last.
async fn seq(Extension(Run(n)): Extension<Run>, wishes: Wishes) -> Result<Response, Mistake> {
    let script = wishes.text("script").unwrap_or("200");
    let statuses: Vec<StatusCode> = script
        .split(',')
        .map(|status| parse("script", status))
        .collect::<Result<_, _>>()?;
    let last = statuses.len() - 1;
    Ok((statuses[(n - 1).min(last)], Json(json!({ "n": n }))).into_response())
}

async fn echo(headers: HeaderMap, body: Bytes) -> Response {
    let mut response = Response::new(Body::from(body));
    if let Some(media_type) = headers.get(CONTENT_TYPE) {
        response
            .headers_mut()
            .insert(CONTENT_TYPE, media_type.clone());
    }
    response
}

/// As `/count`, for a JSON body. Another body releases the key, and is no run.
fn documents(runs: Runs) -> Router {
    Router::new()
        .route("/json", post(document))
        .with_state(runs)
}

async fn document(
    State(runs): State<Runs>,
    account: Option<Extension<Account>>,
    OrRelease(Json(_)): OrRelease<Json<serde_json::Value>>,
) -> Response {
    let account = account.as_ref().map_or("-", |account| account.as_str());
    match runs.add("/json", account) {
        Ok(run) => count(Extension(run)).await,
        Err(error) => runs::unwritable(&error).into_response(),
    }
}

async fn bin(Extension(Run(n)): Extension<Run>) -> Response {
    let mut bytes: Vec<u8> = (0..=u8::MAX).collect();
    bytes.extend_from_slice(n.to_string().as_bytes());
    ([(CONTENT_TYPE, "application/octet-stream")], bytes).into_response()
}

async fn many_headers(
    Extension(Run(n)): Extension<Run>,
    wishes: Wishes,
) -> Result<Response, Mistake> {
    let text = |value: &'static [u8]| HeaderValue::from_bytes(value).ok();
    let named = HeaderName::from_static;
    let lines = [
        (SET_COOKIE, text(b"session=secret; HttpOnly")),
        (SET_COOKIE, text(b"theme=dark")),
        (LINK, text(b"</a?x=1,2>; rel=\"next\"; title=\"one, two\"")),
        (LINK, text(b"</b>; rel=\"prev\"")),
        (VARY, text(b"accept")),
        (VARY, text(b"accept-language")),
        (ETAG, text(b"\"e1\"")),
        (DATE, text(b"Fri, 31 Dec 1999 23:59:59 GMT")),
        (CONNECTION, text(b"x-hop")),
        (named("x-hop"), text(b"this connection only")),
        (named("x-text"), text(b"caf\xe9, cr\xe8me, \xff")),
    ];
    let lines = lines
        .into_iter()
        .filter_map(|(name, value)| value.map(|value| (name, value)));
    let mut response = (AppendHeaders(lines), Json(json!({ "n": n }))).into_response();
    if wishes.flag("lie") {
        let headers = response.headers_mut();
        headers.insert(CONTENT_LENGTH, HeaderValue::from_static("4096"));
    }
    Ok(response)
}

async fn status(
    Path(code): Path<String>,
    operation: Option<Operation>,
    wishes: Wishes,
) -> Result<Response, Mistake> {
    let code: StatusCode = parse("code", &code)?;
    if let Some(operation) = operation.filter(|_| wishes.flag("effects")) {
        operation.effects_started();
    }
    let body = wishes.text("body").unwrap_or_default().to_owned();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = code;
    for (wish, header) in [("type", CONTENT_TYPE), ("location", LOCATION)] {
        if let Some(value) = wishes.text(wish) {
            response.headers_mut().insert(header, parse(wish, value)?);
        }
    }
    Ok(response)
}

async fn streamed(Extension(Run(n)): Extension<Run>, wishes: Wishes) -> Result<Response, Mistake> {
    let stream = Chunks {
        run: n,
        chunks: wishes.number("chunks", 3)?,
        pause: Duration::from_millis(wishes.number("ms", 0)?),
        fail: wishes.number("fail", u64::MAX)?,
        trailers: wishes.flag("trailers"),
    };
    let announced = stream
        .trailers
        .then_some([(TRAILER, "set-cookie, server-timing, x-sum")]);
    let media_type = wishes.text("type").unwrap_or("text/plain").to_owned();
    let body = Body::new(StreamBody::new(stream.frames()));
    let headers = [(CONTENT_TYPE, parse::<HeaderValue>("type", &media_type)?)];
    Ok((headers, announced, body).into_response())
}

struct Chunks {
    run: usize,
    chunks: u64,
    pause: Duration,
    /// The chunk after which the body breaks.
    fail: u64,
    trailers: bool,
}

impl Chunks {
    fn frames(self) -> impl Stream<Item = io::Result<Frame<Bytes>>> + Send + 'static {
        stream::unfold((0, self), async |(sent, plan): (u64, Self)| {
            if sent > 0 {
                time::sleep(plan.pause).await;
            }
            let frame = if sent == plan.fail {
                Err(io::Error::other("the body breaks here"))
            } else if sent < plan.chunks {
                let text = format!("chunk {} of run {}\n", sent + 1, plan.run);
                Ok(Frame::data(Bytes::from(text)))
            } else if sent == plan.chunks && plan.trailers {
                let mut trailers = HeaderMap::new();
                let secret = HeaderValue::from_static("session=secret; HttpOnly");
                trailers.insert(SET_COOKIE, secret);
                trailers.insert("server-timing", HeaderValue::from_static("db;dur=53"));
                trailers.insert("x-sum", HeaderValue::from(plan.chunks));
                Ok(Frame::trailers(trailers))
            } else {
                return None;
            };
            Some((frame, (sent + 1, plan)))
        })
    }
}

async fn big(run: Extension<Run>, wishes: Wishes) -> Result<Response, Mistake> {
    let length = wishes.length()?;
    let body = if wishes.flag("stream") {
        let rest = stream::unfold(length, |left| {
            let next = left.min(16 << 10);
            let data = Ok::<_, io::Error>(Bytes::from(vec![b'x'; next]));
            ready((next > 0).then_some((data, left - next)))
        });
        Body::from_stream(rest)
    } else {
        Body::from(vec![b'x'; length])
    };
    let Extension(Run(n)) = run;
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/plain")),
        (HeaderName::from_static("x-run"), HeaderValue::from(n)),
    ];
    Ok((headers, body).into_response())
}

async fn panics() -> StatusCode {
    panic!("a handler that panics")
}

async fn panics_after_an_effect(operation: Option<Operation>) -> StatusCode {
    if let Some(operation) = operation {
        operation.effects_started();
    }
    panic!("a handler that panics after an effect")
}

async fn say(
    Path(word): Path<String>,
    Extension(Run(n)): Extension<Run>,
    wishes: Wishes,
) -> Result<Response, Mistake> {
    let disposition = match word.as_str() {
        "record" => Disposition::Record,
        "release" => Disposition::Release(Release::AnyRequest),
        "unknown" => Disposition::Unknown,
        _ => return Err(Mistake(format!("{word:?} is no word of a handler"))),
    };
    let keep_ms = wishes.text("keep_ms").is_some();
    let keep_for = keep_ms.then(|| wishes.number("keep_ms", 0)).transpose()?;
    let status: StatusCode = wishes.number("status", StatusCode::OK)?;
    let mut response = (status, disposition, Json(json!({ "n": n }))).into_response();
    if let Some(keep_for) = keep_for {
        let keep_for = KeepFor(Duration::from_millis(keep_for));
        response.extensions_mut().insert(keep_for);
    }
    Ok(response)
}

async fn operation(
    Extension(Run(n)): Extension<Run>,
    operation: Option<Operation>,
) -> Json<serde_json::Value> {
    Json(json!(operation.map(|operation| json!({
        "id": operation.id().to_string(),
        "attempt": operation.attempt(),
        "fence": operation.fence().get(),
        "payments": operation.derive("payments"),
        "key": operation.key().as_str(),
        "n": n,
    }))))
}

/// The parameters of a query.
pub(crate) struct Wishes(HashMap<String, String>);

impl Wishes {
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    fn flag(&self, name: &str) -> bool {
        self.text(name) == Some("1")
    }

    pub(crate) fn number<T: FromStr<Err: fmt::Display>>(
        &self,
        name: &str,
        unset: T,
    ) -> Result<T, Mistake> {
        self.text(name).map_or(Ok(unset), |text| parse(name, text))
    }

    /// Returns `len`, the number of bytes of a response; 0 by default.
    pub(crate) fn length(&self) -> Result<usize, Mistake> {
        let length = self.number("len", 0)?;
        if length > LARGEST {
            return Err(Mistake(format!("len: {length} is more than {LARGEST}")));
        }
        Ok(length)
    }
}

impl<S: Sync> axum::extract::FromRequestParts<S> for Wishes {
    type Rejection = axum::extract::rejection::QueryRejection;

    async fn from_request_parts(
        parts: &mut http::request::Parts,
        _state: &S,
    ) -> Result<Self, Self::Rejection> {
        Query::try_from_uri(&parts.uri).map(|Query(wishes)| Self(wishes))
    }
}

/// A parameter that is out of range: 400.
pub(crate) struct Mistake(String);

impl IntoResponse for Mistake {
    fn into_response(self) -> Response {
        (StatusCode::BAD_REQUEST, self.0).into_response()
    }
}

fn parse<T: FromStr<Err: fmt::Display>>(name: &str, text: &str) -> Result<T, Mistake> {
    text.parse()
        .map_err(|error| Mistake(format!("{name}: {text:?}: {error}")))
}

const LARGEST: usize = 1 << 30;
