//! What policies show of themselves.

use tower_idempotency::Reconciler;

#[test]
fn debug_names_a_reconciler() {
    let hook = Reconciler::new(|_| async { None });
    assert_eq!(format!("{hook:?}"), "Reconciler(..)");
}
