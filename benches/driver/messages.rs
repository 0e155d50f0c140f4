//! Marks of an inbox and events of an outbox, in transactions of an application.

use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_idempotency::{
    PostgresStore,
    messages::{Event, Publish, Relay},
    sqlx::{PgConnection, PgPool, query, query_as, query_scalar, raw_sql},
};

use crate::{
    Plan,
    load::Pairs,
    postgres,
    report::Report,
    target::{Bound, Target},
};

pub(crate) async fn measure(plan: Plan, report: &mut Report) {
    let url = postgres::database("driver_messages").await;
    let store = PostgresStore::connect(&url).await.unwrap();
    store.inbox("billing").unwrap().migrate().await.unwrap();
    store.outbox("orders").unwrap().migrate().await.unwrap();
    let pool = PgPool::connect(&url).await.unwrap();
    raw_sql(TABLES).execute(&pool).await.unwrap();

    marks(plan, report, &pool, &store).await;
    stages(plan, report, &pool, &store).await;
    relays(plan, report, &pool, &store).await;
    store.close().await;
    pool.close().await;
}

/// A transaction that marks 100 messages beside one that marks one.
async fn marks(plan: Plan, report: &mut Report, pool: &PgPool, store: &PostgresStore) {
    let mark = |messages: u32| {
        let (pool, inbox) = (pool.clone(), store.inbox("billing").unwrap());
        move || {
            let (pool, inbox) = (pool.clone(), inbox.clone());
            async move {
                let ids: Vec<String> = (0..messages).map(|_| id()).collect();
                let mut transaction = pool.begin().await.unwrap();
                let marked = inbox.first_times(&mut transaction, &ids).await;
                assert_eq!(marked.unwrap().len(), ids.len());
                transaction.commit().await.unwrap();
            }
        }
    };
    let pairs = Pairs::measure(plan, 1, mark(1), mark(100)).await;
    report.add(Target::new(
        "a transaction that marks 100 messages, against one that marks one: p50",
        Bound::AtMost(2.0),
        "×",
        pairs.ratios(|load| load.p50),
    ));
}

/// An order with an event beside one without, and beside one whose event is a row that
/// nothing orders.
async fn stages(plan: Plan, report: &mut Report, pool: &PgPool, store: &PostgresStore) {
    for in_flight in [1, 16] {
        let order = |event: EventOf| {
            let (pool, outbox) = (pool.clone(), store.outbox("orders").unwrap());
            move || {
                let (pool, outbox) = (pool.clone(), outbox.clone());
                async move {
                    let mut transaction = pool.begin().await.unwrap();
                    let order = order(&mut transaction).await;
                    match event {
                        EventOf::Nothing => {}
                        EventOf::Hand => plain_event(&mut transaction, order).await,
                        EventOf::Outbox => {
                            let event = Event::new(id(), order.to_string(), PAYLOAD);
                            outbox.stage(&mut transaction, event).await.unwrap();
                        }
                    }
                    transaction.commit().await.unwrap();
                }
            }
        };
        let without = || order(EventOf::Nothing);
        let staged = Pairs::measure(plan, in_flight, without(), order(EventOf::Outbox)).await;
        report.add(Target::new(
            format!("an order with an event, {in_flight} in flight, against one without: p50"),
            Bound::AtMost(1.25),
            "×",
            staged.ratios(|load| load.p50),
        ));
        let by_hand = Pairs::measure(plan, in_flight, without(), order(EventOf::Hand)).await;
        report.tell(&Target::new(
            format!("an order with a plain row, {in_flight} in flight, against one without: p50"),
            Bound::AtMost(1.25),
            "×",
            by_hand.ratios(|load| load.p50),
        ));
    }
}

/// What an order brings along.
#[derive(Clone, Copy)]
enum EventOf {
    Nothing,
    /// A row without a position in its aggregate, and without a turn for relays.
    Hand,
    Outbox,
}

async fn plain_event(on: &mut PgConnection, order: i64) {
    query("INSERT INTO plain_events (id, aggregate, payload) VALUES ($1, $2, $3)")
        .bind(id())
        .bind(order.to_string())
        .bind(PAYLOAD)
        .execute(on)
        .await
        .unwrap();
}

/// What an order usually takes: its row, its lines, the stock, the customer's balance.
async fn order(on: &mut PgConnection) -> i64 {
    let (order,): (i64,) = query_as("INSERT INTO orders (customer) VALUES ($1) RETURNING id")
        .bind(rand::random::<u16>() as i32)
        .fetch_one(&mut *on)
        .await
        .unwrap();
    for statement in [
        "INSERT INTO lines (order_id, item) VALUES ($1, 'pen'), ($1, 'ink')",
        "UPDATE stock SET pieces = pieces - 1 WHERE item = $1 % 1000",
        "UPDATE balances SET cents = cents - 100 WHERE customer = $1 % 1000",
    ] {
        query(statement)
            .bind(order)
            .execute(&mut *on)
            .await
            .unwrap();
    }
    order
}

/// A relay whose publisher does nothing, on 1,000 aggregates with 20 events each.
async fn relays(plan: Plan, report: &mut Report, pool: &PgPool, store: &PostgresStore) {
    let outbox = store.outbox("relayed").unwrap();
    let mut reached = Vec::new();
    for _ in 0..plan.pairs {
        let mut transaction = pool.begin().await.unwrap();
        let events =
            (0..EVENTS).map(|event| Event::new(id(), (event % 1_000).to_string(), PAYLOAD));
        let staged = outbox.stage_all(&mut transaction, events.collect()).await;
        staged.unwrap();
        transaction.commit().await.unwrap();
        raw_sql("VACUUM ANALYZE").execute(pool).await.unwrap();

        let begun = Instant::now();
        let relay = Relay::new(outbox.clone(), async |_| Publish::Done).spawn();
        while is_pending(pool).await {
            sleep(Duration::from_millis(5)).await;
        }
        reached.push(EVENTS as f64 / begun.elapsed().as_secs_f64());
        let relayed = relay.stop(Duration::from_secs(10)).await;
        assert_eq!(relayed.published, EVENTS);
    }
    report.add(Target::new(
        "a relay to a publisher that does nothing",
        Bound::AtLeast(5_000.0),
        "events a second",
        reached,
    ));
}

async fn is_pending(pool: &PgPool) -> bool {
    let pending =
        query_scalar("SELECT EXISTS (SELECT FROM idempotency_turns WHERE topic = 'relayed')");
    pending.fetch_one(pool).await.unwrap()
}

fn id() -> String {
    format!("{:032x}", rand::random::<u128>())
}

const EVENTS: u64 = 20_000;

const PAYLOAD: &[u8] = &[b'p'; 512];

const TABLES: &str = "
CREATE TABLE orders (id bigserial PRIMARY KEY, customer int NOT NULL);
CREATE TABLE lines (order_id bigint REFERENCES orders, item text NOT NULL);
CREATE TABLE plain_events (id text PRIMARY KEY, aggregate text NOT NULL, payload bytea NOT NULL);
CREATE TABLE stock (item bigint PRIMARY KEY, pieces bigint NOT NULL);
CREATE TABLE balances (customer bigint PRIMARY KEY, cents bigint NOT NULL);
INSERT INTO stock SELECT item, 1000000000 FROM generate_series(0, 999) AS item;
INSERT INTO balances SELECT customer, 0 FROM generate_series(0, 999) AS customer";
