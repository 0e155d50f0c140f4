//! The settings of sealed responses.

use std::{fmt, sync::Arc, time::Duration};

use bytes::Bytes;

use super::{
    key::{SealingKey, is_sound},
    provider::{KeyProvider, Loader},
    sealed::{self, Place, is_sealed},
};
use crate::{
    error::StoreError,
    fingerprint::Fingerprint,
    key::{OperationId, RecordName},
    response::recorded::RecordedResponse,
    store::{Completion, Record, RecordState},
};

/// Encrypts the responses in the store: status, headers, body and trailers, and the values
/// of a guard.
///
/// A response is sealed with AES-256-GCM-SIV (RFC 8452) under the current key. It opens in
/// its own record alone: under the same table, scope, key, fingerprint, operation and key
/// id. A record whose response does not open is a corrupt one: its requests receive 503
/// `store-unavailable`, and nothing runs.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// use tower_idempotency::{
///     IdempotencyLayer, MemoryStore, Scope,
///     sealing::{Sealing, SealingKey, Secret},
/// };
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (new, old) = (Secret::random(), Secret::random());
/// // Seals with the key of November, and opens what that of October has sealed.
/// let sealing = Sealing::new("payments", SealingKey::new("2026-11", &new)?)
///     .earlier(SealingKey::new("2026-10", &old)?);
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .sealing(sealing)
///     .build()?;
/// # let app = Router::new().route("/", post("paid").layer(layer));
/// # for replayed in [false, true] {
/// #     let request = Request::post("/").header("idempotency-key", "k").body(Body::empty())?;
/// #     let response = app.clone().oneshot(request).await?;
/// #     assert_eq!(response.status(), StatusCode::OK);
/// #     assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct Sealing(Arc<Settings>);

#[derive(Clone)]
struct Settings {
    table: Arc<str>,
    /// Those of the settings. The first one is the current one, unless there is a loader.
    keys: Vec<Arc<SealingKey>>,
    loader: Option<Arc<Loader>>,
    provider_timeout: Duration,
    accepts_unsealed: bool,
    seals: bool,
}

impl Sealing {
    /// Seals with this key.
    ///
    /// `table` names the records that are sealed, such as the service or its database.
    /// Layers and guards that share a store give the same name. A response that is copied
    /// to a store of another name does not open there.
    pub fn new(table: impl Into<Arc<str>>, current: SealingKey) -> Self {
        Self::of(table.into(), vec![Arc::new(current)], None)
    }

    /// Seals with the key that has this id at the provider, which knows earlier keys too.
    ///
    /// `table` is that of [`new`](Self::new). While the key cannot be had, requests receive
    /// 503 `store-unavailable`, and nothing runs, whatever the
    /// [`StoreFailure`](crate::StoreFailure) is.
    pub fn with_provider(
        table: impl Into<Arc<str>>,
        current: impl Into<Arc<str>>,
        provider: impl KeyProvider,
    ) -> Self {
        let loader = Loader::new(current.into(), provider);
        Self::of(table.into(), Vec::new(), Some(Arc::new(loader)))
    }

    fn of(table: Arc<str>, keys: Vec<Arc<SealingKey>>, loader: Option<Arc<Loader>>) -> Self {
        Self(Arc::new(Settings {
            table,
            keys,
            loader,
            provider_timeout: Duration::from_secs(5),
            accepts_unsealed: false,
            seals: true,
        }))
    }

    /// Adds a key that opens responses and seals none: an earlier one, or the next one
    /// before it becomes current. Defaults to none.
    pub fn earlier(mut self, key: SealingKey) -> Self {
        self.settings().keys.push(Arc::new(key));
        self
    }

    /// Replays responses that are not sealed. Defaults to refusing them with 503, since a
    /// writer of the store could have planted them.
    ///
    /// Set it when you begin to seal, until the responses of before have expired; see
    /// [`open_only`](Self::open_only).
    pub fn accept_unsealed(mut self) -> Self {
        self.settings().accepts_unsealed = true;
        self
    }

    /// Seals nothing yet, and accepts responses that are not sealed. Defaults to sealing.
    ///
    /// Set it in every process before the first one seals, so that each can open what the
    /// others have sealed.
    pub fn open_only(mut self) -> Self {
        self.settings().seals = false;
        self.accept_unsealed()
    }

    /// Sets how long the provider may take to return a key. Defaults to 5 s.
    pub fn provider_timeout(mut self, timeout: Duration) -> Self {
        self.settings().provider_timeout = timeout;
        self
    }

    fn settings(&mut self) -> &mut Settings {
        Arc::make_mut(&mut self.0)
    }

    /// Asks the provider for the current key, and keeps it. A process that calls this when
    /// it starts asks no key service while a request waits.
    ///
    /// Without a provider, nothing is asked.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::StoreErrorKind::Unavailable) if the provider has no such key,
    /// fails, panics, or does not answer in time.
    pub async fn load(&self) -> Result<(), StoreError> {
        self.current().await.map(drop)
    }

    /// Seals a response for the record of an operation whose outcome is unknown, so that
    /// [`Store::resolve`](crate::Store::resolve) can record it. `name` and `record` are
    /// those that the store has returned.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub async fn seal(
        &self,
        name: &RecordName,
        record: &Record,
        response: &RecordedResponse,
    ) -> Result<RecordedResponse, StoreError> {
        let key = self.current().await?;
        let sealer = self.sealer(key, name, &record.fingerprint, record.operation);
        Ok(RecordedResponse::sealed(sealer.seal(&response.encode())))
    }

    /// Opens the response of a record, or returns `None` if the record is not completed.
    /// `name` and `record` are those that the store has returned.
    ///
    /// # Errors
    ///
    /// [`Corrupt`](crate::StoreErrorKind::Corrupt) if it does not open here, as a layer
    /// finds it too; or as [`load`](Self::load) if it needs a key of the provider.
    pub async fn open(
        &self,
        name: &RecordName,
        record: &Record,
    ) -> Result<Option<RecordedResponse>, StoreError> {
        let RecordState::Completed { response } = &record.state else {
            return Ok(None);
        };
        let bytes = response.clone();
        let opened = self.open_bytes(name, &record.fingerprint, record.operation, bytes);
        RecordedResponse::decode(opened.await?).map(Some)
    }

    /// Returns the encoded response of a record.
    pub(crate) async fn open_bytes(
        &self,
        name: &RecordName,
        fingerprint: &Fingerprint,
        operation: OperationId,
        bytes: Bytes,
    ) -> Result<Bytes, StoreError> {
        if !is_sealed(&bytes) {
            return match self.0.accepts_unsealed {
                true => Ok(bytes),
                false => Err(StoreError::corrupt(UNSEALED)),
            };
        }
        let id = sealed::key_id(&bytes)?;
        let key = self.key(id).await?.ok_or_else(|| {
            let source = format!("response: sealed with the key `{id}`, {KEY_UNKNOWN}");
            StoreError::corrupt("").because(source)
        })?;
        let place = Place {
            table: &self.0.table,
            name,
            fingerprint,
            operation,
        };
        sealed::open(&key, &place.associated_data(id), &bytes)
    }

    /// Whether responses are sealed.
    pub(crate) fn seals(&self) -> bool {
        self.0.seals
    }

    /// Returns the current key, or `None` if it has to be [loaded](Self::current).
    pub(crate) fn current_if_loaded(&self) -> Option<Arc<SealingKey>> {
        match &self.0.loader {
            Some(loader) => self.find(&loader.current),
            None => self.0.keys.first().cloned(),
        }
    }

    pub(crate) async fn current(&self) -> Result<Arc<SealingKey>, StoreError> {
        if let Some(key) = self.current_if_loaded() {
            return Ok(key);
        }
        let id = self.0.loader.as_ref().map_or("", |loader| &loader.current);
        self.key(id).await?.ok_or_else(|| {
            StoreError::unavailable(format!("the `KeyProvider` has no sealing key `{id}`"))
        })
    }

    async fn key(&self, id: &str) -> Result<Option<Arc<SealingKey>>, StoreError> {
        match (self.find(id), &self.0.loader) {
            (Some(key), _) => Ok(Some(key)),
            (None, None) => Ok(None),
            (None, Some(loader)) => loader.load(id, self.0.provider_timeout).await,
        }
    }

    fn find(&self, id: &str) -> Option<Arc<SealingKey>> {
        let known = self.0.keys.iter().find(|key| key.id() == id);
        known.cloned().or_else(|| self.0.loader.as_ref()?.find(id))
    }

    pub(crate) fn sealer(
        &self,
        key: Arc<SealingKey>,
        name: &RecordName,
        fingerprint: &Fingerprint,
        operation: OperationId,
    ) -> Sealer {
        let place = Place {
            table: &self.0.table,
            name,
            fingerprint,
            operation,
        };
        let associated_data = place.associated_data(key.id());
        Sealer {
            key,
            associated_data,
        }
    }

    /// The rule that these settings break, if any.
    pub(crate) fn fault(&self) -> Option<String> {
        let Settings {
            table,
            keys,
            loader,
            provider_timeout,
            ..
        } = &*self.0;
        let length = table.len();
        if !(1..=LONGEST_TABLE).contains(&length) {
            return Some(format!(
                "must name its table in 1 to {LONGEST_TABLE} bytes, got {length}"
            ));
        }
        if provider_timeout.is_zero() {
            return Some("must have a `provider_timeout` longer than zero".to_owned());
        }
        let of_provider = loader.as_ref().map(|loader| &*loader.current);
        if of_provider.is_some_and(|id| !is_sound(id)) {
            return Some("must name its key in 1 to 64 visible ASCII characters".to_owned());
        }
        let mut ids: Vec<_> = keys.iter().map(|key| key.id()).chain(of_provider).collect();
        ids.sort_unstable();
        let twice = ids.windows(2).find(|pair| pair[0] == pair[1])?;
        Some(format!(
            "must have keys with different ids, got `{}` twice",
            twice[0]
        ))
    }
}

impl fmt::Debug for Sealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealing")
            .field("table", &self.0.table)
            .field("keys", &self.0.keys)
            .finish_non_exhaustive()
    }
}

/// Seals the response of one operation. Its key is loaded, so that it cannot fail.
pub(crate) struct Sealer {
    key: Arc<SealingKey>,
    associated_data: Box<[u8]>,
}

impl Sealer {
    /// Seals the response of a completion, unless a hook has sealed it.
    pub(crate) fn completion(&self, completion: Completion) -> Completion {
        match is_sealed(&completion.response) {
            true => completion,
            false => Completion {
                response: self.seal(&completion.response),
                ..completion
            },
        }
    }

    fn seal(&self, plaintext: &[u8]) -> Bytes {
        sealed::seal(&self.key, &self.associated_data, plaintext)
    }
}

const LONGEST_TABLE: usize = 255;
const KEY_UNKNOWN: &str = "which is not known here: add it with `Sealing::earlier`";
const UNSEALED: &str = "response: it is not sealed. If the layer recorded it before it sealed, set \
    `accept_unsealed` until it has expired";
