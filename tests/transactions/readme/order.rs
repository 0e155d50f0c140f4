use axum::{extract::State, http::StatusCode};
use tower_idempotency::{CommitError, Committed, Operation, PostgresStore, sqlx};

async fn order(
    State(store): State<PostgresStore>,
    operation: Operation,
) -> Result<Committed, CommitError> {
    let mut transaction = store.begin(&operation).await?;
    sqlx::query("UPDATE stock SET pieces = pieces - 1 WHERE item = 'pen'")
        .execute(&mut *transaction)
        .await?;
    let response = (StatusCode::CREATED, "ordered"); // any `IntoResponse`
    store.commit(&operation, transaction, response).await
}
