//! Keys that another service unwraps.

use std::{
    collections::HashMap,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use futures_util::{FutureExt as _, future::BoxFuture};
use thiserror::Error;
use tokio::time::{self, Instant};
use tower::BoxError;

use super::key::SealingKey;
use crate::error::StoreError;
use crate::secret::Secret;

/// Returns the secrets of sealing keys, for example by asking a key management service to
/// unwrap them.
///
/// The layer asks for the current key before the first request that needs it, and for an
/// earlier one when it reads a response that it has sealed. It keeps each key that it gets
/// until the process ends. It asks once at a time, and repeats a failed question after a
/// second at the earliest.
///
/// ```
/// use std::{collections::HashMap, sync::Arc};
/// use tower::BoxError;
/// use tower_idempotency::sealing::{KeyProvider, Sealing, Secret};
///
/// /// Keys as the key management service has wrapped them, by their ids.
/// struct Wrapped(HashMap<String, Vec<u8>>);
///
/// # async fn decrypt(wrapped: &[u8]) -> Result<Vec<u8>, BoxError> { Ok(wrapped.to_vec()) }
/// impl KeyProvider for Wrapped {
///     async fn secret(&self, id: &str) -> Result<Option<Secret>, BoxError> {
///         let Some(wrapped) = self.0.get(id) else {
///             return Ok(None);
///         };
///         // Here the service is asked.
///         Ok(Some(Secret::from_bytes(&decrypt(wrapped).await?)?))
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), BoxError> {
/// let wrapped = Wrapped(HashMap::from([("2026-11".to_owned(), vec![7; 32])]));
/// let sealing = Sealing::with_provider("payments", "2026-11", wrapped);
/// // A process that cannot get its key does not start.
/// sealing.load().await?;
/// # Ok(())
/// # }
/// ```
pub trait KeyProvider: Send + Sync + 'static {
    /// Returns the secret of the key with this id, or `None` if there is no such key.
    ///
    /// The id is that of the settings, or the one that a sealed response names. Anyone with
    /// write access to the store can put an id there.
    ///
    /// # Errors
    ///
    /// Any error if the secret cannot be had at the moment. Its text is logged, and must
    /// not quote the secret.
    fn secret(&self, id: &str) -> impl Future<Output = Result<Option<Secret>, BoxError>> + Send;
}

/// Asks a provider, and keeps the keys that it gets.
pub(super) struct Loader {
    pub(super) current: Arc<str>,
    provider: Box<dyn AnyProvider>,
    loaded: RwLock<Vec<Arc<SealingKey>>>,
    failed: Mutex<HashMap<Arc<str>, Failure>>,
    /// Held while the provider is asked.
    asking: tokio::sync::Mutex<()>,
}

trait AnyProvider: Send + Sync {
    fn secret<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Option<Secret>, BoxError>>;
}

impl<P: KeyProvider> AnyProvider for P {
    fn secret<'a>(&'a self, id: &'a str) -> BoxFuture<'a, Result<Option<Secret>, BoxError>> {
        Box::pin(async move { KeyProvider::secret(self, id).await })
    }
}

/// Why there is no key, since when.
struct Failure {
    at: Instant,
    /// `None` if there is no such key.
    error: Option<StoreError>,
}

impl Loader {
    pub(super) fn new(current: Arc<str>, provider: impl KeyProvider) -> Self {
        Self {
            current,
            provider: Box::new(provider),
            loaded: RwLock::default(),
            failed: Mutex::default(),
            asking: tokio::sync::Mutex::default(),
        }
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<SealingKey>> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.iter().find(|key| key.id() == id).cloned()
    }

    /// Returns the key with this id, or `None` if there is none. Waits up to `timeout`.
    ///
    /// The provider is asked in a task: requests wait for the answer to another one, which
    /// may not be polled any more.
    pub(super) async fn load(
        self: &Arc<Self>,
        id: &str,
        timeout: Duration,
    ) -> Result<Option<Arc<SealingKey>>, StoreError> {
        if let Some(key) = self.find(id) {
            return Ok(Some(key));
        }
        let asked = tokio::spawn({
            let (loader, id) = (Arc::clone(self), id.to_owned());
            async move { loader.ask_in_turn(&id, timeout).await }
        });
        match time::timeout(timeout, asked).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(unavailable(id, NoKey::Panicked)),
            Err(_) => Err(unavailable(id, NoKey::TimedOut(timeout))),
        }
    }

    async fn ask_in_turn(
        &self,
        id: &str,
        timeout: Duration,
    ) -> Result<Option<Arc<SealingKey>>, StoreError> {
        // The request that asks has left after that.
        let turn = time::timeout(timeout, self.asking.lock()).await;
        let _turn = turn.map_err(|_| unavailable(id, NoKey::TimedOut(timeout)))?;
        if let Some(key) = self.find(id) {
            return Ok(Some(key));
        }
        if let Some(remembered) = self.remembered(id) {
            return match remembered {
                Some(error) => Err(error),
                None => Ok(None),
            };
        }
        let asked = AssertUnwindSafe(async { self.provider.secret(id).await }).catch_unwind();
        let secret = match time::timeout(timeout, asked).await {
            Ok(Ok(answer)) => answer.map_err(NoKey::Failed),
            Ok(Err(_panic)) => Err(NoKey::Panicked),
            Err(_) => Err(NoKey::TimedOut(timeout)),
        };
        let key = secret.and_then(|secret| {
            let key = secret.map(|secret| SealingKey::new(id, &secret));
            key.transpose().map_err(|error| NoKey::Failed(error.into()))
        });
        match key {
            Ok(Some(key)) => {
                let key = Arc::new(key);
                let loaded = self.loaded.write();
                let mut loaded = loaded.unwrap_or_else(PoisonError::into_inner);
                loaded.push(Arc::clone(&key));
                Ok(Some(key))
            }
            Ok(None) => {
                self.remember(id, None);
                Ok(None)
            }
            Err(reason) => {
                let error = unavailable(id, reason);
                self.remember(id, Some(error.clone()));
                Err(error)
            }
        }
    }

    /// Returns why there was no key within the last second.
    fn remembered(&self, id: &str) -> Option<Option<StoreError>> {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.retain(|_, failure| failure.at.elapsed() < PAUSE);
        match failed.get(id) {
            Some(failure) => Some(failure.error.clone()),
            // A writer of the store could make up ids.
            None if failed.len() >= MOST_FAILURES => Some(Some(unavailable(id, NoKey::TooMany))),
            None => None,
        }
    }

    fn remember(&self, id: &str, error: Option<StoreError>) {
        let mut failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        let at = Instant::now();
        failed.insert(id.into(), Failure { at, error });
    }
}

fn unavailable(id: &str, reason: NoKey) -> StoreError {
    let id = id.to_owned();
    StoreError::unavailable(KeyUnavailable { id, reason })
}

#[derive(Debug, Error)]
#[error("the sealing key `{id}` could not be had from its `KeyProvider`: {reason}")]
struct KeyUnavailable {
    id: String,
    reason: NoKey,
}

#[derive(Debug, Error)]
enum NoKey {
    #[error("{0}. Find out why, the layer asks again")]
    Failed(BoxError),
    #[error("it panicked. Find out why, the layer asks again")]
    Panicked,
    #[error(
        "it did not answer within `provider_timeout` ({0:?}). Find out why, the layer asks again"
    )]
    TimedOut(Duration),
    #[error("too many keys were asked for in vain. Find out who writes such ids to the store")]
    TooMany,
}

/// A provider that has failed is asked again after this.
const PAUSE: Duration = Duration::from_secs(1);
const MOST_FAILURES: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::future::join_all;

    use super::*;

    /// Knows no key, and counts the questions.
    #[derive(Default)]
    struct Empty(Arc<AtomicUsize>);

    impl KeyProvider for Empty {
        async fn secret(&self, _: &str) -> Result<Option<Secret>, BoxError> {
            self.0.fetch_add(1, Ordering::SeqCst);
            Ok(None)
        }
    }

    /// Never answers.
    struct Silent;

    impl KeyProvider for Silent {
        async fn secret(&self, _: &str) -> Result<Option<Secret>, BoxError> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn questions_of_requests_that_left_end_with_them() {
        let loader = Arc::new(Loader::new("current".into(), Silent));
        let ids: Vec<_> = (0..1_000).map(|id| id.to_string()).collect();
        let loads = ids.iter().map(|id| loader.load(id, PAUSE));
        for loaded in join_all(loads).await {
            assert!(loaded.is_err());
        }
        // The last one may have asked in its turn.
        time::sleep(2 * PAUSE).await;
        assert_eq!(Arc::strong_count(&loader), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn made_up_ids_reach_the_provider_64_times_a_second() {
        let asked = Arc::new(AtomicUsize::new(0));
        let loader = Arc::new(Loader::new("current".into(), Empty(Arc::clone(&asked))));
        for expected in [64, 128] {
            for id in 0..100 {
                let loaded = loader.load(&id.to_string(), PAUSE).await;
                assert!(!matches!(loaded, Ok(Some(_))));
                // Once more: it is remembered.
                assert!(!matches!(
                    loader.load(&id.to_string(), PAUSE).await,
                    Ok(Some(_))
                ));
            }
            assert_eq!(asked.load(Ordering::SeqCst), expected);
            time::advance(PAUSE).await;
        }
    }
}
