//! The life of one record, as a pure function of its state and the time.
//!
//! Each method is one transition with its guard. The memory store runs them
//! under its lock; the SQL stores say the same in `WHERE` clauses.

use std::time::Duration;

use bytes::Bytes;

use crate::{
    Fence, Fingerprint, OperationId, Token,
    store::{
        Claim, Completion, Grant, MarkedBy, ReclaimAs, Record, RecordState, Release, Resolution,
        Transitioned,
    },
};

/// The token of a record that was resolved: an owner that was alive after all
/// has lost it.
pub(crate) const NOBODYS: Token = Token::from_bytes([0; 16]);

/// A moment on the store's clock, as the time since its start.
pub(crate) type Moment = Duration;

/// One record that exists.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    operation: OperationId,
    fence: Fence,
    attempt: u32,
    takeovers: u32,
    fingerprint: Fingerprint,
    token: Token,
    claimed_at: Moment,
    expires_at: Moment,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    InProgress { lease_until: Moment },
    Completed { response: Bytes },
    Unknown,
    Released(Release),
}

impl Row {
    /// Absent → in progress.
    pub(crate) fn claimed(claim: &Claim, fence: Fence, now: Moment) -> Self {
        Self {
            operation: claim.operation,
            fence,
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

    /// Lapsed, released or expired → in progress. `next` is the store's next
    /// fence; the grant's is larger than the last one too.
    pub(crate) fn reclaim(
        &mut self,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
        next: Fence,
        now: Moment,
    ) -> Option<Grant> {
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
        let fence = next.max(Fence::new(self.fence.get() + 1));
        let (operation, attempt, takeovers) = match reclaim_as {
            ReclaimAs::Takeover | ReclaimAs::Rerun => {
                (self.operation, self.attempt + 1, self.takeovers + 1)
            }
            ReclaimAs::Reconcile => (self.operation, self.attempt, self.takeovers),
            // An answer ends the row of unknown outcomes, and does not undo them.
            ReclaimAs::Retry => (self.operation, self.attempt + 1, self.takeovers.min(1)),
            ReclaimAs::Replace | ReclaimAs::Expired => (claim.operation, 1, 0),
        };
        *self = Self {
            operation,
            attempt,
            takeovers,
            ..Self::claimed(claim, fence, now)
        };
        Some(self.grant())
    }

    pub(crate) fn renew(&mut self, token: Token, lease: Duration, now: Moment) -> Transitioned {
        match &mut self.state {
            State::InProgress { lease_until } if self.token == token => {
                *lease_until = now.saturating_add(lease);
                Transitioned::Applied
            }
            _ => Transitioned::Superseded,
        }
    }

    pub(crate) fn complete(
        &mut self,
        token: Token,
        completion: &Completion,
        now: Moment,
    ) -> Transitioned {
        match self.state {
            _ if self.token != token => Transitioned::Superseded,
            State::InProgress { .. } | State::Unknown => {
                self.state = State::Completed {
                    response: completion.response.clone(),
                };
                self.expires_at = self
                    .claimed_at
                    .saturating_add(completion.retention)
                    .max(now.saturating_add(completion.at_least));
                Transitioned::Applied
            }
            State::Completed { .. } => Transitioned::Applied,
            State::Released(_) => Transitioned::Superseded,
        }
    }

    pub(crate) fn release(&mut self, token: Token, release: Release) -> Transitioned {
        match self.state {
            _ if self.token != token => Transitioned::Superseded,
            State::InProgress { .. } => {
                self.state = State::Released(match self.takeovers {
                    0 => release,
                    // A run before may have had its effect: another request
                    // would repeat it under keys of its own.
                    _ => Release::SameRequest,
                });
                Transitioned::Applied
            }
            State::Released(_) => Transitioned::Applied,
            State::Completed { .. } | State::Unknown => Transitioned::Superseded,
        }
    }

    pub(crate) fn mark_unknown(
        &mut self,
        marked_by: MarkedBy,
        retention: Duration,
        now: Moment,
    ) -> Transitioned {
        let known = match marked_by {
            MarkedBy::Owner(token) => self.token == token,
            MarkedBy::Lapsed(seen) => self.fence == seen,
        };
        let allowed = matches!(marked_by, MarkedBy::Owner(_)) || self.has_lapsed(now);
        match self.state {
            State::InProgress { .. } if known && allowed => {
                self.state = State::Unknown;
                self.expires_at = now.saturating_add(retention);
                Transitioned::Applied
            }
            State::Unknown if known => Transitioned::Applied,
            _ => Transitioned::Superseded,
        }
    }

    pub(crate) fn resolve(
        &mut self,
        seen: Fence,
        resolution: &Resolution,
        now: Moment,
    ) -> Transitioned {
        match self.state {
            State::Unknown if self.fence == seen => {
                self.state = match resolution {
                    Resolution::Happened { response, at_least } => {
                        self.token = NOBODYS;
                        self.expires_at = self.expires_at.max(now.saturating_add(*at_least));
                        State::Completed {
                            response: response.clone(),
                        }
                    }
                    Resolution::DidNotHappen => {
                        self.takeovers = 0;
                        State::Released(Release::SameRequest)
                    }
                };
                Transitioned::Applied
            }
            _ => Transitioned::Superseded,
        }
    }

    /// What a sweep does with this record.
    pub(crate) fn sweep(&mut self, unknown_retention: Duration, now: Moment) -> Sweep {
        match self.state {
            _ if !self.has_expired(now) => Sweep::Kept,
            State::InProgress { .. } if self.has_lapsed(now) => {
                self.state = State::Unknown;
                self.expires_at = now.saturating_add(unknown_retention);
                Sweep::MarkedUnknown
            }
            State::InProgress { .. } => Sweep::Kept,
            State::Unknown => Sweep::Due { unknown: true },
            State::Completed { .. } | State::Released(_) => Sweep::Due { unknown: false },
        }
    }

    /// From when on a sweep has something to do with this record.
    pub(crate) fn due(&self) -> Due {
        match self.state {
            State::InProgress { lease_until } => Due::Marking(self.expires_at.max(lease_until)),
            _ => Due::Removal(self.expires_at),
        }
    }

    pub(crate) fn fence(&self) -> Fence {
        self.fence
    }

    pub(crate) fn grant(&self) -> Grant {
        Grant::new(self.operation, self.fence, self.attempt)
    }

    /// The bytes that a completed record keeps.
    pub(crate) fn kept_bytes(&self) -> usize {
        match &self.state {
            State::Completed { response } => response.len(),
            _ => 0,
        }
    }

    pub(crate) fn snapshot(&self, now: Moment) -> Record {
        let left = |until: Moment| (until >= now).then(|| until.saturating_sub(now));
        Record::new(
            self.operation,
            self.fence,
            self.attempt,
            self.takeovers,
            self.fingerprint,
            self.token,
            now.saturating_sub(self.claimed_at),
            left(self.expires_at),
            match &self.state {
                State::InProgress { lease_until } => RecordState::InProgress {
                    lease_left: left(*lease_until),
                },
                State::Completed { response } => RecordState::Completed {
                    response: response.clone(),
                },
                State::Unknown => RecordState::Unknown,
                State::Released(release) => RecordState::Released(*release),
            },
        )
    }

    fn has_expired(&self, now: Moment) -> bool {
        self.expires_at < now
    }

    fn has_lapsed(&self, now: Moment) -> bool {
        matches!(self.state, State::InProgress { lease_until } if lease_until < now)
    }
}

/// When a sweep is due, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// It becomes unknown after this moment.
    Marking(Moment),
    /// It is removed after this moment.
    Removal(Moment),
}

/// What a sweep does with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sweep {
    Kept,
    MarkedUnknown,
    Due { unknown: bool },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_for_ever_is_kept() {
        let for_ever = Duration::MAX;
        let fingerprint = Fingerprint::from_bytes([0; Fingerprint::LENGTH]);
        let claim = Claim::new(fingerprint, for_ever, for_ever);
        let now = Moment::from_secs(1);
        let mut row = Row::claimed(&claim, Fence::new(1), now);
        assert_eq!(row.renew(claim.token, for_ever, now), Transitioned::Applied);
        let marked_by = MarkedBy::Owner(claim.token);
        assert_eq!(
            row.mark_unknown(marked_by, for_ever, now),
            Transitioned::Applied
        );
        let completion = Completion::new(Bytes::new(), for_ever, for_ever);
        assert_eq!(
            row.complete(claim.token, &completion, now),
            Transitioned::Applied
        );
        assert!(row.snapshot(now).expires_in.is_some());
    }
}
