//! Bodies of requests: late, large, slow or broken ones.

use std::time::Duration;

use http::StatusCode;

use crate::{
    api::{Api, keyed, required, settle},
    client::Wire,
    probe::{Probe, data, streamed},
    stores::memory,
};

const GRACE: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn f107_a_body_that_ends_while_draining_is_refused() {
    let (store, probe) = (memory(), Probe::counting());
    let api = Api::new(required(store.clone()), &probe);
    let (frames, body) = streamed();
    let asked = api.spawn(keyed("K").body(body));
    frames.send(Ok(data("{\"amount\""))).unwrap();
    settle().await;
    assert_eq!(api.layer.drain(GRACE).await.left(), 0);
    frames.send(Ok(data(":1}"))).unwrap();
    drop(frames);
    asked.await.unwrap().assert_problem(503, "draining");
    // Nothing was claimed: another process runs it.
    assert_eq!(probe.runs(), 0);
    let other = Api::new(required(store), &probe);
    other.send(keyed("K")).await.assert_run(1);
}

#[tokio::test]
async fn f107_an_upload_over_a_socket_is_refused_while_draining() {
    let probe = Probe::counting();
    let api = Api::new(required(memory()), &probe);
    let server = api.serve().await;
    let mut wire = Wire::open(&server).await;
    let head = "POST /count HTTP/1.1\r\nHost: test\r\nX-Account: acme\r\nIdempotency-Key: K\r\n";
    wire.write(format!("{head}Content-Length: 12\r\n\r\n{{\"am"))
        .await;
    server.start_of_a_request().await;
    assert_eq!(api.layer.drain(GRACE).await.left(), 0);
    let answer = wire.ask("ount\":1}").await;
    assert_eq!((answer.status, &*answer.problem()), (503, "draining"));
    assert_eq!(probe.runs(), 0);
    let lines = "Content-Length: 0\r\n\r\n";
    // The connection is still in step.
    let get = head.replace("POST", "GET");
    assert_eq!(
        wire.ask(format!("{get}{lines}")).await.status,
        StatusCode::CREATED
    );
}
