//! Many messages in one transaction.

use std::time::Duration;

use tokio::{join, sync::Barrier, time::timeout};
use tower_idempotency::messages::Delivery::{self, First, Repeat};

use crate::shop::{Shop, with_each_database};

with_each_database! {
    deliveries_are_in_the_order_of_the_ids;
    no_ids_have_no_deliveries;
    overlapping_batches_in_opposite_order_both_commit;
}

async fn mark(shop: &impl Shop, ids: &[&str]) -> Vec<Delivery> {
    let mut transaction = shop.begin().await;
    let inbox = shop.inbox("billing");
    let deliveries = inbox.first_times(&mut transaction, ids).await.unwrap();
    transaction.commit().await.unwrap();
    deliveries
}

async fn deliveries_are_in_the_order_of_the_ids(shop: impl Shop) {
    assert_eq!(mark(&shop, &["b", "d"]).await, [First, First]);
    let deliveries = mark(&shop, &["e", "d", "c", "e", "b", "a", "b"]).await;
    assert_eq!(
        deliveries,
        [First, Repeat, First, Repeat, Repeat, First, Repeat]
    );
    let quoted = ["{\"a\",b}", "'; --", "ü", " a", "a "];
    assert_eq!(mark(&shop, &quoted).await, [First; 5]);
    assert_eq!(mark(&shop, &quoted).await, [Repeat; 5]);
}

async fn no_ids_have_no_deliveries(shop: impl Shop) {
    assert!(mark(&shop, &[]).await.is_empty());
}

async fn overlapping_batches_in_opposite_order_both_commit(shop: impl Shop) {
    for round in 0..10 {
        let ids: Vec<String> = (0..200).map(|id| format!("{round}-{id}")).collect();
        let up: Vec<&str> = ids.iter().map(String::as_str).collect();
        let down: Vec<&str> = up.iter().rev().copied().collect();
        let barrier = Barrier::new(2);
        let deliver = async |ids: &[&str]| {
            barrier.wait().await;
            mark(&shop, ids).await
        };
        let both = async { join!(deliver(&up), deliver(&down)) };
        let (one, mut other) = timeout(Duration::from_secs(30), both).await.unwrap();
        other.reverse();
        for (one, other) in one.into_iter().zip(other) {
            assert_ne!(one, other);
        }
    }
}
