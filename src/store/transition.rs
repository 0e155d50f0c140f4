//! The life of one record as a pure function of its state and the time.
//!
//! A [`StoredRecord`] is what a store keeps under a name. Its methods are the
//! transitions of the [`Store`](super::Store) contract, with their guards. A store
//! loads the record, calls one method, and keeps the changed record, all in one atomic
//! step. That is a step under a lock, or a compare-and-swap that starts again if it
//! fails.
//!
//! Nothing here reads a clock. Each method takes `now`, the time on the store's clock
//! since an origin of its choice, such as 1970 or the start of the process. The origin
//! must not change while there are records.
//!
//! ```
//! use std::time::Duration;
//! use tower_idempotency::store::{Claim, Completion, OwnerTransition, RecordState, Transition, Transitioned, transition::StoredRecord, Fingerprint};
//!
//! let hour = Duration::from_secs(3600);
//! let claim = Claim::new(Fingerprint::from_bytes([0; Fingerprint::LENGTH]), hour, hour);
//! let now = Duration::ZERO;
//! let mut record = StoredRecord::claimed(&claim, now);
//!
//! let completion = Completion::new("the encoded response".into(), hour, hour);
//! let complete = Transition::Owner(claim.token, OwnerTransition::Complete(completion));
//! assert_eq!(record.apply(&complete, now), Transitioned::Applied);
//! assert!(matches!(record.read(now).state, RecordState::Completed { .. }));
//! ```

use std::{array, fmt, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use super::{
    Claim, Claimed, FencedTransition, Grant, OwnerTransition, ReclaimAs, Record, RecordState,
    Release, StoreError, Transition, Transitioned, admin::Resolution,
};
use crate::{
    fingerprint::Fingerprint,
    key::OperationId,
    store::{Fence, Token},
};

/// The token of a record that was forgotten, or resolved as happened. No claim has it.
pub(crate) const NO_OWNER: Token = Token::from_bytes([0; 16]);

/// How long a forgotten record is kept from then on: one day.
///
/// It keeps the last fence, so that the next claim has a larger one even if the clock is
/// set back by less than this.
pub const FORGOTTEN_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Returns the fence of a claim at `now`: the microseconds on the store's clock, or the
/// one after `last` if that is larger.
///
/// With a clock that counts from 1970, it stays below 2^53 until the year 2255.
#[must_use]
pub fn next_fence(last: Fence, now: Duration) -> Fence {
    let now = u64::try_from(now.as_micros()).unwrap_or(u64::MAX);
    Fence::from(now.max(last.get().saturating_add(1)))
}

/// A record as a store keeps it, with moments on the store's clock.
///
/// There is no value for an absent record: [`claimed`](Self::claimed) makes the
/// first one of a name, and after [`Swept::Remove`] there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    pub(crate) operation: OperationId,
    pub(crate) fence: Fence,
    pub(crate) attempt: u32,
    pub(crate) takeovers: u32,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) token: Token,
    pub(crate) claimed_at: Duration,
    pub(crate) expires_at: Duration,
    pub(crate) state: State,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum State {
    InProgress { lease_until: Duration },
    Completed { response: Bytes },
    Unknown,
    Released(Release),
}

impl StoredRecord {
    /// The record of a first claim: in progress, attempt 1.
    ///
    /// Keep it only if the name has no record. Its fence comes from the clock, and is
    /// larger than those of records that were [swept](Self::sweep) before. A crash right
    /// after the record is kept leaves it in progress, and its lease lapses.
    #[must_use]
    pub fn claimed(claim: &Claim, now: Duration) -> Self {
        Self {
            operation: claim.operation,
            fence: next_fence(Fence::from(0), now),
            attempt: 1,
            takeovers: 0,
            fingerprint: claim.fingerprint,
            token: claim.token,
            claimed_at: now,
            expires_at: now.saturating_add(claim.retention),
            state: State::InProgress {
                lease_until: now.saturating_add(claim.lease),
            },
        }
    }

    /// Returns the answer to a claim of a name that has this record.
    ///
    /// Changes nothing, unless the record is that of an earlier call with the claim's
    /// token, whose answer was lost. Then the claim gets a new fence. Keep it before you
    /// answer: a write tells that the store's replicas have the record.
    pub fn claim(&mut self, claim: &Claim, now: Duration) -> Claimed {
        if self.is_own(claim) {
            self.fence = next_fence(self.fence, now);
        }
        Claimed::Occupied(self.read(now))
    }

    /// Claims the record again. Returns `None`, and changes nothing, unless `seen`
    /// is its fence and its state is the one that `reclaim_as` names.
    ///
    /// If an earlier call with the claim's token was granted, whose answer was lost, it is
    /// granted again with a new fence. A crash right after the record is kept leaves it in
    /// progress, and its lease lapses.
    pub fn reclaim(
        &mut self,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
        now: Duration,
    ) -> Option<Grant> {
        if self.is_own(claim) {
            self.fence = next_fence(self.fence, now);
            return Some(self.grant());
        }
        let expired = self.has_expired(now);
        let allowed = match (&self.state, reclaim_as) {
            (State::InProgress { .. }, ReclaimAs::Takeover) => self.has_lapsed(now),
            (State::Unknown, ReclaimAs::Rerun | ReclaimAs::Reconcile)
            | (State::Released(_), ReclaimAs::Retry)
            | (State::Released(Release::AnyRequest), ReclaimAs::Replace) => !expired,
            (State::InProgress { .. }, ReclaimAs::Expired) => expired && self.has_lapsed(now),
            (_, ReclaimAs::Expired) => expired,
            _ => false,
        };
        if !allowed || self.fence != seen {
            return None;
        }
        let attempt = self.attempt.saturating_add(1);
        let (operation, attempt, takeovers) = match reclaim_as {
            ReclaimAs::Takeover | ReclaimAs::Rerun => {
                (self.operation, attempt, self.takeovers.saturating_add(1))
            }
            ReclaimAs::Reconcile => (self.operation, self.attempt, self.takeovers),
            // A release does not undo the run before it, whose outcome is unknown.
            ReclaimAs::Retry => (self.operation, attempt, self.takeovers.min(1)),
            ReclaimAs::Replace | ReclaimAs::Expired => (claim.operation, 1, 0),
        };
        *self = Self {
            operation,
            fence: next_fence(self.fence, now),
            attempt,
            takeovers,
            ..Self::claimed(claim, now)
        };
        Some(self.grant())
    }

    /// Makes one transition of the last claim.
    ///
    /// Returns [`Superseded`](Transitioned::Superseded), and changes nothing, if its token
    /// or fence is another, or if the state of the record does not allow the transition.
    /// If the transition was made before, returns [`Applied`](Transitioned::Applied) and
    /// changes nothing.
    pub fn apply(&mut self, transition: &Transition, now: Duration) -> Transitioned {
        match transition {
            Transition::Owner(token, transition) => self.apply_owner(*token, transition, now),
            Transition::Fenced(seen, transition) => self.apply_fenced(*seen, transition, now),
        }
    }

    pub(crate) fn apply_owner(
        &mut self,
        token: Token,
        transition: &OwnerTransition,
        now: Duration,
    ) -> Transitioned {
        if self.token != token {
            return Transitioned::Superseded;
        }
        match (transition, &self.state) {
            (OwnerTransition::Complete(_), State::Completed { .. })
            | (OwnerTransition::Release(_), State::Released(_))
            | (OwnerTransition::MarkUnknown { .. }, State::Unknown) => {}
            (OwnerTransition::Renew { lease }, State::InProgress { .. }) => {
                let lease_until = now.saturating_add(*lease);
                self.state = State::InProgress { lease_until };
            }
            (OwnerTransition::Complete(completion), State::InProgress { .. } | State::Unknown) => {
                self.expires_at = self
                    .claimed_at
                    .saturating_add(completion.retention)
                    .max(now.saturating_add(completion.at_least));
                let response = completion.response.clone();
                self.state = State::Completed { response };
            }
            (OwnerTransition::Release(release), State::InProgress { .. }) => {
                self.state = State::Released(match self.takeovers {
                    0 => *release,
                    // A run before may have had its effect: another request
                    // would repeat it under keys of its own.
                    _ => Release::SameRequest,
                });
            }
            (OwnerTransition::MarkUnknown { retention }, State::InProgress { .. }) => {
                self.mark_unknown(*retention, now);
            }
            _ => return Transitioned::Superseded,
        }
        Transitioned::Applied
    }

    pub(crate) fn apply_fenced(
        &mut self,
        seen: Fence,
        transition: &FencedTransition,
        now: Duration,
    ) -> Transitioned {
        if self.fence != seen {
            return Transitioned::Superseded;
        }
        match (transition, &self.state) {
            (FencedTransition::MarkLapsed { .. }, State::Unknown) => {}
            (FencedTransition::MarkLapsed { retention }, State::InProgress { .. })
                if self.has_lapsed(now) =>
            {
                self.mark_unknown(*retention, now);
            }
            (
                FencedTransition::Resolve {
                    resolution,
                    at_least,
                },
                State::Unknown | State::InProgress { .. },
            ) if !self.is_in_progress() || self.has_lapsed(now) => {
                self.expires_at = self.expires_at.max(now.saturating_add(*at_least));
                match &**resolution {
                    Resolution::Happened(response) => {
                        self.token = NO_OWNER;
                        let response = response.encode();
                        self.state = State::Completed { response };
                    }
                    Resolution::DidNotHappen => {
                        self.takeovers = 0;
                        self.state = State::Released(Release::SameRequest);
                    }
                }
            }
            (FencedTransition::Forget, State::Released(Release::AnyRequest))
                if self.token == NO_OWNER => {}
            (FencedTransition::Forget, _) => {
                self.token = NO_OWNER;
                self.takeovers = 0;
                self.expires_at = now.saturating_add(FORGOTTEN_RETENTION);
                self.state = State::Released(Release::AnyRequest);
            }
            _ => return Transitioned::Superseded,
        }
        Transitioned::Applied
    }

    /// Sweeps the record, and returns the result.
    ///
    /// Does nothing before [`sweep_after`](Self::sweep_after) has passed.
    pub fn sweep(&mut self, unknown_retention: Duration, now: Duration) -> Swept {
        match self.state {
            _ if now <= self.sweep_after() => Swept::Kept,
            State::InProgress { .. } => {
                self.mark_unknown(unknown_retention, now);
                Swept::MarkedUnknown
            }
            State::Unknown => Swept::Remove { unknown: true },
            State::Completed { .. } | State::Released(_) => Swept::Remove { unknown: false },
        }
    }

    /// The last moment at which a sweep has nothing to do with the record, if nothing
    /// changes it: the key of an index for sweeps.
    ///
    /// It is not before the moment of the fence, which lies ahead if the clock was set
    /// back. So the next claim of the name has a larger fence.
    ///
    /// A store that removes records by itself, for example by a time to live, must
    /// not do so before a sweep has seen the record.
    #[must_use]
    pub fn sweep_after(&self) -> Duration {
        let fence = Duration::from_micros(self.fence.get().saturating_add(1));
        let due = self.expires_at.max(fence);
        match self.state {
            State::InProgress { lease_until } => due.max(lease_until),
            _ => due,
        }
    }

    /// Whether the last claim is in progress, lapsed or not.
    #[must_use]
    pub fn is_in_progress(&self) -> bool {
        matches!(self.state, State::InProgress { .. })
    }

    /// The length of the recorded response in bytes; 0 unless the record is completed.
    #[must_use]
    pub fn response_len(&self) -> usize {
        match &self.state {
            State::Completed { response } => response.len(),
            _ => 0,
        }
    }

    /// What the last claim was granted.
    #[must_use]
    pub fn grant(&self) -> Grant {
        Grant {
            operation: self.operation,
            fence: self.fence,
            attempt: self.attempt,
        }
    }

    /// The record as [`Store::read`](super::Store::read) shows it at `now`.
    #[must_use]
    pub fn read(&self, now: Duration) -> Record {
        let left = |until: Duration| until.checked_sub(now);
        Record {
            operation: self.operation,
            fence: self.fence,
            attempt: self.attempt,
            takeovers: self.takeovers,
            fingerprint: self.fingerprint,
            token: self.token,
            age: now.saturating_sub(self.claimed_at),
            expires_in: left(self.expires_at),
            state: match &self.state {
                State::InProgress { lease_until } => RecordState::InProgress {
                    lease_left: left(*lease_until),
                },
                State::Completed { response } => RecordState::Completed {
                    response: response.clone(),
                },
                State::Unknown => RecordState::Unknown,
                State::Released(release) => RecordState::Released(*release),
            },
        }
    }

    /// Encodes the record, for a store that keeps bytes.
    ///
    /// Moments are encoded in whole microseconds. Equal records have equal bytes, so that a compare-and-swap may compare the
    /// bytes. Later versions of this crate decode them.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(ENCODED_LEN + self.response_len());
        bytes.put_u8(VERSION);
        let (state, lease_until, response) = match &self.state {
            State::InProgress { lease_until } => (1, *lease_until, None),
            State::Completed { response } => (2, Duration::ZERO, Some(response)),
            State::Unknown => (3, Duration::ZERO, None),
            State::Released(Release::SameRequest) => (4, Duration::ZERO, None),
            State::Released(Release::AnyRequest) => (5, Duration::ZERO, None),
        };
        bytes.put_u8(state);
        bytes.put_u32_le(self.attempt);
        bytes.put_u32_le(self.takeovers);
        bytes.put_u64_le(self.fence.get());
        for moment in [self.claimed_at, self.expires_at, lease_until] {
            bytes.put_u64_le(u64::try_from(moment.as_micros()).unwrap_or(u64::MAX));
        }
        bytes.put_slice(self.operation.as_bytes());
        bytes.put_slice(self.token.as_bytes());
        bytes.put_slice(self.fingerprint.as_bytes());
        bytes.put_slice(response.map_or(&[], |response| response));
        bytes.freeze()
    }

    /// Decodes a record. A recorded response shares the memory of `bytes`.
    ///
    /// # Errors
    ///
    /// [`Corrupt`](super::StoreErrorKind::Corrupt) if the bytes are no record, or of a
    /// version that is not known here. Such a record is never absent.
    pub fn from_bytes(mut bytes: Bytes) -> Result<Self, StoreError> {
        if bytes.len() < ENCODED_LEN || bytes.get_u8() != VERSION {
            return Err(StoreError::corrupt("record: version or length"));
        }
        let state = bytes.get_u8();
        let (attempt, takeovers) = (bytes.get_u32_le(), bytes.get_u32_le());
        let fence = Fence::from(bytes.get_u64_le());
        let [claimed_at, expires_at, lease_until] =
            array::from_fn(|_| Duration::from_micros(bytes.get_u64_le()));
        let operation = OperationId::from_bytes(take(&mut bytes));
        let token = Token::from_bytes(take(&mut bytes));
        let fingerprint = Fingerprint::from_bytes(take(&mut bytes));
        let state = match (state, bytes.is_empty()) {
            (1, true) => State::InProgress { lease_until },
            (2, _) => State::Completed { response: bytes },
            (3, true) => State::Unknown,
            (4, true) => State::Released(Release::SameRequest),
            (5, true) => State::Released(Release::AnyRequest),
            _ => return Err(StoreError::corrupt("record: state")),
        };
        Ok(Self {
            operation,
            fence,
            attempt,
            takeovers,
            fingerprint,
            token,
            claimed_at,
            expires_at,
            state,
        })
    }

    fn mark_unknown(&mut self, retention: Duration, now: Duration) {
        self.state = State::Unknown;
        self.expires_at = now.saturating_add(retention);
    }

    fn is_own(&self, claim: &Claim) -> bool {
        self.is_in_progress() && self.token == claim.token
    }

    fn has_expired(&self, now: Duration) -> bool {
        self.expires_at < now
    }

    fn has_lapsed(&self, now: Duration) -> bool {
        matches!(self.state, State::InProgress { lease_until } if lease_until < now)
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InProgress { lease_until } => f
                .debug_struct("InProgress")
                .field("lease_until", lease_until)
                .finish(),
            Self::Completed { response } => write!(f, "Completed({} bytes)", response.len()),
            Self::Unknown => f.write_str("Unknown"),
            Self::Released(release) => f.debug_tuple("Released").field(release).finish(),
        }
    }
}

/// What a sweep did with a record.
///
/// Exhaustive on purpose: a store removes the record or keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Swept {
    /// Nothing: it has not expired, or its owner has a live lease.
    Kept,
    /// It had expired in progress with a lapsed lease, and is unknown now. Keep its new
    /// state.
    MarkedUnknown,
    /// It has expired. Remove it.
    Remove {
        /// Whether its outcome was still unknown.
        unknown: bool,
    },
}

fn take<const N: usize>(bytes: &mut Bytes) -> [u8; N] {
    let mut taken = [0; N];
    bytes.copy_to_slice(&mut taken);
    taken
}

pub(crate) const VERSION: u8 = 1;

/// The length of an encoded record without its response.
pub(crate) const ENCODED_LEN: usize = 2 + 2 * 4 + 4 * 8 + 2 * 16 + Fingerprint::LENGTH;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Completion, admin::RecordedResponse};

    const GUIDE: &str = include_str!("../../docs/writing-a-store.md");
    const STATES: [&str; 6] = ["live", "lapsed", "completed", "unknown", "released", "free"];
    const NOW: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_secs(1);
    const HOUR: Duration = Duration::from_secs(3600);
    #[derive(Clone, Copy)]
    enum Call {
        Apply(fn(&Claim, Fence) -> Transition),
        Reclaim(ReclaimAs),
        Sweep,
    }

    #[test]
    fn each_call_in_each_state_does_as_documented() {
        let calls: [(&str, Call); 16] = [
            (
                "`Renew`",
                Call::Apply(|claim, _| by_owner(claim, OwnerTransition::Renew { lease: HOUR })),
            ),
            (
                "`Complete`",
                Call::Apply(|claim, _| complete(claim, "late", HOUR, HOUR)),
            ),
            (
                "`Release(SameRequest)`",
                Call::Apply(|claim, _| release(claim, Release::SameRequest)),
            ),
            (
                "`Release(AnyRequest)`",
                Call::Apply(|claim, _| release(claim, Release::AnyRequest)),
            ),
            (
                "`MarkUnknown`",
                Call::Apply(|claim, _| mark_unknown(claim, HOUR)),
            ),
            (
                "`MarkLapsed`",
                Call::Apply(|_, seen| {
                    let retention = HOUR;
                    Transition::Fenced(seen, FencedTransition::MarkLapsed { retention })
                }),
            ),
            (
                "`Resolve(Happened)`",
                Call::Apply(|_, seen| {
                    let response = RecordedResponse::tombstone();
                    resolve(seen, Resolution::Happened(response))
                }),
            ),
            (
                "`Resolve(DidNotHappen)`",
                Call::Apply(|_, seen| resolve(seen, Resolution::DidNotHappen)),
            ),
            (
                "`Forget`",
                Call::Apply(|_, seen| Transition::Fenced(seen, FencedTransition::Forget)),
            ),
            ("`Takeover`", Call::Reclaim(ReclaimAs::Takeover)),
            ("`Rerun`", Call::Reclaim(ReclaimAs::Rerun)),
            ("`Reconcile`", Call::Reclaim(ReclaimAs::Reconcile)),
            ("`Retry`", Call::Reclaim(ReclaimAs::Retry)),
            ("`Replace`", Call::Reclaim(ReclaimAs::Replace)),
            ("`Expired`", Call::Reclaim(ReclaimAs::Expired)),
            ("sweep", Call::Sweep),
        ];
        let mut table = vec![
            format!("| call | expired | {} |", STATES.join(" | ")),
            "|---|---|---|---|---|---|---|---|".to_owned(),
        ];
        for (name, call) in calls {
            let live = STATES.map(|state| effect(call, state, HOUR));
            let expired = STATES.map(|state| effect(call, state, SHORT));
            let nothing = ["–"; 6];
            let (when, effects) = match () {
                () if live == expired => ("either", live),
                () if expired == nothing => ("no", live),
                () if live == nothing => ("yes", expired),
                () => panic!("{name}: {live:?}, and expired {expired:?}"),
            };
            table.push(format!("| {name} | {when} | {} |", effects.join(" | ")));
        }
        let table = table.join("\n");
        assert!(GUIDE.contains(&table), "the guide is to have\n{table}");
    }

    /// What a call makes of a record in this state. No call does anything with the
    /// token or fence of another claim.
    fn effect(call: Call, state: &'static str, retention: Duration) -> &'static str {
        let (claim, before) = record(state, retention);
        let seen = before.grant().fence;
        let strange = Fence::from(seen.get() + 1);
        let mut after = before.clone();
        let applied = match call {
            Call::Apply(transition) => {
                let stranger = new_claim(HOUR, HOUR);
                let refused = after.apply(&transition(&stranger, strange), NOW);
                assert_eq!((refused, &after), (Transitioned::Superseded, &before));
                after.apply(&transition(&claim, seen), NOW) == Transitioned::Applied
            }
            Call::Reclaim(reclaim_as) => {
                let claim = new_claim(HOUR, HOUR);
                let refused = after.reclaim(strange, reclaim_as, &claim, NOW);
                assert_eq!((refused, &after), (None, &before));
                let granted = after.reclaim(seen, reclaim_as, &claim, NOW);
                assert!(granted.is_none_or(|grant| grant.fence > seen));
                granted.is_some()
            }
            Call::Sweep => match after.sweep(HOUR, NOW) {
                Swept::Kept => false,
                Swept::MarkedUnknown => true,
                Swept::Remove { unknown } => {
                    assert_eq!(unknown, state == "unknown");
                    return "removed";
                }
            },
        };
        assert!(applied || after == before, "a refused call changes nothing");
        match after.read(NOW).state {
            _ if !applied => "–",
            _ if after == before => "=",
            RecordState::InProgress { lease_left } => match lease_left {
                Some(_) => "live",
                None => "lapsed",
            },
            RecordState::Completed { .. } => "completed",
            RecordState::Unknown => "unknown",
            RecordState::Released(Release::SameRequest) => "released",
            RecordState::Released(Release::AnyRequest) => "free",
        }
    }

    /// A record in this state at [`NOW`], and its last claim.
    fn record(state: &str, retention: Duration) -> (Claim, StoredRecord) {
        let lease = if state == "lapsed" { SHORT } else { HOUR };
        let claim = new_claim(lease, retention);
        let mut record = StoredRecord::claimed(&claim, Duration::ZERO);
        let transition = match state {
            "completed" => complete(&claim, "kept", retention, Duration::ZERO),
            "unknown" => mark_unknown(&claim, retention),
            "released" => release(&claim, Release::SameRequest),
            "free" => release(&claim, Release::AnyRequest),
            _ => return (claim, record),
        };
        let applied = record.apply(&transition, Duration::ZERO);
        assert_eq!(applied, Transitioned::Applied);
        (claim, record)
    }

    fn new_claim(lease: Duration, retention: Duration) -> Claim {
        let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
        Claim::new(fingerprint, lease, retention)
    }

    fn by_owner(claim: &Claim, transition: OwnerTransition) -> Transition {
        Transition::Owner(claim.token, transition)
    }

    fn complete(
        claim: &Claim,
        response: &'static str,
        retention: Duration,
        at_least: Duration,
    ) -> Transition {
        let completion = Completion::new(response.into(), retention, at_least);
        by_owner(claim, OwnerTransition::Complete(completion))
    }

    fn release(claim: &Claim, release: Release) -> Transition {
        by_owner(claim, OwnerTransition::Release(release))
    }

    fn mark_unknown(claim: &Claim, retention: Duration) -> Transition {
        by_owner(claim, OwnerTransition::MarkUnknown { retention })
    }

    fn resolve(seen: Fence, resolution: Resolution) -> Transition {
        let resolve = FencedTransition::Resolve {
            resolution: Box::new(resolution),
            at_least: HOUR,
        };
        Transition::Fenced(seen, resolve)
    }

    #[test]
    fn bytes_of_version_1_stay_readable() {
        let claim = Claim {
            token: Token::from_bytes([0xb1; 16]),
            operation: OperationId::from_bytes([0xa1; 16]),
            ..Claim::new(
                Fingerprint::from_bytes([0xc1; Fingerprint::LENGTH]),
                Duration::new(3, 4_000),
                HOUR,
            )
        };
        let mut record = StoredRecord::claimed(&claim, Duration::new(1, 2_000));
        record.attempt = 5;
        record.takeovers = 6;
        let head = |state: &str, expires: &str, lease: &str| {
            let bytes = format!(
                "01{state}050000000600000042420f000000000042420f0000000000{expires}{lease}{}{}{}",
                "a1".repeat(16),
                "b1".repeat(16),
                "c1".repeat(Fingerprint::LENGTH),
            );
            hex::decode(bytes).unwrap()
        };
        let golden = head("01", "42e6a2d600000000", "06093d0000000000");
        assert_eq!(record.to_bytes(), golden);
        assert_eq!(StoredRecord::from_bytes(golden.into()).unwrap(), record);

        let complete = complete(&claim, "kept", HOUR, Duration::ZERO);
        assert_eq!(record.apply(&complete, NOW), Transitioned::Applied);
        let mut golden = head("02", "42e6a2d600000000", "0000000000000000");
        golden.extend(b"kept");
        assert_eq!(record.to_bytes(), golden);
        assert_eq!(StoredRecord::from_bytes(golden.into()).unwrap(), record);
    }

    #[test]
    fn every_state_is_decoded_and_every_cut_is_corrupt() {
        for state in STATES {
            let (_, record) = record(state, HOUR);
            let bytes = record.to_bytes();
            assert_eq!(StoredRecord::from_bytes(bytes.clone()).unwrap(), record);
            for end in 0..ENCODED_LEN {
                assert!(StoredRecord::from_bytes(bytes.slice(..end)).is_err());
            }
            for (index, byte) in [(0, 2), (1, 0), (1, 6)] {
                let mut damaged = bytes.to_vec();
                damaged[index] = byte;
                assert!(StoredRecord::from_bytes(damaged.into()).is_err());
            }
            let longer = [&bytes[..], b"!"].concat();
            let decoded = StoredRecord::from_bytes(longer.into());
            assert_eq!(decoded.is_ok(), state == "completed");
        }
    }

    #[test]
    fn largest_counts_of_a_stored_record_stay_as_they_are() {
        let (claim, mut record) = record("unknown", HOUR);
        (record.attempt, record.takeovers) = (u32::MAX, u32::MAX);
        record.fence = Fence::from(u64::MAX - 1);
        let seen = record.fence;
        let grant = record.reclaim(seen, ReclaimAs::Rerun, &claim, NOW).unwrap();
        assert_eq!((grant.attempt, grant.fence.get()), (u32::MAX, u64::MAX));
        assert_eq!(record.takeovers, u32::MAX);
    }

    #[test]
    fn durations_beyond_the_clock_are_kept() {
        let for_ever = Duration::MAX;
        let claim = new_claim(for_ever, for_ever);
        let now = Duration::from_secs(1);
        let mut record = StoredRecord::claimed(&claim, now);
        for transition in [
            by_owner(&claim, OwnerTransition::Renew { lease: for_ever }),
            mark_unknown(&claim, for_ever),
            complete(&claim, "", for_ever, for_ever),
        ] {
            assert_eq!(record.apply(&transition, now), Transitioned::Applied);
        }
        assert!(record.read(now).expires_in.is_some());
    }
}
