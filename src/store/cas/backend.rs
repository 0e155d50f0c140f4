use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::store::{Fence, StoreError};

/// A server that swaps a value only if it has not changed meanwhile, such as etcd, NATS or
/// DynamoDB. [`CasStore`](super::CasStore) stores records in it.
///
/// A key is the text of a scope, a NUL, and the text of a key, so that different names
/// have different keys. For a quota, it is the text of a scope, two NULs, and `usage`. It has up to 1,537 bytes. An engine that allows fewer characters
/// needs an encoding that keeps different keys apart, such as hexadecimal. One that
/// allows fewer bytes can keep a digest, but then cannot list.
///
/// # Errors
///
/// As for [`Store`](crate::Store#errors): after an error it is not known whether a value
/// was written or deleted.
pub trait CompareAndSwap: Send + Sync + 'static {
    /// Names one write. Each write has a version that its key never had before, also
    /// where the value stays the same and after the key was deleted.
    type Version: Clone + PartialEq + Send + Sync + 'static;

    /// The fence of a claim whose write has this version, where versions grow over all
    /// writes of a key, also after it was deleted: the revision of etcd or NATS.
    ///
    /// Defaults to `None`: fences come from the clock then, and from the fence before.
    const FENCE: Option<fn(&Self::Version) -> Fence> = None;

    /// Returns the value of a key, with every write that was answered before the call.
    /// Never reads from a replica that may lag.
    fn get(
        &self,
        key: &str,
    ) -> impl Future<Output = Result<Option<Versioned<Self::Version>>, StoreError>> + Send;

    /// Writes a value if the key still has the version `expected`, or no value if that is
    /// `None`. The value is durable when this returns.
    ///
    /// Otherwise it returns the present value. A server that does not say is asked.
    fn put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<&Self::Version>,
    ) -> impl Future<Output = Result<Swap<Self::Version>, StoreError>> + Send;

    /// Deletes a key that still has the version `expected`. Returns whether it had.
    fn delete(
        &self,
        key: &str,
        expected: &Self::Version,
    ) -> impl Future<Output = Result<bool, StoreError>> + Send;

    /// Returns the first keys that begin with `prefix` and come after `after`, with their
    /// values, in the order of their bytes. Returns up to `limit`, and at least one if
    /// there is one.
    ///
    /// Defaults to an error, for engines that cannot list. Without it, `list`, `count`
    /// and `purge_expired` of the store fail: nothing removes expired records.
    fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> impl Future<Output = Result<Listed<Self::Version>, StoreError>> + Send {
        let _ = (prefix, after, limit);
        async {
            let error = StoreError::unavailable(
                "this backend cannot list its keys: implement `CompareAndSwap::list`, and run no \
                 sweeper without it",
            );
            Err(error.unsent())
        }
    }

    /// Returns the time since 1970. Defaults to this host's clock; tests set another.
    ///
    /// It decides when a record expires, and never when a lease lapses.
    fn now(&self) -> Duration {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        since_1970.unwrap_or_default()
    }
}

/// A page of keys and their values.
pub type Listed<V> = Vec<(String, Versioned<V>)>;

/// A value, and the version of the write that made it.
#[derive(Clone, Debug)]
pub struct Versioned<V> {
    /// The value.
    pub value: Bytes,
    /// The version.
    pub version: V,
}

/// The answer to a [`put`](CompareAndSwap::put).
#[derive(Clone, Debug)]
pub enum Swap<V> {
    /// The value was written, with this version.
    Written(V),
    /// Nothing was written: this is there now, or nothing.
    Lost(Option<Versioned<V>>),
}
