//! The PostgreSQL store keeps every promise, with a second pool to the same
//! database.

use tower_idempotency::{
    PostgresStore,
    conformance::Subject,
    conformance_tests,
    sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions, query},
};

/// A new database on the server that `DATABASE_URL` names.
struct Postgres {
    server: PgConnectOptions,
    database: String,
}

impl Postgres {
    fn new() -> Self {
        let server = std::env::var("DATABASE_URL").expect(
            "DATABASE_URL names no PostgreSQL server on which these tests may create databases; \
             ./tests/run starts one",
        );
        Self {
            server: server.parse().unwrap(),
            database: format!("conformance_{:016x}", rand::random::<u64>()),
        }
    }

    async fn connect(&self) -> PostgresStore {
        let options = self.server.clone().database(&self.database);
        PostgresStore::builder(options).connect().await.unwrap()
    }

    async fn tell(&self, statement: String) {
        let mut connection: PgConnection = self.server.connect().await.unwrap();
        query(tower_idempotency::sqlx::AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }
}

impl Subject for Postgres {
    type Store = PostgresStore;

    async fn store(&self) -> PostgresStore {
        self.tell(format!("CREATE DATABASE {}", self.database))
            .await;
        let store = self.connect().await;
        store.migrate().await.unwrap();
        store
    }

    async fn peer(&self, _: &PostgresStore) -> PostgresStore {
        self.connect().await
    }

    async fn finish(&self, store: PostgresStore) {
        store.close().await;
        self.tell(format!("DROP DATABASE {} WITH (FORCE)", self.database))
            .await;
    }
}

conformance_tests! {
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    Postgres::new()
}
