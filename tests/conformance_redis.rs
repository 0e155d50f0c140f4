//! The Redis store keeps every promise, on one server and on a cluster, with a second
//! store on the same keys.

mod redis_servers;

use redis_servers::Keys;
use tower_idempotency::{RedisStore, conformance::Subject, conformance_tests};

struct Redis(Keys);

impl Subject for Redis {
    type Store = RedisStore;
    const ADDS_USAGE: bool = true;
    const REMOVES_BY_ITSELF: bool = true;

    async fn store(&self) -> RedisStore {
        self.0.connect().await
    }

    async fn peer(&self, _: &RedisStore) -> RedisStore {
        self.0.connect().await
    }
}

mod server {
    use super::*;

    conformance_tests! {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        Redis(Keys::on_server())
    }
}

mod cluster {
    use super::*;

    conformance_tests! {
        #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
        Redis(Keys::on_cluster())
    }
}
