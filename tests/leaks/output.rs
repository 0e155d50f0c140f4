//! The process that makes the requests, and its output.

use std::{env, io::Write as _, process::Stdio, time::Duration};

use metrics_util::debugging::DebuggingRecorder;
use tokio::{process::Command, time::timeout};
use tower_idempotency::store::cas::CasStore;
use tower_idempotency::{DynStore, MemoryStore, PostgresStore, RedisStore, SqliteStore};
use tracing_subscriber::filter::LevelFilter;

use crate::{
    etcd::Etcd,
    messages, requests,
    shop::{PostgresShop, SqliteShop},
    stores::Place,
};

/// Runs all requests against this place in a process, and returns its output and errors.
pub(crate) async fn of_requests(place: &Place, hidden: bool) -> String {
    let mut process = Command::new(env::current_exe().unwrap());
    process
        .args([
            "--exact",
            "--ignored",
            "output::a_child_process_makes_each_kind_of_request",
            "--nocapture",
        ])
        .env(STORE, place.address())
        .env(HIDDEN, hidden.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let ended = timeout(Duration::from_secs(60), process.output()).await;
    let ended = ended.expect("the process does not end").unwrap();
    let mut output = ended.stdout;
    output.extend(ended.stderr);
    let output = String::from_utf8_lossy(&output).into_owned();
    assert!(ended.status.success(), "{output}");
    output
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn a_child_process_makes_each_kind_of_request() {
    let (address, hidden) = (env::var(STORE).unwrap(), env::var(HIDDEN).unwrap());
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(std::io::stderr)
        .init();
    let recorder = DebuggingRecorder::new();
    let metrics = recorder.snapshotter();
    recorder.install().unwrap();
    tracing::trace!("{TRACED}");
    let store = open(&address).await;
    Box::pin(requests::make_each_kind(store.clone(), hidden == "true")).await;
    if address.starts_with("postgres") {
        let shop = PostgresShop::open(&address).await;
        Box::pin(messages::publish_and_receive(shop)).await;
    }
    if let Some(path) = address.strip_prefix("sqlite:") {
        let shop = SqliteShop::open(path).await;
        Box::pin(messages::publish_and_receive(shop)).await;
    }
    for (key, _, description, value) in metrics.snapshot().into_vec() {
        for label in key.key().labels() {
            let (name, value_of) = (label.key(), label.value());
            print(format_args!(
                "{name} = {value_of:?} {key:?} {description:?} {value:?}"
            ));
        }
    }
    print(format_args!("{PRINTED} {store:?}"));
}

async fn open(address: &str) -> DynStore {
    if let Some(path) = address.strip_prefix("sqlite:") {
        return DynStore::new(SqliteStore::open(path).await.unwrap());
    }
    if let Some(etcd) = address.strip_prefix("etcd://") {
        let (host, prefix) = etcd.split_once('/').unwrap();
        return DynStore::new(CasStore::new(Etcd::new(&format!("http://{host}"), prefix)));
    }
    if let Some((url, prefix)) = address.split_once('#') {
        let store = RedisStore::builder(url).prefix(prefix).connect().await;
        return DynStore::new(store.unwrap());
    }
    match address {
        "memory" => DynStore::new(MemoryStore::new()),
        url => DynStore::new(PostgresStore::connect(url).await.unwrap()),
    }
}

/// Adds a line to the output.
pub(crate) fn print(line: std::fmt::Arguments<'_>) {
    let mut out = std::io::stdout();
    writeln!(out, "{line}").unwrap();
}

/// The outcomes that the requests have at least.
pub(crate) const OUTCOMES: &[&str] = &[
    "recorded",
    "released",
    "unknown",
    "streamed",
    "unrecorded",
    "replayed",
    "left",
    "key-missing",
    "key-invalid",
    "caller-unknown",
    "body-too-large",
    "body-timeout",
    "body-invalid",
    "digest-invalid",
    "digest-mismatch",
    "key-reused",
    "request-in-progress",
    "outcome-unknown",
    "response-not-replayable",
    "replay-refused",
    "store-unavailable",
    "overloaded",
    "quota-exceeded",
    "draining",
    "callback-panicked",
];

/// Something at TRACE, and something on the standard output.
pub(crate) const TRACED: &str = "events at TRACE are in the output";
pub(crate) const PRINTED: &str = "printed lines are in the output";
const STORE: &str = "LEAKS_STORE";
const HIDDEN: &str = "LEAKS_HIDDEN";
