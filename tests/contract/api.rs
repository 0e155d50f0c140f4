//! A guarded handler, and asking it without a socket.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use http_body_util::BodyExt as _;
use serde_json::Value;
use tokio::task::JoinHandle;
use tower::{Layer as _, Service, ServiceExt as _};
use tower_idempotency::{
    DynStore, Idempotency, IdempotencyBuilder, IdempotencyLayer, Key, MemoryStore, Outcome,
    ResponseBody, Scope, Store,
    store::{Fingerprint, Record, RecordName},
};

use crate::{
    probe::{Failure, Probe},
    scan,
    server::{Server, serve},
};

/// The caller of every request that names no other.
pub(crate) const CALLER: &str = "acme-7";

/// A layer whose routes require a key.
pub(crate) fn required<S: Store>(store: S) -> IdempotencyBuilder<S> {
    IdempotencyLayer::required(store, account)
}

/// A layer whose routes need no key.
pub(crate) fn optional<S: Store>(store: S) -> IdempotencyBuilder<S> {
    IdempotencyLayer::optional(store, account)
}

fn account(parts: &http::request::Parts) -> Option<Scope> {
    scan::sent(parts);
    Scope::new(parts.headers.get("x-account")?.to_str().ok()?)
}

/// The name of the record of a key of [`CALLER`].
pub(crate) fn named(key: &str) -> RecordName {
    RecordName::new(Scope::new(CALLER).unwrap(), Key::new(key))
}

/// The record of a key of [`CALLER`].
pub(crate) async fn record(store: &impl Store, key: &str) -> Option<Record> {
    store.read(&named(key)).await.unwrap()
}

/// The fingerprint that a layer with the default settings gives a request.
pub(crate) async fn fingerprint(ask: Ask) -> Fingerprint {
    let store = MemoryStore::new();
    let api = Api::new(required(DynStore::new(store.clone())), &Probe::counting());
    let name = named(ask.0.headers()["idempotency-key"].to_str().unwrap());
    api.send(ask).await;
    store.read(&name).await.unwrap().unwrap().fingerprint
}

/// A handler under a layer.
#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) layer: IdempotencyLayer<DynStore>,
    probe: Probe,
}

pub(crate) type Guarded = Idempotency<Probe, DynStore>;

impl Api {
    pub(crate) fn new(builder: IdempotencyBuilder<DynStore>, probe: &Probe) -> Self {
        Self {
            layer: builder.build().unwrap(),
            probe: probe.clone(),
        }
    }

    pub(crate) fn service(&self) -> Guarded {
        self.layer.layer(self.probe.clone())
    }

    pub(crate) async fn send(&self, ask: Ask) -> Answer {
        send(self.service(), ask).await
    }

    pub(crate) async fn respond(
        &self,
        request: Request<Body>,
    ) -> Result<Response<ResponseBody<Body>>, Failure> {
        self.service().oneshot(request).await
    }

    /// Sends a request on a new task.
    pub(crate) fn spawn(&self, ask: Ask) -> JoinHandle<Answer> {
        let api = self.clone();
        tokio::spawn(async move { api.send(ask).await })
    }

    pub(crate) async fn serve(&self) -> Server {
        serve(self.service()).await
    }
}

/// Sends a request to any service.
pub(crate) async fn send<S, R>(service: S, ask: Ask) -> Answer
where
    S: Service<Request<Body>, Response = Response<R>>,
    S::Error: std::fmt::Debug,
    R: HttpBody<Data = Bytes>,
    R::Error: std::fmt::Debug,
{
    Answer::of(service.oneshot(ask.0).await.unwrap()).await
}

/// A request: by default a POST of `{"amount":1}` by [`CALLER`], without a key.
pub(crate) struct Ask(pub(crate) Request<Body>);

pub(crate) fn ask(uri: &str) -> Ask {
    Ask(Request::post(uri)
        .header("x-account", CALLER)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from("{\"amount\":1}"))
        .unwrap())
}

/// The request that most tests send.
pub(crate) fn keyed(key: &str) -> Ask {
    ask("/count").key(key)
}

impl Ask {
    pub(crate) fn key(self, value: &str) -> Self {
        self.header("idempotency-key", value)
    }

    pub(crate) fn from(self, caller: &str) -> Self {
        self.header("x-account", caller)
    }

    pub(crate) fn method(mut self, method: Method) -> Self {
        *self.0.method_mut() = method;
        self
    }

    /// Sets this header to one line.
    pub(crate) fn header(mut self, name: &'static str, value: impl AsRef<[u8]>) -> Self {
        self.0.headers_mut().insert(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value.as_ref()).unwrap(),
        );
        self
    }

    /// One more line of this header.
    pub(crate) fn line(mut self, name: &'static str, value: &'static str) -> Self {
        self.0.headers_mut().append(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
        self
    }

    pub(crate) fn without(mut self, name: &'static str) -> Self {
        self.0.headers_mut().remove(name);
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Body>) -> Self {
        *self.0.body_mut() = body.into();
        self
    }
}

/// A response, read to its end.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    pub(crate) outcome: Option<Outcome>,
}

impl Answer {
    pub(crate) async fn of<R>(response: Response<R>) -> Self
    where
        R: HttpBody<Data = Bytes>,
        R::Error: std::fmt::Debug,
    {
        let (parts, body) = response.into_parts();
        let body = body.collect().await.unwrap();
        let trailers = body.trailers().cloned();
        let body = body.to_bytes();
        scan::answered(&parts.headers, &body);
        Self {
            status: parts.status,
            headers: parts.headers,
            body,
            trailers,
            outcome: parts.extensions.get().copied(),
        }
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.headers
            .get("idempotent-replayed")
            .is_some_and(|value| value == "true")
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub(crate) fn problem(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    /// Asserts the handler's own answer: neither marked as a replay nor as
    /// unrecorded.
    #[track_caller]
    pub(crate) fn assert_live(&self, status: u16) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        assert!(
            !self.headers.contains_key("idempotent-replayed"),
            "{self:?}"
        );
        assert!(
            !self.headers.contains_key("idempotent-recorded"),
            "{self:?}"
        );
        self
    }

    /// Asserts the answer of the handler's n-th run, and no replay.
    #[track_caller]
    pub(crate) fn assert_run(&self, number: usize) -> &Self {
        assert_eq!(self.header("x-run"), Some(&*number.to_string()), "{self:?}");
        self.assert_live(self.status.as_u16())
    }

    /// Asserts a replay of `first`: its status, end-to-end headers in their order,
    /// body and trailers, with the marker.
    #[track_caller]
    pub(crate) fn assert_replay_of(&self, first: &Self) -> &Self {
        assert!(self.is_replay(), "no marker: {self:?}");
        assert!(!first.is_replay(), "the first answer has the marker");
        assert_eq!(self.status, first.status);
        assert_eq!(self.body, first.body);
        assert_eq!(self.trailers, first.trailers);
        assert_eq!(lines(&self.headers), lines(&first.headers));
        self
    }

    /// Asserts a refusal of this type, with all members of its problem.
    #[track_caller]
    pub(crate) fn assert_problem(&self, status: u16, slug: &str) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(
            self.header("content-type"),
            Some("application/problem+json"),
            "{self:?}"
        );
        assert_eq!(self.header("cache-control"), Some("no-store"));
        assert!(
            !self.headers.contains_key("idempotent-replayed"),
            "{self:?}"
        );
        let problem = self.problem();
        assert_eq!(
            problem["type"],
            format!("urn:tower-idempotency:problem:{slug}")
        );
        assert_eq!(problem["status"], status);
        for member in ["title", "detail"] {
            assert!(!problem[member].as_str().unwrap().is_empty());
        }
        let after = self.retry_after();
        assert_eq!(problem["retryable"], after.is_some());
        assert_eq!(problem["retry_after"].as_u64(), after);
        self
    }

    pub(crate) fn retry_after(&self) -> Option<u64> {
        Some(self.header("retry-after")?.parse().unwrap())
    }
}

/// The header lines that a replay repeats: all but those of one message.
fn lines(headers: &HeaderMap) -> Vec<(String, Bytes)> {
    let of_one_message = [
        "date",
        "content-length",
        "transfer-encoding",
        "trailer",
        "idempotent-replayed",
    ];
    headers
        .iter()
        .filter(|(name, _)| !of_one_message.contains(&name.as_str()))
        .map(|(name, value)| (name.to_string(), Bytes::copy_from_slice(value.as_bytes())))
        .collect()
}

/// Lets every task run until it waits. Needs a runtime of one thread.
pub(crate) async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

/// Asks again until `look` returns a value.
pub(crate) async fn eventually<T>(mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..2_000 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(15)).await;
    }
    panic!("it never came about");
}
