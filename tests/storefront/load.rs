//! Many orders under all faults.

use std::process::Output;

use crate::{databases::with_database, process::load};

const ORDERS: u32 = 60;

#[test]
fn load_does_each_order_once_on_sqlite() {
    assert_exact(&load(ORDERS, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn load_does_each_order_once_on_postgres() {
    with_database(async |url| {
        let output = tokio::task::spawn_blocking(move || load(ORDERS, Some(&url)));
        assert_exact(&output.await.unwrap());
    })
    .await;
}

fn assert_exact(output: &Output) {
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    for name in ["orders", "charges", "stock taken"] {
        let line = printed.lines().find(|line| line.starts_with(name)).unwrap();
        let counts = line[name.len()..].split_whitespace();
        let counts: Vec<u32> = counts.map(|count| count.parse().unwrap()).collect();
        assert_eq!(counts, [ORDERS, ORDERS, 0, 0], "{printed}");
    }
}
