//! The builder of a guard.

use std::{fmt, sync::Arc, time::Duration};

use super::Guard;
#[cfg(all(feature = "sealing", feature = "tracing"))]
use crate::sealing::log_ids::LogIds;
#[cfg(feature = "sealing")]
use crate::{
    fingerprint::Fingerprinting,
    sealing::{names::NameDigests, settings::Sealing},
    secret::Secret,
};
use crate::{
    flow::{
        config::{error::BuildError, settings::Settings},
        shared::Shared,
    },
    operation::recovery::Recovery,
    policy::{
        Requirement,
        quota::{Quota, QuotaSetting},
    },
    store::Store,
};

/// Builds a [`Guard`]. Made by [`Guard::builder`].
///
/// The settings have the names, the defaults and the limits of those of an
/// [`IdempotencyBuilder`](crate::IdempotencyBuilder).
#[must_use = "a builder does nothing until it is built"]
pub struct GuardBuilder<S> {
    store: S,
    settings: Settings,
    schema: String,
}

/// Settings that are kept as they are given, each with its place.
macro_rules! settings {
    ($($(#[$doc:meta])* $name:ident($value:ident: $type:ty) => [$($place:tt)+];)*) => {
        $(
            $(#[$doc])*
            pub fn $name(mut self, $value: $type) -> Self {
                self.settings.$($place)+ = $value.into();
                self
            }
        )*
    };
}

impl<S: Store> GuardBuilder<S> {
    pub(super) fn new(store: S) -> Self {
        Self {
            store,
            settings: Settings::new(Arc::new(|_| None), Requirement::Required),
            schema: String::new(),
        }
    }

    settings! {
        /// Sets how long a call waits for another one with the same name, before it receives
        /// [`InProgress`](super::RunError::InProgress). Defaults to zero, which does not
        /// wait.
        ///
        /// A waiter is woken when the other call ends, in another process too if the store
        /// can tell. Otherwise it reads the record after pauses of 50 ms to one second.
        wait(timeout: Duration) => [config.wait];

        /// Sets how many calls may wait at a time. Further ones receive
        /// [`InProgress`](super::RunError::InProgress) at once. Defaults to 1,000.
        max_waiters(calls: usize) => [config.max_waiters];

        /// Sets how many calls may claim, wait or run at a time. Further ones receive
        /// [`Overloaded`](super::RunError::Overloaded). Defaults to 4,096.
        ///
        /// Work whose caller was dropped counts too. As many outcomes may be recorded late
        /// beside them, and as many claims withdrawn.
        max_in_flight(calls: usize) => [config.max_in_flight];

        /// Sets how many calls of one scope may wait at a time, counted while more than half
        /// of [`max_waiters`](Self::max_waiters) do. Further ones receive
        /// [`InProgress`](super::RunError::InProgress) at once. Defaults to a quarter of
        /// `max_waiters`.
        ///
        /// A call of [`Scope::single_tenant`](crate::Scope::single_tenant) counts for no scope.
        max_waiters_per_scope(calls: usize) => [config.per_scope.waiters];

        /// Sets how many calls of one scope may claim, wait or run at a time, counted while
        /// more than half of [`max_in_flight`](Self::max_in_flight) do. Further ones receive
        /// [`Overloaded`](super::RunError::Overloaded). Defaults to a quarter of
        /// `max_in_flight`.
        ///
        /// A call of [`Scope::single_tenant`](crate::Scope::single_tenant) counts for no scope.
        max_in_flight_per_scope(calls: usize) => [config.per_scope.in_flight];

        /// Sets what a call receives while the outcome is unknown. Defaults to
        /// [`Recovery::Refuse`].
        ///
        /// A [`Reconciler`](crate::Reconciler) returns a value with
        /// [`RecordedResponse::of_value`](crate::store::admin::RecordedResponse::of_value).
        recovery(recovery: Recovery) => [config.recovery];

        /// Sets how often in a row the work may start without a result, before its outcome
        /// is unknown even under [`Recovery::Rerun`]. Defaults to 5.
        max_attempts(attempts: u32) => [config.max_attempts];

        /// Sets how long a record is kept, counted from its claim. A call after that runs
        /// again. Defaults to 24 hours.
        retention(retention: Duration) => [responses().retention];

        /// Sets how long an unknown outcome is shown, counted from the moment at which it
        /// became unknown. Defaults to 7 days.
        unknown_retention(retention: Duration) => [config.unknown_retention];

        /// Sets the lease: the time after which a claim without a heartbeat counts as
        /// abandoned. Defaults to 30 s.
        lease(lease: Duration) => [responses().lease];

        /// Sets how often running work renews its lease: at most a third of the lease.
        /// Defaults to a third of the lease.
        heartbeat(interval: Duration) => [heartbeat];

        /// Sets how long the lease of running work is renewed. Work that hangs loses it
        /// after that. Defaults to 15 minutes.
        max_run_time(time: Duration) => [config.max_run_time];

        /// Sets how long one call to the store may take: at most half of the lease. Defaults
        /// to 5 s, or to a third of a lease that is shorter than 15 s.
        store_timeout(timeout: Duration) => [store_timeout];

        /// Sets how long the guard tries to record an outcome in the background, after its
        /// caller was answered. Defaults to 15 minutes.
        late_recording_timeout(timeout: Duration) => [config.late_recording_timeout];

        /// Sets how many bytes of values may be held for late recording. Outcomes beyond it
        /// stay unknown. Defaults to 64 MiB.
        max_late_recording_bytes(bytes: usize) => [config.max_late_recording_bytes];
    }

    /// Sets how much each scope may keep in the store at a time. Further names receive
    /// [`QuotaExceeded`](super::RunError::QuotaExceeded). Defaults to no limit.
    ///
    /// It is as exact as that of a
    /// [layer](crate::IdempotencyBuilder::quota). A guard and a layer on one store count
    /// together.
    pub fn quota(mut self, quota: Quota) -> Self {
        self.settings.config.quota = Some(QuotaSetting::Fixed(quota));
        self
    }

    /// Sets the largest value that is kept, in bytes of its JSON and its schema. A larger
    /// one is returned to its caller, and later calls receive
    /// [`NotReplayable`](super::RunError::NotReplayable). Defaults to 1 MiB.
    pub fn max_value(mut self, bytes: usize) -> Self {
        self.settings.responses().max_body = bytes;
        self
    }

    /// Sets the name of the values' schema, such as `invoice/2`: up to 255 bytes. A value
    /// that was recorded under another name is [`Unreadable`](super::RunError::Unreadable),
    /// even if it would fit its type. Defaults to an empty name.
    pub fn schema(mut self, name: impl Into<String>) -> Self {
        self.schema = name.into();
        self
    }

    /// Encrypts the values in the store. A value that does not open is
    /// [`Unreadable`](super::RunError::Unreadable). Defaults to none; see
    /// [`IdempotencyBuilder::sealing`](crate::IdempotencyBuilder::sealing).
    #[cfg(feature = "sealing")]
    pub fn sealing(mut self, sealing: Sealing) -> Self {
        self.settings.responses().sealing = Some(sealing);
        self
    }

    /// Replaces the scope and the key of each name with digests in the store. Defaults to
    /// none; see
    /// [`IdempotencyBuilder::name_digests`](crate::IdempotencyBuilder::name_digests).
    #[cfg(feature = "sealing")]
    pub fn name_digests(mut self, digests: NameDigests) -> Self {
        self.settings.config.names = Some(digests);
        self
    }

    /// Gives the event of each outcome the field `key_id`. Defaults to none; see
    /// [`LogIds`].
    #[cfg(all(feature = "sealing", feature = "tracing"))]
    pub fn log_ids(mut self, ids: LogIds) -> Self {
        self.settings.config.log_ids = Some(ids);
        self
    }

    /// Makes the fingerprints of inputs with HMAC-SHA-256 under this secret. A reader of the
    /// store can then not guess an input by trying. Defaults to SHA-256.
    ///
    /// Calls with names that were recorded under another secret or under none receive
    /// [`OtherKind`](super::RunError::OtherKind), unless that is an earlier one.
    #[cfg(feature = "sealing")]
    pub fn fingerprint_secret(mut self, secret: &Secret) -> Self {
        self.settings.fingerprinting = keyed(secret);
        self
    }

    /// Adds a secret that made fingerprints before, or that will make them next. Defaults
    /// to none.
    #[cfg(feature = "sealing")]
    pub fn earlier_fingerprint_secret(mut self, secret: &Secret) -> Self {
        self.settings.earlier.push(keyed(secret));
        self
    }

    /// Compares with fingerprints that were made without a secret, beside those of
    /// [`fingerprint_secret`](Self::fingerprint_secret). Set it when you begin to use one,
    /// until the records of before have expired. Defaults to off.
    #[cfg(feature = "sealing")]
    pub fn accept_unkeyed(mut self) -> Self {
        self.settings.earlier.push(Fingerprinting::bytes());
        self
    }

    /// Returns the guard.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] names the first setting that is refused, its limit and its value.
    pub fn build(mut self) -> Result<Guard<S>, BuildError> {
        let length = self.schema.len();
        if length > LONGEST_SCHEMA {
            let reason =
                format!("must have a name of at most {LONGEST_SCHEMA} bytes, got {length}");
            return Err(BuildError::new("schema", reason));
        }
        self.settings.responses().schema = Some(self.schema);
        let config = self.settings.build();
        let config = config.map_err(|error| error.renamed("max_response_body", "max_value"))?;
        Ok(Guard {
            shared: Arc::new(Shared::new(self.store, config)),
        })
    }
}

impl<S> fmt::Debug for GuardBuilder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardBuilder").finish_non_exhaustive()
    }
}

/// The form stands for its secret alone: an input has one form.
#[cfg(feature = "sealing")]
fn keyed(secret: &Secret) -> Fingerprinting {
    Fingerprinting::bytes().keyed(secret)
}

const LONGEST_SCHEMA: usize = u8::MAX as usize;
