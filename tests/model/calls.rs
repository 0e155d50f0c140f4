//! The calls of a layer, and the guards that a bug breaks in them.

use tower_idempotency::{
    Fence,
    store::{
        Completion, FencedTransition, OwnerTransition, Release, Token, Transition, Transitioned,
        admin::Resolution,
        transition::{StoredRecord, Swept},
    },
};

use crate::{
    protocol::{Broken, Bug, Effects, Protocol, Recovery},
    steps::Way,
    world::{
        ATTEMPTS, Actor, Ending, LATER, LEASE, Late, Plan, RETENTION, UNKNOWN, ViewState, World,
        claim_of, moment, named, resolved, response, view,
    },
};

impl Protocol {
    pub(crate) fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// The call that the layer makes next for a request that sees this record.
    ///
    /// None without a record, and where the record answers the request.
    pub(crate) fn plan(&self, world: &World, other: bool) -> Option<(u64, Plan)> {
        let view = world.view.as_ref()?;
        let in_progress = matches!(view.state, ViewState::InProgress(_));
        let rerun = self.recovery == Recovery::Rerun && view.takeovers + 1 < ATTEMPTS;
        let plan = match view.state {
            _ if !in_progress && view.expires_in.is_none() => Plan::Expired,
            ViewState::InProgress(None) if view.expires_in.is_none() && view.other != other => {
                Plan::Expired
            }
            ViewState::Released { for_any: true } if view.other != other => Plan::Replace,
            _ if view.other != other => return None,
            ViewState::Released { .. } => Plan::Retry,
            ViewState::Unknown if rerun => Plan::Rerun,
            ViewState::InProgress(None) if rerun => Plan::Takeover,
            ViewState::InProgress(None) => Plan::MarkUnknown,
            ViewState::InProgress(Some(_)) | ViewState::Completed(_) | ViewState::Unknown => {
                return None;
            }
        };
        Some((view.fence, plan))
    }

    /// Makes the planned call, or repeats a claim that got no answer.
    pub(crate) fn proceed(&self, world: &mut World, actor: usize, way: Way) {
        let (token, other, granted) = match world.actors[actor] {
            Actor::Saw {
                fence,
                plan: Plan::MarkUnknown,
                ..
            } => {
                self.mark_lapsed(world, fence);
                world.actors[actor] = Actor::Idle;
                return;
            }
            Actor::Saw {
                token: Some(token), ..
            } if world.has_granted(token) => {
                world.actors[actor] = Actor::Idle;
                return;
            }
            Actor::Saw {
                token,
                other,
                fence,
                plan,
            } => {
                let token = token.unwrap_or_else(|| world.token());
                let granted = if way == Way::Late {
                    world.send_late(Late::Reclaim {
                        token,
                        other,
                        fence,
                        plan,
                    });
                    false
                } else {
                    self.reclaim(world, token, other, fence, plan)
                };
                (token, other, granted)
            }
            Actor::Asking { token, other } => {
                if world.is_claimed_by(token) {
                    // Much of its lease may be gone, so the layer renews it first.
                    (
                        token,
                        other,
                        self.renew(world, token) == Transitioned::Applied,
                    )
                } else if let Some((fence, plan)) = self.plan(world, other) {
                    let token = Some(token);
                    world.actors[actor] = Actor::Saw {
                        token,
                        other,
                        fence,
                        plan,
                    };
                    return;
                } else {
                    (token, other, self.claim(world, token, other))
                }
            }
            _ => return,
        };
        self.hear(world, actor, token, other, granted, way);
    }

    /// Moves the request on by the answer to its claim. Only an answered grant
    /// starts a handler.
    pub(crate) fn hear(
        &self,
        world: &mut World,
        actor: usize,
        token: u8,
        other: bool,
        granted: bool,
        way: Way,
    ) {
        world.actors[actor] = match way {
            Way::Answered if granted => {
                let epoch = world.ghost.epoch;
                world.start(self.recovery);
                Actor::Running {
                    token,
                    epoch,
                    affected: false,
                }
            }
            Way::Answered => Actor::Idle,
            Way::Lost => {
                world.faults -= 1;
                Actor::Asking { token, other }
            }
            Way::Late => Actor::Asking { token, other },
        };
    }

    pub(crate) fn claim(&self, world: &mut World, token: u8, other: bool) -> bool {
        if world.row.is_some() {
            return false;
        }
        let at = match self.has(Bug::FencesStartAgain) {
            true => moment(0),
            false => world.now(),
        };
        let row = StoredRecord::claimed(&claim_of(token, other), at);
        world.grant(&row, token, other, None);
        world.row = Some(row);
        true
    }

    pub(crate) fn reclaim(
        &self,
        world: &mut World,
        token: u8,
        other: bool,
        fence: u64,
        plan: Plan,
    ) -> bool {
        let now = world.now();
        let Some(mut row) = world.row.clone() else {
            return false;
        };
        let mut seen = Fence::from(fence);
        if self.has(Bug::ReclaimsAnyFence) {
            seen = row.grant().fence;
        }
        let mut claim = claim_of(token, other);
        if self.has(Bug::KeepsTheToken) {
            claim.token = row.read(now).token;
        }
        let mut at = now;
        if self.has(Bug::TakesOverLive) && plan == Plan::Takeover {
            at = moment(LATER);
        }
        let is_own = matches!(view(&row, now).state, ViewState::InProgress(_))
            && row.read(now).token == claim.token;
        let Some(_) = row.reclaim(seen, plan.reclaim_as(), &claim, at) else {
            return false;
        };
        if is_own {
            // Granted before: its answer was lost, or the call was sent twice.
            world.demand(row.grant().fence.get() > world.ghost.fence, Broken::I2);
            world.ghost.fence = row.grant().fence.get();
        } else {
            world.grant(&row, claim.token.as_bytes()[0], other, Some(plan));
        }
        world.row = Some(row);
        true
    }

    pub(crate) fn renew(&self, world: &mut World, token: u8) -> Transitioned {
        let now = world.now();
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let mut by = named(token);
        if self.has(Bug::RenewsForAnyToken) {
            by = row.read(now).token;
        }
        let lease = moment(LEASE);
        let renew = Transition::Owner(by, OwnerTransition::Renew { lease });
        let renewed = row.apply(&renew, now);
        if renewed == Transitioned::Applied {
            world.ghost.lease_until = world.now + LEASE;
        }
        world.applied_for(token, renewed)
    }

    pub(crate) fn settle(
        &self,
        world: &mut World,
        token: u8,
        epoch: u8,
        ending: Ending,
    ) -> Transitioned {
        match ending {
            Ending::Completed => self.complete(world, token, epoch),
            Ending::ReleasedForSame => self.release(world, token, Release::SameRequest),
            Ending::ReleasedForAny => self.release(world, token, Release::AnyRequest),
            Ending::Unknown => {
                let now = world.now();
                let Some(row) = &mut world.row else {
                    return Transitioned::Superseded;
                };
                let settled = row.apply(&marked_by_owner(named(token)), now);
                world.applied_for(token, settled)
            }
        }
    }

    pub(crate) fn complete(&self, world: &mut World, token: u8, epoch: u8) -> Transitioned {
        let now = world.now();
        let last = world.ghost.last;
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let before = view(row, now);
        let mut by = named(token);
        if self.has(Bug::CompletesForAnyToken) {
            by = row.read(now).token;
        }
        let completed = matches!(before.state, ViewState::Completed(_));
        if completed && token == last && self.has(Bug::CompletesAgain) {
            let other = before.other;
            *row = StoredRecord::claimed(&claim_of(token, other), now);
        }
        let completion = Completion::new(response(token), moment(RETENTION), moment(0));
        let complete = Transition::Owner(by, OwnerTransition::Complete(completion));
        let settled = row.apply(&complete, now);
        let kept = view(row, now);
        // A repeated completion commits nothing.
        let first = matches!(before.state, ViewState::InProgress(_) | ViewState::Unknown);
        if self.effects == Effects::Committed && settled == Transitioned::Applied && first {
            world.affect(epoch);
            let with = kept.token == token && matches!(kept.state, ViewState::Completed(_));
            world.demand(with, Broken::I5);
        }
        world.applied_for(token, settled)
    }

    pub(crate) fn release(&self, world: &mut World, token: u8, release: Release) -> Transitioned {
        let now = world.now();
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let before = view(row, now);
        let mut by = named(token);
        if self.has(Bug::ReleasesForAnyToken) {
            by = row.read(now).token;
        }
        let unknown = before.state == ViewState::Unknown && before.token == token;
        let settled = if unknown && self.has(Bug::ReleasesUnknown) {
            row.apply(&resolved(row.grant().fence, Resolution::DidNotHappen), now)
        } else {
            row.apply(
                &Transition::Owner(by, OwnerTransition::Release(release)),
                now,
            )
        };
        world.applied_for(token, settled)
    }

    pub(crate) fn mark_lapsed(&self, world: &mut World, fence: u64) {
        let now = world.now();
        let Some(row) = &mut world.row else { return };
        let leased = matches!(view(row, now).state, ViewState::InProgress(_));
        let retention = moment(UNKNOWN);
        let mut mark = Transition::Fenced(
            Fence::from(fence),
            FencedTransition::MarkLapsed { retention },
        );
        if self.has(Bug::MarksLive) && row.grant().fence.get() == fence {
            mark = marked_by_owner(row.read(now).token);
        }
        let marked = row.apply(&mark, now);
        if leased && marked == Transitioned::Applied {
            world.demand(world.ghost.lease_until < world.now, Broken::I3);
        }
    }

    pub(crate) fn sweep(&self, world: &mut World) {
        let now = world.now();
        let Some(row) = &mut world.row else { return };
        let before = view(row, now);
        let leased = matches!(before.state, ViewState::InProgress(Some(_)));
        let lapsed = matches!(before.state, ViewState::InProgress(None));
        let expired = before.expires_in.is_none();
        let swept = row.sweep(moment(UNKNOWN), now);
        let remove = matches!(swept, Swept::Remove { .. })
            || (expired && leased && self.has(Bug::SweepsLeased))
            || (expired && lapsed && self.has(Bug::SweepsLapsed));
        if swept == Swept::MarkedUnknown || (remove && leased) {
            world.demand(world.ghost.lease_until < world.now, Broken::I3);
        }
        if remove {
            world.row = None;
            world.forget_calls_in_flight();
        }
    }
}

fn marked_by_owner(token: Token) -> Transition {
    let retention = moment(UNKNOWN);
    Transition::Owner(token, OwnerTransition::MarkUnknown { retention })
}
