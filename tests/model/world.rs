//! The state: the record, the requests, the late call, and the history that the
//! invariants need.

use std::{
    hash::{Hash, Hasher},
    time::Duration,
};

use bytes::Bytes;
use tower_idempotency::{
    Fence, OperationId,
    store::{
        Claim, FencedTransition, Fingerprint, ReclaimAs, RecordState, Release, Token, Transition,
        Transitioned,
        admin::{RecordedResponse, Resolution},
        transition::{StoredRecord, Swept},
    },
};

use crate::{
    protocol::{Broken, Recovery},
    steps::Step,
};

#[derive(Clone, Debug)]
pub(crate) struct World {
    pub(crate) row: Option<StoredRecord>,
    /// All that a reader sees of the row at `now`.
    pub(crate) view: Option<View>,
    pub(crate) now: u8,
    pub(crate) next_token: u8,
    pub(crate) faults: u8,
    pub(crate) actors: Vec<Actor>,
    /// A call whose caller no longer waits.
    pub(crate) late: Option<Late>,
    pub(crate) ghost: Ghost,
}

/// One request after another on one host.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Idle,
    /// It has seen the record and is about to make a call; `token` is that of an
    /// earlier call without an answer.
    Saw {
        token: Option<u8>,
        other: bool,
        fence: u64,
        plan: Plan,
    },
    /// Its claim got no answer.
    Asking {
        token: u8,
        other: bool,
    },
    Running {
        token: u8,
        epoch: u8,
        affected: bool,
    },
    /// Its handler has ended; the outcome is not written yet.
    Ending {
        token: u8,
        epoch: u8,
        ending: Ending,
    },
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Plan {
    Takeover,
    Rerun,
    Retry,
    Replace,
    Expired,
    MarkUnknown,
}

impl Plan {
    pub(crate) fn reclaim_as(self) -> ReclaimAs {
        match self {
            Self::Takeover => ReclaimAs::Takeover,
            Self::Rerun => ReclaimAs::Rerun,
            Self::Retry => ReclaimAs::Retry,
            Self::Replace => ReclaimAs::Replace,
            Self::Expired => ReclaimAs::Expired,
            Self::MarkUnknown => unreachable!("a marking claims nothing"),
        }
    }
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ending {
    Completed,
    ReleasedForSame,
    ReleasedForAny,
    Unknown,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Late {
    Claim {
        token: u8,
        other: bool,
    },
    Reclaim {
        token: u8,
        other: bool,
        fence: u64,
        plan: Plan,
    },
    Settle {
        token: u8,
        epoch: u8,
        ending: Ending,
    },
    Withdraw {
        token: u8,
    },
    Renew {
        token: u8,
    },
}

/// The history by which the next step is judged.
#[derive(Clone, Debug, Default, Hash, PartialEq)]
pub(crate) struct Ghost {
    pub(crate) tokens: u16,
    /// The last token granted, and its request.
    pub(crate) last: u8,
    pub(crate) other: bool,
    pub(crate) fence: u64,
    pub(crate) lease_until: u8,
    pub(crate) epoch: u8,
    pub(crate) epochs: [Epoch; EPOCHS],
    pub(crate) broken: u16,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq)]
pub(crate) struct Epoch {
    pub(crate) starts: u8,
    pub(crate) releases: u8,
    pub(crate) effects: u8,
}

#[derive(Clone, Debug, Hash, PartialEq)]
pub(crate) struct View {
    pub(crate) token: u8,
    pub(crate) fence: u64,
    /// Whether this operation had an attempt before.
    pub(crate) again: bool,
    pub(crate) takeovers: u32,
    pub(crate) other: bool,
    pub(crate) age: Duration,
    pub(crate) expires_in: Option<Duration>,
    pub(crate) state: ViewState,
}

#[derive(Clone, Debug, Hash, PartialEq)]
pub(crate) enum ViewState {
    InProgress(Option<Duration>),
    Completed(Bytes),
    Unknown,
    Released { for_any: bool },
}

/// The row itself adds nothing to its view.
impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.view, self.now, self.next_token).hash(state);
        (self.faults, &self.actors, self.late, &self.ghost).hash(state);
    }
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        self.view == other.view
            && self.now == other.now
            && self.next_token == other.next_token
            && self.faults == other.faults
            && self.actors == other.actors
            && self.late == other.late
            && self.ghost == other.ghost
    }
}

impl World {
    pub(crate) fn now(&self) -> Duration {
        moment(self.now)
    }

    /// A new token.
    pub(crate) fn token(&mut self) -> u8 {
        self.next_token += 1;
        self.next_token - 1
    }

    pub(crate) fn send_late(&mut self, late: Late) {
        self.faults -= 1;
        self.late = Some(late);
    }

    pub(crate) fn is(&self, state: &ViewState) -> bool {
        self.row
            .as_ref()
            .is_some_and(|row| view(row, self.now()).state == *state)
    }

    pub(crate) fn is_claimed_by(&self, token: u8) -> bool {
        self.view.as_ref().is_some_and(|view| {
            view.token == token && matches!(view.state, ViewState::InProgress(_))
        })
    }

    pub(crate) fn has_granted(&self, token: u8) -> bool {
        self.ghost.tokens & 1 << token != 0
    }

    /// The tokens of running and ending handlers.
    pub(crate) fn owners(&self) -> impl Iterator<Item = u8> + '_ {
        self.actors.iter().filter_map(|actor| match actor {
            Actor::Running { token, .. } | Actor::Ending { token, .. } => Some(*token),
            Actor::Idle | Actor::Saw { .. } | Actor::Asking { .. } => None,
        })
    }

    /// Whether the owner of the last claim exists, or may still learn of its grant.
    pub(crate) fn has_owner(&self) -> bool {
        self.actors.iter().any(|actor| match actor {
            Actor::Running { token, .. }
            | Actor::Ending { token, .. }
            | Actor::Asking { token, .. }
            | Actor::Saw {
                token: Some(token), ..
            } => *token == self.ghost.last,
            Actor::Idle | Actor::Saw { token: None, .. } => false,
        })
    }

    pub(crate) fn epoch(&self) -> &Epoch {
        &self.ghost.epochs[usize::from(self.ghost.epoch)]
    }

    pub(crate) fn resolve(&mut self, happened: bool) {
        let now = self.now();
        let Some(row) = &mut self.row else { return };
        let resolution = if happened {
            Resolution::Happened(RecordedResponse::tombstone())
        } else {
            Resolution::DidNotHappen
        };
        let _ = row.apply(&resolved(row.grant().fence, resolution), now);
    }

    /// Records a grant, and judges it.
    pub(crate) fn grant(&mut self, row: &StoredRecord, token: u8, other: bool, plan: Option<Plan>) {
        let fence = row.grant().fence.get();
        let used = self.has_granted(token);
        self.demand(!used, Broken::I1);
        self.demand(fence > self.ghost.fence, Broken::I2);
        match plan {
            None | Some(Plan::Expired) => {
                self.ghost.epoch += 1;
                self.forget_calls_in_flight();
            }
            Some(Plan::Takeover) => {
                self.demand(self.ghost.lease_until < self.now, Broken::I3);
                self.demand(self.ghost.other == other, Broken::I8);
            }
            Some(Plan::Rerun | Plan::Retry) => {
                self.demand(self.ghost.other == other, Broken::I8);
            }
            Some(Plan::Replace | Plan::MarkUnknown) => {}
        }
        self.ghost.tokens |= 1 << token;
        self.ghost.last = token;
        self.ghost.other = other;
        self.ghost.fence = fence;
        self.ghost.lease_until = self.now + LEASE;
    }

    /// Drops late calls and unanswered claims: none outlives its record.
    pub(crate) fn forget_calls_in_flight(&mut self) {
        self.late = None;
        for actor in &mut self.actors {
            if matches!(
                actor,
                Actor::Asking { .. } | Actor::Saw { token: Some(_), .. }
            ) {
                *actor = Actor::Idle;
            }
        }
    }

    /// Clears epochs that no call can change, so that equal states merge.
    pub(crate) fn forget_past_epochs(&mut self) {
        for number in 0..self.ghost.epoch {
            let of_actor = |actor: &Actor| match actor {
                Actor::Running { epoch, .. } | Actor::Ending { epoch, .. } => *epoch == number,
                Actor::Idle | Actor::Saw { .. } | Actor::Asking { .. } => false,
            };
            let of_late = matches!(self.late, Some(Late::Settle { epoch, .. }) if epoch == number);
            if !of_late && !self.actors.iter().any(of_actor) {
                self.ghost.epochs[usize::from(number)] = Epoch::default();
            }
        }
    }

    /// Makes all fences that no record will have again the same, so that equal states merge.
    pub(crate) fn forget_past_fences(&mut self) {
        let last = self.view.as_ref().map_or(0, |view| view.fence);
        let of_actors = self.actors.iter_mut().filter_map(|actor| match actor {
            Actor::Saw { fence, .. } => Some(fence),
            Actor::Idle | Actor::Asking { .. } | Actor::Running { .. } | Actor::Ending { .. } => {
                None
            }
        });
        let of_late = self.late.iter_mut().filter_map(|late| match late {
            Late::Reclaim { fence, .. } => Some(fence),
            Late::Claim { .. }
            | Late::Settle { .. }
            | Late::Withdraw { .. }
            | Late::Renew { .. } => None,
        });
        for fence in of_actors.chain(of_late) {
            if *fence != last {
                *fence = 0;
            }
        }
    }

    pub(crate) fn start(&mut self, recovery: Recovery) {
        let epoch = &mut self.ghost.epochs[usize::from(self.ghost.epoch)];
        epoch.starts += 1;
        let once = recovery == Recovery::Rerun || epoch.starts <= 1 + epoch.releases;
        self.demand(once, Broken::I6);
    }

    pub(crate) fn affect(&mut self, epoch: u8) {
        let epoch = &mut self.ghost.epochs[usize::from(epoch)];
        epoch.effects += 1;
        let once = epoch.effects <= 1;
        self.demand(once, Broken::I6);
    }

    pub(crate) fn applied_for(&mut self, token: u8, settled: Transitioned) -> Transitioned {
        if settled == Transitioned::Applied {
            self.demand(token == self.ghost.last, Broken::I1);
        }
        settled
    }

    /// Judges the change of the record in one step.
    pub(crate) fn judge_change(&mut self, before: &Self, step: Step) {
        let (Some(was), is) = (&before.view, &self.view) else {
            return;
        };
        let expired = was.expires_in.is_none();
        let state = is.as_ref().map(|view| &view.state);
        let resolved = matches!(step, Step::Resolve { .. });
        let released = matches!(state, Some(ViewState::Released { .. }));
        let completed = matches!(state, Some(ViewState::Completed(_)));
        let (mut i4, mut i11) = (true, true);
        match &was.state {
            ViewState::Completed(_) if !expired => i4 = state == Some(&was.state),
            ViewState::Unknown if !expired => {
                let claimed = matches!(step, Step::Continue { .. } | Step::Arrive)
                    && matches!(state, Some(ViewState::InProgress(_)));
                i11 = state == Some(&ViewState::Unknown)
                    || completed
                    || claimed
                    || resolved && released;
            }
            // An abandoned run is shown as unknown before it is removed.
            ViewState::InProgress(_) => i11 = is.is_some(),
            _ => {}
        }
        let ended = matches!(was.state, ViewState::InProgress(_) | ViewState::Unknown);
        if ended && released {
            self.ghost.epochs[usize::from(self.ghost.epoch)].releases += 1;
        }
        self.demand(i4, Broken::I4);
        self.demand(i11, Broken::I11);
    }

    /// I10: sweeps alone remove any record in the end.
    pub(crate) fn is_removed_in_the_end(&self) -> bool {
        let Some(mut row) = self.row.clone() else {
            return true;
        };
        let sweeps = [LATER, LATER * 2].map(|now| row.sweep(moment(UNKNOWN), moment(now)));
        sweeps
            .iter()
            .any(|swept| matches!(swept, Swept::Remove { .. }))
    }

    pub(crate) fn demand(&mut self, holds: bool, otherwise: Broken) {
        if !holds {
            self.ghost.broken |= 1 << otherwise as u16;
        }
    }

    pub(crate) fn keeps(&self, invariant: Broken) -> bool {
        self.ghost.broken & 1 << invariant as u16 == 0
    }
}

pub(crate) fn view(row: &StoredRecord, now: Duration) -> View {
    let record = row.read(now);
    View {
        token: record.token.as_bytes()[0],
        fence: record.fence.get(),
        again: record.attempt > 1,
        takeovers: record.takeovers,
        other: record.fingerprint.as_bytes()[0] == 1,
        age: record.age,
        expires_in: record.expires_in,
        state: match record.state {
            RecordState::InProgress { lease_left } => ViewState::InProgress(lease_left),
            RecordState::Completed { response } => ViewState::Completed(response),
            RecordState::Unknown => ViewState::Unknown,
            RecordState::Released(release) => ViewState::Released {
                for_any: release == Release::AnyRequest,
            },
            state => unreachable!("{state:?}"),
        },
    }
}

/// The claim of a request with this token.
pub(crate) fn claim_of(token: u8, other: bool) -> Claim {
    let fingerprint = Fingerprint::from_bytes([u8::from(other); Fingerprint::LENGTH]);
    let mut claim = Claim::new(fingerprint, moment(LEASE), moment(RETENTION));
    claim.token = named(token);
    claim.operation = OperationId::from_bytes([token; 16]);
    claim
}

pub(crate) fn named(token: u8) -> Token {
    Token::from_bytes([token; 16])
}

pub(crate) fn response(token: u8) -> Bytes {
    Bytes::from_static(&RESPONSES).slice(usize::from(token)..usize::from(token) + 1)
}

pub(crate) fn moment(ticks: u8) -> Duration {
    Duration::from_secs(ticks.into())
}

/// A lease lapses with the next tick.
pub(crate) const LEASE: u8 = 0;
pub(crate) const RETENTION: u8 = 1;
pub(crate) const UNKNOWN: u8 = 1;
/// After everything that happens.
pub(crate) const LATER: u8 = 100;
pub(crate) const ATTEMPTS: u32 = 3;
pub(crate) const EPOCHS: usize = 8;
pub(crate) static RESPONSES: [u8; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];

pub(crate) fn resolved(seen: Fence, resolution: Resolution) -> Transition {
    let resolve = FencedTransition::Resolve {
        resolution: Box::new(resolution),
        at_least: moment(1),
    };
    Transition::Fenced(seen, resolve)
}
