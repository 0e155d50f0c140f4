//! The usage of scopes, for quotas: one value for each scope.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::{CasStore, CompareAndSwap, Swap};
use crate::{
    key::Scope,
    store::{
        StoreError, Usage, UsageDelta,
        usage::{Periods, add_to, live, micros},
    },
};

impl<B: CompareAndSwap> CasStore<B> {
    /// Adds the deltas, and returns the live usage of their scopes.
    pub(super) async fn add_usage_of_scopes(
        &self,
        deltas: &[UsageDelta],
    ) -> Result<Vec<Usage>, StoreError> {
        let mut deltas: Vec<_> = deltas.iter().collect();
        deltas.sort_by(|one, other| one.scope.cmp(&other.scope));
        let mut usage = Vec::new();
        for deltas in deltas.chunk_by(|one, other| one.scope == other.scope) {
            let scope = &deltas[0].scope;
            let periods = self.add_usage_of_scope(scope, deltas).await?;
            usage.extend(live(scope, &periods, self.0.backend.now()));
        }
        Ok(usage)
    }

    async fn add_usage_of_scope(
        &self,
        scope: &Scope,
        deltas: &[&UsageDelta],
    ) -> Result<Periods, StoreError> {
        let backend = &self.0.backend;
        let key = key_of(scope);
        let mut found = backend.get(&key).await?;
        loop {
            let value = found.as_ref().map(|found| found.value.clone());
            let mut periods = value.map(decode).transpose()?.unwrap_or_default();
            if deltas.iter().all(|delta| delta.is_none()) {
                return Ok(periods);
            }
            let now = backend.now();
            for delta in deltas {
                add_to(&mut periods, delta, now);
            }
            let version = found.as_ref().map(|found| &found.version);
            match backend.put(&key, encode(&periods), version).await? {
                Swap::Written(_) => return Ok(periods),
                Swap::Lost(other) => found = other,
            }
        }
    }

    /// Deletes the usage of a scope if all of its periods have ended.
    pub(super) async fn sweep_usage(
        &self,
        key: &str,
        found: &super::Versioned<B::Version>,
    ) -> Result<(), StoreError> {
        let now = micros(self.0.backend.now());
        let periods = decode(found.value.clone())?;
        if periods.keys().all(|end| *end < now) {
            self.0.backend.delete(key, &found.version).await?;
        }
        Ok(())
    }
}

/// The key of a record has one NUL.
fn key_of(scope: &Scope) -> String {
    format!("{}{SUFFIX}", scope.as_str())
}

/// Whether a key is that of a scope's usage.
pub(super) fn is_usage(key: &str) -> bool {
    key.ends_with(SUFFIX)
}

fn encode(periods: &Periods) -> Bytes {
    let mut bytes = BytesMut::with_capacity(1 + PERIOD * periods.len());
    bytes.put_u8(VERSION);
    for (end, (records, sum)) in periods {
        bytes.put_u64_le(*end);
        bytes.put_i64_le(*records);
        bytes.put_i64_le(*sum);
    }
    bytes.freeze()
}

fn decode(mut bytes: Bytes) -> Result<Periods, StoreError> {
    if bytes.is_empty() || bytes.get_u8() != VERSION || !bytes.len().is_multiple_of(PERIOD) {
        return Err(StoreError::corrupt("usage of a scope"));
    }
    let mut periods = Periods::new();
    while !bytes.is_empty() {
        let (end, records, sum) = (bytes.get_u64_le(), bytes.get_i64_le(), bytes.get_i64_le());
        periods.insert(end, (records, sum));
    }
    Ok(periods)
}

const SUFFIX: &str = "\0\0usage";
const VERSION: u8 = 1;
/// The bytes of a period.
const PERIOD: usize = 24;
