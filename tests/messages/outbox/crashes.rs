//! Relays that die or stop at any moment.

use std::{
    collections::{BTreeMap, HashSet},
    env,
    fs::{File, read_to_string, remove_file},
    io::Write as _,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use tokio::{sync::Semaphore, time::sleep};
use tower_idempotency::messages::{Event, Publish, Relay};

use super::relay::{event, spawn, stage, until, until_all_is_published};
use crate::shop::{Connection, PostgresShop, Shop, SqliteShop, with_each_database};

with_each_database! {
    relays_killed_at_any_moment_lose_and_reorder_nothing;
    event_of_a_killed_relay_is_published_again;
    stopped_relay_settles_nothing_after_its_lease;
}

/// A relay in a process of its own. It notes each delivery in the table `effects`, or in a
/// file.
struct Process(Child);

impl Process {
    /// Each of its publications takes `publication`.
    fn start(shop: &impl Shop, publication: Duration) -> Self {
        Self::start_with(shop, publication, None)
    }

    fn start_with(shop: &impl Shop, publication: Duration, file: Option<&Path>) -> Self {
        let process = Command::new(env::current_exe().unwrap())
            .envs(file.map(|file| ("DELIVERIES", file)))
            .args(["outbox::crashes::child", "--exact", "--ignored"])
            .env("SHOP", shop.address())
            .env("PUBLICATION_MS", publication.as_millis().to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(process)
    }

    fn signal(&self, signal: &str) {
        let mut kill = Command::new("kill");
        let kill = kill.args([signal, &self.0.id().to_string()]);
        assert!(kill.status().unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

async fn deliver<S: Shop>(shop: S, event: Event) -> Publish {
    let mut connection = shop.connect().await;
    let on: &mut Connection<S> = &mut connection;
    let delivery = delivery(&event);
    match S::effect(on, &delivery).await {
        Ok(()) => Publish::Done,
        Err(_) => Publish::Retry,
    }
}

fn delivery(event: &Event) -> String {
    format!("{} {}", event.aggregate(), event.id())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn child() {
    let address = env::var("SHOP").unwrap();
    if address.starts_with("postgres") {
        Box::pin(relay(PostgresShop::open(&address).await)).await;
    } else {
        Box::pin(relay(SqliteShop::open(address).await)).await;
    }
}

/// Relays until it is killed.
async fn relay<S: Shop>(shop: S) {
    let publication = env::var("PUBLICATION_MS").unwrap().parse().unwrap();
    let outbox = shop.outbox("orders");
    let file = env::var_os("DELIVERIES").map(|file| Arc::new(open(file.as_ref())));
    let _relay = Relay::new(outbox, move |event| {
        let (shop, file) = (shop.clone(), file.clone());
        async move {
            let published = match file {
                Some(file) => append(&file, &event),
                None => deliver(shop, event).await,
            };
            sleep(Duration::from_millis(publication)).await;
            published
        }
    })
    .lease(LEASE)
    .poll(Duration::from_millis(5))
    .spawn();
    std::future::pending::<()>().await;
}

fn open(file: &Path) -> File {
    File::options()
        .create(true)
        .append(true)
        .open(file)
        .unwrap()
}

/// Writes a line in one call, so that those of several processes are not mixed.
fn append(mut file: &File, event: &Event) -> Publish {
    let line = format!("{}\n", delivery(event));
    assert_eq!(file.write(line.as_bytes()).unwrap(), line.len());
    Publish::Done
}

async fn relays_killed_at_any_moment_lose_and_reorder_nothing<S: Shop>(shop: S) {
    let (aggregates, each) = (1_000, 20);
    let events = (0..aggregates).flat_map(|aggregate| {
        (0..each).map(move |id| event(&format!("{aggregate}-{id:02}"), &aggregate.to_string()))
    });
    stage(&shop, events).await;
    let file = env::temp_dir().join(format!("deliveries-{:016x}", rand::random::<u64>()));
    let start = || Process::start_with(&shop, Duration::from_millis(40), Some(&file));
    let mut relays = [start(), start(), start(), start()];
    let outbox = shop.outbox("orders");
    let mut killed = 0;
    while outbox.lag().await.unwrap().events > 0 {
        sleep(Duration::from_millis(400)).await;
        relays[killed % 4] = start();
        killed += 1;
    }
    assert!(
        killed > 4,
        "all was published when {killed} relays were killed"
    );
    until_all_is_published(&shop).await;
    drop(relays);

    let deliveries = read_to_string(&file).unwrap();
    remove_file(&file).unwrap();
    let (mut seen, mut streams) = (HashSet::new(), BTreeMap::<&str, Vec<&str>>::new());
    for delivery in deliveries.lines() {
        if seen.insert(delivery) {
            let (aggregate, id) = delivery.split_once(' ').unwrap();
            streams.entry(aggregate).or_default().push(id);
        }
    }
    assert_eq!(seen.len(), aggregates * each);
    for ids in streams.values() {
        assert!(ids.is_sorted(), "{ids:?}");
    }
    let repeated = deliveries.lines().count() - seen.len();
    assert!(repeated > 0, "no relay was killed while it published");
}

async fn event_of_a_killed_relay_is_published_again(shop: impl Shop) {
    stage(&shop, [event("one", "a"), event("two", "a")]).await;
    let relay = Process::start(&shop, Duration::from_secs(60));
    until(async || shop.effects().await == ["a one"]).await;
    drop(relay);
    let delivered = shop.clone();
    let relay = spawn(shop.outbox("orders"), move |event| {
        deliver(delivered.clone(), event)
    });
    until_all_is_published(&shop).await;
    relay.stop(Duration::from_secs(10)).await;
    assert_eq!(shop.effects().await, ["a one", "a one", "a two"]);
}

async fn stopped_relay_settles_nothing_after_its_lease(shop: impl Shop) {
    stage(&shop, [event("one", "a"), event("two", "a")]).await;
    let process = Process::start(&shop, LEASE / 4);
    until(async || shop.effects().await == ["a one"]).await;
    process.signal("-STOP");

    let gate = Arc::new(Semaphore::new(0));
    let (delivered, held) = (shop.clone(), Arc::clone(&gate));
    let relay = spawn(shop.outbox("orders"), move |event| {
        let (delivered, held) = (delivered.clone(), Arc::clone(&held));
        async move {
            let published = deliver(delivered, event).await;
            held.acquire().await.unwrap().forget();
            published
        }
    });
    until(async || shop.effects().await == ["a one", "a one"]).await;
    process.signal("-CONT");
    // Time for it to settle.
    sleep(LEASE).await;
    let left = shop
        .all("SELECT id FROM idempotency_events ORDER BY position")
        .await;
    assert_eq!(left, ["one", "two"]);
    let taken = "SELECT aggregate FROM idempotency_turns WHERE token IS NOT NULL";
    assert_eq!(shop.all(taken).await, ["a"]);

    gate.add_permits(2);
    until_all_is_published(&shop).await;
    let report = relay.stop(Duration::from_secs(10)).await;
    // The other process may take the second event.
    assert!((1..=2).contains(&report.published));
    assert_eq!(shop.effects().await, ["a one", "a one", "a two"]);
}

const LEASE: Duration = Duration::from_millis(1200);
