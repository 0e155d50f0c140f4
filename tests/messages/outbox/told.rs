//! What a relay tells of its events.

use std::{
    collections::BTreeMap,
    future::pending,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use tokio::{
    sync::{Notify, mpsc},
    time::sleep,
};
use tower_idempotency::{
    Sweeper,
    messages::{Delivery, Event, Publish, Relay},
};

use super::relay::{Broker, event, spawn, stage, until, until_all_is_published};
use crate::shop::{Shop, SqliteShop, with_sqlite};

/// The lines of a log.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    /// Collects the log of this thread, until the guard is dropped.
    fn collect() -> (Self, tracing::subscriber::DefaultGuard) {
        let lines = Self::default();
        let written = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::DEBUG)
            .with_writer(move || written.clone())
            .finish();
        (lines, tracing::subscriber::set_default(subscriber))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

/// A value that a publisher holds, whose code panics when it is dropped.
struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("on purpose");
    }
}

/// On one thread, to which the recorder and the subscriber belong.
#[tokio::test]
async fn events_are_counted_and_logged_without_payloads() {
    let recorder = Box::leak(Box::new(DebuggingRecorder::new()));
    let metrics = recorder.snapshotter();
    let _recorder = metrics::set_default_local_recorder(recorder);
    let (lines, _subscriber) = Lines::collect();

    Box::pin(with_sqlite(async |shop| {
        stage(
            &shop,
            [
                event("fine", "a"),
                event("dead", "b"),
                event("retried", "c"),
                event("panics", "d"),
            ],
        )
        .await;
        let relay = spawn(shop.outbox("orders"), async |event: Event| {
            match event.id() {
                "dead" => Publish::Reject,
                "retried" => Publish::Retry,
                "panics" => panic!("on purpose"),
                _ => Publish::Done,
            }
        });
        let outbox = shop.outbox("orders");
        until(async || outbox.lag().await.unwrap().events == 3).await;
        until(async || outbox.lag().await.unwrap().dead == 1).await;
        let report = relay.stop(Duration::from_secs(10)).await;
        assert_eq!((report.published, report.retried, report.dead), (1, 2, 1));
    }))
    .await;

    let (mut counts, mut gauges) = (BTreeMap::new(), Vec::new());
    for (key, unit, description, value) in metrics.snapshot().into_vec() {
        let (_, key) = key.into_parts();
        let label = key.labels().next().unwrap().value().to_owned();
        assert!(unit.is_some() && description.is_some(), "{}", key.name());
        match value {
            DebugValue::Counter(count) => assert!(counts.insert(label, count).is_none()),
            DebugValue::Gauge(_) => gauges.push((key.name().to_owned(), label)),
            DebugValue::Histogram(_) => unreachable!("there is none"),
        }
    }
    let expected = [("dead", 1), ("published", 1), ("retried", 2), ("staged", 4)];
    let expected = expected.map(|(what, count)| (what.to_owned(), count));
    assert_eq!(counts, BTreeMap::from(expected));
    gauges.sort();
    let expected = [
        "idempotency_outbox_lag_dead",
        "idempotency_outbox_lag_events",
        "idempotency_outbox_lag_seconds",
        "idempotency_outbox_oldest_snapshot_seconds",
    ];
    assert_eq!(
        gauges,
        expected.map(|name| (name.to_owned(), "orders".to_owned()))
    );

    let lines = lines.text();
    assert!(
        lines.contains("WARN") && lines.contains("event=\"dead\""),
        "{lines}"
    );
    assert!(lines.contains("what=\"retried\""), "{lines}");
    assert!(lines.contains("publisher of a relay panicked"), "{lines}");
    assert!(!lines.contains("payload of"), "{lines}");
}

/// On one thread, to which the subscriber belongs.
#[tokio::test]
async fn panic_of_a_dropped_publication_is_logged_and_its_event_published() {
    let (lines, _subscriber) = Lines::collect();
    Box::pin(with_sqlite(async |shop| {
        stage(&shop, [event("event", "a")]).await;
        let attempts = Arc::<AtomicUsize>::default();
        let attempt = Arc::clone(&attempts);
        let relay = Relay::new(shop.outbox("orders"), move |_: Event| {
            let is_first = attempt.fetch_add(1, Ordering::SeqCst) == 0;
            async move {
                if is_first {
                    let _held = PanicsWhenDropped;
                    pending::<()>().await;
                }
                Publish::Done
            }
        });
        // The first attempt is dropped after a third of the lease.
        let relay = relay.lease(Duration::from_millis(100));
        let relay = relay.poll(Duration::from_millis(5)).spawn();
        until_all_is_published(&shop).await;
        assert_eq!(attempts.load(Ordering::SeqCst), 2);
        relay.stop(Duration::from_secs(10)).await;
    }))
    .await;
    let lines = lines.text();
    assert!(
        lines.contains("WARN") && lines.contains("task of a relay panicked"),
        "{lines}"
    );
}

/// On one thread, to which the subscriber belongs.
#[tokio::test]
async fn turn_that_another_relay_took_is_logged_when_it_ends() {
    let (lines, _subscriber) = Lines::collect();
    Box::pin(with_sqlite(async |shop| {
        stage(&shop, [event("event", "a")]).await;
        let (sender, mut begun) = mpsc::unbounded_channel();
        let gate = Arc::new(Notify::new());
        let held = Arc::clone(&gate);
        let slow = Relay::new(shop.outbox("orders"), move |_: Event| {
            let (sender, held) = (sender.clone(), Arc::clone(&held));
            async move {
                sender.send(()).unwrap();
                held.notified().await;
                Publish::Done
            }
        });
        // After its first look it looks for events only when it is woken.
        let slow = slow.poll(Duration::from_secs(3600)).spawn();
        begun.recv().await.unwrap();
        // As if the database saw the lease end.
        let mut connection = shop.connect().await;
        let lapse = "UPDATE idempotency_turns SET due_at = 0";
        SqliteShop::run(&mut connection, lapse).await.unwrap();
        let relay = spawn(shop.outbox("orders"), async |_| Publish::Done);
        until_all_is_published(&shop).await;
        relay.stop(Duration::from_secs(10)).await;
        gate.notify_one();
        slow.stop(Duration::from_secs(10)).await;
    }))
    .await;
    let lines = lines.text();
    assert!(lines.contains("its lease ended before"), "{lines}");
}

/// On one thread, to which the subscriber belongs.
#[tokio::test]
async fn events_that_are_read_for_most_of_their_lease_are_logged() {
    let (lines, _subscriber) = Lines::collect();
    Box::pin(with_sqlite(async |shop| {
        stage(&shop, [event("event", "a")]).await;
        let relay = Relay::new(shop.outbox("orders"), async |_: Event| Publish::Done);
        // A writer keeps the relay waiting for longer than its lease.
        let writing = shop.begin().await;
        let relay = relay.lease(Duration::from_millis(100)).spawn();
        sleep(Duration::from_millis(150)).await;
        writing.rollback().await.unwrap();
        until(async || lines.text().contains("read for most of their lease")).await;
        until_all_is_published(&shop).await;
        relay.stop(Duration::from_secs(10)).await;
    }))
    .await;
}

/// A recorder whose counters and gauges panic.
struct PanickingRecorder;

impl Recorder for PanickingRecorder {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        panic!("on purpose")
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        panic!("on purpose")
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        panic!("on purpose")
    }
}

/// On one thread, to which the recorder and the subscriber belong.
#[tokio::test]
async fn background_tasks_that_panic_are_logged() {
    let (lines, _subscriber) = Lines::collect();
    let _recorder = metrics::set_default_local_recorder(&PanickingRecorder);
    Box::pin(with_sqlite(async |shop| {
        let relay = spawn(shop.outbox("orders"), async |_: Event| Publish::Done);
        let logged = |text: &'static str| lines.text().contains(text);
        until(async || logged("report of the lag of the outbox panicked")).await;
        let report = relay.stop(Duration::from_secs(10)).await;
        assert!(!report.is_broken_off);

        let inbox = shop.inbox("billing").retention(Duration::ZERO);
        let mut transaction = shop.begin().await;
        let marked = inbox.first_time(&mut transaction, "message").await;
        assert_eq!(marked.unwrap(), Delivery::First);
        transaction.commit().await.unwrap();
        let sweeper = Sweeper::new(inbox).every(Duration::ZERO).spawn();
        until(async || logged("sweeper panicked and has ended")).await;
        assert_eq!(sweeper.stop().await.removed, 0);
    }))
    .await;
}

#[tokio::test]
async fn longest_durations_are_accepted() {
    Box::pin(with_sqlite(async |shop| {
        stage(&shop, [event("event", "a")]).await;
        let broker = Broker::default();
        let publish = broker.clone();
        let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
            let published = publish.publish(event);
            async move { published }
        });
        let relay = relay.lease(Duration::MAX).poll(Duration::MAX).spawn();
        until_all_is_published(&shop).await;
        let report = relay.stop(Duration::MAX).await;
        assert_eq!((report.published, report.is_broken_off), (1, false));

        let sweeper = Sweeper::new(shop.inbox("billing").retention(Duration::MAX));
        let sweeper = sweeper.every(Duration::MAX).pause(Duration::MAX).spawn();
        sleep(Duration::from_millis(10)).await;
        assert_eq!(sweeper.stop().await.failures, 0);
    }))
    .await;
}
