//! A gate for handlers and stores.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Holds handlers, or calls to a store, until a test lets them go on.
///
/// Clones are the same gate.
///
/// ```
/// use tower_idempotency::test_support::Gate;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let gate = Gate::closed();
/// let handler = tokio::spawn({
///     let gate = gate.clone();
///     async move { gate.pass().await }
/// });
/// gate.arrival().await; // It runs, and waits.
/// assert!(!handler.is_finished());
/// gate.open();
/// handler.await.unwrap();
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Gate {
    arrived: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

impl Gate {
    /// Returns a closed gate.
    #[must_use]
    pub fn closed() -> Self {
        Self {
            arrived: Arc::new(Semaphore::new(0)),
            open: Arc::new(Semaphore::new(0)),
        }
    }

    /// Waits until the gate lets the caller pass.
    pub async fn pass(&self) {
        self.arrived.add_permits(1);
        // It fails once the gate is open.
        if let Ok(permit) = self.open.acquire().await {
            permit.forget();
        }
    }

    /// Waits until one more caller has come to the gate.
    pub async fn arrival(&self) {
        if let Ok(permit) = self.arrived.acquire().await {
            permit.forget();
        }
    }

    /// Lets one caller pass: one that waits, or the next one.
    pub fn let_one_pass(&self) {
        self.open.add_permits(1);
    }

    /// Opens the gate for good.
    pub fn open(&self) {
        self.open.close();
    }
}
