//! Rule 61: bodies over the limit on routes where keys are optional.

use std::time::Duration;

use http::StatusCode;
use tower_idempotency::{
    ContentDigest, DynStore, IdempotencyBuilder, KeySyntax, MemoryStore, Outcome, OversizedBody,
    StoreError,
};

use crate::{
    api::{Answer, Api, Ask, keyed, optional, record, required},
    client::Wire,
    faulty::{Call, Fault, Faulty},
    probe::{Gate, Probe, Run, bytes_of, streamed},
    stores::memory,
    told::Told,
    uploads::sha256,
};

const LIMIT: usize = 1 << 10;
const LENGTH: usize = 5_000;

fn lenient(store: DynStore) -> IdempotencyBuilder<DynStore> {
    let lenient = OversizedBody::RunUnguarded;
    optional(store)
        .max_request_body(LIMIT)
        .oversized_body(lenient)
}

/// Answers with the length of its body.
fn measuring() -> Probe {
    Probe::running(async |mut run: Run| {
        let length = bytes_of(std::mem::take(run.request.body_mut())).await.len();
        Ok(run.created().map(|_| length.to_string().into()))
    })
}

/// A body of several frames, whose length is not known.
fn chunked() -> Ask {
    let (frames, body) = streamed();
    for _ in 0..LENGTH / 500 {
        let frame = http_body::Frame::data(vec![b'x'; 500].into());
        frames.send(Ok(frame)).unwrap();
    }
    keyed("K").body(body)
}

fn whole() -> Ask {
    keyed("K").body(vec![b'x'; LENGTH])
}

#[track_caller]
fn assert_unguarded(answer: &Answer) {
    assert_eq!(answer.status, StatusCode::CREATED);
    assert_eq!(answer.body, LENGTH.to_string());
    assert_eq!(answer.header("idempotent-recorded"), Some("false"));
    assert_eq!(answer.outcome, Some(Outcome::Unguarded));
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_oversized_body_runs_unguarded_where_that_is_chosen() {
    for ask in [whole, chunked] {
        let told = Told::listen();
        let (store, probe) = (MemoryStore::new(), measuring());
        let api = Api::new(lenient(DynStore::new(store.clone())), &probe);
        for _ in 0..2 {
            assert_unguarded(&api.send(ask()).await);
        }
        assert_eq!(probe.runs(), 2);
        assert!(record(&store, "K").await.is_none());
        let (events, counts, text) = told.so_far();
        assert_eq!((events["unguarded"], counts["unguarded"]), (2, 2));
        assert!(text.contains("raise `max_request_body`"), "{text}");
        // Smaller ones are guarded.
        let first = api.send(keyed("L")).await;
        first.assert_live(201);
        api.send(keyed("L")).await.assert_replay_of(&first);
    }
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_oversized_body_is_refused_by_default() {
    for ask in [whole, chunked] {
        let api = Api::new(optional(memory()).max_request_body(LIMIT), &measuring());
        api.send(ask()).await.assert_problem(413, "body-too-large");
    }
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_oversized_body_whose_key_has_a_record_does_not_run() {
    let (store, probe) = (memory(), measuring());
    let before = Api::new(optional(store.clone()), &probe);
    before.send(whole()).await.assert_live(201);
    let api = Api::new(lenient(store), &probe);
    for ask in [whole, chunked] {
        let refused = api.send(ask()).await;
        refused.assert_problem(413, "body-too-large");
    }
    assert_eq!(probe.runs(), 1);
    // After its retention the key is new.
    tokio::time::advance(Duration::from_secs(25 * 3_600)).await;
    assert_unguarded(&api.send(whole()).await);
}

#[tokio::test(start_paused = true)]
async fn rule_11_an_oversized_body_with_a_stale_key_does_not_run() {
    let probe = measuring();
    let recent = KeySyntax::compat().uuid_v7(Duration::from_secs(3_600));
    let api = Api::new(lenient(memory()).key_syntax(recent), &probe);
    for ask in [whole, chunked] {
        let stale = ask().key("017f22e2-79b0-7cc3-98c4-dc0c0c07398f");
        api.send(stale).await.assert_problem(400, "key-stale");
    }
    assert_eq!(probe.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_61_an_unguarded_body_holds_no_buffer_while_its_handler_runs() {
    let gate = Gate::closed();
    let probe = {
        let gate = gate.clone();
        Probe::running(move |mut run: Run| {
            let gate = gate.clone();
            async move {
                bytes_of(std::mem::take(run.request.body_mut())).await;
                if run.request.headers()["idempotency-key"] == "K" {
                    gate.pass().await;
                }
                Ok(run.created())
            }
        })
    };
    let api = Api::new(lenient(memory()).max_buffered_bytes(2 * LIMIT), &probe);
    let unguarded = api.spawn(chunked());
    gate.arrival().await;
    let guarded = keyed("L").body(vec![b'x'; LIMIT]);
    api.send(guarded).await.assert_live(201);
    gate.open();
    unguarded.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn rule_73_an_oversized_body_on_an_unreadable_record_is_counted() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), measuring());
    store.inject(Call::Read, .., Fault::Error(StoreError::corrupt("state")));
    let api = Api::new(lenient(DynStore::new(store)), &probe);
    let told = Told::listen();
    let refused = api.send(whole()).await;
    refused.assert_problem(503, "store-unavailable");
    assert_eq!(told.so_far().1["corrupt"], 1);
    assert_eq!(probe.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_58_an_oversized_body_does_not_run_while_the_store_is_down() {
    let (store, probe) = (Faulty::new(MemoryStore::new()), measuring());
    store.inject(Call::Read, .., Fault::unavailable());
    let api = Api::new(lenient(DynStore::new(store)), &probe);
    let refused = api.send(whole()).await;
    refused.assert_problem(503, "store-unavailable");
    assert_eq!(probe.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn rule_39_a_declared_digest_guards_an_oversized_body() {
    let stream = ContentDigest::Stream {
        max_upload: 1 << 20,
    };
    let api = Api::new(lenient(memory()).content_digest(stream), &measuring());
    let digest = sha256(&[b'x'; LENGTH]);
    let declared = || chunked().header("content-digest", &digest);
    let first = api.send(declared()).await;
    first.assert_live(201);
    api.send(declared()).await.assert_replay_of(&first);
    assert_unguarded(&api.send(chunked().key("L")).await);
}

#[tokio::test]
async fn rule_61_an_oversized_body_streams_over_a_socket() {
    let server = Api::new(lenient(memory()), &measuring()).serve().await;
    let mut wire = Wire::open(&server).await;
    for (framing, body) in [
        (format!("Content-Length: {LENGTH}"), "x".repeat(LENGTH)),
        (
            "Transfer-Encoding: chunked".to_owned(),
            format!("{LENGTH:x}\r\n{}\r\n0\r\n\r\n", "x".repeat(LENGTH)),
        ),
    ] {
        let answer = wire
            .ask(format!(
                "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nIdempotency-Key: K\r\n{framing}\r\n\r\n{body}"
            ))
            .await;
        assert_eq!(answer.body, LENGTH.to_string().into_bytes());
        assert_eq!(answer.text("idempotent-recorded").as_deref(), Some("false"));
    }
}

#[tokio::test]
async fn rule_77_an_unguarded_oversized_body_needs_optional_keys() {
    let lenient = OversizedBody::RunUnguarded;
    let fault = required(memory()).oversized_body(lenient).build();
    assert_eq!(fault.unwrap_err().setting(), "oversized_body");
}
