//! A transaction whose response cannot be kept rolls back.

use std::{convert::Infallible, io};

use axum::{
    body::Body,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures_util::stream;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::StreamBody;
use tower_idempotency::{CommitErrorKind, Outcome};

use crate::{
    service::{Service, status},
    shop::{SHORT, Shop, ordered, with_each_database},
};

fn unkept(kind: &str) -> Response {
    match kind {
        "large" => Body::from(vec![b'x'; LIMIT + 1]).into_response(),
        "large-stream" => {
            let chunks = (0..=LIMIT).map(|_| Ok::<_, io::Error>("x"));
            Body::from_stream(stream::iter(chunks)).into_response()
        }
        "endless" => {
            Body::from_stream(stream::pending::<Result<&str, io::Error>>()).into_response()
        }
        "broken" => {
            let chunks = [Ok("x"), Err(io::Error::other("broken"))];
            Body::from_stream(stream::iter(chunks)).into_response()
        }
        "trailers" => {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-end", "clean".parse().unwrap());
            let frames = [Frame::data(Bytes::from("x")), Frame::trailers(trailers)];
            let frames = frames.map(Ok::<_, Infallible>);
            Body::new(StreamBody::new(stream::iter(frames))).into_response()
        }
        "events" => ([("content-type", "text/event-stream")], "data: x\n\n").into_response(),
        "headers" => ([("x-long", "x".repeat(LIMIT + (64 << 10)))], "x").into_response(),
        "interim" => status(103),
        kind => unreachable!("{kind}"),
    }
}

with_each_database! {
    i13_a_response_not_kept_rolls_back_and_a_retry_runs;
    responses_at_the_limit_and_empty_responses_are_kept;
}

async fn i13_a_response_not_kept_rolls_back_and_a_retry_runs<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let transaction = run.begin_order("pen").await;
        let response = match run.number % 2 {
            0 => ordered("a pen"),
            _ => unkept(run.operation.key().as_str()),
        };
        let committed = run.commit(transaction, response).await;
        if let Err(error) = &committed {
            assert_eq!(error.kind(), CommitErrorKind::ResponseNotKept);
        }
        committed.into_response()
    })
    .set(|layer| layer.max_response_body(LIMIT).response_body_timeout(SHORT));
    let kinds = [
        "large",
        "large-stream",
        "endless",
        "broken",
        "trailers",
        "events",
        "headers",
        "interim",
    ];
    for (n, kind) in kinds.into_iter().enumerate() {
        let first = service.post(kind).await;
        first.assert_problem(500, "rolled-back");
        assert!(!first.headers.contains_key("retry-after"));
        assert_eq!(first.outcome, Outcome::Released, "{kind}");
        assert_eq!(shop.orders().await.len(), n, "{kind}");
        service.post(kind).await.assert_is(201, "ordered a pen");
        assert_eq!(shop.orders().await.len(), n + 1, "{kind}");
    }
}

async fn responses_at_the_limit_and_empty_responses_are_kept<S: Shop>(shop: S) {
    let service = Service::new(&shop, async |run| {
        let transaction = run.shop.begin(&run.operation).await.unwrap();
        let response = match run.operation.key().as_str() {
            "empty" => status(204),
            _ => "x".repeat(LIMIT).into_response(),
        };
        run.commit(transaction, response).await.into_response()
    })
    .set(|layer| layer.max_response_body(LIMIT));
    for _ in 0..2 {
        service
            .post("full")
            .await
            .assert_is(200, &"x".repeat(LIMIT));
        service.post("empty").await.assert_is(204, "");
    }
    assert_eq!(service.runs(), 2);
}

const LIMIT: usize = 1_000;
