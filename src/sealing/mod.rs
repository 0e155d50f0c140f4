//! Sealed responses, keyed fingerprints, and names that only the service can read.
//!
//! A [`Sealing`] encrypts the responses in the store. [`Fingerprinting::keyed`] keeps the
//! bodies of requests from being guessed by their fingerprints. [`NameDigests`] replace
//! scopes and keys, and [`LogIds`] name keys in logs. The guide on
//! [sealing](crate::guide::sealing) shows all of them, and how to change their secrets.
//!
//! [`Fingerprinting::keyed`]: crate::Fingerprinting::keyed

mod key;
pub(crate) mod log_ids;
pub(crate) mod names;
mod provider;
mod sealed;
pub(crate) mod settings;

pub use self::{
    key::{SealingKey, SealingKeyError},
    log_ids::LogIds,
    names::NameDigests,
    provider::KeyProvider,
    settings::Sealing,
};
pub use crate::secret::{Secret, SecretError};
