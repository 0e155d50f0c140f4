//! The PostgreSQL store keeps every promise behind a pooler that gives each
//! transaction another server connection.

use tower_idempotency::{
    PostgresStore,
    conformance::Subject,
    conformance_tests,
    sqlx::{
        AssertSqlSafe, ConnectOptions as _, Connection as _, PgConnection,
        postgres::PgConnectOptions, query,
    },
};

/// A new database on the server that `DATABASE_URL` names, used through the
/// pooler that `PGBOUNCER_URL` names.
struct Pooled {
    server: PgConnectOptions,
    pooler: PgConnectOptions,
    database: String,
}

impl Pooled {
    fn new() -> Self {
        let options = |variable| -> PgConnectOptions {
            std::env::var(variable)
                .unwrap_or_else(|_| {
                    panic!("{variable} is not set; ./tests/run starts what it names")
                })
                .parse()
                .unwrap()
        };
        Self {
            server: options("DATABASE_URL"),
            pooler: options("PGBOUNCER_URL"),
            database: format!("pooled_{:016x}", rand::random::<u64>()),
        }
    }

    async fn connect(&self) -> PostgresStore {
        let options = self.pooler.clone().database(&self.database);
        let store = PostgresStore::builder(options).pooler_safe();
        store.connect().await.unwrap()
    }

    async fn tell(&self, statement: String) {
        let mut connection: PgConnection = self.server.connect().await.unwrap();
        query(AssertSqlSafe(statement))
            .execute(&mut connection)
            .await
            .unwrap();
        connection.close().await.unwrap();
    }
}

impl Subject for Pooled {
    type Store = PostgresStore;

    async fn store(&self) -> PostgresStore {
        self.tell(format!("CREATE DATABASE {}", self.database))
            .await;
        let direct = PostgresStore::builder(self.server.clone().database(&self.database));
        let direct = direct.connect().await.unwrap();
        direct.migrate().await.unwrap();
        direct.close().await;
        self.connect().await
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
    Pooled::new()
}
