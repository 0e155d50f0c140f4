//! A user of the server with the documented rights alone.

use std::time::Duration;

use tokio::time::timeout;
use tower_idempotency::{
    RedisStore, Store,
    store::{Claim, admin::Filter},
};

use crate::{
    any_store::{HOUR, acquired, applied, done, fingerprint, hour, name},
    redis_nodes::Node,
};

#[tokio::test]
async fn a_user_needs_the_documented_rights_alone() {
    let primary = Node::start(&["--repl-diskless-sync-delay", "0"]).await;
    let replica = Node::replica_of(&primary).await;
    let mut user = redis::cmd("ACL");
    user.arg("SETUSER").arg("app").arg("on").arg(">secret");
    user.arg("~idempotency:*").arg("&idempotency:*");
    for command in documented() {
        user.arg(format!("+{}", command.to_lowercase().replace(' ', "|")));
    }
    primary.command::<()>(&user).await.unwrap();
    let url = format!("redis://app:secret@127.0.0.1:{}", primary.port);
    let waiting = RedisStore::builder(&url).replicas(1, Duration::from_secs(5));
    let store = waiting.connect().await.unwrap();
    let (first, claim) = (name("caller", "first"), hour());
    let seen = acquired(store.claim(&first, &claim).await).fence;
    let soon = Duration::from_millis(200);
    assert!(timeout(soon, store.wait(&first, seen)).await.is_err());
    applied(store.complete(&first, claim.token, &done()).await);
    assert!(store.read(&first).await.unwrap().is_some());
    let second = name("caller", "second");
    let short = Claim::new(fingerprint(1), Duration::ZERO, Duration::ZERO);
    acquired(store.claim(&second, &short).await);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(
        store
            .purge_expired(10, Duration::ZERO)
            .await
            .unwrap()
            .marked_unknown,
        1
    );
    let page = store.list(&Filter::unknown(), None, 10).await.unwrap();
    assert_eq!(page.records.len(), 1);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(
        store.purge_expired(10, HOUR).await.unwrap().removed_unknown,
        1
    );
    drop(replica);
}

/// The commands that the guide on operating names.
fn documented() -> Vec<&'static str> {
    let guide = include_str!("../../docs/operating.md");
    let (_, rights) = guide.split_once("**Rights.**").unwrap();
    let commands: Vec<_> = rights.split('`').skip(1).step_by(2).collect();
    assert!(commands.contains(&"EVALSHA") && commands.contains(&"CLUSTER SLOTS"));
    commands
}
