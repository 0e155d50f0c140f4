//! Rule 76: what the requests of one scope may take of a process.

use std::time::Duration;

use futures_util::future::join_all;
use http::StatusCode;
use tower_idempotency::Scope;

use crate::{
    api::{Answer, Api, eventually, keyed, required, settle},
    client::Wire,
    probe::{Gate, Probe},
    stores::memory,
};

#[tokio::test]
async fn rule_76_slow_uploads_of_one_scope_leave_room_for_others() {
    let builder = required(memory()).max_uploads(200);
    let server = Api::new(builder, &Probe::counting()).serve().await;
    let head = |caller: &str, key: &str| {
        format!(
            "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: {caller}\r\n\
             Content-Length: 2\r\nIdempotency-Key: {key}\r\n\r\n{{"
        )
    };
    let mut uploads = Vec::new();
    for number in 0..400 {
        let mut upload = Wire::open(&server).await;
        upload.write(head("hostile", &number.to_string())).await;
        uploads.push(upload);
    }
    // Those beyond three quarters of the limit are refused.
    let refused = uploads.split_off(150);
    for mut upload in refused {
        let answer = upload.answer().await;
        assert_eq!(
            (answer.status, &*answer.problem()),
            (429, "scope-overloaded")
        );
    }
    // Bodies of another scope that arrive in two parts are all read.
    let others = (0..50).map(async |number| {
        let mut other = Wire::open(&server).await;
        other.write(head("other", &number.to_string())).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        other.ask("}").await.status
    });
    assert_eq!(join_all(others).await, [201; 50]);
    for mut upload in uploads {
        assert_eq!(upload.ask("}").await.status, 201);
    }
}

#[tokio::test]
async fn rule_76_running_requests_of_one_scope_leave_room_for_others() {
    let gate = Gate::closed();
    let api = Api::new(required(memory()).max_in_flight(100), &Probe::behind(&gate));
    let hostile: Vec<_> = (0..300)
        .map(|number| api.spawn(keyed(&format!("K{number}")).from("hostile")))
        .collect();
    settle().await;
    let others: Vec<_> = (0..25)
        .map(|number| api.spawn(keyed(&format!("K{number}")).from("other")))
        .collect();
    settle().await;
    gate.open();
    for answer in join_all(others).await {
        answer.unwrap().assert_live(201);
    }
    let answers = join_all(hostile).await;
    let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
    let ran = |answer: &&Answer| answer.status == StatusCode::CREATED;
    assert_eq!(answers.iter().filter(ran).count(), 75);
    for answer in answers.iter().filter(|answer| !ran(answer)) {
        answer.assert_problem(429, "scope-overloaded");
        assert_eq!(answer.retry_after(), Some(1));
    }
    // What they held is free again.
    api.send(keyed("later").from("hostile"))
        .await
        .assert_live(201);
}

#[tokio::test]
async fn rule_76_waiters_of_one_scope_leave_room_for_others() {
    let gate = Gate::closed();
    let builder = required(memory())
        .max_waiters(40)
        .wait(Duration::from_secs(60));
    let api = Api::new(builder, &Probe::behind(&gate));
    let crowd = |caller: &'static str, requests| -> Vec<_> {
        let ask = |_| api.spawn(keyed("K").from(caller));
        (0..requests).map(ask).collect()
    };
    let hostile = crowd("hostile", 100);
    settle().await;
    let others = crowd("other", 11);
    settle().await;
    gate.open();
    let replays = async |answers| {
        let answers = join_all(answers).await;
        answers
            .into_iter()
            .filter(|answer: &Result<Answer, _>| answer.as_ref().unwrap().is_replay())
            .count()
    };
    // One of each runs, and those that do not wait get 409 at once.
    assert_eq!((replays(hostile).await, replays(others).await), (30, 10));
}

#[tokio::test]
async fn rule_76_large_bodies_of_one_scope_leave_room_for_others() {
    let gate = Gate::closed();
    let builder = required(memory())
        .max_request_body(100)
        .max_buffered_bytes(4_000)
        .wait(Duration::from_secs(60));
    let api = Api::new(builder, &Probe::behind(&gate));
    let large = |caller: &'static str| keyed("K").from(caller).body("x".repeat(100));
    let owners = ["hostile", "other"].map(|caller| api.spawn(large(caller)));
    settle().await;
    // Each waiter holds its body.
    let hostile: Vec<_> = (0..60).map(|_| api.spawn(large("hostile"))).collect();
    settle().await;
    let refused = eventually(async || Some(api.send(large("hostile")).await)).await;
    refused.assert_problem(429, "scope-overloaded");
    let others: Vec<_> = (0..10).map(|_| api.spawn(large("other"))).collect();
    settle().await;
    gate.open();
    for other in join_all(others).await {
        assert!(other.unwrap().is_replay());
    }
    let held = join_all(hostile).await;
    let held = held
        .into_iter()
        .filter(|answer| answer.as_ref().unwrap().is_replay());
    assert_eq!(held.count(), 30);
    for owner in owners {
        owner.await.unwrap().assert_live(201);
    }
}

#[tokio::test]
async fn rule_76_single_tenant_may_take_a_whole_limit() {
    let gate = Gate::closed();
    let builder =
        tower_idempotency::IdempotencyLayer::required(memory(), |_| Some(Scope::single_tenant()));
    let api = Api::new(builder.max_in_flight(20), &Probe::behind(&gate));
    let running: Vec<_> = (0..20)
        .map(|number| api.spawn(keyed(&format!("K{number}"))))
        .collect();
    settle().await;
    api.send(keyed("more"))
        .await
        .assert_problem(503, "overloaded");
    gate.open();
    for answer in join_all(running).await {
        answer.unwrap().assert_live(201);
    }
}

#[tokio::test]
async fn rule_76_part_of_a_scope_can_be_set() {
    let gate = Gate::closed();
    let builder = required(memory())
        .max_in_flight(20)
        .max_in_flight_per_scope(20);
    let api = Api::new(builder, &Probe::behind(&gate));
    let running: Vec<_> = (0..20)
        .map(|number| api.spawn(keyed(&format!("K{number}"))))
        .collect();
    settle().await;
    api.send(keyed("more"))
        .await
        .assert_problem(503, "overloaded");
    gate.open();
    join_all(running).await;
}

#[tokio::test]
async fn rule_77_part_of_a_scope_beyond_its_limit_is_refused() {
    let builder = || required(memory());
    for (builder, setting) in [
        (
            builder().max_waiters_per_scope(1_001),
            "max_waiters_per_scope",
        ),
        (
            builder().max_in_flight_per_scope(0),
            "max_in_flight_per_scope",
        ),
        (
            builder().max_uploads(9).max_uploads_per_scope(10),
            "max_uploads_per_scope",
        ),
        (builder().max_uploads(0), "max_uploads"),
        (
            builder().max_buffered_bytes_per_scope((1 << 20) - 1),
            "max_buffered_bytes_per_scope",
        ),
    ] {
        assert_eq!(builder.build().unwrap_err().setting(), setting);
    }
}
