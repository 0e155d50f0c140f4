//! Values that are committed together with the writes of their work.

use axum::{Router, body::Body, http::Request, routing::post};
use tower::ServiceExt as _;
use tower_idempotency::{
    CommitError, CommitErrorKind, CommitFuture, Guard, IdempotencyLayer, Operation, PostgresStore,
    PostgresTransaction, Ran, RunError, Scope, SqliteStore, SqliteTransaction, Store,
    sqlx::{self, Connection as _, PgConnection, SqliteConnection, query, query_scalar},
    store::RecordState,
};

use crate::{
    Runs, name, retry,
    stores::{with_postgres, with_sqlite},
    told,
};

/// A database with a table of orders.
trait Shop: Store + Clone {
    type Transaction: Send + 'static;

    fn begin(
        &self,
        operation: &Operation,
    ) -> impl Future<Output = Result<Self::Transaction, CommitError>> + Send;

    fn order(
        transaction: &mut Self::Transaction,
    ) -> impl Future<Output = Result<(), sqlx::Error>> + Send;

    fn commit_value(
        &self,
        operation: &Operation,
        transaction: Self::Transaction,
        value: &str,
    ) -> CommitFuture<()>;

    async fn create(url: &str);

    async fn orders(url: &str) -> i64;
}

macro_rules! impl_shop {
    ($store:ty, $transaction:ty, $connection:ty) => {
        impl Shop for $store {
            type Transaction = $transaction;

            async fn begin(&self, operation: &Operation) -> Result<$transaction, CommitError> {
                Self::begin(self, operation).await
            }

            async fn order(transaction: &mut $transaction) -> Result<(), sqlx::Error> {
                let order = query("INSERT INTO orders (item) VALUES ('pen')");
                order.execute(&mut **transaction).await.map(drop)
            }

            fn commit_value(
                &self,
                operation: &Operation,
                transaction: $transaction,
                value: &str,
            ) -> CommitFuture<()> {
                Self::commit_value(self, operation, transaction, value)
            }

            async fn create(url: &str) {
                let mut connection = <$connection>::connect(url).await.unwrap();
                let create = query("CREATE TABLE orders (item TEXT)");
                create.execute(&mut connection).await.unwrap();
                connection.close().await.unwrap();
            }

            async fn orders(url: &str) -> i64 {
                let mut connection = <$connection>::connect(url).await.unwrap();
                let count = query_scalar("SELECT count(*) FROM orders");
                let orders = count.fetch_one(&mut connection).await.unwrap();
                connection.close().await.unwrap();
                orders
            }
        }
    };
}

impl_shop!(SqliteStore, SqliteTransaction, SqliteConnection);
impl_shop!(PostgresStore, PostgresTransaction, PgConnection);

macro_rules! in_both_databases {
    ($($name:ident;)*) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::with_sqlite(async |store, url| super::in_shop(store, url, super::$name).await).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::with_postgres(async |store, url| super::in_shop(store, url, super::$name).await).await;
            })*
        }
    };
}

in_both_databases! {
    a_commit_keeps_the_value_and_the_writes;
    a_rollback_keeps_neither_and_the_next_call_runs;
    a_commit_with_an_error_afterwards_still_counts;
    a_value_after_a_failed_commit_is_rolled_back;
    a_value_that_cannot_be_kept_is_rolled_back;
    a_transaction_that_is_left_open_leaves_the_outcome_unknown;
    the_two_commits_refuse_each_others_operations;
}

async fn in_shop<S: Shop>(store: S, url: String, story: impl AsyncFnOnce(S, Guard<S>, &str)) {
    S::create(&url).await;
    let guard = Guard::builder(store.clone()).build().unwrap();
    story(store, guard, &url).await;
}

/// Orders, and returns a value.
async fn ordered<S: Shop>(store: S, operation: Operation) -> Result<String, CommitError> {
    let mut transaction = store.begin(&operation).await?;
    S::order(&mut transaction).await?;
    let value = "ordered".to_owned();
    store.commit_value(&operation, transaction, &value).await?;
    Ok(value)
}

async fn a_commit_keeps_the_value_and_the_writes<S: Shop>(store: S, guard: Guard<S>, url: &str) {
    for ran in [
        Ran::Now("ordered".to_owned()),
        Ran::Replayed("ordered".to_owned()),
    ] {
        let store = store.clone();
        let order = guard.run(&name("job"), &(), async |operation| {
            ordered(store, operation).await
        });
        assert_eq!(order.await.unwrap(), ran);
        assert_eq!(S::orders(url).await, 1);
    }
    let record = store.read(&name("job")).await.unwrap().unwrap();
    assert!(matches!(record.state, RecordState::Completed { .. }));
}

async fn a_rollback_keeps_neither_and_the_next_call_runs<S: Shop>(
    store: S,
    guard: Guard<S>,
    url: &str,
) {
    let inner = store.clone();
    let failed = guard.run(&name("job"), &(), async move |operation| {
        let mut transaction = inner.begin(&operation).await?;
        S::order(&mut transaction).await?;
        drop(transaction);
        Err::<String, CommitError>(sqlx::Error::RowNotFound.into())
    });
    assert_eq!(told(&failed.await), "failed");
    assert_eq!(S::orders(url).await, 0);
    let order = guard.run(&name("job"), &(), async |operation| {
        ordered(store, operation).await
    });
    assert_eq!(told(&order.await), "now");
    assert_eq!(S::orders(url).await, 1);
}

/// The record holds the value, so that the call returns what later ones do.
async fn a_commit_with_an_error_afterwards_still_counts<S: Shop>(
    store: S,
    guard: Guard<S>,
    url: &str,
) {
    let order = guard.run(&name("job"), &(), async |operation| {
        ordered(store, operation).await?;
        Err::<String, CommitError>(sqlx::Error::RowNotFound.into())
    });
    assert_eq!(order.await.unwrap(), Ran::Now("ordered".to_owned()));
    assert_eq!(S::orders(url).await, 1);
}

async fn a_value_after_a_failed_commit_is_rolled_back<S: Shop>(
    store: S,
    guard: Guard<S>,
    url: &str,
) {
    let runs = Runs::default();
    let order = guard.run(&name("job"), &"input", async move |operation: Operation| {
        let mut transaction = store.begin(&operation).await?;
        S::order(&mut transaction).await?;
        let large = "x".repeat(2 << 20);
        let failed = store.commit_value(&operation, transaction, &large).await;
        assert!(failed.is_err());
        Ok::<_, CommitError>(7)
    });
    assert!(matches!(order.await, Err(RunError::RolledBack)));
    assert_eq!(S::orders(url).await, 0);
    assert_eq!(retry(&guard, "job", &runs).await, "now");
}

async fn a_value_that_cannot_be_kept_is_rolled_back<S: Shop>(store: S, guard: Guard<S>, url: &str) {
    let order = guard.run(&name("job"), &(), async move |operation: Operation| {
        let mut transaction = store.begin(&operation).await?;
        S::order(&mut transaction).await?;
        let large = "x".repeat(2 << 20);
        store.commit_value(&operation, transaction, &large).await?;
        Ok::<_, CommitError>(7)
    });
    let Err(RunError::Failed(error)) = order.await else {
        panic!("a value over the limit is committed");
    };
    assert_eq!(error.kind(), CommitErrorKind::ResponseNotKept);
    assert!(error.to_string().contains("`max_value`"), "{error}");
    assert_eq!(S::orders(url).await, 0);
}

async fn a_transaction_that_is_left_open_leaves_the_outcome_unknown<S: Shop>(
    store: S,
    guard: Guard<S>,
    url: &str,
) {
    let order = guard.run(&name("job"), &"input", async move |operation: Operation| {
        let mut transaction = store.begin(&operation).await?;
        S::order(&mut transaction).await?;
        Ok::<_, CommitError>(7)
    });
    assert_eq!(told(&order.await), "unknown");
    assert_eq!(retry(&guard, "job", &Runs::default()).await, "unknown");
    assert_eq!(S::orders(url).await, 0);
}

async fn the_two_commits_refuse_each_others_operations<S: Shop>(store: S, _: Guard<S>, url: &str) {
    let layer = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()));
    let handler = async move |operation: Operation| {
        let error = ordered(store, operation).await.unwrap_err();
        assert_eq!(error.kind(), CommitErrorKind::ResponseNotKept);
        assert!(error.to_string().contains("use `commit`"), "{error}");
        error.status()
    };
    let app = Router::new().route("/", post(handler).layer(layer.build().unwrap()));
    let request = Request::post("/").header("idempotency-key", "request");
    let response = app.oneshot(request.body(Body::empty()).unwrap());
    assert_eq!(response.await.unwrap().status(), 500);
    assert_eq!(S::orders(url).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_is_not_committed_in_the_work_of_a_guard() {
    with_sqlite(async |store, url| {
        SqliteStore::create(&url).await;
        let guard = Guard::builder(store.clone()).build().unwrap();
        let order = guard.run(&name("job"), &(), async move |operation: Operation| {
            let transaction = store.begin(&operation).await?;
            let committed = store.commit(&operation, transaction, "ordered").await?;
            drop(committed);
            Ok::<_, CommitError>(7)
        });
        let Err(RunError::Failed(error)) = order.await else {
            panic!("a response is committed in the place of a value");
        };
        assert_eq!(error.kind(), CommitErrorKind::ResponseNotKept);
        assert!(error.to_string().contains("use `commit_value`"), "{error}");
    })
    .await;
}
