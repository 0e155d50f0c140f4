//! Requests that an extractor of axum refuses, and their corrected retries.

use axum::{
    Form, Json, Router,
    body::Body,
    extract::{DefaultBodyLimit, Path, Query},
    response::IntoResponse as _,
    routing::post,
};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use tower::ServiceExt as _;
use tower_idempotency::{
    Disposition, IdempotencyLayer, MemoryStore, Operation, OrRelease, Outcome, Scope,
};

#[derive(Deserialize)]
struct Amount {
    amount: u32,
}

/// One route for each extractor, in the wrapper and bare.
fn app() -> Router {
    let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
        .build()
        .unwrap();
    let wrapped = Router::new()
        .route(
            "/json",
            post(async |OrRelease(Json(Amount { amount })): OrRelease<Json<Amount>>| paid(amount)),
        )
        .route(
            "/form",
            post(async |OrRelease(Form(Amount { amount })): OrRelease<Form<Amount>>| paid(amount)),
        )
        .route(
            "/query",
            post(
                async |OrRelease(Query(Amount { amount })): OrRelease<Query<Amount>>| paid(amount),
            ),
        )
        .route(
            "/path/{amount}",
            post(async |OrRelease(Path(amount)): OrRelease<Path<u32>>| paid(amount)),
        )
        .route(
            "/all/{id}",
            post(
                async |operation: Operation,
                       OrRelease(Path(id)): OrRelease<Path<u32>>,
                       OrRelease(Query(_)): OrRelease<Query<Amount>>,
                       OrRelease(Json(Amount { amount })): OrRelease<Json<Amount>>| {
                    assert_eq!(operation.attempt(), 1);
                    paid(id + amount)
                },
            ),
        )
        .route(
            "/optional",
            post(
                async |OrRelease(amount): OrRelease<Option<Json<Amount>>>| {
                    paid(amount.map_or(1, |Json(Amount { amount })| amount))
                },
            ),
        );
    let bare = Router::new()
        .route(
            "/json",
            post(async |Json(Amount { amount }): Json<Amount>| paid(amount)),
        )
        .route(
            "/query",
            post(async |Query(Amount { amount }): Query<Amount>| paid(amount)),
        );
    Router::new()
        .merge(wrapped)
        .nest("/bare", bare)
        .layer(DefaultBodyLimit::max(64))
        .layer(layer)
}

fn paid(amount: u32) -> axum::response::Response {
    match amount {
        // The handler's own disposition.
        0 => (StatusCode::UNPROCESSABLE_ENTITY, "nothing to pay").into_response(),
        _ => (StatusCode::CREATED, format!("{amount} paid")).into_response(),
    }
}

const JSON: &str = "application/json";
/// Over the limit of the routes.
const LARGE: &str = r#"{"amount":5, "note":"0123456789012345678901234567890123456789012345"}"#;
const FORM: &str = "application/x-www-form-urlencoded";

struct Answer {
    status: u16,
    outcome: Outcome,
    body: String,
}

async fn ask(app: &Router, target: &str, media_type: &str, body: &str) -> Answer {
    let request = Request::post(target).header("idempotency-key", "key");
    let request = match media_type {
        "" => request,
        media_type => request.header("content-type", media_type),
    };
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let (parts, body) = app.clone().oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer {
        status: parts.status.as_u16(),
        outcome: parts.extensions.get().copied().unwrap(),
        body: String::from_utf8(body.to_vec()).unwrap(),
    }
}

/// The target, media type, body and status of each refused request; then the
/// corrected body and the amount that it pays.
type Story = (
    &'static [(&'static str, &'static str, &'static str, u16)],
    [&'static str; 3],
    &'static str,
);

#[tokio::test]
async fn rule_52_a_request_refused_by_an_extractor_retries_with_its_key() {
    let stories: [Story; 6] = [
        (
            &[
                ("/json", "", r#"{"amount":5}"#, 415),
                ("/json", "text/plain", r#"{"amount":5}"#, 415),
                ("/json", JSON, r#"{"amount":5"#, 400),
                ("/json", JSON, "", 400),
                ("/json", JSON, r#"{"amount":"5"}"#, 422),
                ("/json", JSON, LARGE, 413),
            ],
            ["/json", JSON, r#"{"amount":5}"#],
            "5 paid",
        ),
        (
            &[
                ("/form", JSON, "amount=5", 415),
                ("/form", FORM, "amount=five", 422),
                ("/form", FORM, "", 422),
            ],
            ["/form", FORM, "amount=5"],
            "5 paid",
        ),
        (
            &[("/query", "", "", 400), ("/query?amount=five", "", "", 400)],
            ["/query?amount=5", "", ""],
            "5 paid",
        ),
        (
            &[("/path/five", "", "", 400)],
            ["/path/5", "", ""],
            "5 paid",
        ),
        (
            &[
                ("/all/one?amount=5", JSON, r#"{"amount":5}"#, 400),
                ("/all/1?amount=five", JSON, r#"{"amount":5}"#, 400),
                ("/all/1?amount=5", JSON, r#"{"amount":"five"}"#, 422),
            ],
            ["/all/1?amount=5", JSON, r#"{"amount":5}"#],
            "6 paid",
        ),
        (
            &[("/optional", JSON, r#"{"amount":"#, 400)],
            ["/optional", "", ""],
            "1 paid",
        ),
    ];
    for (refused, [target, media_type, body], said) in stories {
        let app = app();
        for &(target, media_type, body, status) in refused {
            let answer = ask(&app, target, media_type, body).await;
            assert_eq!(answer.status, status, "{target} {body}: {}", answer.body);
            assert_eq!(answer.outcome, Outcome::Released, "{target} {body}");
        }
        for outcome in [Outcome::Recorded, Outcome::Replayed] {
            let answer = ask(&app, target, media_type, body).await;
            assert_eq!((answer.status, &*answer.body), (201, said));
            assert_eq!(answer.outcome, outcome);
        }
    }
}

#[tokio::test]
async fn rule_52_a_handlers_own_422_is_recorded() {
    let app = app();
    for (body, status, outcome) in [
        (r#"{"amount":0}"#, 422, Outcome::Recorded),
        (r#"{"amount":0}"#, 422, Outcome::Replayed),
    ] {
        let answer = ask(&app, "/json", JSON, body).await;
        assert_eq!((answer.status, &*answer.body), (status, "nothing to pay"));
        assert_eq!(answer.outcome, outcome);
    }
    let other = ask(&app, "/json", JSON, r#"{"amount":5}"#).await;
    assert_eq!(other.status, 422);
    assert!(other.body.contains("key-reused"));
}

#[tokio::test]
async fn rule_51_a_bare_extractors_rejection_is_recorded() {
    for (target, media_type, body, status) in [
        ("/bare/json", JSON, r#"{"amount":"5"}"#, 422),
        ("/bare/json", JSON, "{", 400),
        ("/bare/query", "", "", 400),
    ] {
        let answer = ask(&app(), target, media_type, body).await;
        assert_eq!(answer.status, status);
        assert_eq!(answer.outcome, Outcome::Recorded);
    }
    // This one is released for its status.
    let answer = ask(&app(), "/bare/json", "", r#"{"amount":5}"#).await;
    assert_eq!((answer.status, answer.outcome), (415, Outcome::Released));
}

#[tokio::test]
async fn rule_53_a_rejection_keeps_its_disposition_and_earlier_effects() {
    struct Refused;
    impl<S: Sync> axum::extract::FromRequestParts<S> for Refused {
        type Rejection = (StatusCode, Disposition, &'static str);

        async fn from_request_parts(
            _: &mut http::request::Parts,
            _: &S,
        ) -> Result<Self, Self::Rejection> {
            Err((StatusCode::BAD_REQUEST, Disposition::Record, "refused"))
        }
    }
    let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
        .build()
        .unwrap();
    let begin = axum::middleware::from_fn(
        async |operation: Operation,
               request: axum::extract::Request,
               next: axum::middleware::Next| {
            operation.effects_started();
            next.run(request).await
        },
    );
    let app = Router::new()
        .route("/word", post(async |_: OrRelease<Refused>| ()))
        .route(
            "/effects",
            post(async |_: OrRelease<Query<Amount>>| ()).layer(begin),
        )
        .layer(layer);
    for target in ["/word", "/effects"] {
        let request = Request::post(target)
            .header("idempotency-key", target)
            .body(Body::empty())
            .unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 400);
        assert_eq!(response.extensions().get(), Some(&Outcome::Recorded));
    }
}
