//! A PostgreSQL server whose synchronous standby is gone: each write waits in its
//! COMMIT, where no timeout of the server reaches it.

use std::time::Duration;

use tower_idempotency::{DynStore, PostgresStore, store::RecordState};

use crate::{
    api::{Api, eventually, keyed, record, required},
    postgres_server::Server,
    probe::Probe,
};

#[tokio::test(flavor = "multi_thread")]
async fn f102_claims_behind_a_lost_standby_are_withdrawn() {
    let server = Server::start().await;
    server.migrate().await;
    let postgres = PostgresStore::connect(&server.url(server.port())).await;
    let postgres = postgres.unwrap();
    let store = DynStore::new(postgres.clone());
    let probe = Probe::statuses(&[500, 201]);
    let builder = required(store.clone())
        .lease(LEASE)
        .store_timeout(LEASE / 2);
    let api = Api::new(builder, &probe);
    api.send(keyed("released")).await.assert_live(500);

    server.lose_standby().await.unwrap();
    for key in ["released", "new"] {
        api.send(keyed(key))
            .await
            .assert_problem(503, "store-unavailable");
    }
    assert!(server.stalled_commits().await.unwrap() > 2);
    // Lets the leases of the pending claims lapse.
    tokio::time::sleep(LEASE * 3).await;
    assert!(server.stalled_commits().await.unwrap() > 2);
    server.regain_standby().await.unwrap();

    for (key, attempt, run) in [("new", 1, 2), ("released", 2, 3)] {
        eventually(async || {
            let record = record(&store, key).await?;
            let is_released = matches!(record.state, RecordState::Released(_));
            (is_released && record.attempt == attempt).then_some(())
        })
        .await;
        assert_eq!(probe.runs(), run - 1, "{key}");
        let first = api.send(keyed(key)).await;
        first.assert_run(run);
        api.send(keyed(key)).await.assert_replay_of(&first);
    }
    postgres.close().await;
}

const LEASE: Duration = Duration::from_secs(1);
