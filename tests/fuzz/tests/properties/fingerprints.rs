//! Different parts of a request make different fingerprints.

use bytes::Bytes;
use http::{HeaderName, Request};
use proptest::{collection::vec, prelude::*, sample::select};
use tower_idempotency::{Fingerprinting, IdempotencyLayer, MemoryStore, Scope};

use crate::responses::{answer, current_thread};

proptest! {
    /// Rules 23, 26, 27 and 29.
    #[test]
    fn different_parts_make_different_fingerprints(
        first in parts(),
        other in parts(),
        changed in 0..8_usize,
    ) {
        let second = first.clone().with(changed, other);
        let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
            .fingerprint(Fingerprinting::bytes().header(HEADERS[0].clone()).header(HEADERS[1].clone()).authority())
            .build()
            .unwrap();
        let (status, replayed) = current_thread().block_on(async {
            let handler = || http::Response::new(Default::default());
            answer(&layer, first.request(), handler).await;
            let second = answer(&layer, second.request(), handler).await;
            (second.status, second.headers.contains_key("idempotent-replayed"))
        });
        let is_same = first == second;
        prop_assert_eq!((status.as_u16(), replayed), if is_same { (200, true) } else { (422, false) });
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Parts {
    method: &'static str,
    path: String,
    query: Option<String>,
    media_types: Vec<&'static str>,
    codings: Vec<&'static str>,
    headers: [Vec<String>; 2],
    hosts: Vec<&'static str>,
    body: Vec<u8>,
}

impl Parts {
    /// One part is another's.
    fn with(mut self, changed: usize, other: Self) -> Self {
        match changed {
            0 => self.method = other.method,
            1 => self.path = other.path,
            2 => self.query = other.query,
            3 => self.media_types = other.media_types,
            4 => self.codings = other.codings,
            5 => self.headers = other.headers,
            6 => self.hosts = other.hosts,
            _ => self.body = other.body,
        }
        self
    }

    fn request(&self) -> Request<Bytes> {
        let query = self.query.as_ref().map(|query| format!("?{query}"));
        let mut request = Request::builder()
            .method(self.method)
            .uri(format!("/{}{}", self.path, query.unwrap_or_default()))
            .header("idempotency-key", "k");
        for media_type in &self.media_types {
            request = request.header("content-type", *media_type);
        }
        if !self.codings.is_empty() {
            request = request.header("content-encoding", self.codings.join(","));
        }
        for (name, values) in HEADERS.iter().zip(&self.headers) {
            for value in values {
                request = request.header(name, value);
            }
        }
        for host in &self.hosts {
            request = request.header("host", *host);
        }
        request.body(self.body.clone().into()).unwrap()
    }
}

fn parts() -> impl Strategy<Value = Parts> {
    let text = || vec(select(&["a", "b", "%20"][..]), 0..2).prop_map(|text| text.concat());
    let few = |from: &'static [&'static str]| vec(select(from), 0..2);
    (
        select(&["POST", "PATCH"][..]),
        text(),
        prop::option::of(text()),
        few(&["text/plain", "text/plain;a=b", ""]),
        few(&["gzip", "br"]),
        [vec(text(), 0..3), vec(text(), 0..3)],
        few(&["a.example", "b.example", "a.example:8080"]),
        vec(select(&b"ab\n"[..]), 0..2),
    )
        .prop_map(
            |(method, path, query, media_types, codings, headers, hosts, body)| Parts {
                method,
                path,
                query,
                media_types,
                codings,
                headers,
                hosts,
                body,
            },
        )
}

const HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("x-one"),
    HeaderName::from_static("x-other"),
];
