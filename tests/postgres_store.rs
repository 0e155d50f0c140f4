//! The PostgreSQL store against a real server.

mod reference;

use std::{
    panic::resume_unwind,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::future::join_all;
use reference::{Compared, name};
use tower_idempotency::{
    Fence, Fingerprint, PostgresStore, RecordName, Store, StoreError, StoreErrorKind, Token,
    sqlx::{
        AssertSqlSafe, Connection as _, PgConnection, Row as _,
        migrate::{Migration, MigrationType, Migrator},
        postgres::PgConnectOptions,
        query, query_scalar, raw_sql,
    },
    store::{
        Claim, Claimed, Completion, Grant, MarkedBy, ReclaimAs, RecordState, Release, Transitioned,
        admin::{Filter, Resolution},
    },
};

#[tokio::test(flavor = "multi_thread")]
async fn of_64_simultaneous_claims_exactly_one_is_acquired() {
    with_store(async |store, _| {
        for round in 0..10 {
            let name = name("caller", &format!("key {round}"));
            let answers = join_all((0..64).map(|_| {
                let (store, name) = (store.clone(), name.clone());
                tokio::spawn(async move { store.claim(&name, &hour()).await.unwrap() })
            }))
            .await;
            let acquired = answers
                .iter()
                .filter(|answer| matches!(answer.as_ref().unwrap(), Claimed::Acquired(_)))
                .count();
            assert_eq!(acquired, 1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_has_the_guard_of_the_memory_store() {
    with_store(async |store, url| {
        Compared::new(&store).every_transition().await;
        marks_exactly_the_unknown(&url).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_random_walk_gets_the_answers_of_the_memory_store() {
    with_store(async |store, url| {
        Compared::new(&store).random_walk(1, 300).await;
        marks_exactly_the_unknown(&url).await;
    })
    .await;
}

/// The column that the index of unknown records is over.
async fn marks_exactly_the_unknown(url: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let wrong: i64 = query_scalar(
        "SELECT count(*) FROM idempotency_records
         WHERE (state = 3) <> (unknown_since IS NOT NULL)",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap();
    assert_eq!(wrong, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_transition_checks_its_own_guard() {
    with_store(async |store, _| {
        use Transitioned::{Applied, Superseded};
        let name = name("caller", "key");
        let live = hour();
        let first = acquired(store.claim(&name, &live).await);
        let other = Token::random();

        // In progress, leased.
        assert!(
            taken(&store, &name, first, ReclaimAs::Takeover)
                .await
                .is_none()
        );
        assert!(
            taken(&store, &name, first, ReclaimAs::Retry)
                .await
                .is_none()
        );
        assert!(
            taken(&store, &name, first, ReclaimAs::Expired)
                .await
                .is_none()
        );
        assert_eq!(store.renew(&name, other, HOUR).await.unwrap(), Superseded);
        assert_eq!(
            store.complete(&name, other, &done()).await.unwrap(),
            Superseded
        );
        assert_eq!(
            store
                .release(&name, other, Release::AnyRequest)
                .await
                .unwrap(),
            Superseded
        );
        let lapsed = MarkedBy::Lapsed(first.fence);
        assert_eq!(
            store.mark_unknown(&name, lapsed, HOUR).await.unwrap(),
            Superseded
        );
        assert_eq!(
            store
                .resolve(&name, first.fence, &Resolution::DidNotHappen, HOUR)
                .await
                .unwrap(),
            Superseded
        );
        assert_eq!(
            store.forget(&name, Fence::from(0)).await.unwrap(),
            Superseded
        );

        // Lapsed, and alive again by a late heartbeat of its owner.
        assert_eq!(
            store
                .renew(&name, live.token, Duration::ZERO)
                .await
                .unwrap(),
            Applied
        );
        assert!(
            taken(&store, &name, first, ReclaimAs::Expired)
                .await
                .is_none()
        );
        assert_eq!(store.renew(&name, live.token, HOUR).await.unwrap(), Applied);
        assert!(
            taken(&store, &name, first, ReclaimAs::Takeover)
                .await
                .is_none()
        );
        assert_eq!(
            store
                .renew(&name, live.token, Duration::ZERO)
                .await
                .unwrap(),
            Applied
        );
        let second_claim = Claim::new(fingerprint(1), Duration::ZERO, HOUR);
        let second = store
            .reclaim(&name, first.fence, ReclaimAs::Takeover, &second_claim)
            .await
            .unwrap()
            .unwrap();
        assert_eq!((second.operation, second.attempt), (first.operation, 2));
        assert!(second.fence > first.fence);

        // Taken over: nothing of the first owner counts.
        assert_eq!(
            store.renew(&name, live.token, HOUR).await.unwrap(),
            Superseded
        );
        assert_eq!(
            store.complete(&name, live.token, &done()).await.unwrap(),
            Superseded
        );
        assert_eq!(
            store
                .mark_unknown(&name, MarkedBy::Owner(live.token), HOUR)
                .await
                .unwrap(),
            Superseded
        );

        // Unknown, by one who saw the lease lapse; the owner may still complete.
        let lapsed = MarkedBy::Lapsed(second.fence);
        assert_eq!(
            store.mark_unknown(&name, lapsed, HOUR).await.unwrap(),
            Applied
        );
        assert_eq!(
            store.renew(&name, second_claim.token, HOUR).await.unwrap(),
            Superseded
        );
        assert_eq!(
            store
                .release(&name, second_claim.token, Release::SameRequest)
                .await
                .unwrap(),
            Superseded
        );
        assert!(
            taken(&store, &name, second, ReclaimAs::Expired)
                .await
                .is_none()
        );
        assert_eq!(
            store
                .complete(&name, second_claim.token, &done())
                .await
                .unwrap(),
            Applied
        );

        // Completed: it stays so until it expires.
        for reclaim_as in [
            ReclaimAs::Takeover,
            ReclaimAs::Retry,
            ReclaimAs::Replace,
            ReclaimAs::Expired,
        ] {
            assert!(taken(&store, &name, second, reclaim_as).await.is_none());
        }
        assert_eq!(
            store
                .release(&name, second_claim.token, Release::AnyRequest)
                .await
                .unwrap(),
            Superseded
        );
        assert_eq!(store.forget(&name, second.fence).await.unwrap(), Applied);
        assert!(store.read(&name).await.unwrap().is_none());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_repeated_with_its_token_returns_the_lost_answer() {
    with_store(async |store, _| {
        use Transitioned::Applied;
        let (completed, released, unknown) = (
            name("s", "completed"),
            name("s", "released"),
            name("s", "unknown"),
        );
        for _ in 0..2 {
            let claim = hour();
            acquired(store.claim(&completed, &claim).await);
            for response in ["first", "second"] {
                let completion = Completion::new(response.into(), HOUR, Duration::ZERO);
                assert_eq!(
                    store
                        .complete(&completed, claim.token, &completion)
                        .await
                        .unwrap(),
                    Applied
                );
            }
            let record = store.read(&completed).await.unwrap().unwrap();
            assert!(matches!(
                record.state,
                RecordState::Completed { response } if response == "first"
            ));
            assert_eq!(
                store.forget(&completed, record.fence).await.unwrap(),
                Applied
            );
        }

        let claim = hour();
        acquired(store.claim(&released, &claim).await);
        for release in [Release::SameRequest, Release::AnyRequest] {
            assert_eq!(
                store
                    .release(&released, claim.token, release)
                    .await
                    .unwrap(),
                Applied
            );
        }
        assert!(matches!(
            store.read(&released).await.unwrap().unwrap().state,
            RecordState::Released(Release::SameRequest)
        ));

        let claim = hour();
        acquired(store.claim(&unknown, &claim).await);
        for retention in [HOUR, Duration::ZERO] {
            let owner = MarkedBy::Owner(claim.token);
            assert_eq!(
                store
                    .mark_unknown(&unknown, owner, retention)
                    .await
                    .unwrap(),
                Applied
            );
        }
        let record = store.read(&unknown).await.unwrap().unwrap();
        assert!(record.expires_in.is_some());

        // A claim whose answer got lost is recognised by its token.
        let Claimed::Occupied(record) = store.claim(&unknown, &claim).await.unwrap() else {
            panic!("claimed twice");
        };
        assert_eq!(record.token, claim.token);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_over_sweeping_forgetting_and_claiming_again() {
    with_store(async |store, _| {
        let name = name("caller", "key");
        let mut last = Fence::from(0);
        for round in 0..30 {
            let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
            let grant = acquired(store.claim(&name, &claim).await);
            assert!(grant.fence > last, "{} after {last}", grant.fence);
            last = grant.fence;
            match round % 3 {
                0 => {
                    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
                    let _ = store.complete(&name, claim.token, &gone).await.unwrap();
                    past().await;
                    assert_eq!(store.purge_expired(10, HOUR).await.unwrap().removed, 1);
                }
                1 => {
                    assert_eq!(
                        store.forget(&name, grant.fence).await.unwrap(),
                        Transitioned::Applied
                    );
                }
                _ => {
                    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
                    let _ = store.complete(&name, claim.token, &gone).await.unwrap();
                    past().await;
                    let again = taken(&store, &name, grant, ReclaimAs::Expired)
                        .await
                        .unwrap();
                    assert!(again.fence > last);
                    last = again.fence;
                    let _ = store.forget(&name, again.fence).await.unwrap();
                }
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i2_a_repeated_claim_draws_a_new_fence() {
    with_store(async |store, url| {
        for companions in [0, 40] {
            let lost = name("caller", &format!("lost among {companions}"));
            let before = acquired(store.claim(&lost, &hour()).await);
            let _ = store.forget(&lost, before.fence).await.unwrap();
            let claim = hour();
            acquired(store.claim(&lost, &claim).await);
            // As if it had drawn its fence first of all, and been cut off before it
            // drew another.
            run(
                &url,
                "UPDATE idempotency_records SET fence = 0 WHERE key LIKE 'lost%'",
            )
            .await;
            let others = (0..companions).map(|number| {
                let store = store.clone();
                let name = name("caller", &format!("companion {number}"));
                async move { store.claim(&name, &hour()).await }
            });
            let (_, again) = tokio::join!(join_all(others), store.claim(&lost, &claim));
            let Ok(Claimed::Occupied(record)) = again else {
                panic!("claimed again: {again:?}");
            };
            assert_eq!(record.token, claim.token);
            assert!(record.fence > before.fence);
            let kept = store.read(&lost).await.unwrap().unwrap();
            assert_eq!(kept.fence, record.fence);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fence_grows_past_a_sequence_that_was_set_back() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        let claim = Claim::new(fingerprint(1), Duration::ZERO, HOUR);
        for _ in 0..5 {
            let grant = acquired(store.claim(&name, &claim).await);
            let _ = store.forget(&name, grant.fence).await.unwrap();
        }
        let grant = acquired(store.claim(&name, &claim).await);
        run(&url, "ALTER SEQUENCE idempotency_fences RESTART WITH 1").await;
        past().await;
        let next = taken(&store, &name, grant, ReclaimAs::Takeover)
            .await
            .unwrap();
        assert_eq!(next.fence.get(), grant.fence.get() + 1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_never_deletes_a_record_that_was_claimed_again() {
    with_store(async |store, url| {
        // A record whose renewal of life is under way is passed over, not waited for.
        let held = name("caller", "held");
        let claim = expired(&store, &held).await;
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let mut reclaiming = connection.begin().await.unwrap();
        raw_sql(
            "UPDATE idempotency_records SET state = 1, response = NULL, fence = fence + 1,
             lease_until = now() + interval '1 hour', expires_at = now() + interval '1 hour'",
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

        // And in the open: whoever was granted a record still has one.
        for round in 0..15 {
            let names: Vec<_> = (0..20)
                .map(|n| name("caller", &format!("{round} {n}")))
                .collect();
            for name in &names {
                expired(&store, name).await;
            }
            let sweepers = (0..3).map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    for _ in 0..10 {
                        store.purge_expired(3, HOUR).await.unwrap();
                    }
                })
            });
            let claimers = names.iter().cloned().map(|name| {
                let store = store.clone();
                tokio::spawn(async move {
                    let seen = store.read(&name).await.unwrap()?;
                    store
                        .reclaim(&name, seen.fence, ReclaimAs::Expired, &hour())
                        .await
                        .unwrap()
                        .map(|grant| (name, grant))
                })
            });
            let (granted, _) = tokio::join!(join_all(claimers), join_all(sweepers));
            for (name, grant) in granted.into_iter().filter_map(Result::unwrap) {
                let record = store
                    .read(&name)
                    .await
                    .unwrap()
                    .expect("swept while leased");
                assert_eq!(record.fence, grant.fence);
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_obeys_its_limit_and_spares_leased_records() {
    with_store(async |store, _| {
        let leased = name("leased", "0");
        // As many as the limit, and before all others.
        for n in 0..3 {
            let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
            acquired(store.claim(&name("leased", &n.to_string()), &claim).await);
        }
        for n in 0..5 {
            expired(&store, &name("done", &n.to_string())).await;
        }
        for n in 0..3 {
            let lapsed = Claim::new(fingerprint(1), Duration::ZERO, Duration::ZERO);
            acquired(store.claim(&name("lapsed", &n.to_string()), &lapsed).await);
        }
        past().await;
        let mut total = (0, 0);
        loop {
            let purged = store.purge_expired(3, HOUR).await.unwrap();
            assert!(purged.touched() <= 3);
            total = (total.0 + purged.removed, total.1 + purged.marked_unknown);
            if purged.touched() == 0 {
                break;
            }
        }
        assert_eq!(total, (5, 3));
        assert!(store.read(&leased).await.unwrap().is_some());
        let page = store.list(&Filter::unknown(), None, 10).await.unwrap();
        assert_eq!((page.records.len(), page.next), (3, None));
        let page = store.list(&Filter::unknown(), None, 2).await.unwrap();
        assert_eq!(page.records.len(), 2);
        let page = store
            .list(&Filter::unknown(), page.next.as_ref(), 2)
            .await
            .unwrap();
        assert_eq!((page.records.len(), page.next), (1, None));
        let old = Filter::in_progress_for(Duration::ZERO);
        assert_eq!(
            store.list(&old, None, 10).await.unwrap().records[0].0,
            leased
        );
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_touches_no_index() {
    with_store(async |store, url| {
        for burst in 0..20 {
            let claims: Vec<_> = (0..5)
                .map(|n| (name("s", &format!("{burst} {n}")), hour()))
                .collect();
            for (name, claim) in &claims {
                acquired(store.claim(name, claim).await);
            }
            for (name, claim) in &claims {
                assert_eq!(
                    store.renew(name, claim.token, HOUR).await.unwrap(),
                    Transitioned::Applied
                );
                assert_eq!(
                    store.complete(name, claim.token, &done()).await.unwrap(),
                    Transitioned::Applied
                );
            }
        }
        // The very first claim is given its fence once more.
        let changes = changes_after(store, &url, 201).await;
        assert_eq!((changes.updated, changes.hot), (201, 201));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_completions_touches_no_index() {
    with_store(async |store, url| {
        for number in 0..10 {
            burst(&store, number).await;
        }
        let changes = changes_after(store, &url, 401).await;
        assert_eq!(changes.inserted, 400);
        // All claims of the very first batch are given their fences once more.
        assert!(changes.updated <= 440);
        assert_eq!(changes.hot, changes.updated);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_uses_the_index_after_its_table_has_grown() {
    with_store(async |store, url| {
        run(
            &url,
            "ALTER TABLE idempotency_records SET (autovacuum_enabled = off)",
        )
        .await;
        burst(&store, 0).await;
        // Few records, and none of them in progress.
        run(&url, "ANALYZE idempotency_records").await;
        // Until the server has made up its mind how to go about it.
        for number in 1..10 {
            burst(&store, number).await;
        }
        run(
            &url,
            "INSERT INTO idempotency_records
             SELECT scope, 'more ' || number, state, attempt, takeovers, fence, claimed_at,
                    lease_until, expires_at, operation, token, fingerprint, response
             FROM idempotency_records, generate_series(1, 20000) AS number
             WHERE key = 'burst 0 0'",
        )
        .await;
        for number in 10..20 {
            burst(&store, number).await;
        }
        let changes = changes_after(store, &url, 801).await;
        assert!(changes.seen < 20_000, "{} entries read", changes.seen);
    })
    .await;
}

/// Claims and completes 40 records at once.
async fn burst(store: &PostgresStore, number: usize) {
    let one = |n: usize| {
        let store = store.clone();
        tokio::spawn(async move {
            let (name, claim) = (name("caller", &format!("burst {number} {n}")), hour());
            acquired(store.claim(&name, &claim).await);
            let completed = store.complete(&name, claim.token, &done()).await;
            assert_eq!(completed.unwrap(), Transitioned::Applied);
        })
    };
    for done in join_all((0..40).map(one)).await {
        done.unwrap();
    }
}

/// What the server counted.
struct Changes {
    inserted: i64,
    updated: i64,
    hot: i64,
    /// Entries of the primary key.
    seen: i64,
}

/// The counts of the table, once there were so many updates at least.
async fn changes_after(store: PostgresStore, url: &str, updates: i64) -> Changes {
    // A backend's counts are certain once it has gone.
    store.close().await;
    let mut connection = PgConnection::connect(url).await.unwrap();
    let mut updated = 0;
    for _ in 0..100 {
        let row = query(
            "SELECT n_tup_upd, n_tup_ins, n_tup_hot_upd, idx_tup_read
             FROM pg_stat_user_tables JOIN pg_stat_user_indexes USING (relid)
             WHERE indexrelname = 'idempotency_records_pkey'",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        updated = row.get(0);
        if updated >= updates {
            return Changes {
                updated,
                inserted: row.get(1),
                hot: row.get(2),
                seen: row.get(3),
            };
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{updated} updates instead of {updates}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_s_careless_defaults_do_not_reach_the_store() {
    with_database(async |url| {
        // The defaults are of the database, so that other tests keep theirs.
        for setting in [
            "default_transaction_isolation = 'serializable'",
            "synchronous_commit = off",
            "lock_timeout = 1",
            "statement_timeout = 1000",
            "default_transaction_read_only = on",
        ] {
            let alter = format!(
                "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {}', current_database()); END $$",
                setting.replace('\'', "''")
            );
            run(&url, &alter).await;
        }
        let store = PostgresStore::builder(options(&url).application_name("careless"))
            .max_connections(1)
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let name = name("caller", "key");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        // What is in force is asked of the store's own session, by a trigger.
        run(
            &url,
            "SET transaction_read_only = off;
             CREATE TABLE seen (setting text, value text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen SELECT each, current_setting(each) FROM unnest(ARRAY[
                     'transaction_isolation', 'transaction_read_only', 'synchronous_commit',
                     'statement_timeout', 'lock_timeout', 'application_name']) AS each;
                 RETURN NEW; END $$;
             CREATE TRIGGER note BEFORE UPDATE ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
        let _ = store.complete(&name, claim.token, &done()).await.unwrap();
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let seen: Vec<String> =
            query_scalar("SELECT setting || ' ' || value FROM seen ORDER BY setting")
                .fetch_all(&mut connection)
                .await
                .unwrap();
        assert_eq!(
            seen,
            [
                "application_name careless",
                "lock_timeout 2s",
                "statement_timeout 5s",
                "synchronous_commit on",
                "transaction_isolation read committed",
                "transaction_read_only off",
            ]
        );
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_durability_than_asked_for_is_kept() {
    with_database(async |url| {
        run(
            &url,
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = remote_apply',
             current_database()); END $$",
        )
        .await;
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        run(
            &url,
            "CREATE TABLE seen (value text);
             CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 INSERT INTO seen VALUES (current_setting('synchronous_commit'));
                 RETURN NEW; END $$;
             CREATE TRIGGER note BEFORE INSERT ON idempotency_records
             FOR EACH ROW EXECUTE FUNCTION note()",
        )
        .await;
        acquired(store.claim(&name("caller", "key"), &hour()).await);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let seen: String = query_scalar("SELECT value FROM seen")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        assert_eq!(seen, "remote_apply");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_may_be_dropped_at_any_time() {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .max_connections(2)
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        for round in 0..150 {
            let name = name("caller", &round.to_string());
            let claim = hour();
            let patience = Duration::from_micros(40 * (round % 50));
            let _ = tokio::time::timeout(patience, store.claim(&name, &claim)).await;
            let _ = tokio::time::timeout(patience, store.read(&name)).await;
            // Whatever became of the dropped call, asking again is safe, and
            // what is acknowledged now is there.
            let token = match store.claim(&name, &claim).await.unwrap() {
                Claimed::Acquired(_) => claim.token,
                Claimed::Occupied(record) => record.token,
                Claimed::Vanished => panic!("nobody sweeps"),
            };
            assert_eq!(token, claim.token);
            let completion = done();
            let dropped = store.complete(&name, claim.token, &completion);
            let _ = tokio::time::timeout(patience, dropped).await;
            assert_eq!(
                store.complete(&name, claim.token, &done()).await.unwrap(),
                Transitioned::Applied
            );
        }
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let completed: i64 =
            query_scalar("SELECT count(*) FROM idempotency_records WHERE state = 2")
                .fetch_one(&mut connection)
                .await
                .unwrap();
        assert_eq!(completed, 150);
        let open: i64 = query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND state LIKE 'idle in transaction%'
               AND datname = current_database()",
        )
        .fetch_one(&mut connection)
        .await
        .unwrap();
        assert_eq!(open, 0);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_outcome_is_still_written() {
    with_store(async |store, _| {
        let name = name("caller", "key");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        {
            let outcome = done();
            let mut call = std::pin::pin!(store.complete(&name, claim.token, &outcome));
            let _ = futures_util::poll!(&mut call);
        }
        let begun = Instant::now();
        let is_completed = async || {
            let record = store.read(&name).await.unwrap().unwrap();
            matches!(record.state, RecordState::Completed { .. })
        };
        while !is_completed().await {
            assert!(begun.elapsed() < Duration::from_secs(60));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn migrations_coexist_with_those_of_the_application() {
    with_store(async |store, url| {
        let own = Migrator::with_migrations(vec![Migration::new(
            20_250_101,
            "accounts".into(),
            MigrationType::Simple,
            tower_idempotency::sqlx::SqlSafeStr::into_sql_str("CREATE TABLE accounts (id bigint)"),
            false,
        )]);
        let mut connection = PgConnection::connect(&url).await.unwrap();
        for _ in 0..2 {
            own.run(&mut connection).await.unwrap();
            store.migrate().await.unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_processes_may_migrate_at_once() {
    with_database(async |url| {
        let stores =
            join_all((0..8).map(|_| async { PostgresStore::connect(&url).await.unwrap() })).await;
        for migrated in join_all(stores.iter().map(PostgresStore::migrate)).await {
            migrated.unwrap();
        }
        acquired(stores[0].claim(&name("caller", "key"), &hour()).await);
        for store in stores {
            store.close().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_stores_on_one_database_share_their_records() {
    with_store(async |store, url| {
        let other = PostgresStore::connect(&url).await.unwrap();
        for round in 0..50 {
            let name = name("caller", &round.to_string());
            let (one, two) = (hour(), hour());
            let (one, two) = tokio::join!(store.claim(&name, &one), other.claim(&name, &two));
            let acquired = [one.unwrap(), two.unwrap()]
                .iter()
                .filter(|answer| matches!(answer, Claimed::Acquired(_)))
                .count();
            assert_eq!(acquired, 1);
        }
        let name = name("caller", "handed over");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        assert_eq!(
            other.complete(&name, claim.token, &done()).await.unwrap(),
            Transitioned::Applied
        );
        other.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_other_collations_merge_stay_apart() {
    with_store(async |store, _| {
        for key in ["key", "KEY", "ke\u{301}y", "k\u{e9}y", "key ", ""] {
            acquired(store.claim(&name("caller", key), &hour()).await);
        }
        acquired(store.claim(&name("callerk", "ey"), &hour()).await);
        let longest = name(&"s".repeat(511), &"k".repeat(1_024));
        acquired(store.claim(&longest, &hour()).await);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i9_an_unreadable_row_fails_only_its_own_claim() {
    with_store(async |store, url| {
        let damaged = name("caller", "damaged");
        acquired(store.claim(&damaged, &hour()).await);
        run(&url, "UPDATE idempotency_records SET fingerprint = 'short'").await;
        for round in 0..10 {
            let fresh = (0..40).map(|n| {
                let (store, name) = (store.clone(), name("caller", &format!("{round} {n}")));
                async move { store.claim(&name, &hour()).await }
            });
            let again = hour();
            let (fresh, failed) = tokio::join!(join_all(fresh), store.claim(&damaged, &again));
            for claimed in fresh {
                acquired(claimed);
            }
            assert_eq!(failed.unwrap_err().kind(), StoreErrorKind::Corrupt);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_row_is_an_error_and_never_absent() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        let claim = hour();
        for damage in [
            "state = 9",
            "state = 0",
            "state = 2",
            "response = 'stray'",
            "token = 'short'",
            "operation = ''",
            "fingerprint = 'short'",
            "fence = -1",
            "attempt = -1",
            "takeovers = -1",
        ] {
            run(&url, "DROP TABLE IF EXISTS idempotency_records CASCADE").await;
            run(
                &url,
                "DROP SEQUENCE idempotency_fences, idempotency_removals",
            )
            .await;
            run(
                &url,
                include_str!("../migrations/postgres/0001_records.sql"),
            )
            .await;
            // The statements that the connections prepared were for the old table.
            let store = PostgresStore::connect(&url).await.unwrap();
            acquired(store.claim(&name, &claim).await);
            run(&url, &format!("UPDATE idempotency_records SET {damage}")).await;
            let read = store.read(&name).await.unwrap_err();
            assert_eq!(read.kind(), StoreErrorKind::Corrupt, "{damage}");
            let claimed = store.claim(&name, &claim).await.unwrap_err();
            assert_eq!(claimed.kind(), StoreErrorKind::Corrupt, "{damage}");
            store.close().await;
        }
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partitioned_table_gives_the_answers_of_the_memory_store() {
    with_database(async |url| {
        let whole = include_str!("../migrations/postgres/0001_records.sql");
        let parted = whole.replace(
            ") WITH (fillfactor = 20);",
            ") PARTITION BY HASH (scope, key);
             CREATE TABLE one PARTITION OF idempotency_records
                 FOR VALUES WITH (MODULUS 2, REMAINDER 0) WITH (fillfactor = 20);
             CREATE TABLE other PARTITION OF idempotency_records
                 FOR VALUES WITH (MODULUS 2, REMAINDER 1) WITH (fillfactor = 20);",
        );
        assert_ne!(parted, whole);
        run(&url, &parted).await;
        let store = PostgresStore::connect(&url).await.unwrap();
        Compared::new(&store).every_transition().await;
        Compared::new(&store).random_walk(2, 200).await;
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_batch_waits_for_a_transaction_on_one_record() {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .lock_timeout(Duration::from_secs(60))
            .statement_timeout(Duration::from_secs(60))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let mut held = Vec::new();
        for number in 0..40 {
            let (name, claim) = (name("caller", &format!("key {number}")), hour());
            acquired(store.claim(&name, &claim).await);
            held.push((name, claim.token));
        }
        // As a handler does that has completed its record and not committed yet.
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut open = other.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records WHERE key = 'key 0' FOR NO KEY UPDATE")
            .execute(&mut *open)
            .await
            .unwrap();
        let (locked, free) = held.split_first().unwrap();
        let complete = |(name, token): &(RecordName, Token)| {
            let (store, name, token) = (store.clone(), name.clone(), *token);
            tokio::spawn(async move { store.complete(&name, token, &done()).await.unwrap() })
        };
        let claim = |name: RecordName| {
            let store = store.clone();
            tokio::spawn(async move { store.claim(&name, &hour()).await.unwrap() })
        };
        for _ in 0..5 {
            // Before and among the others, in batches and by itself.
            let waits = complete(locked);
            let done: Vec<_> = free.iter().map(complete).collect();
            let again = claim(locked.0.clone());
            let claimed: Vec<_> = (0..40)
                .map(|_| claim(name("caller", &hex(Token::random()))))
                .collect();
            for done in done {
                assert_eq!(done.await.unwrap(), Transitioned::Applied);
            }
            assert!(matches!(again.await.unwrap(), Claimed::Occupied(_)));
            for claimed in claimed {
                assert!(matches!(claimed.await.unwrap(), Claimed::Acquired(_)));
            }
            assert!(!waits.is_finished());
        }
        open.rollback().await.unwrap();
        assert_eq!(complete(locked).await.unwrap(), Transitioned::Applied);
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_cannot_be_kept_fails_alone_among_many() {
    with_store(async |store, _| {
        let calls = (0..60).map(|number| {
            // PostgreSQL's text has no NUL.
            let odd = if number % 20 == 7 { "\0" } else { "" };
            let name = name("caller", &format!("key {number}{odd}"));
            let store = store.clone();
            tokio::spawn(async move { store.claim(&name, &hour()).await })
        });
        for (number, claimed) in join_all(calls).await.into_iter().enumerate() {
            match claimed.unwrap() {
                Ok(Claimed::Acquired(_)) => assert_ne!(number % 20, 7),
                Err(error) => {
                    assert_eq!(number % 20, 7, "{error:?}");
                    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
                }
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_on_a_lost_connection_are_answered_and_granted_once() {
    with_store(async |store, url| {
        let killer = tokio::spawn({
            let url = url.to_owned();
            async move {
                for _ in 0..20 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    run(
                        &url,
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                         WHERE application_name = 'tower-idempotency'
                           AND datname = current_database()",
                    )
                    .await;
                }
            }
        });
        let mut lost = 0;
        while !killer.is_finished() {
            let calls = (0..64).map(|_| {
                let store = store.clone();
                tokio::spawn(async move {
                    let (name, claim) = (name("caller", &hex(Token::random())), hour());
                    let first = store.claim(&name, &claim).await;
                    let was_lost = first.is_err();
                    // Asked again until the store answers: it is this claim's.
                    let mut claimed = first;
                    while claimed.is_err() {
                        claimed = store.claim(&name, &claim).await;
                    }
                    let is_mine = match claimed.unwrap() {
                        Claimed::Acquired(grant) => grant.operation == claim.operation,
                        Claimed::Occupied(record) => record.token == claim.token,
                        Claimed::Vanished => false,
                    };
                    assert!(is_mine);
                    was_lost
                })
            });
            for was_lost in join_all(calls).await {
                lost += usize::from(was_lost.unwrap());
            }
        }
        killer.await.unwrap();
        assert!(lost > 0, "no connection was lost on its way");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_may_wait_are_refused_at_once() {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .max_waiting_calls(3)
            .lock_timeout(Duration::from_secs(60))
            .statement_timeout(Duration::from_secs(60))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut open = other.begin().await.unwrap();
        raw_sql("LOCK TABLE idempotency_records IN ACCESS EXCLUSIVE MODE")
            .execute(&mut *open)
            .await
            .unwrap();
        let claims: Vec<_> = (0..10)
            .map(|number| {
                let (store, name) = (store.clone(), name("caller", &format!("key {number}")));
                tokio::spawn(async move { store.claim(&name, &hour()).await })
            })
            .collect();
        let begun = Instant::now();
        // Up to three are under way, unless they came all at once, and three wait.
        while claims.iter().filter(|claim| claim.is_finished()).count() < 4 {
            assert!(begun.elapsed() < Duration::from_secs(30));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        open.rollback().await.unwrap();
        let mut refused = 0;
        for claim in claims {
            match claim.await.unwrap() {
                Ok(claimed) => assert!(matches!(claimed, Claimed::Acquired(_))),
                Err(error) => {
                    assert_eq!(error.kind(), StoreErrorKind::Overloaded);
                    refused += 1;
                }
            }
        }
        assert!((4..=7).contains(&refused), "{refused} were refused");
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_connection_is_an_error_and_then_forgotten() {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .lock_timeout(Duration::from_secs(20))
            .statement_timeout(Duration::from_secs(20))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let name = name("caller", "key");
        let mut blocker = PgConnection::connect(&url).await.unwrap();
        let grant = acquired(store.claim(&name, &hour()).await);
        let mut lock = blocker.begin().await.unwrap();
        raw_sql("LOCK TABLE idempotency_records")
            .execute(&mut *lock)
            .await
            .unwrap();
        let call = tokio::spawn({
            let (store, name) = (store.clone(), name.clone());
            async move { store.forget(&name, grant.fence).await }
        });
        // Cut while it waits for the table.
        let mut killer = PgConnection::connect(&url).await.unwrap();
        let begun = Instant::now();
        loop {
            let cut: i64 = query_scalar(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
                 WHERE wait_event_type = 'Lock' AND datname = current_database()",
            )
            .fetch_one(&mut killer)
            .await
            .unwrap();
            if cut > 0 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(15));
        }
        let error = call.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        lock.rollback().await.unwrap();
        assert!(store.read(&name).await.unwrap().is_some());

        // Cut while idle: noticed at the latest by the call after the next.
        run(
            &url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND datname = current_database()",
        )
        .await;
        let mut failures = 0;
        while store.read(&name).await.is_err() {
            failures += 1;
            assert!(
                failures <= 10,
                "every connection of the pool failed and more"
            );
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(store.read(&name).await.unwrap().is_some());
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_cut_while_idle_fail_no_call() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        run(
            &url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE application_name = 'tower-idempotency' AND datname = current_database()",
        )
        .await;
        tokio::time::sleep(Duration::from_millis(1_200)).await;
        assert!(store.read(&name).await.unwrap().is_some());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_does_not_wait_for_a_completion_under_way() {
    with_store(async |store, url| {
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut completing = other.begin().await.unwrap();
        raw_sql("UPDATE idempotency_records SET state = 2, response = ''")
            .execute(&mut *completing)
            .await
            .unwrap();
        let begun = Instant::now();
        let Claimed::Occupied(record) = store.claim(&name, &hour()).await.unwrap() else {
            panic!("claimed twice");
        };
        assert!(matches!(record.state, RecordState::InProgress { .. }));
        assert!(begun.elapsed() < Duration::from_secs(1));
        completing.rollback().await.unwrap();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_record_times_out_and_the_store_stays_usable() {
    with_database(async |url| {
        let store = PostgresStore::builder(options(&url))
            .max_connections(1)
            .acquire_timeout(Duration::from_secs(1))
            .lock_timeout(Duration::from_secs(3))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let name = name("caller", "key");
        let claim = hour();
        acquired(store.claim(&name, &claim).await);
        let mut other = PgConnection::connect(&url).await.unwrap();
        let mut lock = other.begin().await.unwrap();
        raw_sql("SELECT FROM idempotency_records FOR UPDATE")
            .execute(&mut *lock)
            .await
            .unwrap();
        let waiting = tokio::spawn({
            let (store, name) = (store.clone(), name.clone());
            async move { store.renew(&name, claim.token, HOUR).await }
        });
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The only connection is free.
        assert!(store.read(&name).await.unwrap().is_some());
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        lock.rollback().await.unwrap();
        assert_eq!(
            store.renew(&name, claim.token, HOUR).await.unwrap(),
            Transitioned::Applied
        );
        store.close().await;
        let error = store.read(&name).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_holds_no_connection_past_a_timeout() {
    with_database(async |url| {
        let proxy = Proxy::to(&url).await;
        let store = PostgresStore::builder(proxy.options(&url))
            .max_connections(1)
            .statement_timeout(Duration::from_millis(500))
            .connect()
            .await
            .unwrap();
        store.migrate().await.unwrap();
        let name = name("caller", "key");
        acquired(store.claim(&name, &hour()).await);
        proxy.silence(true);
        let error = store.read(&name).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::TimedOut);
        proxy.silence(false);
        let begun = Instant::now();
        while store.read(&name).await.is_err() {
            assert!(begun.elapsed() < Duration::from_secs(15));
        }
        assert!(store.read(&name).await.unwrap().is_some());
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_never_contain_keys_tokens_or_responses() {
    with_store(async |store, url| {
        run(
            &url,
            "ALTER TABLE idempotency_records ADD CHECK (length(key) < 5 OR scope = '')",
        )
        .await;
        let secret = name("the-scope", "the-key");
        let errors = [
            store.claim(&secret, &hour()).await.unwrap_err(),
            store
                .claim(&name("the-scope", "the-key\0"), &hour())
                .await
                .unwrap_err(),
            PostgresStore::connect("postgres://the-key:the-scope@127.0.0.1:1/x")
                .await
                .unwrap_err(),
        ];
        for error in &errors {
            let text = told(error);
            assert!(
                !text.contains("the-key") && !text.contains("the-scope"),
                "{text}"
            );
        }
        assert!(!format!("{store:?}").contains("postgres:"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f61_a_table_that_a_crash_would_empty_is_refused() {
    with_store(async |store, url| {
        run(&url, "ALTER TABLE idempotency_records SET UNLOGGED").await;
        let error = PostgresStore::connect(&url).await.unwrap_err();
        assert!(told(&error).contains("UNLOGGED"), "{}", told(&error));
        run(&url, "ALTER TABLE idempotency_records SET LOGGED").await;
        PostgresStore::connect(&url).await.unwrap().close().await;
        store.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_standby_is_refused_with_its_reason() {
    with_database(async |url| {
        // A server that says of itself what a standby says.
        run(
            &url,
            "CREATE SCHEMA standby;
             CREATE FUNCTION standby.pg_is_in_recovery() RETURNS boolean
             LANGUAGE sql AS 'SELECT true';
             DO $$ BEGIN EXECUTE format(
                 'ALTER DATABASE %I SET search_path = standby, pg_catalog, public',
                 current_database()); END $$",
        )
        .await;
        let error = PostgresStore::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
        assert!(told(&error).contains("standby"), "{}", told(&error));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_for_missing_table_and_wrong_address_say_the_remedy() {
    with_database(async |url| {
        let store = PostgresStore::connect(&url).await.unwrap();
        let error = store.read(&name("caller", "key")).await.unwrap_err();
        assert!(told(&error).contains("migrate"), "{}", told(&error));
        store.close().await;
        let error = PostgresStore::connect("mysql://localhost")
            .await
            .unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    })
    .await;
}

/// Runs a test against a new, migrated database.
async fn with_store(test: impl AsyncFnOnce(PostgresStore, String)) {
    with_database(async |url| {
        let store = PostgresStore::connect(&url).await.unwrap();
        store.migrate().await.unwrap();
        test(store.clone(), url).await;
        store.close().await;
    })
    .await;
}

/// Runs a test against a new database, which is dropped whatever comes of it.
async fn with_database(test: impl AsyncFnOnce(String)) {
    let server = std::env::var("DATABASE_URL").expect(
        "DATABASE_URL names no PostgreSQL server on which these tests may create databases; \
         ./tests/run starts one",
    );
    let database = format!("idempotency_{:016x}", rand::random::<u64>());
    run(&server, &format!("CREATE DATABASE {database}")).await;
    let url = options(&server).database(&database);
    let url = tower_idempotency::sqlx::ConnectOptions::to_url_lossy(&url).to_string();
    let outcome =
        futures_util::FutureExt::catch_unwind(std::panic::AssertUnwindSafe(test(url))).await;
    run(&server, &format!("DROP DATABASE {database} WITH (FORCE)")).await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
}

fn options(url: &str) -> PgConnectOptions {
    url.parse().unwrap()
}

async fn run(url: &str, statements: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    run_on(&mut connection, statements).await;
    connection.close().await.unwrap();
}

async fn run_on(connection: &mut PgConnection, statements: &str) {
    raw_sql(AssertSqlSafe(statements.to_owned()))
        .execute(connection)
        .await
        .unwrap();
}

fn told(error: &StoreError) -> String {
    format!("{error} {error:?}")
}

/// A record that was completed and has expired.
async fn expired(store: &PostgresStore, name: &tower_idempotency::RecordName) -> Claim {
    let claim = Claim::new(fingerprint(1), HOUR, Duration::ZERO);
    acquired(store.claim(name, &claim).await);
    let gone = Completion::new(Bytes::new(), Duration::ZERO, Duration::ZERO);
    let _ = store.complete(name, claim.token, &gone).await.unwrap();
    past().await;
    claim
}

async fn taken(
    store: &PostgresStore,
    name: &tower_idempotency::RecordName,
    seen: Grant,
    reclaim_as: ReclaimAs,
) -> Option<Grant> {
    store
        .reclaim(name, seen.fence, reclaim_as, &hour())
        .await
        .unwrap()
}

fn acquired(answer: Result<Claimed, StoreError>) -> Grant {
    match answer.unwrap() {
        Claimed::Acquired(grant) => grant,
        other => panic!("{other:?}"),
    }
}

fn hex(token: Token) -> String {
    token.as_bytes().map(|byte| format!("{byte:02x}")).concat()
}

fn hour() -> Claim {
    Claim::new(fingerprint(1), HOUR, HOUR)
}

fn done() -> Completion {
    Completion::new(Bytes::from_static(&[7; 300]), HOUR, Duration::ZERO)
}

fn fingerprint(body: u8) -> Fingerprint {
    Fingerprint::from_bytes([body; Fingerprint::LENGTH])
}

/// Until what lasted no time is over.
async fn past() {
    tokio::time::sleep(Duration::from_millis(2)).await;
}

/// Stands between a store and its server, and can swallow what the server says.
struct Proxy {
    port: u16,
    silent: Arc<std::sync::atomic::AtomicBool>,
}

impl Proxy {
    async fn to(url: &str) -> Self {
        let server = (options(url).get_host().to_owned(), options(url).get_port());
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let silent = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let swallow = silent.clone();
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = tokio::net::TcpStream::connect(&server).await.unwrap();
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                let swallow = swallow.clone();
                tokio::spawn(
                    async move { tokio::io::copy(&mut from_client, &mut to_server).await },
                );
                tokio::spawn(async move {
                    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
                    let mut said = [0; 8_192];
                    while let Ok(length @ 1..) = from_server.read(&mut said).await {
                        let silent = swallow.load(std::sync::atomic::Ordering::Relaxed);
                        if !silent && to_client.write_all(&said[..length]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { port, silent }
    }

    fn options(&self, url: &str) -> PgConnectOptions {
        options(url).host("127.0.0.1").port(self.port)
    }

    fn silence(&self, silent: bool) {
        self.silent
            .store(silent, std::sync::atomic::Ordering::Relaxed);
    }
}

const HOUR: Duration = Duration::from_secs(3600);
