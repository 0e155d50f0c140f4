//! A job, and the runs of its periods.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    calendar::shifted,
    period::{Period, Periods},
};
use crate::{
    error::StoreError,
    flow::config::error::BuildError,
    guard::{Guard, Ran, RunError},
    key::{Key, RecordName, Scope},
    operation::Operation,
    store::Store,
};

/// Work that runs once for each period. Made by [`Job::builder`].
///
/// The record of a period has the key `NAME:LABEL`, such as `billing:2026-07`, in the scope
/// `~schedules`. Its fingerprint is the kind of the periods and the name of the zone. A job
/// whose zone is changed finds a [`Mismatch`](RunError::Mismatch), and runs no period twice.
///
/// Clones share the guard.
#[derive(Clone, Debug)]
pub struct Job<S> {
    guard: Guard<S>,
    name: Arc<str>,
    periods: Periods,
    first: Period,
    missed: Missed,
}

/// What happens with periods that did not run in time, for example because no process was
/// up. There is no default.
///
/// Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// They run, from the oldest to the latest: the last `at_most` periods that have ended.
    All {
        /// The number of periods, from 1. The guard's retention must be longer than they
        /// are together, so that the record of each is still there.
        at_most: u32,
    },
    /// Only the last period that has ended runs.
    Latest,
    /// Only the last period that has ended runs, and only until this time after its end.
    Skip {
        /// How long after its end a period may start.
        later_than: Duration,
    },
}

/// A job that does not know its first period yet.
#[derive(Debug)]
#[must_use = "a job does nothing until it is built"]
pub struct JobBuilder<S> {
    guard: Guard<S>,
    name: String,
    periods: Periods,
}

/// A job that does not know yet what to do with missed periods.
#[derive(Debug)]
#[must_use = "a job does nothing until it is built"]
pub struct JobSince<S> {
    job: JobBuilder<S>,
    since: String,
}

/// What came of one period.
#[derive(Debug)]
pub struct PeriodRun<T, E> {
    /// The period.
    pub period: Period,
    /// What its run returned: [`Ran::Now`] if it ran, [`Ran::Replayed`] if it ran before,
    /// or the reason why there is no value.
    pub result: Result<Ran<T>, RunError<E>>,
}

/// What the record of a period was made for.
#[derive(Serialize)]
struct Input<'p> {
    periods: &'p str,
    zone: &'p str,
}

impl<S: Store> Job<S> {
    /// Returns the builder of a job with a name, with which the names of its periods start.
    /// It must stay the same over all deploys.
    ///
    /// **Services that share a store need different names**, such as `shop-billing`. A job
    /// finds the periods of another job with its name done, and does not run them.
    ///
    /// Give the guard a [`retention`](crate::GuardBuilder::retention) and an
    /// [`unknown_retention`](crate::GuardBuilder::unknown_retention) of 400 days or more: a
    /// period whose record has expired would run again.
    pub fn builder(guard: Guard<S>, name: impl Into<String>, periods: Periods) -> JobBuilder<S> {
        JobBuilder {
            guard,
            name: name.into(),
            periods,
        }
    }

    /// Runs the periods that are due and did not run yet, one after another, and returns
    /// what came of each period that [`Missed`] chooses.
    ///
    /// A period is due once it has ended on the store's clock. Call this as often as a run
    /// may be late: a call that finds all runs recorded reads their records, and no more.
    /// Several processes may call it at once.
    ///
    /// After an error of one period, later ones still run. The call ends early after a
    /// period that another process runs at the moment, and after one that the guard could
    /// not ask its store for. That period is the last one returned.
    ///
    /// A crash before a period's claim leaves it to the next call. A crash during its work
    /// leaves it to its lease, and then to [`Recovery`](crate::Recovery). Dropping the
    /// future leaves the work that runs to a task, and starts no further period.
    ///
    /// The work must not shorten the retention with [`Operation::keep_for`].
    ///
    /// # Errors
    ///
    /// A [`StoreError`] if the store does not tell the time. Nothing ran then.
    pub async fn run_due<T, E, W, F>(&self, work: W) -> Result<Vec<PeriodRun<T, E>>, StoreError>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
        E: Send + 'static,
        W: Fn(Operation, Period) -> F + Send + Sync + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let work = Arc::new(work);
        let input = Input {
            periods: self.periods.kind(),
            zone: self.periods.zone_name(),
        };
        let mut runs = Vec::new();
        for period in self.due(self.store_time().await?) {
            let (work, this) = (Arc::clone(&work), period.clone());
            let work = move |operation| work(operation, this);
            let result = self.guard.run(&self.name_of(&period), &input, work).await;
            let ends = matches!(
                result,
                Err(RunError::InProgress
                    | RunError::Store(_)
                    | RunError::Overloaded
                    | RunError::Draining)
            );
            runs.push(PeriodRun { period, result });
            if ends {
                break;
            }
        }
        Ok(runs)
    }

    /// Returns the name of a period's record, for an operator who resolves it.
    #[must_use]
    pub fn record_of(&self, period: &Period) -> RecordName {
        let config = &self.guard.shared().config;
        config.name(self.name_of(period)).into_kept()
    }

    fn name_of(&self, period: &Period) -> RecordName {
        let scope = Scope::single_tenant().with_endpoint("schedules");
        RecordName::new(scope, Key::new(format!("{}:{}", self.name, period.label())))
    }

    /// Returns the periods to run at this time, from the oldest to the latest.
    fn due(&self, now: Timestamp) -> Vec<Period> {
        let (most, since) = match self.missed {
            Missed::All { at_most } => (at_most, Timestamp::MIN),
            Missed::Latest => (1, Timestamp::MIN),
            Missed::Skip { later_than } => {
                let later_than = SignedDuration::try_from(later_than);
                (1, shifted(now, -later_than.unwrap_or(SignedDuration::MAX)))
            }
        };
        let mut due = Vec::new();
        let mut period = self.periods.containing(now).previous();
        while due.len() < most as usize
            && period.start() >= self.first.start()
            && period.end() >= since
        {
            let earlier = period.previous();
            due.push(period);
            period = earlier;
        }
        due.reverse();
        due
    }

    async fn store_time(&self) -> Result<Timestamp, StoreError> {
        let now = self.guard.shared().call(S::now).await?;
        SignedDuration::try_from(now)
            .and_then(Timestamp::from_duration)
            .map_err(|_| StoreError::corrupt("clock: it is far from the present"))
    }
}

impl<S: Store> JobBuilder<S> {
    /// Sets the label of the first period that runs. Earlier ones never do, so that a first
    /// deploy does not run the past.
    pub fn since(self, label: impl Into<String>) -> JobSince<S> {
        JobSince {
            job: self,
            since: label.into(),
        }
    }
}

impl<S: Store> JobSince<S> {
    /// Sets what happens with missed periods, and returns the job.
    ///
    /// # Errors
    ///
    /// A [`BuildError`] names the first of these, its limit and its value:
    ///
    /// - a name that is empty, longer than 200 bytes, or has a control character;
    /// - a first period whose label is not one of these periods;
    /// - no periods at all in [`Missed::All`];
    /// - a retention of the guard of less than 400 days, or of less than the periods of
    ///   [`Missed::All`] and a day.
    pub fn missed(self, missed: Missed) -> Result<Job<S>, BuildError> {
        let JobBuilder {
            guard,
            name,
            periods,
        } = self.job;
        let is_sound = (1..=LONGEST_NAME).contains(&name.len()) && !name.contains(char::is_control);
        if !is_sound {
            let reason = format!("must have 1 to {LONGEST_NAME} printable bytes, got {name:?}");
            return Err(BuildError::new("name", reason));
        }
        let Some(first) = periods.labelled(&self.since) else {
            let (kind, since) = (periods.kind(), &self.since);
            let example = match kind {
                "hourly" => "2026-10-25T02+02:00",
                "daily" => "2026-10-25",
                "weekly" => "2026-W43",
                _ => "2026-10",
            };
            let reason = format!(
                "must be the label of one of its {kind} periods, as {example}, got {since:?}"
            );
            return Err(BuildError::new("since", reason));
        };
        let most = match missed {
            Missed::All { at_most: 0 } => {
                return Err(BuildError::new(
                    "missed",
                    "must be at least 1 period, got 0",
                ));
            }
            Missed::All { at_most } => u64::from(at_most),
            Missed::Latest | Missed::Skip { .. } => 1,
        };
        // The oldest of these periods has ended, and was claimed, at most `most` periods ago.
        let needed = (periods.longest_hours() * most).div_ceil(24) + 1;
        let least = SHORTEST_RETENTION_DAYS.max(needed);
        let config = &guard.shared().config;
        for (setting, retention) in [
            ("retention", config.responses.retention),
            ("unknown_retention", config.unknown_retention),
        ] {
            if retention < Duration::from_secs(least * 24 * 3600) {
                let reason = format!(
                    "must be at least {least} days for this job, so that no period runs again, \
                     got {retention:?}"
                );
                return Err(BuildError::new(setting, reason));
            }
        }
        Ok(Job {
            guard,
            name: name.into(),
            periods,
            first,
            missed,
        })
    }
}

const SHORTEST_RETENTION_DAYS: u64 = 400;
const LONGEST_NAME: usize = 200;
