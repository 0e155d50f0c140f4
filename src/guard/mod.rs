//! Work under a key that is not HTTP.

mod builder;

use std::{fmt, sync::Arc, time::Duration};

use serde::{Serialize, de::DeserializeOwned};

pub use self::builder::GuardBuilder;
pub use crate::flow::work::{Ran, RunError};
use crate::{
    flow::{self, drained::Drained, shared::Shared},
    key::RecordName,
    operation::Operation,
    store::Store,
};

/// Runs work once for each name, and replays its value: what an
/// [`IdempotencyLayer`](crate::IdempotencyLayer) does for
/// requests, for jobs, messages and commands.
///
/// It is the layer's own engine without HTTP: claims, leases, heartbeats, waiting,
/// recovery, late recording, events and metrics are those of the layer. Clones share
/// their settings and their running work.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tower_idempotency::{
///     Guard, Key, MemoryStore, Ran, RunError, Scope, store::RecordName,
/// };
///
/// #[derive(Serialize)]
/// struct Order { item: &'static str, pieces: u32 }
///
/// #[derive(Serialize, Deserialize)]
/// struct Invoice { number: u32 }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let guard = Guard::builder(MemoryStore::new()).schema("invoice/1").build()?;
/// let name = RecordName::new(Scope::single_tenant().with_endpoint("invoices"), Key::new("order-7"));
/// let bill = async |pieces| {
///     guard
///         .run(&name, &Order { item: "pen", pieces }, async |operation| {
///             // The same for every attempt: hand it to whatever the work calls.
///             let _downstream_key = operation.derive("mail");
///             Ok::<_, std::io::Error>(Invoice { number: 1 })
///         })
///         .await
/// };
///
/// assert!(matches!(bill(2).await?, Ran::Now(Invoice { number: 1 })));
/// assert!(matches!(bill(2).await?, Ran::Replayed(Invoice { number: 1 })));
/// assert!(matches!(bill(3).await, Err(RunError::Mismatch)));
/// # Ok(())
/// # }
/// ```
///
/// # Promises
///
/// - **`Ok` is recorded**, and later calls with the same name and input return it. A
///   refusal that is final, such as "the card was declined", belongs into the value.
/// - **`Err` releases the name** for the same input: the next call runs. After
///   [`Operation::effects_started`] the outcome is unknown instead, and no call runs,
///   unless [`recovery`](GuardBuilder::recovery) says so.
/// - **A panic or the end of the process leaves the outcome unknown.**
/// - **A dropped future does not stop the work.** It continues on a task of the runtime
///   that polled it first, and the next call returns its value. A call that only waits is
///   given up.
/// - **A value that cannot be kept is not made again.** That is one without a form in JSON,
///   or over [`max_value`](GuardBuilder::max_value). Its caller receives it, and later calls
///   receive [`RunError::NotReplayable`].
/// - **A record of a request is never replayed as a value**, nor the other way round.
///
/// Values are kept as JSON. A value that JSON changes is replayed changed: NaN becomes null.
pub struct Guard<S> {
    shared: Arc<Shared<S>>,
}

impl<S: Store> Guard<S> {
    /// Returns the builder of a guard.
    pub fn builder(store: S) -> GuardBuilder<S> {
        GuardBuilder::new(store)
    }

    /// Runs `work` under `name`, unless it ran before with the same input.
    ///
    /// `input` is what the work is about. Two calls with one name are the same work if
    /// their inputs are the same JSON. The order of members does not count. Only a digest
    /// of the input is kept.
    ///
    /// Nothing runs before the future is polled. A crash while the work runs leaves its
    /// name in progress until the lease lapses. A crash after the value is recorded loses
    /// nothing.
    ///
    /// # Errors
    ///
    /// A [`RunError`]: the work's own error, or why it did not run.
    ///
    /// # Panics
    ///
    /// The future panics outside of a Tokio runtime.
    pub fn run<I, T, E, W, F>(
        &self,
        name: &RecordName,
        input: &I,
        work: W,
    ) -> impl Future<Output = Result<Ran<T>, RunError<E>>> + Send + use<S, I, T, E, W, F>
    where
        I: Serialize + ?Sized,
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        W: FnOnce(Operation) -> F + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let running = serde_json::to_vec(input)
            .map_err(|_| RunError::InputInvalid("it cannot be written as JSON"))
            .and_then(|json| {
                let fingerprints = self.shared.config.fingerprinter.of_input(&json);
                fingerprints.map_err(|fault| RunError::InputInvalid(fault.0))
            })
            .map(|input| flow::work::work(&self.shared, name, input, work));
        async move { running?.await }
    }

    /// Starts no more work, and waits until the work that runs has ended and is recorded,
    /// for up to `grace`; see [`IdempotencyLayer::drain`](crate::IdempotencyLayer::drain).
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.shared.drain(grace).await
    }

    #[cfg(feature = "schedules")]
    pub(crate) fn shared(&self) -> &Shared<S> {
        &self.shared
    }

    /// The store that the guard was built with.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.shared.store
    }
}

impl<S> Clone for Guard<S> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl<S> fmt::Debug for Guard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").finish_non_exhaustive()
    }
}
