//! Rule 88 in the databases themselves: their rows and files hold nothing readable.

use tower_idempotency::sqlx::{Connection as _, PgConnection, query_scalar};

use super::{assert_nothing_readable, contains, hidden, secret_answers, secret_ask};
use crate::{
    api::{Api, keyed, required},
    probe::Probe,
    stores::{Place, check},
};

/// Runs a request with secrets in each of its parts.
async fn run_hidden(place: &Place) {
    let api = Api::new(hidden(place.open().await), &secret_answers());
    let first = api.send(secret_ask()).await;
    first.assert_run(1);
    api.send(secret_ask()).await.assert_replay_of(&first);
}

/// Runs a request that hides nothing, so that the search can find something.
async fn run_readable(place: &Place) {
    let api = Api::new(required(place.open().await), &Probe::counting());
    api.send(keyed("r3adable")).await.assert_run(1);
}

#[tokio::test]
async fn rule_88_rows_of_postgres_show_nothing_readable() {
    async fn rows(place: &Place) -> Vec<u8> {
        let mut connection = PgConnection::connect(&place.address()).await.unwrap();
        let rows = "SELECT string_agg(concat_ws(' ', scope, key, encode(fingerprint, 'escape'), \
                    encode(response, 'escape'), r::text), ' ') FROM idempotency_records r";
        let rows: Option<String> = query_scalar(rows).fetch_one(&mut connection).await.unwrap();
        rows.unwrap_or_default().into_bytes()
    }

    check(Place::postgres().await, async |place: &Place| {
        run_hidden(place).await;
        let bytes = rows(place).await;
        assert!(bytes.len() > 400);
        assert_nothing_readable(&bytes);
        run_readable(place).await;
        assert!(contains(&rows(place).await, b"r3adable"));
    })
    .await;
}

#[tokio::test]
async fn rule_88_files_of_sqlite_show_nothing_readable() {
    fn files(place: &Place) -> Vec<u8> {
        let address = place.address();
        let path = address.strip_prefix("sqlite:").unwrap();
        let mut bytes = std::fs::read(path).unwrap();
        bytes.extend(std::fs::read(format!("{path}-wal")).unwrap_or_default());
        bytes
    }

    check(Place::sqlite().await, async |place: &Place| {
        run_hidden(place).await;
        assert_nothing_readable(&files(place));
        run_readable(place).await;
        assert!(contains(&files(place), b"r3adable"));
    })
    .await;
}
