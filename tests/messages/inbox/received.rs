//! Work that the inbox commits.

use std::time::Duration;

use tokio::{join, sync::oneshot, time::sleep};
use tower_idempotency::{
    messages::{Event, Inbox, MessageError, MessageErrorKind, Received},
    sqlx::{self, Connection as _},
};

use crate::shop::{Connection, Shop, with_each_database, with_postgres, with_sqlite};

with_each_database! {
    work_runs_once_and_returns_its_value;
    two_deliveries_at_once_have_one_effect;
    failed_work_runs_again;
    second_delivery_runs_if_the_first_fails;
    work_that_ended_its_transaction_is_aborted;
    savepoint_that_rolls_back_keeps_the_rest;
    dropped_work_is_rolled_back;
}

#[derive(Debug)]
enum Failure {
    Own,
    Message,
}

impl From<MessageError> for Failure {
    fn from(_: MessageError) -> Self {
        Self::Message
    }
}

async fn effect<S: Shop>(
    inbox: &Inbox<S::Store>,
    id: &str,
) -> Result<Received<&'static str>, MessageError> {
    let work = async |on: &mut Connection<S>| {
        S::effect(on, "effect").await?;
        Ok("done")
    };
    inbox.receive(id, work).await
}

async fn work_runs_once_and_returns_its_value<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let first = effect::<S>(&inbox, "id").await.unwrap();
    assert_eq!(first, Received::First("done"));
    let second = effect::<S>(&inbox, "id").await.unwrap();
    assert_eq!(second, Received::Repeat);
    assert_eq!(shop.effects().await, ["effect"]);
}

async fn two_deliveries_at_once_have_one_effect<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let (begun, is_begun) = oneshot::channel();
    let slow = inbox.receive("id", async |on: &mut Connection<S>| {
        S::effect(on, "effect").await?;
        begun.send(()).unwrap();
        // Time for the other one to wait.
        sleep(Duration::from_millis(100)).await;
        Ok::<_, MessageError>("done")
    });
    let second = async {
        is_begun.await.unwrap();
        effect::<S>(&inbox, "id").await
    };
    let (first, second) = join!(slow, second);
    assert_eq!(first.unwrap(), Received::First("done"));
    assert_eq!(second.unwrap(), Received::Repeat);
    assert_eq!(shop.effects().await, ["effect"]);
}

async fn failed_work_runs_again<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let failed: Result<Received<()>, Failure> = inbox
        .receive("id", async |on: &mut Connection<S>| {
            S::effect(on, "effect").await.map_err(MessageError::from)?;
            Err(Failure::Own)
        })
        .await;
    assert!(matches!(failed, Err(Failure::Own)), "{failed:?}");
    assert!(shop.effects().await.is_empty());
    let second = effect::<S>(&inbox, "id").await.unwrap();
    assert_eq!(second, Received::First("done"));
    assert_eq!(shop.effects().await, ["effect"]);
}

async fn second_delivery_runs_if_the_first_fails<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let (begun, is_begun) = oneshot::channel();
    let failing = inbox.receive("id", async |on: &mut Connection<S>| {
        S::effect(on, "failed").await.map_err(MessageError::from)?;
        begun.send(()).unwrap();
        sleep(Duration::from_millis(100)).await;
        Err::<(), _>(Failure::Own)
    });
    let second = async {
        is_begun.await.unwrap();
        effect::<S>(&inbox, "id").await
    };
    let (first, second) = join!(failing, second);
    assert!(matches!(first, Err(Failure::Own)), "{first:?}");
    assert_eq!(second.unwrap(), Received::First("done"));
    assert_eq!(shop.effects().await, ["effect"]);
}

async fn work_that_ended_its_transaction_is_aborted<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let ended = inbox.receive("id", async |on: &mut Connection<S>| {
        S::effect(on, "lost").await?;
        S::run(on, "ROLLBACK").await?;
        Ok::<_, MessageError>(())
    });
    let error = ended.await.unwrap_err();
    assert_eq!(error.kind(), MessageErrorKind::Aborted, "{error}");
    assert!(shop.effects().await.is_empty());
    let second = effect::<S>(&inbox, "id").await.unwrap();
    assert_eq!(second, Received::First("done"));
}

async fn savepoint_that_rolls_back_keeps_the_rest<S: Shop>(shop: S)
where
    Connection<S>: sqlx::Connection<Database = S::Sql>,
{
    let inbox = shop.inbox("billing");
    let received = inbox.receive("id", async |on: &mut Connection<S>| {
        S::effect(on, "kept").await?;
        let mut savepoint = on.begin().await?;
        let refused = S::effect(&mut savepoint, "refused").await;
        assert!(refused.is_err());
        savepoint.rollback().await?;
        Ok::<_, MessageError>(())
    });
    assert_eq!(received.await.unwrap(), Received::First(()));
    assert_eq!(shop.effects().await, ["kept"]);
}

async fn dropped_work_is_rolled_back<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let (begun, is_begun) = oneshot::channel();
    let endless = inbox.receive("id", async |on: &mut Connection<S>| {
        S::effect(on, "lost").await?;
        begun.send(()).unwrap();
        std::future::pending::<Result<(), MessageError>>().await
    });
    tokio::select! {
        _ = endless => unreachable!("it is endless"),
        begun = is_begun => begun.unwrap(),
    }
    let second = effect::<S>(&inbox, "id").await.unwrap();
    assert_eq!(second, Received::First("done"));
    assert_eq!(shop.effects().await, ["effect"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn swallowed_statement_error_is_aborted() {
    with_postgres(async |shop| {
        let inbox = shop.inbox("billing");
        let swallowed = inbox.receive("id", async |on| {
            let refused = sqlx::query("INSERT INTO effects (effect) VALUES ('refused')");
            assert!(refused.execute(&mut *on).await.is_err());
            Ok::<_, MessageError>(())
        });
        let error = swallowed.await.unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Aborted, "{error}");
        assert!(error.to_string().contains("25P02"), "{error}");
        assert!(inbox.list(None, 10).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_that_sqlite_ended_is_aborted() {
    with_sqlite(async |shop| {
        let inbox = shop.inbox("billing");
        let swallowed = inbox.receive("id", async |on| {
            let refused =
                sqlx::query("INSERT OR ROLLBACK INTO effects (effect) VALUES ('refused')");
            assert!(refused.execute(&mut *on).await.is_err());
            Ok::<_, MessageError>(())
        });
        let error = swallowed.await.unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Aborted, "{error}");
        assert!(inbox.list(None, 10).await.unwrap().is_empty());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transaction_that_sqlite_ended_marks_and_stages_nothing() {
    with_sqlite(async |shop| {
        let (inbox, outbox) = (shop.inbox("billing"), shop.outbox("orders"));
        let mut transaction = shop.begin().await;
        let refused = sqlx::query("INSERT OR ROLLBACK INTO effects (effect) VALUES ('refused')");
        assert!(refused.execute(&mut *transaction).await.is_err());
        let marked = inbox.first_time(&mut transaction, "id").await;
        let event = Event::new("id", "a", "payload");
        let staged = outbox.stage(&mut transaction, event).await;
        for error in [marked.unwrap_err(), staged.unwrap_err()] {
            assert_eq!(error.kind(), MessageErrorKind::Transaction, "{error}");
        }
        let _ = transaction.commit().await;
        assert!(inbox.list(None, 10).await.unwrap().is_empty());
        assert_eq!(outbox.lag().await.unwrap().events, 0);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn constraint_checked_at_commit_is_aborted() {
    with_postgres(async |shop| {
        sqlx::raw_sql(
            "CREATE TABLE items (name text PRIMARY KEY);
             CREATE TABLE orders (
                 item text REFERENCES items (name) DEFERRABLE INITIALLY DEFERRED)",
        )
        .execute(&shop.pool)
        .await
        .unwrap();
        let inbox = shop.inbox("billing");
        let received = inbox.receive("id", async |on| {
            sqlx::query("INSERT INTO orders VALUES ('unicorn')")
                .execute(&mut *on)
                .await?;
            Ok::<_, MessageError>(())
        });
        let error = received.await.unwrap_err();
        assert_eq!(error.kind(), MessageErrorKind::Aborted, "{error}");
        assert!(inbox.list(None, 10).await.unwrap().is_empty());
    })
    .await;
}

/// The futures are `Send`, so that a consumer can spawn them.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_run_in_tasks_of_their_own() {
    with_postgres(async |shop| {
        let deliveries = (0..16).map(|delivery| {
            let inbox = shop.inbox("billing");
            tokio::spawn(async move {
                let id = format!("id {}", delivery % 4);
                let received = inbox.receive(&id, async |on| {
                    sqlx::query("INSERT INTO effects (effect) VALUES ($1)")
                        .bind(&id)
                        .execute(&mut *on)
                        .await?;
                    Ok::<_, MessageError>(())
                });
                received.await.unwrap()
            })
        });
        let mut first = 0;
        for delivery in deliveries.collect::<Vec<_>>() {
            first += u32::from(delivery.await.unwrap() == Received::First(()));
        }
        assert_eq!(first, 4);
        assert_eq!(shop.effects().await, ["id 0", "id 1", "id 2", "id 3"]);
    })
    .await;
}
