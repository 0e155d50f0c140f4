//! The view that the documentation gives to people.

use tower_idempotency::{
    Store,
    sqlx::{self, Connection as _, PgConnection},
    store::Release,
};

use crate::{
    any_store::{HOUR, acquired, applied, done, hour, name},
    databases::run,
    with_store,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_view_names_each_state() {
    let guide = include_str!("../../docs/operating.md");
    let view = guide
        .split("```")
        .find_map(|block| block.strip_prefix("sql\nCREATE VIEW"))
        .expect("docs/operating.md has a view");
    with_store(async |store, url| {
        run(&url, &format!("CREATE VIEW{view}")).await;
        let states = [
            "completed",
            "in progress",
            "released for any request",
            "released for the same request",
            "unknown",
        ];
        for state in states {
            let (name, claim) = (name("caller", state), hour());
            acquired(store.claim(&name, &claim).await);
            let release = async |release| store.release(&name, claim.token, release).await;
            match state {
                "completed" => applied(store.complete(&name, claim.token, &done()).await),
                "released for any request" => applied(release(Release::AnyRequest).await),
                "released for the same request" => applied(release(Release::SameRequest).await),
                "unknown" => applied(store.mark_unknown(&name, claim.token, HOUR).await),
                _ => {}
            }
        }
        let mut connection = PgConnection::connect(&url).await.unwrap();
        let shown: Vec<(String, String, bool, bool)> = sqlx::query_as(
            "SELECT key, state, COALESCE(lease_until > now(), false),
                    claimed_at BETWEEN now() - interval '1 minute' AND now()
                        AND expires_at > now() + interval '10 minutes'
             FROM idempotency_records_readable ORDER BY key",
        )
        .fetch_all(&mut connection)
        .await
        .unwrap();
        let expected = states.map(|state| {
            let state = state.to_owned();
            (state.clone(), state.clone(), state == "in progress", true)
        });
        assert_eq!(shown, expected);
        connection.close().await.unwrap();
    })
    .await;
}
