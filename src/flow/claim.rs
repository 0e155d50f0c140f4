//! Claiming a key, and what the record found there means for the request.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, request};
use tokio::time::{self, Instant};

use crate::{
    Fence, OperationId, RecordName, Recovery, Store, StoreError, StoreErrorKind,
    config::Config,
    fingerprint::{BodyFault, Comparison, Mismatch},
    flow::shared::Host,
    flow::withdraw::Withdrawal,
    jitter::jittered,
    outcome::Notice,
    store::{
        Claim, Claimed, Grant, MarkedBy, ReclaimAs, Record, RecordState, Release, Transitioned,
    },
    timeout::Within,
};

/// One guarded request on its way to a claim.
pub(crate) struct Claimant {
    pub(crate) name: RecordName,
    pub(crate) claim: Claim,
    /// From when on the key may start no run, if that is bounded.
    pub(crate) stale_from: Option<Instant>,
    /// The fault of a body that cannot be compared.
    pub(crate) body_fault: Option<BodyFault>,
    pub(crate) parts: request::Parts,
    pub(crate) body: Bytes,
    pub(crate) trailers: Option<HeaderMap>,
    /// What the token of this claim may hold although the request does not run.
    pub(crate) hold: Option<Hold>,
}

/// How a claim ended.
pub(crate) enum Claiming {
    /// The request may run; its lease counts from a moment after `since`.
    Granted { grant: Grant, since: Instant },
    /// The request may ask what became of the operation, and `may_run` if that
    /// did not happen.
    Asking {
        grant: Grant,
        since: Instant,
        may_run: bool,
    },
    /// It may not, because of the record that is there.
    Found(Seen),
    /// It may not whatever the store says, and no record answers it.
    Barred(Bar),
    /// The store did not answer, and may hold the claim all the same; `seen`, if
    /// it had shown a record of the key before, or the request may not run.
    Failed { error: StoreError, seen: bool },
    /// The record changed under every attempt.
    Contended,
}

/// The operation that a record stands for, and what it means for a request that
/// may not run.
pub(crate) struct Seen {
    pub(crate) operation: OperationId,
    pub(crate) found: Found,
}

pub(crate) enum Found {
    InProgress {
        age: Duration,
        lease_left: Duration,
    },
    Completed {
        response: Bytes,
    },
    Unknown,
    OtherRequest(Box<Mismatch>),
    OtherScheme,
    /// The function of an earlier fingerprint panicked.
    Panicked,
}

/// Why a request may not run, whatever the store says. It gets what the record
/// answers without a run.
#[derive(Clone, Copy)]
pub(crate) enum Bar {
    /// Its key was made too long ago.
    KeyStale,
    BodyInvalid(BodyFault),
}

/// What one look at the store brought.
enum Round {
    Granted(Grant),
    Found(Seen),
}

/// What to do about a record.
enum Standing {
    /// The answer to an earlier try of this very claim got lost.
    Mine(Grant),
    Free(ReclaimAs),
    Lapsed,
    Taken(Found),
}

/// Claims the key, in rounds, since the record may change between two looks.
pub(crate) async fn claim<S: Store>(host: &Host<S>, claimant: &mut Claimant) -> Claiming {
    if let Some(bar) = claimant.bar() {
        return Box::pin(barred(host, claimant, bar)).await;
    }
    let mut tried = Tried {
        hold: claimant.hold,
        ..Tried::default()
    };
    let claiming = claim_in_rounds(host, claimant, &mut tried).await;
    claimant.hold = match claiming {
        Claiming::Granted { .. } => None,
        _ => tried.hold,
    };
    if let Some(error) = &tried.failure
        && !matches!(claiming, Claiming::Failed { .. })
    {
        let warnings = &host.config.warnings;
        warnings.warn("claim failed and was tried again", Some(error), None);
    }
    claiming
}

async fn claim_in_rounds<S: Store>(
    host: &Host<S>,
    claimant: &Claimant,
    tried: &mut Tried,
) -> Claiming {
    let start = Instant::now();
    let mut outcome = Claiming::Contended;
    for round in 0..ROUNDS {
        if round > 0 {
            time::sleep(jittered(PAUSE * round)).await;
        }
        let left = match round {
            0 => host.config.store_timeout,
            _ => host.config.store_timeout.saturating_sub(start.elapsed()),
        };
        let round = Within::new(left, caught(round_of(host, claimant, tried))).await;
        match round.unwrap_or_else(|| Err(StoreError::timed_out())) {
            Ok(Some(Round::Granted(grant))) => {
                if start.elapsed() <= host.config.lease / 3 {
                    return tried.granted(grant, start);
                }
                // Much of the lease is gone already: confirm it before the
                // handler starts.
                let since = Instant::now();
                match renew(host, claimant).await {
                    Ok(Transitioned::Applied) => return tried.granted(grant, since),
                    Ok(Transitioned::Superseded) => outcome = Claiming::Contended,
                    Err(error) => return Claiming::Failed { error, seen: true },
                }
            }
            Ok(Some(Round::Found(seen))) => return Claiming::Found(seen),
            Ok(None) => outcome = Claiming::Contended,
            Err(error) => {
                let passing = matches!(
                    error.kind(),
                    StoreErrorKind::Unavailable | StoreErrorKind::TimedOut
                );
                // A busy or full store says nothing about the round before it.
                if passing || !matches!(outcome, Claiming::Failed { .. }) {
                    let seen = tried.seen;
                    tried.failure = Some(error.clone());
                    outcome = Claiming::Failed { error, seen };
                }
                if !passing || start.elapsed() >= host.config.store_timeout {
                    return outcome;
                }
            }
        }
    }
    outcome
}

/// What the rounds of one claim have found out.
#[derive(Default)]
struct Tried {
    /// Whether the store has shown a record of the key.
    seen: bool,
    /// Whether the request may run if the operation did not happen.
    may_run: bool,
    hold: Option<Hold>,
    /// Why a round failed.
    failure: Option<StoreError>,
}

impl Tried {
    /// A claim that was made in order to ask is for asking alone.
    fn granted(&self, grant: Grant, since: Instant) -> Claiming {
        match self.hold {
            Some(Hold::Reclaim {
                reclaim_as: ReclaimAs::Reconcile,
                ..
            }) => Claiming::Asking {
                grant,
                since,
                may_run: self.may_run,
            },
            _ => Claiming::Granted { grant, since },
        }
    }

    /// Forgets what the token can no longer hold beside another claim's record.
    fn saw_another(&mut self, record: &Record) {
        self.hold = self.hold.filter(|hold| match hold {
            Hold::Claim => false,
            Hold::Reclaim { seen, .. } => *seen == record.fence,
        });
    }
}

/// What a token holds, or may hold if the answer of the store got lost.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Hold {
    /// A name that had no record.
    Claim,
    /// The record that was seen with this fence.
    Reclaim {
        seen: Fence,
        reclaim_as: ReclaimAs,
        /// For whom the record was released, if it was.
        released: Option<Release>,
    },
}

/// One round; `None` if the record changed meanwhile.
async fn round_of<S: Store>(
    host: &Host<S>,
    claimant: &Claimant,
    tried: &mut Tried,
) -> Result<Option<Round>, StoreError> {
    let Claimant { name, claim, .. } = claimant;
    let config = &host.config;
    let before = tried.hold;
    tried.hold = before.or(Some(Hold::Claim));
    let claimed = match host.store.claim(name, claim).await {
        Err(error) if error.sent_nothing() => {
            tried.hold = before;
            return Err(error);
        }
        claimed => claimed?,
    };
    let record = match claimed {
        Claimed::Acquired(grant) => {
            tried.hold = Some(Hold::Claim);
            return Ok(Some(Round::Granted(grant)));
        }
        Claimed::Occupied(record) => record,
        Claimed::Vanished => {
            tried.hold = before;
            return Ok(None);
        }
    };
    if record.token != claim.token {
        tried.saw_another(&record);
    }
    tried.seen = true;
    let seen = |found| {
        Round::Found(Seen {
            operation: record.operation,
            found,
        })
    };
    Ok(match claimant.judge(config, &record) {
        Standing::Mine(grant) => Some(Round::Granted(grant)),
        Standing::Free(reclaim_as) => {
            tried.may_run = record.takeovers + 1 < config.max_attempts;
            let before = tried.hold;
            tried.hold = Some(Hold::Reclaim {
                seen: record.fence,
                reclaim_as,
                released: match record.state {
                    RecordState::Released(release) => Some(release),
                    _ => None,
                },
            });
            let reclaimed = host.store.reclaim(name, record.fence, reclaim_as, claim);
            let granted = match reclaimed.await {
                Err(error) if error.sent_nothing() => {
                    tried.hold = before;
                    return Err(error);
                }
                granted => granted?,
            };
            if granted.is_none() {
                tried.hold = before;
            }
            let was_open = matches!(
                record.state,
                RecordState::Unknown | RecordState::InProgress { .. }
            );
            if granted.is_some() && reclaim_as == ReclaimAs::Expired && was_open {
                Notice::UnknownExpired.tell(&config.warnings, Some(record.operation));
            }
            granted.map(Round::Granted)
        }
        Standing::Lapsed => match mark_lapsed(host, name, record.fence).await {
            Ok(Transitioned::Superseded) => None,
            // The next round asks what became of it.
            Ok(Transitioned::Applied) if matches!(config.recovery, Recovery::Reconcile(_)) => None,
            Ok(Transitioned::Applied) => Some(seen(Found::Unknown)),
            // Written down or not, it is what this request has seen.
            Err(error) => {
                config.warnings.warn(
                    "recording failed of a lapsed lease as an unknown outcome: the next request or \
                     sweep tries again",
                    Some(&error),
                    Some(record.operation),
                );
                Some(seen(Found::Unknown))
            }
        },
        Standing::Taken(found) => Some(seen(found)),
    })
}

/// What the record that is there answers to a request that must not claim.
async fn barred<S: Store>(host: &Host<S>, claimant: &Claimant, bar: Bar) -> Claiming {
    let start = Instant::now();
    for _ in 0..ROUNDS {
        let record = match host.timely(host.store.read(&claimant.name)).await {
            Ok(Some(record)) => record,
            Ok(None) => return Claiming::Barred(bar),
            // Such a body is refused with or without a record.
            Err(_) if matches!(bar, Bar::BodyInvalid(_)) => return Claiming::Barred(bar),
            Err(error) => return Claiming::Failed { error, seen: true },
        };
        let found = match claimant.judge(&host.config, &record) {
            Standing::Mine(grant) => {
                return Claiming::Granted {
                    grant,
                    since: start,
                };
            }
            Standing::Free(ReclaimAs::Retry | ReclaimAs::Replace | ReclaimAs::Expired) => {
                return Claiming::Barred(bar);
            }
            Standing::Taken(Found::OtherRequest(mismatch))
                if matches!(bar, Bar::BodyInvalid(_)) && mismatch.is_of_body_alone() =>
            {
                return Claiming::Barred(bar);
            }
            Standing::Taken(found) => found,
            Standing::Free(ReclaimAs::Rerun | ReclaimAs::Reconcile) => Found::Unknown,
            Standing::Free(ReclaimAs::Takeover) | Standing::Lapsed => {
                match mark_lapsed(host, &claimant.name, record.fence).await {
                    Ok(Transitioned::Superseded) => continue,
                    Ok(Transitioned::Applied) | Err(_) => Found::Unknown,
                }
            }
        };
        return Claiming::Found(Seen {
            operation: record.operation,
            found,
        });
    }
    Claiming::Contended
}

/// What the record that is there now means for the request; `None` if the key
/// can be claimed.
pub(crate) async fn look<S: Store>(
    host: &Host<S>,
    claimant: &Claimant,
) -> Result<Option<Seen>, StoreError> {
    let record = host.timely(host.store.read(&claimant.name)).await?;
    Ok(
        record.and_then(|record| match claimant.judge(&host.config, &record) {
            Standing::Taken(found) => Some(Seen {
                operation: record.operation,
                found,
            }),
            Standing::Mine(_) | Standing::Free(_) | Standing::Lapsed => None,
        }),
    )
}

async fn mark_lapsed<S: Store>(
    host: &Host<S>,
    name: &RecordName,
    seen: Fence,
) -> Result<Transitioned, StoreError> {
    let retention = host.config.unknown_retention;
    let lapsed = MarkedBy::Lapsed(seen);
    host.store.mark_unknown(name, lapsed, retention).await
}

async fn renew<S: Store>(host: &Host<S>, claimant: &Claimant) -> Result<Transitioned, StoreError> {
    let Claimant { name, claim, .. } = claimant;
    host.timely(host.store.renew(name, claim.token, claim.lease))
        .await
}

impl Claimant {
    /// What takes the claim back, if it may be in the store.
    pub(crate) fn withdrawal<S: Store>(&self, host: &Arc<Host<S>>) -> Option<Withdrawal<S>> {
        self.hold.map(|hold| Withdrawal {
            host: Arc::clone(host),
            name: self.name.clone(),
            claim: Claim {
                reads_response: false,
                ..self.claim
            },
            hold,
        })
    }

    /// Why the request may not run now, if so.
    fn bar(&self) -> Option<Bar> {
        match self.body_fault {
            Some(fault) => Some(Bar::BodyInvalid(fault)),
            None => self.is_stale().then_some(Bar::KeyStale),
        }
    }

    /// Whether the key may start no run any more.
    pub(crate) fn is_stale(&self) -> bool {
        self.stale_from.is_some_and(|from| Instant::now() >= from)
    }

    /// The one place where records are compared with requests. A mismatch wins
    /// over every live state but "free for any request".
    fn judge(&self, config: &Config, record: &Record) -> Standing {
        let in_progress = matches!(record.state, RecordState::InProgress { .. });
        if in_progress && record.token == self.claim.token {
            return Standing::Mine(Grant::new(record.operation, record.fence, record.attempt));
        }
        if !in_progress && record.expires_in.is_none() {
            return Standing::Free(ReclaimAs::Expired);
        }
        let compare = || {
            config.fingerprinter.compare(
                &record.fingerprint,
                &self.claim.fingerprint,
                &self.parts,
                &self.body,
            )
        };
        let Ok(compared) = catch_unwind(AssertUnwindSafe(compare)) else {
            return Standing::Taken(Found::Panicked);
        };
        let is_freed = matches!(record.state, RecordState::Released(Release::AnyRequest));
        // A crashed claim binds its key until it expires, whether it was swept or
        // not.
        let is_over = matches!(record.state, RecordState::InProgress { lease_left: None })
            && record.expires_in.is_none();
        match compared {
            Comparison::Same => {}
            _ if is_freed => return Standing::Free(ReclaimAs::Replace),
            Comparison::SchemeUnknown if is_over => return Standing::Lapsed,
            Comparison::SchemeUnknown => return Standing::Taken(Found::OtherScheme),
            Comparison::Different(_) if is_over => return Standing::Free(ReclaimAs::Expired),
            Comparison::Different(mismatch) => {
                return Standing::Taken(Found::OtherRequest(Box::new(mismatch)));
            }
        }
        let rerun = matches!(config.recovery, Recovery::Rerun)
            && record.takeovers + 1 < config.max_attempts;
        match &record.state {
            RecordState::Released(_) => Standing::Free(ReclaimAs::Retry),
            RecordState::Completed { response } => Standing::Taken(Found::Completed {
                response: response.clone(),
            }),
            RecordState::Unknown if rerun => Standing::Free(ReclaimAs::Rerun),
            RecordState::Unknown if matches!(config.recovery, Recovery::Reconcile(_)) => {
                Standing::Free(ReclaimAs::Reconcile)
            }
            RecordState::Unknown => Standing::Taken(Found::Unknown),
            RecordState::InProgress {
                lease_left: Some(lease_left),
            } => Standing::Taken(Found::InProgress {
                age: record.age,
                lease_left: *lease_left,
            }),
            RecordState::InProgress { lease_left: None } if rerun => {
                Standing::Free(ReclaimAs::Takeover)
            }
            RecordState::InProgress { lease_left: None } => Standing::Lapsed,
        }
    }
}

impl<S> Host<S> {
    /// Bounds one call to the store.
    pub(crate) async fn timely<T>(
        &self,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        Within::new(self.config.store_timeout, caught(call))
            .await
            .unwrap_or_else(|| Err(StoreError::timed_out()))
    }
}

/// Turns a panic of the store into an error, so that it does not end a background
/// task.
pub(crate) fn caught<T>(
    call: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    AssertUnwindSafe(call)
        .catch_unwind()
        .map(|answer| answer.unwrap_or_else(|_| Err(StoreError::unavailable("the store panicked"))))
}

const ROUNDS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(20);
