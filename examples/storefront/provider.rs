//! The payment provider: another company, with a database of its own.

use std::{path::Path, time::Duration};

use axum::{Json, Router, extract::State, routing::post};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tower_idempotency::{
    CommitError, Committed, IdempotencyLayer, Operation, OrRelease, Recovery, Scope, SqliteStore,
    sqlx::{self, SqlitePool, query, query_as, raw_sql, sqlite::SqliteConnectOptions},
};
use tracing::info;

use crate::{Error, ordered::Ordered, server};

pub(crate) async fn run() -> Result<(), Error> {
    let bank = Bank::open(&server::directory()?).await?;
    let idempotency =
        IdempotencyLayer::required(bank.store.clone(), |_| Some(Scope::single_tenant()))
            .lease(Duration::from_secs(2))
            .store_timeout(Duration::from_secs(1))
            .wait(Duration::from_secs(3))
            // Longer than a client may take to try again.
            .retention(Duration::from_secs(14 * 24 * 3600))
            // The charge and its record are one transaction.
            .recovery(Recovery::Rerun)
            .build()?;
    let app = Router::new()
        .route("/charges", post(charge).layer(idempotency.clone()))
        .with_state(bank);
    server::serve(app).await?;
    server::log_drained(idempotency.drain(server::GRACE).await);
    Ok(())
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

/// A charge, as the client asks for it.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) struct Charge {
    cart: String,
    /// The operation of the client, which the provider shows in its own records.
    operation: String,
    cents: u32,
}

impl Charge {
    pub(crate) fn of(ordered: &Ordered) -> Self {
        Self {
            cart: ordered.cart.clone(),
            operation: ordered.operation.clone(),
            cents: 500,
        }
    }
}

async fn charge(
    State(bank): State<Bank>,
    operation: Operation,
    OrRelease(Json(charge)): OrRelease<Json<Charge>>,
) -> Result<Committed, CommitError> {
    let Charge {
        cart,
        operation: reference,
        cents,
    } = &charge;
    let mut transaction = bank.store.begin(&operation).await?;
    query("INSERT INTO charges (cart, operation, cents) VALUES ($1, $2, $3)")
        .bind(cart)
        .bind(reference)
        .bind(cents)
        .execute(&mut *transaction)
        .await?;
    let response = (StatusCode::CREATED, Json(json!({ "cents": cents })));
    let committed = bank.store.commit(&operation, transaction, response).await?;
    info!(cart, operation = reference, cents, "charged");
    Ok(committed)
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
