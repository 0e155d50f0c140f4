//! Addresses that name no server.

use tower_idempotency::{RedisStore, StoreErrorKind};

async fn refusal(url: &str) -> String {
    let error = RedisStore::connect(url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    error.to_string()
}

// The tests turn on no TLS feature of the client.
#[tokio::test]
async fn tls_without_its_feature_is_refused_with_the_remedy() {
    for url in [
        "rediss://user:secret@host",
        "rediss+cluster://:secret@a,b",
        "rediss+sentinel://:secret@a,b/service",
    ] {
        let refused = refusal(url).await;
        assert!(refused.contains("`tokio-rustls-comp`"), "{refused}");
        assert!(!refused.contains("secret"), "{refused}");
    }
}

#[tokio::test]
async fn an_unknown_address_is_refused_with_the_known_forms() {
    for url in ["host:6379", "http://host", "redis+sentinel://:secret@host"] {
        let refused = refusal(url).await;
        assert!(refused.contains("redis+cluster://HOST:PORT"), "{refused}");
        assert!(!refused.contains("secret"), "{refused}");
    }
    let refused = refusal("rediss://:secret@host:port").await;
    assert!(!refused.contains("`tokio-rustls-comp`"), "{refused}");
}
