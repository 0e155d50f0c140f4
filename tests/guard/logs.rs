//! The events and metrics of calls.

use std::collections::BTreeMap;

use tower_idempotency::MemoryStore;

use crate::{Runs, guard, name, retry, told::Told};

#[tokio::test]
async fn each_call_is_one_event_and_one_count_without_its_data() {
    let listener = Told::listen();
    let (guard, runs) = (guard(MemoryStore::new()), Runs::default());
    for _ in 0..2 {
        retry(&guard, "hushed-key", &runs).await;
    }
    let _ = guard
        .run(&name("hushed-key"), &"hushed-input", runs.work())
        .await;
    let failing = guard.run(&name("failing"), &(), async |_| {
        Err::<(), _>("hushed-error")
    });
    assert!(failing.await.is_err());
    let panicking = guard.run(&name("panicking"), &(), async |_| -> Result<(), ()> {
        panic!("hushed-panic")
    });
    assert!(panicking.await.is_err());
    let unreadable = guard.run(&name("text"), &(), async |_| {
        Ok::<_, ()>("hushed-value".to_owned())
    });
    assert!(unreadable.await.is_ok());
    let unreadable = guard.run(&name("text"), &(), async |_| Ok::<_, ()>(7));
    assert!(unreadable.await.is_err());

    let (events, counts, text) = listener.so_far();
    let expected = BTreeMap::from([
        ("recorded", 2),
        ("replayed", 1),
        ("key-reused", 1),
        ("released", 1),
        ("unknown", 1),
        ("store-unavailable", 1),
        ("corrupt", 1),
    ]);
    assert_eq!(events, expected);
    assert_eq!(counts, expected);
    assert!(!text.contains("hushed"), "{text}");
}
