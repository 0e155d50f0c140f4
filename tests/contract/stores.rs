//! The stores for which the rules hold. Each test has a fresh one.

use std::{path::PathBuf, sync::Mutex, time::Duration};

use futures_util::{FutureExt as _, future::BoxFuture};
use tower_idempotency::{DynStore, MemoryStore, PostgresStore, SqliteStore};

use crate::{
    databases::{CitusSchema, Database},
    etcd,
    redis_servers::Keys,
};

/// The records of one test. Each [`open`](Self::open) is the view of another
/// process.
pub(crate) struct Place {
    kind: Kind,
    /// Stores to close before the records are removed.
    opened: Mutex<Vec<Closing>>,
}

type Closing = BoxFuture<'static, ()>;

enum Kind {
    Memory(MemoryStore),
    Sqlite(PathBuf),
    Postgres(Box<Database>),
    Citus(CitusSchema),
    Redis(Keys),
    Etcd(etcd::Keys),
}

impl Place {
    pub(crate) async fn memory() -> Self {
        Self::of(Kind::Memory(MemoryStore::new()))
    }

    pub(crate) async fn sqlite() -> Self {
        let name = format!("{:016x}.sqlite", rand::random::<u64>());
        Self::of(Kind::Sqlite(
            PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name),
        ))
    }

    pub(crate) async fn postgres() -> Self {
        let database = Database::new();
        database.create().await;
        let store = PostgresStore::connect(&database.url()).await.unwrap();
        store.migrate().await.unwrap();
        store.close().await;
        Self::of(Kind::Postgres(Box::new(database)))
    }

    pub(crate) async fn citus() -> Self {
        let schema = CitusSchema::new();
        schema.create().await;
        Self::of(Kind::Citus(schema))
    }

    pub(crate) async fn redis() -> Self {
        Self::of(Kind::Redis(Keys::on_server()))
    }

    pub(crate) async fn redis_cluster() -> Self {
        Self::of(Kind::Redis(Keys::on_cluster()))
    }

    pub(crate) async fn etcd() -> Self {
        Self::of(Kind::Etcd(etcd::Keys::new()))
    }

    /// A database without the store's tables.
    pub(crate) async fn postgres_without_tables() -> Self {
        let database = Database::new();
        database.create().await;
        Self::of(Kind::Postgres(Box::new(database)))
    }

    fn of(kind: Kind) -> Self {
        Self {
            kind,
            opened: Mutex::default(),
        }
    }

    pub(crate) async fn open(&self) -> DynStore {
        match &self.kind {
            Kind::Memory(store) => DynStore::new(store.clone()),
            Kind::Sqlite(path) => {
                let store = SqliteStore::open(path).await.unwrap();
                let opened = store.clone();
                self.closed_with(async move { opened.close().await });
                DynStore::new(store)
            }
            Kind::Postgres(_) | Kind::Citus(_) => {
                let store = PostgresStore::connect(&self.address()).await.unwrap();
                let opened = store.clone();
                self.closed_with(async move { opened.close().await });
                DynStore::new(store)
            }
            Kind::Redis(keys) => DynStore::new(keys.connect().await),
            Kind::Etcd(keys) => DynStore::new(keys.open()),
        }
    }

    /// The address of these records for another process.
    pub(crate) fn address(&self) -> String {
        match &self.kind {
            Kind::Memory(_) => "memory".to_owned(),
            Kind::Sqlite(path) => format!("sqlite:{}", path.display()),
            Kind::Postgres(database) => database.url(),
            Kind::Citus(schema) => schema.url(),
            Kind::Redis(keys) => keys.address(),
            Kind::Etcd(keys) => keys.address(),
        }
    }

    fn closed_with(&self, closing: impl Future<Output = ()> + Send + 'static) {
        self.opened.lock().unwrap().push(Box::pin(closing));
    }

    /// Removes the records.
    async fn remove(self) {
        for closing in self.opened.into_inner().unwrap() {
            closing.await;
        }
        match self.kind {
            Kind::Memory(_) => {}
            Kind::Sqlite(path) => {
                for end in ["", "-wal", "-shm"] {
                    let mut file = path.clone().into_os_string();
                    file.push(end);
                    // SQLite removes some of them itself.
                    let _ = std::fs::remove_file(file);
                }
            }
            Kind::Postgres(database) => database.remove().await,
            Kind::Citus(schema) => schema.remove().await,
            // No other test reads them.
            Kind::Redis(_) => {}
            Kind::Etcd(keys) => keys.remove().await,
        }
    }
}

/// A fresh memory store, for rules that do not depend on the store.
pub(crate) fn memory() -> DynStore {
    DynStore::new(MemoryStore::new())
}

/// Runs a rule on every store, as one test for each: `rule::memory` and so on.
macro_rules! on_each_store {
    ($($rule:ident)*) => {
        $(mod $rule {
            use crate::stores::{Place, check};

            #[tokio::test]
            async fn memory() {
                check(Place::memory().await, super::$rule).await;
            }

            crate::stores::on_shared_stores!($rule);
        })*
    };
}
pub(crate) use on_each_store;

/// The same on the stores that processes can share.
macro_rules! on_each_shared_store {
    ($($rule:ident)*) => {
        $(mod $rule {
            use crate::stores::{Place, check};

            crate::stores::on_shared_stores!($rule);
        })*
    };
}
pub(crate) use on_each_shared_store;

macro_rules! on_shared_stores {
    ($rule:ident) => {
        #[tokio::test]
        async fn sqlite() {
            check(Place::sqlite().await, super::$rule).await;
        }

        #[tokio::test]
        async fn postgres() {
            check(Place::postgres().await, super::$rule).await;
        }

        #[tokio::test]
        #[ignore = "needs the Citus of CITUS_URL"]
        async fn citus() {
            check(Place::citus().await, super::$rule).await;
        }

        #[tokio::test]
        async fn redis() {
            check(Place::redis().await, super::$rule).await;
        }

        #[tokio::test]
        async fn redis_cluster() {
            check(Place::redis_cluster().await, super::$rule).await;
        }

        #[tokio::test]
        async fn etcd() {
            check(Place::etcd().await, super::$rule).await;
        }
    };
}
pub(crate) use on_shared_stores;

/// Runs a rule, and removes its records even if it fails.
pub(crate) async fn check(place: Place, rule: impl AsyncFnOnce(&Place)) {
    let bounded = tokio::time::timeout(LONGEST_TEST, rule(&place));
    let ended = std::panic::AssertUnwindSafe(bounded).catch_unwind().await;
    place.remove().await;
    match ended {
        Ok(in_time) => in_time.expect("a rule that hangs is a rule that fails"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

const LONGEST_TEST: Duration = Duration::from_secs(120);
