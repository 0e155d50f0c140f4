//! Sweeps beside claims.

use std::time::{Duration, Instant};

use tower_idempotency::{
    Store,
    sqlx::{Connection as _, PgConnection, raw_sql},
};

use crate::{
    any_store::{HOUR, expired, guards, name},
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_never_deletes_a_record_that_was_claimed_again() {
    with_store(async |store, url| {
        // A sweep passes over a record that is being claimed again; it does not wait.
        let held = name("caller", "held");
        let claim = expired(&store, &held).await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let mut reclaiming = connection.begin().await.unwrap();
        raw_sql(
            "UPDATE idempotency_records SET state = 1, response = NULL, fence = fence + 1,
             lease_until = claimed_at + 3600000000, expires_at = claimed_at + 3600000000",
        )
        .execute(&mut *reclaiming)
        .await
        .unwrap();
        let begun = Instant::now();
        assert_eq!(store.purge_expired(10, HOUR).await.unwrap().touched(), 0);
        assert!(begun.elapsed() < Duration::from_secs(1));
        reclaiming.commit().await.unwrap();
        let record = store.read(&held).await.unwrap().unwrap();
        assert_eq!(record.token, claim.token);
        let _ = store.forget(&held, record.fence).await.unwrap();

        guards::a_sweep_never_deletes_a_record_claimed_again(&store, &store).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_obeys_its_limit_and_spares_leased_records() {
    with_store(async |store, _| {
        guards::a_sweep_obeys_its_limit_and_spares_leased_records(&store).await;
    })
    .await;
}
