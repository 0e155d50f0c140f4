//! Handlers that keep tenants apart by schemas and roles.

use axum::response::IntoResponse as _;
use tower_idempotency::{
    CommitErrorKind,
    sqlx::{PgPool, Row as _, query},
};

use crate::{
    service::{Run, Service},
    shop::{PostgresShop, Shop, options, ordered, with_postgres},
};

#[tokio::test(flavor = "multi_thread")]
async fn f112_commit_completes_under_a_search_path_of_the_handler() {
    with_postgres(async |shop| {
        shop.execute(TENANT).await;
        let service = Service::new(&shop, async |run| {
            order(run, "SET LOCAL search_path = tenant").await
        });
        service.post("key").await.assert_is(201, "ordered a pen");
        assert!(service.post("key").await.is_replay());
        let (role, path) = seen(&shop).await;
        assert_eq!((&*role, &*path), ("postgres", "tenant"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f112_commit_completes_under_a_role_without_rights_on_the_records() {
    with_postgres(async |shop| {
        with_role(&shop, async |role| {
            let enter: &'static str =
                format!("SET LOCAL ROLE {role}; SET LOCAL search_path = tenant").leak();
            let service = Service::new(&shop, move |run| order(run, enter));
            service.post("key").await.assert_is(201, "ordered a pen");
            assert!(service.post("key").await.is_replay());
            // A trigger of the tenant must not run as the session's role.
            assert_eq!(seen(&shop).await, (role.clone(), "tenant".to_owned()));
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f112_commit_keeps_a_role_that_may_write_the_records() {
    with_postgres(async |shop| {
        with_role(&shop, async |role| {
            shop.execute(&format!(
                "GRANT SELECT, UPDATE ON idempotency_records TO {role};
                 CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql SECURITY INVOKER AS $$ BEGIN
                     INSERT INTO tenant.seen VALUES (current_user, 'completed'); RETURN NEW; END $$;
                 CREATE TRIGGER who BEFORE UPDATE ON idempotency_records
                 FOR EACH ROW WHEN (NEW.state = 2) EXECUTE FUNCTION who()"
            ))
            .await;
            let enter: &'static str = format!("SET LOCAL ROLE {role}").leak();
            let service = Service::new(&shop, move |run| async move {
                let mut transaction = run.shop.begin(&run.operation).await.unwrap();
                PostgresShop::run(&mut transaction, enter).await.unwrap();
                let committed = run.commit(transaction, ordered("it"));
                committed.await.into_response()
            });
            service.post("key").await.assert_is(201, "ordered it");
            assert_eq!(seen(&shop).await, (role.clone(), "completed".to_owned()));
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f112_completion_uses_no_operator_of_the_handler_s_schema() {
    with_postgres(async |shop| {
        with_role(&shop, async |role| {
            // A tenant's attempt to run as the session's role.
            shop.execute(
                "CREATE FUNCTION tenant.trap(bigint, interval) RETURNS interval
                 LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
                 CREATE OPERATOR tenant.* (
                     LEFTARG = bigint, RIGHTARG = interval, FUNCTION = tenant.trap);
                 CREATE FUNCTION tenant.trap(text, text) RETURNS boolean
                 LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$;
                 CREATE OPERATOR tenant.= (
                     LEFTARG = text, RIGHTARG = text, FUNCTION = tenant.trap);
                 CREATE FUNCTION tenant.set_config(text, text, boolean) RETURNS text
                 LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$",
            )
            .await;
            let enter: &'static str =
                format!("SET LOCAL ROLE {role}; SET LOCAL search_path = tenant, pg_catalog").leak();
            let service = Service::new(&shop, move |run| order(run, enter));
            service.post("key").await.assert_is(201, "ordered a pen");
        })
        .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f112_commit_accepts_a_pool_with_its_own_schema() {
    with_postgres(async |shop| {
        shop.execute(TENANT).await;
        let tenant = options(&shop.url).options([("search_path", "tenant")]);
        let pool = PgPool::connect_lazy_with(tenant);
        let other = pool.clone();
        let service = Service::new(&shop, move |run| {
            let other = other.clone();
            async move {
                let mut transaction = other.begin().await.unwrap();
                PostgresShop::order(&mut transaction, &run.operation, "pen")
                    .await
                    .unwrap();
                let committed = run.commit(transaction, ordered("a pen"));
                committed.await.into_response()
            }
        });
        service.post("key").await.assert_is(201, "ordered a pen");
        assert_eq!(seen(&shop).await.1, "tenant");
        pool.close().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn f110_commit_without_privileges_names_the_grants() {
    with_postgres(async |shop| {
        with_role(&shop, async |role| {
            shop.execute(&format!("ALTER ROLE {role} LOGIN")).await;
            let pool = PgPool::connect_lazy_with(options(&shop.url).username(&role));
            let other = pool.clone();
            let service = Service::new(&shop, move |run| {
                let other = other.clone();
                async move {
                    let transaction = other.begin().await.unwrap();
                    let committed = run.commit(transaction, ordered("it"));
                    let error = committed.await.unwrap_err();
                    assert_eq!(error.kind(), CommitErrorKind::Aborted);
                    assert!(error.to_string().contains("42501"), "{error}");
                    assert!(error.to_string().contains("GRANT SELECT"), "{error}");
                    error.into_response()
                }
            });
            assert_eq!(service.post("key").await.status, 500);
            pool.close().await;
        })
        .await;
    })
    .await;
}

/// One order in the tenant's schema.
async fn order(run: Run<PostgresShop>, enter: &'static str) -> axum::response::Response {
    let mut transaction = run.shop.begin(&run.operation).await.unwrap();
    PostgresShop::run(&mut transaction, enter).await.unwrap();
    PostgresShop::order(&mut transaction, &run.operation, "pen")
        .await
        .unwrap();
    let committed = run.commit(transaction, ordered("a pen"));
    match committed.await {
        Ok(committed) => committed.into_response(),
        Err(error) => panic!("{error:?}"),
    }
}

/// Runs a test with the tenant's schema and a role without other rights. Drops the
/// role after the test.
async fn with_role(shop: &PostgresShop, test: impl AsyncFnOnce(String)) {
    let role = format!("tenant_{:016x}", rand::random::<u64>());
    shop.execute(TENANT).await;
    shop.execute(&format!(
        "CREATE ROLE {role}; GRANT USAGE ON SCHEMA tenant TO {role};
         GRANT ALL ON ALL TABLES IN SCHEMA tenant TO {role}"
    ))
    .await;
    let test = std::panic::AssertUnwindSafe(test(role.clone()));
    let outcome = futures_util::FutureExt::catch_unwind(test).await;
    shop.execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))
        .await;
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

/// The role and the `search_path` that the last trigger saw.
async fn seen(shop: &PostgresShop) -> (String, String) {
    let row = query("SELECT role, path FROM tenant.seen")
        .fetch_one(&shop.pool)
        .await
        .unwrap();
    (row.get(0), row.get(1))
}

const TENANT: &str = "
CREATE SCHEMA tenant;
CREATE TABLE tenant.orders (fence bigint NOT NULL, item text NOT NULL);
CREATE TABLE tenant.seen (role text, path text);
CREATE FUNCTION tenant.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO seen VALUES (current_user, current_setting('search_path'));
    RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER note AFTER INSERT ON tenant.orders DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION tenant.note()";
