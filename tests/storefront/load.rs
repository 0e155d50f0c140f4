//! Many orders under all faults.

use std::process::Output;

use crate::{
    databases::with_database,
    outcome::{Line, Outcome},
    process::load,
};

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

#[test]
fn load_of_too_few_orders_fails() {
    let output = load(49, None);
    assert_eq!(output.status.code(), Some(1));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("at least 50 orders, got 49"), "{errors}");
}

#[test]
fn outcome_is_exact_if_each_is_done_once_under_troubles() {
    for (found, different, times, is_exact) in [
        (2, 2, 1, true),
        (3, 2, 1, false),
        (1, 1, 1, false),
        // One twice, and one missing.
        (2, 1, 1, false),
        (2, 2, 0, false),
    ] {
        let lines = vec![Line {
            name: "charges",
            expected: 2,
            found,
            different,
        }];
        let troubles = vec![("shop", "died", times)];
        let outcome = Outcome { lines, troubles };
        assert_eq!(outcome.is_exact(), is_exact, "{outcome}");
    }
}

fn assert_exact(output: &Output) {
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    for name in ["orders", "events consumed", "charges", "stock taken"] {
        let line = printed.lines().find(|line| line.starts_with(name)).unwrap();
        let counts = line[name.len()..].split_whitespace();
        let counts: Vec<u32> = counts.map(|count| count.parse().unwrap()).collect();
        assert_eq!(counts, [ORDERS, ORDERS, 0, 0], "{printed}");
    }
    assert!(printed.contains("statements"), "{printed}");
}
