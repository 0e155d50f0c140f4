//! Processes that die while they process a message.

use std::{
    env,
    io::{BufRead as _, BufReader},
    process::{Child, Command, Stdio},
};

use tower_idempotency::messages::{MessageError, Received};

use crate::shop::{Connection, PostgresShop, Shop, SqliteShop, with_each_database};

with_each_database! {
    process_killed_before_commit_leaves_one_effect;
    process_killed_after_commit_leaves_a_repeat;
}

/// Starts [`child`], and waits until it is where it says.
fn start(shop: &impl Shop, point: &str) -> Child {
    let mut process = Command::new(env::current_exe().unwrap())
        .args([
            "inbox::crashes::child",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env("SHOP", shop.address())
        .env("POINT", point)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let out = BufReader::new(process.stdout.take().unwrap());
    let mut lines = out.lines().map_while(Result::ok);
    assert!(lines.any(|line| line.ends_with(point)), "no `{point}`");
    process
}

fn kill(mut process: Child) {
    process.kill().unwrap();
    process.wait().unwrap();
}

async fn receive<S: Shop>(shop: &S) -> Received<()> {
    let work = async |on: &mut Connection<S>| {
        S::effect(on, "parent").await?;
        Ok::<_, MessageError>(())
    };
    shop.inbox("billing").receive("id", work).await.unwrap()
}

async fn process_killed_before_commit_leaves_one_effect(shop: impl Shop) {
    kill(start(&shop, "before COMMIT"));
    assert_eq!(receive(&shop).await, Received::First(()));
    assert_eq!(shop.effects().await, ["parent"]);
}

async fn process_killed_after_commit_leaves_a_repeat(shop: impl Shop) {
    kill(start(&shop, "after COMMIT"));
    assert_eq!(receive(&shop).await, Received::Repeat);
    assert_eq!(shop.effects().await, ["child"]);
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a process of the other tests"]
async fn child() {
    let address = env::var("SHOP").unwrap();
    if address.starts_with("postgres") {
        Box::pin(die(PostgresShop::open(&address).await)).await;
    } else {
        Box::pin(die(SqliteShop::open(address).await)).await;
    }
}

/// Processes the message up to the point of `POINT`, and waits to be killed.
#[expect(clippy::print_stdout, reason = "the other tests read it")]
async fn die<S: Shop>(shop: S) {
    let point = env::var("POINT").unwrap();
    let reach = async |here: &str| {
        if point == here {
            println!("\n{here}");
            std::future::pending::<()>().await;
        }
    };
    let work = async |on: &mut Connection<S>| {
        S::effect(on, "child").await?;
        reach("before COMMIT").await;
        Ok::<_, MessageError>(())
    };
    let received = shop.inbox("billing").receive("id", work).await.unwrap();
    assert_eq!(received, Received::First(()));
    reach("after COMMIT").await;
}
