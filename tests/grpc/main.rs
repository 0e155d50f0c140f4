//! gRPC: a unary service on tonic, over a real HTTP/2 connection.

mod codes;
mod refusals;
#[path = "../scan/mod.rs"]
mod scan;
mod service;

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use http::uri::PathAndQuery;
use tokio::{
    net::TcpListener,
    sync::{Semaphore, oneshot},
    task::JoinHandle,
};
use tonic::{Code, Request, Response, Status, client::Grpc, transport::Channel};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};
use tonic_prost::ProstCodec;
use tower_idempotency::MemoryStore;

#[path = "../../examples/tonic.rs"]
#[allow(dead_code, reason = "its `main` is not run here")]
mod payments;

use payments::{PAY, Payment, Provider, Receipt, idempotency, serve};

/// Charges as the test wants it, and counts.
#[derive(Clone)]
struct Scripted {
    charges: Arc<AtomicUsize>,
    arrived: Arc<Semaphore>,
    open: Arc<Semaphore>,
    result: Result<(), Code>,
}

impl Scripted {
    fn answering(result: Result<(), Code>) -> Self {
        Self {
            charges: Arc::default(),
            arrived: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(100)),
            result,
        }
    }

    fn charges(&self) -> usize {
        self.charges.load(SeqCst)
    }
}

impl Provider for Scripted {
    async fn charge(&self, key: String, cents: u64) -> Result<String, Status> {
        assert_eq!(key.len(), 36);
        let number = self.charges.fetch_add(1, SeqCst) + 1;
        self.arrived.add_permits(1);
        self.open.acquire().await.unwrap().forget();
        match self.result {
            Ok(()) => Ok(format!("ch_{number}_{cents}")),
            Err(code) => Err(Status::new(code, "as the test wants it")),
        }
    }
}

async fn connect(provider: &Scripted) -> Channel {
    connect_until(provider, pending()).await.0
}

/// Returns the server's end too: how many calls it left.
async fn connect_until(
    provider: &Scripted,
    stop: impl Future<Output = ()> + Send + 'static,
) -> (Channel, JoinHandle<usize>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let layer = idempotency(MemoryStore::new()).unwrap();
    let provider = provider.clone();
    let server = tokio::spawn(async move { serve(listener, layer, provider, stop).await.unwrap() });
    let channel = Channel::from_shared(format!("http://{address}")).unwrap();
    (channel.connect().await.unwrap(), server)
}

async fn pay(channel: &Channel, key: &str, cents: u64) -> Result<Response<Receipt>, Status> {
    let mut request = Request::new(Payment { cents });
    let metadata = request.metadata_mut();
    metadata.insert("x-account", "ann".parse().unwrap());
    if !key.is_empty() {
        metadata.insert("idempotency-key", key.parse().unwrap());
    }
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let codec = ProstCodec::<Payment, Receipt>::default();
    client
        .unary(request, PathAndQuery::from_static(PAY), codec)
        .await
}

#[track_caller]
fn assert_refused(
    answer: Result<Response<Receipt>, Status>,
    code: Code,
    slug: &str,
    pushback: &str,
) {
    let status = answer.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(' '), "{status:?}");
    let metadata = status.metadata();
    let text = |name| metadata.get(name).map(|value| value.to_str().unwrap());
    let problem = format!("urn:tower-idempotency:problem:{slug}");
    assert_eq!(text("problem-type"), Some(&*problem));
    assert_eq!(text("grpc-retry-pushback-ms"), Some(pushback));
    assert_eq!(text("idempotent-replayed"), None);
}

#[tokio::test]
async fn rule_20_a_unary_call_is_replayed_with_its_trailers() {
    let provider = Scripted::answering(Ok(()));
    let channel = connect(&provider).await;
    for is_replay in [false, true, true] {
        let answer = pay(&channel, "k", 500).await.unwrap();
        assert_eq!(answer.get_ref().charge, "ch_1_500");
        let metadata = answer.metadata();
        assert_eq!(metadata.get("idempotent-replayed").is_some(), is_replay);
        assert_eq!(metadata.get("grpc-status").unwrap(), "0");
    }
    assert_eq!(provider.charges(), 1);
    let other = pay(&channel, "l", 500).await.unwrap();
    assert_eq!(other.get_ref().charge, "ch_2_500");
}

#[tokio::test]
async fn rule_81_refusals_of_unary_calls_are_grpc_errors() {
    let provider = Scripted::answering(Ok(()));
    let channel = connect(&provider).await;
    pay(&channel, "k", 500).await.unwrap();
    let mismatch = pay(&channel, "k", 501).await;
    assert_refused(mismatch, Code::InvalidArgument, "key-reused", "-1");
    let missing = pay(&channel, "", 500).await;
    assert_refused(missing, Code::InvalidArgument, "key-missing", "-1");
    assert_eq!(provider.charges(), 1);
}

#[tokio::test]
async fn rule_41_a_second_unary_call_in_flight_may_be_sent_again() {
    let provider = Scripted {
        open: Arc::new(Semaphore::new(0)),
        ..Scripted::answering(Ok(()))
    };
    let channel = connect(&provider).await;
    let first = tokio::spawn({
        let channel = channel.clone();
        async move { pay(&channel, "k", 500).await }
    });
    provider.arrived.acquire().await.unwrap().forget();
    let second = pay(&channel, "k", 500).await;
    assert_refused(second, Code::Unavailable, "request-in-progress", "1000");
    provider.open.add_permits(1);
    assert_eq!(first.await.unwrap().unwrap().get_ref().charge, "ch_1_500");
    let replay = pay(&channel, "k", 500).await.unwrap();
    assert!(replay.metadata().contains_key("idempotent-replayed"));
    assert_eq!(provider.charges(), 1);
}

#[tokio::test]
async fn rule_82_an_error_of_the_provider_leaves_an_unknown_outcome() {
    let provider = Scripted::answering(Err(Code::Unavailable));
    let channel = connect(&provider).await;
    let first = pay(&channel, "k", 500).await.unwrap_err();
    assert_eq!(first.code(), Code::Unavailable);
    let retry = pay(&channel, "k", 500).await;
    assert_refused(retry, Code::FailedPrecondition, "outcome-unknown", "-1");
    assert_eq!(provider.charges(), 1);
}

#[tokio::test]
async fn rule_53_a_grpc_handler_says_that_nothing_happened() {
    let provider = Scripted::answering(Ok(()));
    let channel = connect(&provider).await;
    for _ in 0..2 {
        let refused = pay(&channel, "k", 2_000_000).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert!(!refused.metadata().contains_key("idempotent-replayed"));
    }
    assert_eq!(provider.charges(), 0);
}

#[tokio::test]
async fn rule_84_an_error_that_blames_the_call_is_recorded() {
    let provider = Scripted::answering(Ok(()));
    let channel = connect(&provider).await;
    for is_replay in [false, true] {
        let refused = pay(&channel, "k", 0).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert_eq!(refused.message(), "nothing to pay");
        let metadata = refused.metadata();
        assert_eq!(metadata.get("idempotent-replayed").is_some(), is_replay);
    }
    assert_eq!(provider.charges(), 0);
}

fn health(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.to_owned(),
    }
}

#[tokio::test]
async fn rule_79_a_health_check_needs_no_key() {
    let channel = connect(&Scripted::answering(Ok(()))).await;
    let mut client = HealthClient::new(channel);
    let request = health("shop.Payments");
    let answer = client.check(request.clone()).await.unwrap();
    assert_eq!(answer.get_ref().status(), ServingStatus::Serving);
    // A call that streams is not read to its end.
    let mut watch = client.watch(request).await.unwrap().into_inner();
    let first = tokio::time::timeout(Duration::from_secs(60), watch.message()).await;
    assert_eq!(
        first.unwrap().unwrap().unwrap().status(),
        ServingStatus::Serving
    );
}

#[tokio::test]
async fn the_example_stops_after_its_payments_and_ends_its_streams() {
    let provider = Scripted {
        open: Arc::new(Semaphore::new(0)),
        ..Scripted::answering(Ok(()))
    };
    let (stop, stopped) = oneshot::channel();
    let stopped = async { stopped.await.unwrap() };
    let (channel, server) = connect_until(&provider, stopped).await;
    let mut watches = Vec::new();
    for service in ["", "shop.Payments"] {
        let mut client = HealthClient::new(channel.clone());
        let mut watch = client.watch(health(service)).await.unwrap().into_inner();
        watch.message().await.unwrap().unwrap();
        watches.push(watch);
    }
    let payment = tokio::spawn(async move { pay(&channel, "k", 500).await });
    provider.arrived.acquire().await.unwrap().forget();
    stop.send(()).unwrap();
    for mut watch in watches {
        let last = tokio::time::timeout(Duration::from_secs(60), watch.message()).await;
        assert_eq!(last.expect("the stream goes on").unwrap(), None);
    }
    assert!(!server.is_finished());
    provider.open.add_permits(1);
    assert_eq!(payment.await.unwrap().unwrap().get_ref().charge, "ch_1_500");
    assert_eq!(server.await.unwrap(), 0);
}
