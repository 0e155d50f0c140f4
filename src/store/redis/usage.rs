//! The usage of scopes, for quotas.

use std::time::Duration;

use futures_util::future::try_join_all;
use redis::FromRedisValue as _;

use super::{Inner, error::unexpected, micros, scripts::Call};
use crate::{
    key::{Key, RecordName, Scope},
    store::{StoreError, Usage, UsageDelta},
};

impl Inner {
    /// Adds the deltas, and returns the live usage of their scopes.
    pub(super) async fn add_usage(&self, deltas: &[UsageDelta]) -> Result<Vec<Usage>, StoreError> {
        let mut deltas: Vec<_> = deltas.iter().collect();
        deltas.sort_by(|one, other| one.scope.cmp(&other.scope));
        let scopes = deltas.chunk_by(|one, other| one.scope == other.scope);
        let usage = scopes.map(|deltas| self.add_usage_of_scope(deltas));
        Ok(try_join_all(usage).await?.concat())
    }

    /// One after the other, so that the last answer has all of them.
    async fn add_usage_of_scope(&self, deltas: &[&UsageDelta]) -> Result<Vec<Usage>, StoreError> {
        let mut usage = Vec::new();
        for delta in deltas {
            // The key of a record has no NUL.
            let name = RecordName::new(delta.scope.clone(), Key::new("\0usage"));
            let call = Call {
                place: self.place(&name),
                arguments: vec![
                    micros(delta.expires_in),
                    micros(delta.period.max(Duration::from_micros(1))),
                    delta.records.to_string().into(),
                    delta.bytes.to_string().into(),
                ],
            };
            let live = Vec::<String>::from_redis_value(self.usage.make(call).await?);
            let live = live.map_err(unexpected)?;
            let live = live.iter().map(|period| decode(&delta.scope, period));
            usage = live.collect::<Result<_, _>>()?;
        }
        usage.sort_unstable_by_key(|usage| usage.expires_in);
        Ok(usage)
    }
}

/// Decodes the microseconds, the records and the bytes of a period.
fn decode(scope: &Scope, period: &str) -> Result<Usage, StoreError> {
    let corrupt = || StoreError::corrupt("usage of a scope");
    let mut numbers = period.split(' ').map(str::parse::<i64>);
    let mut number = || numbers.next()?.ok();
    let (Some(left), Some(records), Some(bytes)) = (number(), number(), number()) else {
        return Err(corrupt());
    };
    Ok(Usage {
        scope: scope.clone(),
        expires_in: Duration::from_micros(left.max(0).unsigned_abs()),
        records,
        bytes,
    })
}
