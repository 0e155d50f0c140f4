//! What one scope keeps in the store, as this process knows it.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::SetOnce, time::Instant};

use crate::{
    key::{RecordName, Scope},
    policy::quota::Quota,
    rejection::QuotaExceeded,
    runtime::single_task::SingleTask,
    store::{SHORTEST_PERIOD, Usage, UsageDelta},
};

/// The usage of a scope: the sums that the store returned last, and those that this process
/// has counted since.
pub(super) struct ScopeUsage {
    pub(super) scope: Scope,
    /// Set once the store was asked, whatever it answered.
    pub(super) asked: SetOnce<()>,
    /// Asks the store.
    pub(super) asking: SingleTask,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The sums of all processes, as the store returned them.
    known: Periods,
    /// The sums of this process in the report under way.
    sent: Periods,
    /// The sums of this process for the next report.
    counted: Periods,
    /// Whether the scope is a part of the next report.
    is_due: bool,
}

/// The sums of each period. A period that the store returned has no length.
#[derive(Default)]
struct Periods(Vec<(Period, Kept)>);

#[derive(Clone, Copy, PartialEq, Eq)]
struct Period {
    end: Instant,
    length: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    pub(super) records: i64,
    pub(super) bytes: i64,
}

/// When a record expires, and how long it is kept in all.
#[derive(Clone, Copy)]
pub(super) struct Expiry {
    pub(super) at: Instant,
    pub(super) retention: Duration,
}

impl ScopeUsage {
    pub(super) fn new(scope: Scope) -> Self {
        Self {
            scope,
            asked: SetOnce::new(),
            asking: SingleTask::default(),
            state: Mutex::default(),
        }
    }

    /// Returns why a record with this name would exceed the quota, if it would.
    pub(super) fn exceeded(&self, quota: Quota, name: &RecordName) -> Option<QuotaExceeded> {
        let now = Instant::now();
        let state = self.state();
        let all = || [&state.known, &state.sent, &state.counted];
        let kept = all().into_iter().flat_map(|periods| periods.live(now));
        let kept = kept.fold(Kept::default(), |sum, (_, kept)| sum.plus(kept));
        let record = Kept::of_record(name);
        let over = |kept: Kept| {
            let with = |kept: i64, more: i64| kept.max(0).unsigned_abs() + more.unsigned_abs();
            let records = with(kept.records, record.records);
            if records > quota.records {
                return Some(("records", quota.records, records));
            }
            let bytes = with(kept.bytes, record.bytes);
            (bytes > quota.bytes).then_some(("bytes", quota.bytes, bytes))
        };
        let (unit, limit, got) = over(kept)?;
        let mut ends: Vec<_> = all()
            .into_iter()
            .flat_map(|periods| periods.live(now))
            .collect();
        ends.sort_unstable_by_key(|(end, _)| *end);
        let mut left = kept;
        let mut until = now;
        for (end, ended) in ends {
            until = end;
            left = left.minus(ended);
            if over(left).is_none() {
                break;
            }
        }
        let seconds = (until - now).as_millis().div_ceil(1000);
        Some(QuotaExceeded {
            unit,
            limit,
            got,
            retry_after: u64::try_from(seconds).unwrap_or(u64::MAX).max(1),
        })
    }

    /// Adds to the sums of the period in which a record expires.
    pub(super) fn count(&self, kept: Kept, expiry: Expiry, start: Instant) {
        let period = expiry.period(start);
        self.state().counted.add(period, kept, Instant::now());
    }

    /// Returns whether the scope was not due yet, and makes it due.
    pub(super) fn make_due(&self) -> bool {
        !mem::replace(&mut self.state().is_due, true)
    }

    /// Whether everything was reported.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state();
        !state.is_due && state.sent.0.is_empty() && state.counted.0.is_empty()
    }

    /// Begins a report. Without a sum to add, it asks for the usage of the scope.
    pub(super) fn take_deltas(&self) -> Vec<UsageDelta> {
        let now = Instant::now();
        let mut state = self.state();
        state.is_due = false;
        // The last report may have ended with its runtime.
        state.count_sent_alone(now);
        state.sent = mem::take(&mut state.counted);
        let counted = state.sent.0.iter().filter(|(period, _)| period.end > now);
        let mut deltas: Vec<_> = counted
            .map(|(Period { end, length }, kept)| UsageDelta {
                scope: self.scope.clone(),
                expires_in: *end - now,
                period: *length,
                records: kept.records,
                bytes: kept.bytes,
            })
            .filter(|delta| !delta.is_none())
            .collect();
        if deltas.is_empty() {
            deltas.push(UsageDelta::none(self.scope.clone()));
        }
        deltas
    }

    /// Ends a report with the usage that the store returned.
    pub(super) fn set_known(&self, usage: &[Usage]) {
        let now = Instant::now();
        let known = usage.iter().filter(|usage| usage.scope == self.scope);
        let known = known.map(|usage| {
            let end = later(now, usage.expires_in);
            let kept = Kept {
                records: usage.records,
                bytes: usage.bytes,
            };
            (Period::known(end), kept)
        });
        let mut state = self.state();
        state.known = Periods(known.collect());
        state.sent = Periods::default();
    }

    /// Ends a report that the store may have or not, or does not add up. Its sums count in
    /// this process, until the store returns others.
    pub(super) fn count_sent_alone(&self) {
        self.state().count_sent_alone(Instant::now());
    }

    /// Ends a report that did not reach the store. The next one has its sums.
    pub(super) fn unsend(&self) {
        let now = Instant::now();
        let mut state = self.state();
        for (period, kept) in mem::take(&mut state.sent).0 {
            state.counted.add(period, kept, now);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn count_sent_alone(&mut self, now: Instant) {
        for (period, kept) in mem::take(&mut self.sent).0 {
            self.known.add(Period::known(period.end), kept, now);
        }
    }
}

impl Periods {
    fn live(&self, now: Instant) -> impl Iterator<Item = (Instant, Kept)> + '_ {
        let live = self.0.iter().filter(move |(period, _)| period.end > now);
        live.map(|(period, kept)| (period.end, *kept))
    }

    /// There are few periods, and the last one is the most frequent.
    fn add(&mut self, period: Period, kept: Kept, now: Instant) {
        match self.0.iter_mut().rev().find(|(other, _)| *other == period) {
            Some((_, sum)) => *sum = sum.plus(kept),
            None => {
                self.0.retain(|(period, _)| period.end > now);
                self.0.push((period, kept));
            }
        }
    }
}

impl Period {
    fn known(end: Instant) -> Self {
        let length = Duration::ZERO;
        Self { end, length }
    }
}

impl Expiry {
    /// Returns the expiry of a record that was claimed, or became unknown, at `since`.
    pub(super) fn from(since: Instant, retention: Duration) -> Self {
        let at = later(since, retention);
        Self { at, retention }
    }

    /// Returns the period of the store to which it belongs, and its end, which is rounded up
    /// to a quarter of the period. So the number of periods stays small.
    fn period(self, start: Instant) -> Period {
        let length = (self.retention / PERIODS).max(SHORTEST_PERIOD);
        let step = (length / 4).max(SHORTEST_PERIOD).as_millis().max(1);
        let steps = (self.at - start).as_millis().div_ceil(step);
        let end = u64::try_from(steps * step).unwrap_or(u64::MAX);
        let end = later(start, Duration::from_millis(end));
        Period { end, length }
    }
}

impl Kept {
    /// What a record counts without a response.
    pub(super) fn of_record(name: &RecordName) -> Self {
        let bytes = Quota::RECORD_BYTES + name.bytes() as u64;
        Self {
            records: 1,
            bytes: i64::try_from(bytes).unwrap_or(i64::MAX),
        }
    }

    pub(super) fn of_response(length: usize) -> Self {
        Self {
            records: 0,
            bytes: i64::try_from(length).unwrap_or(i64::MAX),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            records: self.records.saturating_add(other.records),
            bytes: self.bytes.saturating_add(other.bytes),
        }
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self {
            records: self.records.saturating_sub(other.records),
            bytes: self.bytes.saturating_sub(other.bytes),
        }
    }

    pub(super) fn negative(self) -> Self {
        Self::default().minus(self)
    }
}

/// The moments of a runtime's clock are bounded, and retentions are up to ten years.
fn later(moment: Instant, time: Duration) -> Instant {
    let bounded = || moment + LONGEST;
    moment
        .checked_add(time.min(LONGEST))
        .unwrap_or_else(bounded)
}

/// The number of periods into which a retention is divided.
const PERIODS: u32 = 32;
const LONGEST: Duration = Duration::from_secs(20 * 365 * 24 * 3600);
