//! The caller: the layer with its settings, its requests, and the answers to it.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, header};
use tower_idempotency::{
    ContentDigest, DynStore, Fingerprinting, IdempotencyBuilder, Key, ReplayAuthorizer,
    ReplayDecision, Scope,
    sealing::{LogIds, NameDigests, Sealing, SealingKey, Secret},
    store::RecordName,
};

use crate::{
    api::{Answer, Api, Ask, ask, required},
    canaries::{ANSWER, ATTRIBUTE, BODY, COOKIE, HEADER, KEY, QUERY, SCOPE, SET_COOKIE, TOKEN},
    output::print,
    probe::{Probe, Run, chunks_and_trailers},
};

pub(crate) struct Caller {
    pub(crate) store: DynStore,
    pub(crate) hidden: bool,
}

impl Caller {
    pub(crate) fn builder(&self, store: DynStore) -> IdempotencyBuilder<DynStore> {
        let user = |request: &http::request::Parts| {
            let user = request.headers.get("x-user")?;
            user.to_str().ok().map(str::to_owned)
        };
        let authorizer = ReplayAuthorizer::new(move |request, record| {
            let is_same = user(request).as_deref() == record.attribute("user");
            let decision = match is_same {
                true => ReplayDecision::Allow,
                false => ReplayDecision::Refuse,
            };
            async move { decision }
        });
        let authorizer = authorizer.attributes(move |request| {
            let user = user(request).map(|user| ("user", user));
            user.into_iter().collect()
        });
        let stream = ContentDigest::Stream {
            max_upload: 1 << 20,
        };
        let builder = required(store)
            .fingerprint(self.fingerprinting())
            .authorize_replay(authorizer)
            .content_digest(stream)
            .log_ids(LogIds::new(&secret(3)))
            .lease(Duration::from_secs(2))
            .heartbeat(Duration::from_millis(500))
            .request_body_timeout(Duration::from_millis(300))
            .max_request_body(10_000)
            .max_response_body(5_000);
        match self.hidden {
            true => builder.sealing(sealing()).name_digests(digests()),
            false => builder,
        }
    }

    fn fingerprinting(&self) -> Fingerprinting {
        let form = Fingerprinting::json().header(header::CONTENT_LANGUAGE);
        match self.hidden {
            true => form.keyed(&secret(1)),
            false => form,
        }
    }

    pub(crate) fn api(&self, probe: &Probe) -> Api {
        Api::new(self.builder(self.store.clone()), probe)
    }

    /// The name under which the store has a key of the caller.
    pub(crate) fn kept_name(&self, key: &str) -> RecordName {
        let name = RecordName::new(Scope::new(SCOPE).unwrap(), Key::new(named(key)));
        print(format_args!("{name:?}"));
        match self.hidden {
            true => digests().of(&name),
            false => name,
        }
    }
}

/// A request with a canary in each part.
pub(crate) fn secret_ask(key: &str) -> Ask {
    ask(&format!("/count?q={QUERY}"))
        .key(&named(key))
        .from(SCOPE)
        .header("x-user", ATTRIBUTE)
        .header("authorization", format!("Bearer {TOKEN}"))
        .header("cookie", format!("session={COOKIE}"))
        .body(format!("{{\"{BODY}\":1}}"))
}

pub(crate) fn named(key: &str) -> String {
    format!("{KEY}-{key}")
}

/// The answer to the caller; another one gets nothing of it.
pub(crate) fn answer(run: &Run) -> Response<axum::body::Body> {
    let operation = run.operation();
    print(format_args!(
        "{operation:?} {:?} {:?}",
        operation.scope(),
        operation.key()
    ));
    let mut response = run.created();
    if operation.scope().as_str() != SCOPE {
        return response;
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("x-trailer", HeaderValue::from_static(HEADER));
    *response.body_mut() = chunks_and_trailers(&[ANSWER], trailers);
    let headers = response.headers_mut();
    headers.insert("x-header", HeaderValue::from_static(HEADER));
    headers.insert(header::SET_COOKIE, HeaderValue::from_static(SET_COOKIE));
    response
}

/// Prints a refusal, which shows its caller nothing either.
#[track_caller]
pub(crate) fn refused(answer: &Answer, problem: &str) {
    let body = String::from_utf8_lossy(&answer.body);
    assert!(body.contains(problem), "{problem}: {answer:?}");
    print_answer(answer);
}

pub(crate) fn print_answer(answer: &Answer) {
    let body = String::from_utf8_lossy(&answer.body);
    print(format_args!(
        "{} {:?} {body}",
        answer.status, answer.headers
    ));
}

pub(crate) fn secret(filled: u8) -> Secret {
    Secret::from_bytes(&[filled; 32]).unwrap()
}

pub(crate) fn sealing() -> Sealing {
    Sealing::new("payments", SealingKey::new("2026-11", &secret(11)).unwrap())
}

pub(crate) fn digests() -> NameDigests {
    NameDigests::new(&secret(2))
}
