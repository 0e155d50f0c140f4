//! Settings of encrypted responses and hidden names.

use super::IdempotencyBuilder;
#[cfg(feature = "tracing")]
use crate::sealing::log_ids::LogIds;
use crate::{
    sealing::{names::NameDigests, settings::Sealing},
    store::Store,
};

/// Settings of encrypted responses and hidden names.
impl<S: Store> IdempotencyBuilder<S> {
    /// Encrypts the responses in the store, and refuses those that do not open with 503.
    /// Defaults to none, which stores them readable.
    ///
    /// Every process that shares the store needs the same keys; see the guide on
    /// [sealing](crate::guide::sealing).
    pub fn sealing(mut self, sealing: Sealing) -> Self {
        self.settings.responses().sealing = Some(sealing);
        self
    }

    /// Replaces the scope and the key of each record with digests. Defaults to none, which
    /// stores them readable.
    ///
    /// [`Operation::scope`](crate::Operation::scope) and [`key`](crate::Operation::key)
    /// return the readable ones. Every process that shares the store needs the same secret, for
    /// as long as records are kept: under another one, retries run again.
    pub fn name_digests(mut self, digests: NameDigests) -> Self {
        self.settings.config.names = Some(digests);
        self
    }

    /// Gives the event of each outcome the field `key_id`, an id of the key that may be
    /// logged. Defaults to none.
    #[cfg(feature = "tracing")]
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.settings.config.log_ids = Some(ids);
        self
    }
}
