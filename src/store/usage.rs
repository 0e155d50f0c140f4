//! What scopes keep in a store, added up over all processes.

use std::{collections::BTreeMap, fmt, ops::Bound, time::Duration};

use crate::key::Scope;

/// A change of what a scope keeps, for [`Store::add_usage`](super::Store::add_usage).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageDelta {
    /// The scope.
    pub scope: Scope,
    /// The time from now until the records expire. Zero or more.
    pub expires_in: Duration,
    /// The length of the periods to which the usage is added up. Longer than zero.
    pub period: Duration,
    /// The records that were added, or removed if it is negative.
    pub records: i64,
    /// Their bytes.
    pub bytes: i64,
}

impl UsageDelta {
    /// Returns a delta that adds nothing, which asks for the usage of a scope.
    #[must_use]
    pub fn none(scope: Scope) -> Self {
        Self {
            scope,
            expires_in: Duration::ZERO,
            period: SHORTEST_PERIOD,
            records: 0,
            bytes: 0,
        }
    }

    /// Whether it adds nothing. Such a delta is not kept.
    #[must_use]
    pub fn is_none(&self) -> bool {
        (self.records, self.bytes) == (0, 0)
    }

    /// Returns the end of the period in which the records expire, in microseconds on the
    /// clock that shows `now`. A period ends at a multiple of its length.
    #[must_use]
    pub fn period_end(&self, now: Duration) -> u64 {
        let period = micros(self.period).max(1);
        let expires = micros(now.saturating_add(self.expires_in));
        expires.div_ceil(period).saturating_mul(period)
    }
}

/// What a scope keeps of records that expire in one period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The scope.
    pub scope: Scope,
    /// The time until the period ends.
    pub expires_in: Duration,
    /// The records. May be below zero, if another period has the record that was removed.
    pub records: i64,
    /// Their bytes. May be below zero.
    pub bytes: i64,
}

/// The usage of scopes in memory, for stores that keep their records there.
///
/// `Debug` shows no scope.
#[derive(Default)]
pub struct UsageTable(BTreeMap<Scope, Periods>);

/// The records and bytes of each period, by its end in microseconds.
pub(super) type Periods = BTreeMap<u64, (i64, i64)>;

impl UsageTable {
    /// Adds the deltas at `now`, on a clock that does not go back, and returns the live usage
    /// of their scopes, as [`Store::add_usage`](super::Store::add_usage) does.
    pub fn add(&mut self, deltas: &[UsageDelta], now: Duration) -> Vec<Usage> {
        for delta in deltas {
            if delta.is_none() {
                continue;
            }
            let periods = self.0.entry(delta.scope.clone()).or_default();
            add_to(periods, delta, now);
        }
        let mut scopes: Vec<_> = deltas.iter().map(|delta| &delta.scope).collect();
        scopes.sort_unstable();
        scopes.dedup();
        let found = scopes
            .into_iter()
            .filter_map(|scope| Some((scope, self.0.get(scope)?)));
        found
            .flat_map(|(scope, periods)| live(scope, periods, now))
            .collect()
    }

    /// Removes the periods that have ended at `now`.
    pub fn sweep(&mut self, now: Duration) {
        self.0.retain(|_, periods| {
            remove_ended(periods, now);
            !periods.is_empty()
        });
    }
}

impl fmt::Debug for UsageTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UsageTable")
            .field("scopes", &self.0.len())
            .finish_non_exhaustive()
    }
}

pub(super) fn add_to(periods: &mut Periods, delta: &UsageDelta, now: Duration) {
    remove_ended(periods, now);
    if delta.is_none() {
        return;
    }
    let (records, bytes) = periods.entry(delta.period_end(now)).or_default();
    *records = records.saturating_add(delta.records);
    *bytes = bytes.saturating_add(delta.bytes);
}

fn remove_ended(periods: &mut Periods, now: Duration) {
    let now = micros(now);
    periods.retain(|end, sums| *end > now && *sums != (0, 0));
}

pub(super) fn live<'a>(
    scope: &'a Scope,
    periods: &'a Periods,
    now: Duration,
) -> impl Iterator<Item = Usage> + 'a {
    let now = micros(now);
    let live = periods.range((Bound::Excluded(now), Bound::Unbounded));
    live.map(move |(end, (records, bytes))| Usage {
        scope: scope.clone(),
        expires_in: Duration::from_micros(end - now),
        records: *records,
        bytes: *bytes,
    })
}

pub(super) fn micros(time: Duration) -> u64 {
    let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    micros.min(LATEST)
}

/// In microseconds since 1970: far below the range of a column.
const LATEST: u64 = 1 << 52;

/// The shortest period.
pub(crate) const SHORTEST_PERIOD: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_decays_at_the_end_of_its_period() {
        let scope = Scope::single_tenant();
        let delta = |expires_in, records| UsageDelta {
            scope: scope.clone(),
            expires_in: Duration::from_secs(expires_in),
            period: Duration::from_secs(10),
            records,
            bytes: 100 * records,
        };
        let at = Duration::from_secs;
        let mut table = UsageTable::default();
        table.add(&[delta(11, 3), delta(19, 2), delta(20, -1)], at(100));
        let mut kept = |now| -> i64 {
            let asked = table.add(&[UsageDelta::none(scope.clone())], at(now));
            asked.iter().map(|usage| usage.records).sum()
        };
        assert_eq!((kept(100), kept(119), kept(120)), (4, 4, 0));
        table.sweep(at(121));
        assert!(table.0.is_empty());
    }
}
