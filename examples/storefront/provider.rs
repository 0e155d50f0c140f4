//! The payment provider: another company, with a database of its own.

use std::{path::Path, time::Duration};

use axum::{
    Json, Router,
    extract::State,
    response::{IntoResponse as _, Response},
    routing::post,
};
use http::StatusCode;
use serde_json::json;
use tower_idempotency::{
    CommitError, IdempotencyLayer, Operation, OrRelease, Recovery, Scope, SqliteStore,
    sqlx::{
        self, SqliteConnection, SqlitePool, query, query_as, raw_sql, sqlite::SqliteConnectOptions,
    },
};
use tracing::info;

use crate::{Error, payments::Charge, server};

pub(crate) async fn run() -> Result<(), Error> {
    let bank = Bank::open(&server::directory()?).await?;
    // Clients that send no key are charged for each request.
    let idempotency =
        IdempotencyLayer::optional(bank.store.clone(), |_| Some(Scope::single_tenant()))
            .lease(Duration::from_secs(2))
            .store_timeout(Duration::from_secs(1))
            .wait(Duration::from_secs(3))
            // The charge and its record are one transaction.
            .recovery(Recovery::Rerun)
            .build()?;
    let app = Router::new()
        .route("/charges", post(charge).layer(idempotency.clone()))
        .with_state(bank);
    server::serve(app, &idempotency).await
}

/// The provider's database.
#[derive(Clone)]
pub(crate) struct Bank {
    store: SqliteStore,
    pool: SqlitePool,
}

impl Bank {
    pub(crate) async fn open(directory: &Path) -> Result<Self, Error> {
        let file = directory.join("provider.db");
        let store = SqliteStore::open(&file).await?;
        let pool = SqliteConnectOptions::new().filename(&file);
        let pool = SqlitePool::connect_with(pool).await?;
        raw_sql(TABLE).execute(&pool).await?;
        Ok(Self { store, pool })
    }

    /// The charges for the carts with this prefix, and the different carts among them.
    pub(crate) async fn charges(&self, prefix: &str) -> sqlx::Result<(i64, i64)> {
        query_as(CHARGES).bind(prefix).fetch_one(&self.pool).await
    }
}

async fn charge(
    State(bank): State<Bank>,
    operation: Option<Operation>,
    OrRelease(Json(charge)): OrRelease<Json<Charge>>,
) -> Result<Response, CommitError> {
    let response = (StatusCode::CREATED, Json(json!({ "cents": charge.cents })));
    let response = match operation {
        Some(operation) => {
            let mut transaction = bank.store.begin(&operation).await?;
            insert(&mut transaction, &charge).await?;
            let committed = bank.store.commit(&operation, transaction, response);
            committed.await?.into_response()
        }
        None => {
            insert(&mut *bank.pool.acquire().await?, &charge).await?;
            response.into_response()
        }
    };
    let Charge {
        cart,
        operation,
        cents,
    } = &charge;
    info!(cart, operation, cents, "charged");
    Ok(response)
}

async fn insert(connection: &mut SqliteConnection, charge: &Charge) -> sqlx::Result<()> {
    query("INSERT INTO charges (cart, operation, cents) VALUES ($1, $2, $3)")
        .bind(&charge.cart)
        .bind(&charge.operation)
        .bind(charge.cents)
        .execute(connection)
        .await
        .map(drop)
}

const TABLE: &str = "
CREATE TABLE IF NOT EXISTS charges (
    id INTEGER PRIMARY KEY,
    cart TEXT NOT NULL,
    operation TEXT NOT NULL,
    cents INTEGER NOT NULL
)";

const CHARGES: &str = "
SELECT count(*), count(DISTINCT cart) FROM charges WHERE substr(cart, 1, length($1)) = $1";
