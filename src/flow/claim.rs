//! Claims a key in the store.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};

use super::{
    config::Config,
    decide::{Answer, Answered, Decision, decide},
    request::{Comparable, Ineligible, Keyed},
    shared::Shared,
    store_call::bounded,
    usage::Expiry,
    withdraw::Hold,
};
use crate::{
    error::{StoreError, StoreErrorKind},
    key::RecordName,
    operation::recovery::Recovery,
    rejection::QuotaExceeded,
    runtime::backoff::jittered,
    store::{Claimed, Grant, ReclaimAs, Record, RecordState, Store, Transitioned},
    telemetry::notice::Notice,
};

/// How an attempt to claim a key ended.
pub(super) enum ClaimResult {
    /// The request may run.
    Granted(Granted),
    /// The request may ask whether the operation happened, and `may_run` if it did not.
    Reconcile { granted: Granted, may_run: bool },
    /// The request may not run, because of the record.
    Answered(Answered),
    /// The request may not run, and no record answers it.
    Ineligible(Ineligible),
    /// The store did not answer, and may have the claim nevertheless. `may_have_run` if
    /// the work may have been done: the store had shown a record of the key.
    Failed {
        error: StoreError,
        may_have_run: bool,
    },
    /// A new record would exceed the quota of the scope.
    OverQuota(QuotaExceeded),
    /// The record changed during each round.
    Contended,
}

/// A claim that the store granted.
#[derive(Clone, Copy)]
pub(super) struct Granted {
    pub(super) grant: Grant,
    /// A moment before the store granted it, from which the lease counts.
    pub(super) since: Instant,
}

/// What the rounds of one claim have found out.
#[derive(Default)]
struct Progress {
    has_seen_record: bool,
    /// Whether the request may run if the operation did not happen.
    may_run: bool,
    hold: Option<Hold>,
    /// When the record in whose place the claim is would have expired, for the quota.
    replaced: Option<Box<Expiry>>,
    /// Why a round failed.
    failure: Option<StoreError>,
}

/// Claims the key, in rounds, since the record may change between two looks at it.
pub(super) async fn claim<S: Store, W: Comparable>(
    shared: &Arc<Shared<S>>,
    request: &mut Keyed<W>,
) -> ClaimResult {
    if let Some(ineligible) = request.ineligible() {
        return Box::pin(claim_nothing(shared, request, ineligible)).await;
    }
    if request.quota.is_some()
        && let Some(refused) = Box::pin(refuse_over_quota(shared, request)).await
    {
        return refused;
    }
    let mut progress = Progress {
        hold: request.hold,
        ..Progress::default()
    };
    let result = claim_in_rounds(shared, request, &mut progress).await;
    if let (Some(quotas), Some(quota)) = (&shared.quotas, &request.quota)
        && let ClaimResult::Granted(granted) | ClaimResult::Reconcile { granted, .. } = &result
    {
        let replaced = progress.replaced.as_deref().copied();
        quotas.claimed(&quota.usage, &request.name, granted.since, replaced);
    }
    request.hold = progress.hold;
    if let Some(error) = &progress.failure
        && !matches!(result, ClaimResult::Failed { .. })
    {
        let warnings = shared.config.warnings();
        warnings.warn("claim failed and was tried again", Some(error), None);
    }
    result
}

/// Returns the refusal of a new record that would exceed the quota of its scope. A request
/// whose record exists adds none, and is not refused.
async fn refuse_over_quota<S: Store, W: Comparable>(
    shared: &Shared<S>,
    request: &Keyed<W>,
) -> Option<ClaimResult> {
    let (quotas, quota) = (shared.quotas.as_ref()?, request.quota.as_ref()?);
    let exceeded = quotas.exceeded(quota, &request.name).await?;
    let adds_a_record = match shared.call(|store| store.read(&request.name)).await {
        Ok(None) => true,
        Ok(Some(record)) => matches!(
            decide(request, &shared.config, &record),
            Decision::Reclaim(ReclaimAs::Expired)
        ),
        Err(error) => {
            return Some(ClaimResult::Failed {
                error,
                may_have_run: true,
            });
        }
    };
    adds_a_record.then_some(ClaimResult::OverQuota(exceeded))
}

async fn claim_in_rounds<S: Store, W: Comparable>(
    shared: &Shared<S>,
    request: &Keyed<W>,
    progress: &mut Progress,
) -> ClaimResult {
    let store_timeout = shared.config.store_timeout();
    let start = Instant::now();
    let mut result = ClaimResult::Contended;
    for number in 0..ROUNDS {
        let mut timeout = store_timeout;
        if number > 0 {
            time::sleep(jittered(PAUSE * number)).await;
            timeout = store_timeout.saturating_sub(start.elapsed());
        }
        match bounded(timeout, round(shared, request, progress)).await {
            Ok(Some(Round::Granted(grant))) => {
                let mut granted = Granted {
                    grant,
                    since: start,
                };
                if start.elapsed() <= shared.config.lease() / 3 {
                    return progress.granted(granted);
                }
                // Much of the lease has passed: confirm it before the handler starts.
                granted.since = Instant::now();
                match renew(shared, request).await {
                    Ok(Transitioned::Applied) => return progress.granted(granted),
                    Ok(Transitioned::Superseded) => result = ClaimResult::Contended,
                    Err(error) => {
                        return ClaimResult::Failed {
                            error,
                            may_have_run: true,
                        };
                    }
                }
            }
            Ok(Some(Round::Answered(answered))) => return ClaimResult::Answered(answered),
            Ok(None) => result = ClaimResult::Contended,
            Err(error) => {
                let is_passing = matches!(
                    error.kind(),
                    StoreErrorKind::Unavailable | StoreErrorKind::TimedOut
                );
                // A busy or full store says nothing about the round before it.
                if is_passing || !matches!(result, ClaimResult::Failed { .. }) {
                    progress.failure = Some(error.clone());
                    result = ClaimResult::Failed {
                        error,
                        may_have_run: progress.has_seen_record,
                    };
                }
                if !is_passing || start.elapsed() >= store_timeout {
                    return result;
                }
            }
        }
    }
    result
}

impl Progress {
    /// A claim that was made in order to ask is for asking alone.
    fn granted(&self, granted: Granted) -> ClaimResult {
        match self.hold {
            Some(Hold::Reclaim {
                reclaim_as: ReclaimAs::Reconcile,
                ..
            }) => ClaimResult::Reconcile {
                granted,
                may_run: self.may_run,
            },
            _ => ClaimResult::Granted(granted),
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

enum Round {
    Granted(Grant),
    Answered(Answered),
}

/// Claims once. Returns `None` if the record changed meanwhile.
async fn round<S: Store, W: Comparable>(
    shared: &Shared<S>,
    request: &Keyed<W>,
    progress: &mut Progress,
) -> Result<Option<Round>, StoreError> {
    let Keyed { name, claim, .. } = request;
    let before = progress.hold;
    progress.hold = before.or(Some(Hold::Claim));
    let record = match shared.store.claim(name, claim).await {
        Ok(Claimed::Acquired(grant)) => {
            progress.hold = Some(Hold::Claim);
            return Ok(Some(Round::Granted(grant)));
        }
        Ok(Claimed::Occupied(record)) => record,
        Ok(Claimed::Vanished) => {
            progress.hold = before;
            return Ok(None);
        }
        Err(error) => {
            if error.sent_nothing() {
                progress.hold = before;
            }
            return Err(error);
        }
    };
    if record.token != claim.token {
        progress.saw_another(&record);
    }
    progress.has_seen_record = true;
    match decide(request, &shared.config, &record) {
        Decision::Own(grant) => Ok(Some(Round::Granted(grant))),
        Decision::Reclaim(reclaim_as) => {
            let reclaimed = reclaim(shared, request, progress, &record, reclaim_as);
            Ok(Box::pin(reclaimed).await?.map(Round::Granted))
        }
        Decision::MarkUnknown => Ok(Box::pin(mark_unknown(shared, request, &record))
            .await
            .map(Round::Answered)),
        Decision::Answer(answer) => Ok(Some(Round::Answered(Answered::of(&record, answer)))),
    }
}

async fn reclaim<S: Store, W>(
    shared: &Shared<S>,
    Keyed { name, claim, .. }: &Keyed<W>,
    progress: &mut Progress,
    record: &Record,
    reclaim_as: ReclaimAs,
) -> Result<Option<Grant>, StoreError> {
    progress.may_run = shared.config.has_attempts_left(record);
    if shared.quotas.is_some() {
        progress.replaced = expiry(&shared.config, record).map(Box::new);
    }
    let before = progress.hold;
    progress.hold = Some(Hold::Reclaim {
        seen: record.fence,
        reclaim_as,
        released: match record.state {
            RecordState::Released(release) => Some(release),
            _ => None,
        },
    });
    let reclaimed = shared.store.reclaim(name, record.fence, reclaim_as, claim);
    let granted = match reclaimed.await {
        Err(error) if error.sent_nothing() => {
            progress.hold = before;
            return Err(error);
        }
        granted => granted?,
    };
    if granted.is_none() {
        progress.hold = before;
        progress.replaced = None;
    }
    let was_unknown = matches!(
        record.state,
        RecordState::Unknown | RecordState::InProgress { .. }
    );
    if granted.is_some() && reclaim_as == ReclaimAs::Expired && was_unknown {
        Notice::UnknownExpired.tell(shared.config.warnings(), Some(record.operation));
    }
    Ok(granted)
}

/// Marks a record as unknown whose lease has lapsed. Returns `None` if the record is to
/// be claimed again: it changed meanwhile, or a hook may be asked now.
async fn mark_unknown<S: Store, W>(
    shared: &Shared<S>,
    request: &Keyed<W>,
    record: &Record,
) -> Option<Answered> {
    let retention = shared.config.unknown_retention;
    let name: &RecordName = &request.name;
    let marked = shared.store.mark_lapsed(name, record.fence, retention);
    match marked.await {
        Ok(Transitioned::Superseded) => return None,
        Ok(Transitioned::Applied) => {
            count_unknown(shared, request, record);
            if matches!(shared.config.recovery, Recovery::Reconcile(_)) {
                return None;
            }
        }
        // Recorded or not, the outcome is unknown to this request.
        Err(error) => {
            let warnings = shared.config.warnings();
            warnings.warn(MARKING_FAILED, Some(&error), Some(record.operation));
        }
    }
    Some(Answered::of(record, Answer::Unknown))
}

/// Counts for the quota that a record was marked as unknown, and is kept for longer.
fn count_unknown<S: Store, W>(shared: &Shared<S>, request: &Keyed<W>, record: &Record) {
    if let (Some(quotas), Some(quota)) = (&shared.quotas, &request.quota)
        && let Some(before) = expiry(&shared.config, record)
    {
        let after = Expiry::from(Instant::now(), shared.config.unknown_retention);
        quotas.moved(&quota.usage, &request.name, before, after);
    }
}

/// Returns when a record expires, for the quota, or `None` if it has expired.
fn expiry(config: &Config, record: &Record) -> Option<Expiry> {
    let retention = match record.state {
        RecordState::Unknown => config.unknown_retention,
        _ => config.responses.retention,
    };
    record.expires_in.map(|left| Expiry {
        at: Expiry::from(Instant::now(), left).at,
        retention,
    })
}

/// Returns what the record answers to a request that must not claim.
async fn claim_nothing<S: Store, W: Comparable>(
    shared: &Shared<S>,
    request: &Keyed<W>,
    ineligible: Ineligible,
) -> ClaimResult {
    let since = Instant::now();
    let is_body_invalid = matches!(ineligible, Ineligible::BodyInvalid(_));
    for _ in 0..ROUNDS {
        let record = match shared.call(|store| store.read(&request.name)).await {
            Ok(Some(record)) => record,
            Ok(None) => return ClaimResult::Ineligible(ineligible),
            // Such a body is refused with or without a record.
            Err(error) if is_body_invalid => {
                let warnings = shared.config.warnings();
                Notice::tell_if_corrupt(warnings, &error, None);
                warnings.warn(
                    "record not readable, the request is refused because of its body",
                    Some(&error),
                    None,
                );
                return ClaimResult::Ineligible(ineligible);
            }
            Err(error) => {
                return ClaimResult::Failed {
                    error,
                    may_have_run: true,
                };
            }
        };
        let answer = match decide(request, &shared.config, &record) {
            Decision::Own(grant) => return ClaimResult::Granted(Granted { grant, since }),
            Decision::Reclaim(ReclaimAs::Retry | ReclaimAs::Replace | ReclaimAs::Expired) => {
                return ClaimResult::Ineligible(ineligible);
            }
            Decision::Answer(Answer::Mismatch(mismatch))
                if is_body_invalid && mismatch.is_of_body_alone() =>
            {
                return ClaimResult::Ineligible(ineligible);
            }
            Decision::Answer(answer) => answer,
            Decision::Reclaim(ReclaimAs::Rerun | ReclaimAs::Reconcile) => Answer::Unknown,
            Decision::Reclaim(ReclaimAs::Takeover) | Decision::MarkUnknown => {
                let retention = shared.config.unknown_retention;
                let (name, seen) = (&request.name, record.fence);
                let mark = shared.call(|store| store.mark_lapsed(name, seen, retention));
                match mark.await {
                    Ok(Transitioned::Superseded) => continue,
                    Ok(Transitioned::Applied) => count_unknown(shared, request, &record),
                    Err(error) => shared.config.warnings().warn(
                        MARKING_FAILED,
                        Some(&error),
                        Some(record.operation),
                    ),
                }
                Answer::Unknown
            }
        };
        return ClaimResult::Answered(Answered::of(&record, answer));
    }
    ClaimResult::Contended
}

/// Returns what the record answers now, or `None` if the key can be claimed.
pub(super) async fn look_up<S: Store, W: Comparable>(
    shared: &Shared<S>,
    request: &Keyed<W>,
) -> Result<Option<Answered>, StoreError> {
    let record = shared.call(|store| store.read(&request.name)).await?;
    Ok(
        record.and_then(|record| match decide(request, &shared.config, &record) {
            Decision::Answer(answer) => Some(Answered::of(&record, answer)),
            Decision::Own(_) | Decision::Reclaim(_) | Decision::MarkUnknown => None,
        }),
    )
}

async fn renew<S: Store, W>(
    shared: &Shared<S>,
    Keyed { name, claim, .. }: &Keyed<W>,
) -> Result<Transitioned, StoreError> {
    shared
        .call(|store| store.renew(name, claim.token, claim.lease))
        .await
}

const MARKING_FAILED: &str = "recording failed of a lapsed lease as an unknown outcome: the next \
    request or sweep tries again";
const ROUNDS: u32 = 8;
const PAUSE: Duration = Duration::from_millis(20);
