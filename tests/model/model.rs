//! The protocol of one record, explored in every order of events.
//!
//! A few requests, each on a host of its own, share one record. In any order,
//! each looks, claims, takes over, heartbeats, has its effect, and completes,
//! releases or gives up; it crashes; its calls lose their answers, or arrive
//! when it has long gone on; time passes, a sweep comes by, and an operator
//! says what happened. A host that is merely slow is one that does nothing for
//! a while, so every zombie is in here.
//!
//! The transitions are not modelled: the requests share a [`StoredRecord`] of the
//! crate. What the requests do is modelled, in the order and with the decisions of
//! the layer.
//!
//! Handlers come in two kinds. Those with *outside* effects have them in the
//! middle of their run; those with *committed* effects have them in the
//! transaction that completes the record. Invariants that speak of the past are
//! kept in the state ([`Ghost`]) and named by [`Broken`].
//!
//! What is assumed: no call is on its way for longer than a record is kept, so
//! what is late is gone once the record is removed or expires; who asks for a
//! claim again knows it before that claim has lapsed and was ended by somebody
//! else; and an operator says "it did not happen" only of an owner that is gone.
//!
//! Then the same is explored with one guard broken at a time ([`Bug`]): if the
//! model did not notice, its silence about the real transitions would mean
//! little.
//!
//! # Longer
//!
//! `ACTORS=4 FAULTS=3 TICKS=4 CLAIMS=4 cargo test --release -p model` explores more
//! requests, more faults (crashes, lost answers, late calls), more time, for
//! as long as it takes.

use std::{
    env,
    hash::{Hash, Hasher},
    thread,
    time::Duration,
};

use bytes::Bytes;
use stateright::{Checker as _, HasDiscoveries, Model, Property};
use tower_idempotency::{
    Fence, Fingerprint, OperationId, Token,
    store::{
        Claim, Completion, MarkedBy, ReclaimAs, RecordState, Release, Transition, Transitioned,
        admin::{RecordedResponse, Resolution},
        transition::{StoredRecord, Swept},
    },
};

#[test]
fn i1_to_i11_hold_for_outside_effects_under_refuse() {
    Protocol::new(Recovery::Refuse, Effects::Outside).holds();
}

#[test]
fn i1_to_i11_hold_for_committed_effects_with_more_faults() {
    let two = Protocol {
        actors: 2,
        faults: 2,
        ..Protocol::new(Recovery::Refuse, Effects::Committed)
    };
    two.holds();
}

#[test]
fn i1_to_i11_hold_for_committed_effects_under_rerun() {
    Protocol::new(Recovery::Rerun, Effects::Committed).holds();
}

/// The reason for [`Recovery::Refuse`]: it shows what it would take to promise
/// more for a handler that charges and then crashes.
#[test]
fn i6_fails_for_outside_effects_under_rerun() {
    Protocol::new(Recovery::Rerun, Effects::Outside).finds(Broken::I6);
}

#[test]
fn a_take_over_of_a_live_lease_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::TakesOverLive)
        .finds(Broken::I3);
}

#[test]
fn a_reclaim_that_does_not_compare_fences_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::ReclaimsAnyFence)
        .finds(Broken::I8);
}

#[test]
fn a_reclaim_that_keeps_the_old_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::KeepsTheToken)
        .finds(Broken::I1);
}

#[test]
fn a_completion_without_the_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::AnybodyCompletes)
        .finds(Broken::I5);
}

#[test]
fn a_completion_over_a_completed_record_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::CompletesAgain)
        .finds(Broken::I4);
}

#[test]
fn a_release_without_the_token_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::AnybodyReleases)
        .finds(Broken::I1);
}

#[test]
fn a_renewal_by_a_superseded_owner_is_noticed() {
    Protocol::new(Recovery::Rerun, Effects::Committed)
        .with(Bug::AnybodyRenews)
        .finds(Broken::I1);
}

#[test]
fn a_live_lease_that_is_marked_unknown_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::MarksLive)
        .finds(Broken::I3);
}

#[test]
fn fences_that_start_again_after_a_sweep_are_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::FencesStartAgain)
        .finds(Broken::I2);
}

#[test]
fn a_sweep_of_a_leased_record_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::SweepsLeased)
        .finds(Broken::I3);
}

#[test]
fn a_sweep_that_removes_a_lapsed_record_unseen_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::SweepsLapsed)
        .finds(Broken::I11);
}

#[test]
fn an_unknown_outcome_that_is_released_is_noticed() {
    Protocol::new(Recovery::Refuse, Effects::Outside)
        .with(Bug::ReleasesUnknown)
        .finds(Broken::I11);
}

/// One guard of a transition, broken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Bug {
    TakesOverLive,
    ReclaimsAnyFence,
    KeepsTheToken,
    AnybodyCompletes,
    CompletesAgain,
    AnybodyReleases,
    AnybodyRenews,
    MarksLive,
    FencesStartAgain,
    SweepsLeased,
    SweepsLapsed,
    ReleasesUnknown,
}

/// Where a handler's effect happens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Effects {
    /// In the middle of its run, and for good.
    Outside,
    /// In the transaction that completes the record.
    Committed,
}

/// What a step has broken.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    /// A token was granted twice, or something was applied for a token that is
    /// not the last one granted.
    I1,
    /// A fence was not larger than the last.
    I2,
    /// A live lease was taken over, marked or swept.
    I3,
    /// A completed record changed before it expired.
    I4,
    /// An effect was committed without its record, or the other way round.
    I5,
    /// An epoch has two effects, or more starts than its releases allow.
    I6,
    /// An owner was told that it completed, and another's response is kept.
    I7,
    /// Another request's claim continued an operation.
    I8,
    /// An unknown outcome ended in a way that nobody answers for.
    I11,
}

/// The layer's recoveries that decide by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Recovery {
    Refuse,
    Rerun,
}

struct Protocol {
    actors: usize,
    faults: u8,
    ticks: u8,
    /// How many claims there may be.
    claims: u8,
    recovery: Recovery,
    effects: Effects,
    bug: Option<Bug>,
}

#[derive(Clone, Debug)]
struct World {
    row: Option<StoredRecord>,
    /// What is to know of the row, told relative to `now`.
    view: Option<View>,
    now: u8,
    next_token: u8,
    faults: u8,
    actors: Vec<Actor>,
    /// A call that nobody waits for.
    late: Option<Late>,
    ghost: Ghost,
}

/// One request after another on one host.
#[derive(Clone, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
enum Actor {
    Idle,
    /// It has seen the record, and is about to do something about it; with the
    /// token of an earlier call that got no answer.
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
    /// Its handler has ended, and it tries to write that down.
    Ending {
        token: u8,
        epoch: u8,
        ending: Ending,
    },
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
enum Plan {
    Takeover,
    Rerun,
    Retry,
    Replace,
    Expired,
    MarkUnknown,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, PartialOrd, Ord)]
enum Ending {
    Completed,
    Bound,
    Freed,
    Unknown,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Late {
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

/// What becomes of a call.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Way {
    Answered,
    /// It happens, and nobody hears its answer.
    Lost,
    /// It happens at some other time.
    Late,
}

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
enum Step {
    Tick,
    Sweep,
    /// The late call arrives.
    Arrive,
    Resolve {
        happened: bool,
    },
    Claim {
        actor: usize,
        other: bool,
        way: Way,
    },
    Continue {
        actor: usize,
        way: Way,
    },
    Withdraw {
        actor: usize,
        way: Way,
    },
    Renew {
        actor: usize,
        way: Way,
    },
    Affect {
        actor: usize,
    },
    End {
        actor: usize,
        ending: Ending,
    },
    Settle {
        actor: usize,
        way: Way,
    },
    Crash {
        actor: usize,
    },
}

/// What is remembered to judge the next step by.
#[derive(Clone, Debug, Default, Hash, PartialEq)]
struct Ghost {
    tokens: u16,
    /// The last token granted, and its request.
    last: u8,
    other: bool,
    fence: u64,
    lease_until: u8,
    epoch: u8,
    epochs: [Epoch; EPOCHS],
    broken: u16,
}

#[derive(Clone, Copy, Debug, Default, Hash, PartialEq)]
struct Epoch {
    starts: u8,
    releases: u8,
    effects: u8,
}

#[derive(Clone, Debug, Hash, PartialEq)]
struct View {
    token: u8,
    fence: u64,
    /// Whether this operation had an attempt before.
    again: bool,
    takeovers: u32,
    other: bool,
    age: Duration,
    expires_in: Option<Duration>,
    state: ViewState,
}

#[derive(Clone, Debug, Hash, PartialEq)]
enum ViewState {
    InProgress(Option<Duration>),
    Completed(Bytes),
    Unknown,
    Released { freed: bool },
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

impl Model for Protocol {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            row: None,
            view: None,
            now: 0,
            next_token: 1,
            faults: self.faults,
            actors: vec![Actor::Idle; self.actors],
            late: None,
            ghost: Ghost::default(),
        }]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        if world.now < self.ticks {
            steps.push(Step::Tick);
        }
        if world.row.is_some() {
            steps.push(Step::Sweep);
        }
        if world.late.is_some() {
            steps.push(Step::Arrive);
        }
        if matches!(&world.view, Some(view) if view.state == ViewState::Unknown) {
            steps.push(Step::Resolve { happened: true });
            if !world.has_owner() && world.epoch().effects == 0 {
                steps.push(Step::Resolve { happened: false });
            }
        }
        for (number, actor) in world.actors.iter().enumerate() {
            // Hosts that are in the same state are one as good as the other.
            if world.actors[..number].contains(actor) {
                continue;
            }
            self.steps_of(world, number, actor, steps);
        }
    }

    fn next_state(&self, before: &World, step: Step) -> Option<World> {
        let mut world = before.clone();
        self.step(&mut world, step);
        world.actors.sort();
        world.forget_past_epochs();
        world.view = world.row.as_ref().map(|row| view(row, world.now()));
        world.judge_change(before, step);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("I1", |_, world: &World| world.keeps(Broken::I1)),
            Property::always("I2", |_, world: &World| world.keeps(Broken::I2)),
            Property::always("I3", |_, world: &World| world.keeps(Broken::I3)),
            Property::always("I4", |_, world: &World| world.keeps(Broken::I4)),
            Property::always("I5", |_, world: &World| world.keeps(Broken::I5)),
            Property::always("I6", |_, world: &World| world.keeps(Broken::I6)),
            Property::always("I7", |_, world: &World| world.keeps(Broken::I7)),
            Property::always("I8", |_, world: &World| world.keeps(Broken::I8)),
            Property::always("I10", |_, world: &World| world.comes_to_its_end()),
            Property::always("I11", |_, world: &World| world.keeps(Broken::I11)),
            Property::sometimes("a superseded owner at work", |_, world: &World| {
                world.owners().any(|token| token < world.ghost.last)
            }),
            Property::sometimes(
                "an unknown outcome with a late owner",
                |_, world: &World| {
                    world.is(&ViewState::Unknown)
                        && world.owners().any(|token| token == world.ghost.last)
                },
            ),
            Property::sometimes("a claim whose answer got lost", |_, world: &World| {
                let lost = |actor: &Actor| matches!(actor, Actor::Asking { token, .. } if *token == world.ghost.last);
                world.actors.iter().any(lost)
            }),
            Property::sometimes("a record that was swept", |_, world: &World| {
                world.row.is_none() && world.ghost.epoch > 0
            }),
            Property::sometimes("another epoch", |_, world: &World| world.ghost.epoch > 1),
            Property::sometimes("another request in the same epoch", |_, world: &World| {
                let first = matches!(&world.view, Some(view) if !view.again);
                first && world.epoch().starts > 1
            }),
            Property::sometimes(
                "a takeover, where there are any",
                |model: &Self, world: &World| {
                    let taken = matches!(&world.view, Some(view) if view.takeovers > 0);
                    taken || model.recovery == Recovery::Refuse
                },
            ),
        ]
    }
}

impl Protocol {
    fn new(recovery: Recovery, effects: Effects) -> Self {
        let set = |variable, otherwise| match env::var(variable) {
            Ok(text) => text.parse().expect("a number"),
            Err(_) => otherwise,
        };
        Self {
            actors: usize::from(set("ACTORS", 3)),
            faults: set("FAULTS", 1),
            ticks: set("TICKS", 2),
            claims: set("CLAIMS", 3),
            recovery,
            effects,
            bug: None,
        }
    }

    fn with(self, bug: Bug) -> Self {
        Self {
            bug: Some(bug),
            ..self
        }
    }

    #[expect(clippy::print_stdout, reason = "how much a passing test has explored")]
    fn holds(self) {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let checker = self
            .checker()
            .threads(threads)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        println!(
            "{} states, {} of them unique, depth {}",
            checker.state_count(),
            checker.unique_state_count(),
            checker.max_depth()
        );
        checker.assert_properties();
    }

    fn finds(self, broken: Broken) {
        let name = broken.name();
        let checker = self
            .checker()
            .finish_when(HasDiscoveries::AnyOf([name].into()))
            .spawn_bfs()
            .join();
        assert!(checker.discovery(name).is_some(), "{name} is not noticed");
    }

    fn steps_of(&self, world: &World, actor: usize, state: &Actor, steps: &mut Vec<Step>) {
        let ways = |late: bool| {
            let faulty = world.faults > 0;
            [Way::Answered, Way::Lost, Way::Late]
                .into_iter()
                .filter(move |way| match way {
                    Way::Answered => true,
                    Way::Lost => faulty,
                    Way::Late => late && faulty && world.late.is_none(),
                })
        };
        let can_claim = world.next_token <= self.claims;
        match *state {
            Actor::Idle => {
                for other in [false, true] {
                    let free = world.row.is_none();
                    // Whichever request comes first is called the usual one.
                    if free && can_claim && !other {
                        steps.extend(ways(true).map(|way| Step::Claim { actor, other, way }));
                    } else if !free && self.plan(world, other).is_some() {
                        let way = Way::Answered;
                        steps.push(Step::Claim { actor, other, way });
                    }
                }
                return;
            }
            Actor::Saw { plan, .. } => {
                if plan == Plan::MarkUnknown {
                    let way = Way::Answered;
                    steps.push(Step::Continue { actor, way });
                } else if can_claim {
                    steps.extend(ways(true).map(|way| Step::Continue { actor, way }));
                }
            }
            Actor::Asking { .. } => {
                steps.extend(ways(false).map(|way| Step::Continue { actor, way }));
                steps.extend(ways(true).map(|way| Step::Withdraw { actor, way }));
            }
            Actor::Running { affected, .. } => {
                steps.push(Step::Renew {
                    actor,
                    way: Way::Answered,
                });
                if world.faults > 0 && world.late.is_none() {
                    let way = Way::Late;
                    steps.push(Step::Renew { actor, way });
                }
                let outside = self.effects == Effects::Outside;
                if outside && !affected {
                    steps.push(Step::Affect { actor });
                }
                // A handler that did something does not say that it did not.
                let nothing_done = [Ending::Bound, Ending::Freed, Ending::Unknown];
                let done = [Ending::Completed, Ending::Unknown];
                let endings = match (outside, affected) {
                    (true, false) => &nothing_done[..],
                    (true, true) => &done[..],
                    (false, _) => &[
                        Ending::Completed,
                        Ending::Bound,
                        Ending::Freed,
                        Ending::Unknown,
                    ][..],
                };
                steps.extend(endings.iter().map(|&ending| Step::End { actor, ending }));
            }
            Actor::Ending { .. } => {
                steps.extend(ways(true).map(|way| Step::Settle { actor, way }));
            }
        }
        if world.faults > 0 {
            steps.push(Step::Crash { actor });
        }
    }

    fn step(&self, world: &mut World, step: Step) {
        match step {
            Step::Tick => world.now += 1,
            Step::Sweep => self.sweep(world),
            Step::Arrive => match world.late.take().expect("there is a late call") {
                Late::Claim { token, other } => {
                    self.claim(world, token, other);
                }
                Late::Reclaim {
                    token,
                    other,
                    fence,
                    plan,
                } => {
                    self.reclaim(world, token, other, fence, plan);
                }
                Late::Settle {
                    token,
                    epoch,
                    ending,
                } => {
                    let _ = self.settle(world, token, epoch, ending);
                }
                Late::Withdraw { token } => {
                    let _ = self.release(world, token, Release::SameRequest);
                }
                Late::Renew { token } => {
                    let _ = self.renew(world, token);
                }
            },
            Step::Resolve { happened } => world.resolve(happened),
            Step::Claim { actor, other, way } => match self.plan(world, other) {
                Some((fence, plan)) => {
                    world.actors[actor] = Actor::Saw {
                        token: None,
                        other,
                        fence,
                        plan,
                    };
                }
                None => {
                    let token = world.token();
                    let granted = match way {
                        Way::Late => {
                            world.send_late(Late::Claim { token, other });
                            false
                        }
                        Way::Answered | Way::Lost => self.claim(world, token, other),
                    };
                    self.hear(world, actor, token, other, granted, way);
                }
            },
            Step::Continue { actor, way } => self.go_on(world, actor, way),
            Step::Withdraw { actor, way } => {
                let Actor::Asking { token, .. } = world.actors[actor] else {
                    return;
                };
                match way {
                    Way::Late => world.send_late(Late::Withdraw { token }),
                    Way::Lost => {
                        world.faults -= 1;
                        let _ = self.release(world, token, Release::SameRequest);
                        return;
                    }
                    Way::Answered => {
                        let _ = self.release(world, token, Release::SameRequest);
                    }
                }
                world.actors[actor] = Actor::Idle;
            }
            Step::Renew { actor, way } => {
                let Actor::Running { token, .. } = world.actors[actor] else {
                    return;
                };
                match way {
                    Way::Late => world.send_late(Late::Renew { token }),
                    Way::Answered | Way::Lost => {
                        let _ = self.renew(world, token);
                    }
                }
            }
            Step::Affect { actor } => {
                if let Actor::Running {
                    epoch, affected, ..
                } = &mut world.actors[actor]
                {
                    *affected = true;
                    let epoch = *epoch;
                    world.affect(epoch);
                }
            }
            Step::End { actor, ending } => {
                if let Actor::Running { token, epoch, .. } = world.actors[actor] {
                    world.actors[actor] = Actor::Ending {
                        token,
                        epoch,
                        ending,
                    };
                }
            }
            Step::Settle { actor, way } => {
                let Actor::Ending {
                    token,
                    epoch,
                    ending,
                } = world.actors[actor]
                else {
                    return;
                };
                match way {
                    Way::Late => world.send_late(Late::Settle {
                        token,
                        epoch,
                        ending,
                    }),
                    Way::Lost => {
                        world.faults -= 1;
                        let _ = self.settle(world, token, epoch, ending);
                    }
                    Way::Answered => {
                        let settled = self.settle(world, token, epoch, ending);
                        world.actors[actor] = Actor::Idle;
                        let done = settled == Transitioned::Applied;
                        if done && ending == Ending::Completed {
                            let kept = world.is(&ViewState::Completed(response(token)));
                            world.demand(kept, Broken::I7);
                        }
                    }
                }
            }
            Step::Crash { actor } => {
                world.faults -= 1;
                world.actors[actor] = Actor::Idle;
            }
        }
    }
}

/// The calls of a layer, with what the bugs make of them.
impl Protocol {
    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// What a request would do about the record that is there, as the layer
    /// decides it; nothing if it gets an answer instead, or there is no record.
    fn plan(&self, world: &World, other: bool) -> Option<(u64, Plan)> {
        let view = world.view.as_ref()?;
        let in_progress = matches!(view.state, ViewState::InProgress(_));
        let rerun = self.recovery == Recovery::Rerun && view.takeovers + 1 < ATTEMPTS;
        let plan = match view.state {
            _ if !in_progress && view.expires_in.is_none() => Plan::Expired,
            ViewState::InProgress(None) if view.expires_in.is_none() && view.other != other => {
                Plan::Expired
            }
            ViewState::Released { freed: true } if view.other != other => Plan::Replace,
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

    /// The request goes on with what it has seen, or asks again.
    fn go_on(&self, world: &mut World, actor: usize, way: Way) {
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
                    // Much of its lease may be gone: it is confirmed first.
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

    /// What the request knows of its claim now. A handler starts with a claim
    /// that is known.
    fn hear(
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

    fn claim(&self, world: &mut World, token: u8, other: bool) -> bool {
        if world.row.is_some() {
            return false;
        }
        let mut fence = world.fence();
        if self.has(Bug::FencesStartAgain) {
            fence = Fence::from(1);
        }
        let row = StoredRecord::claimed(&brought(token, other), fence, world.now());
        world.grant(&row, token, other, None);
        world.row = Some(row);
        true
    }

    fn reclaim(&self, world: &mut World, token: u8, other: bool, fence: u64, plan: Plan) -> bool {
        let next = world.fence();
        let now = world.now();
        let Some(mut row) = world.row.clone() else {
            return false;
        };
        let mut seen = Fence::from(fence);
        if self.has(Bug::ReclaimsAnyFence) {
            seen = row.grant().fence;
        }
        let mut claim = brought(token, other);
        if self.has(Bug::KeepsTheToken) {
            claim.token = row.read(now).token;
        }
        let mut at = now;
        if self.has(Bug::TakesOverLive) && plan == Plan::Takeover {
            at = moment(LATER);
        }
        let Some(_) = row.reclaim(seen, plan.reclaim_as(), &claim, next, at) else {
            return false;
        };
        world.grant(&row, claim.token.as_bytes()[0], other, Some(plan));
        world.row = Some(row);
        true
    }

    fn renew(&self, world: &mut World, token: u8) -> Transitioned {
        let now = world.now();
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let mut by = named(token);
        if self.has(Bug::AnybodyRenews) {
            by = row.read(now).token;
        }
        let renew = Transition::Renew {
            token: by,
            lease: moment(LEASE),
        };
        let renewed = row.apply(renew, now);
        if renewed == Transitioned::Applied {
            world.ghost.lease_until = world.now + LEASE;
        }
        world.applied_for(token, renewed)
    }

    fn settle(&self, world: &mut World, token: u8, epoch: u8, ending: Ending) -> Transitioned {
        match ending {
            Ending::Completed => self.complete(world, token, epoch),
            Ending::Bound => self.release(world, token, Release::SameRequest),
            Ending::Freed => self.release(world, token, Release::AnyRequest),
            Ending::Unknown => {
                let now = world.now();
                let Some(row) = &mut world.row else {
                    return Transitioned::Superseded;
                };
                let settled = row.apply(marked(MarkedBy::Owner(named(token))), now);
                world.applied_for(token, settled)
            }
        }
    }

    fn complete(&self, world: &mut World, token: u8, epoch: u8) -> Transitioned {
        let now = world.now();
        let last = world.ghost.last;
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let before = view(row, now);
        let mut by = named(token);
        if self.has(Bug::AnybodyCompletes) {
            by = row.read(now).token;
        }
        let completed = matches!(before.state, ViewState::Completed(_));
        if completed && token == last && self.has(Bug::CompletesAgain) {
            let other = before.other;
            *row = StoredRecord::claimed(&brought(token, other), row.grant().fence, now);
        }
        let completion = Completion::new(response(token), moment(RETENTION), moment(0));
        let complete = Transition::Complete {
            token: by,
            completion: &completion,
        };
        let settled = row.apply(complete, now);
        let kept = view(row, now);
        // A completion that repeats commits nothing.
        let first = matches!(before.state, ViewState::InProgress(_) | ViewState::Unknown);
        if self.effects == Effects::Committed && settled == Transitioned::Applied && first {
            world.affect(epoch);
            let with = kept.token == token && matches!(kept.state, ViewState::Completed(_));
            world.demand(with, Broken::I5);
        }
        world.applied_for(token, settled)
    }

    fn release(&self, world: &mut World, token: u8, release: Release) -> Transitioned {
        let now = world.now();
        let Some(row) = &mut world.row else {
            return Transitioned::Superseded;
        };
        let before = view(row, now);
        let mut by = named(token);
        if self.has(Bug::AnybodyReleases) {
            by = row.read(now).token;
        }
        let unknown = before.state == ViewState::Unknown && before.token == token;
        let settled = if unknown && self.has(Bug::ReleasesUnknown) {
            let resolve = Transition::Resolve {
                seen: row.grant().fence,
                resolution: &Resolution::DidNotHappen,
                at_least: moment(1),
            };
            row.apply(resolve, now)
        } else {
            row.apply(Transition::Release { token: by, release }, now)
        };
        world.applied_for(token, settled)
    }

    fn mark_lapsed(&self, world: &mut World, fence: u64) {
        let now = world.now();
        let Some(row) = &mut world.row else { return };
        let leased = matches!(view(row, now).state, ViewState::InProgress(_));
        let mut marked_by = MarkedBy::Lapsed(Fence::from(fence));
        if self.has(Bug::MarksLive) && row.grant().fence.get() == fence {
            marked_by = MarkedBy::Owner(row.read(now).token);
        }
        let marked = row.apply(marked(marked_by), now);
        if leased && marked == Transitioned::Applied {
            world.demand(world.ghost.lease_until < world.now, Broken::I3);
        }
    }

    fn sweep(&self, world: &mut World) {
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
            world.forget_what_is_on_its_way();
        }
    }
}

impl World {
    fn now(&self) -> Duration {
        moment(self.now)
    }

    /// A token that nobody has used.
    fn token(&mut self) -> u8 {
        self.next_token += 1;
        self.next_token - 1
    }

    /// The next of the store's sequence.
    fn fence(&self) -> Fence {
        Fence::from(self.ghost.fence + 1)
    }

    fn send_late(&mut self, late: Late) {
        self.faults -= 1;
        self.late = Some(late);
    }

    fn is(&self, state: &ViewState) -> bool {
        self.row
            .as_ref()
            .is_some_and(|row| view(row, self.now()).state == *state)
    }

    fn is_claimed_by(&self, token: u8) -> bool {
        self.view.as_ref().is_some_and(|view| {
            view.token == token && matches!(view.state, ViewState::InProgress(_))
        })
    }

    fn has_granted(&self, token: u8) -> bool {
        self.ghost.tokens & 1 << token != 0
    }

    /// The tokens that somebody works with.
    fn owners(&self) -> impl Iterator<Item = u8> + '_ {
        self.actors.iter().filter_map(|actor| match actor {
            Actor::Running { token, .. } | Actor::Ending { token, .. } => Some(*token),
            Actor::Idle | Actor::Saw { .. } | Actor::Asking { .. } => None,
        })
    }

    /// Whether the last claim's owner is there, or may find out that it is.
    fn has_owner(&self) -> bool {
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

    fn epoch(&self) -> &Epoch {
        &self.ghost.epochs[usize::from(self.ghost.epoch)]
    }

    fn resolve(&mut self, happened: bool) {
        let now = self.now();
        let Some(row) = &mut self.row else { return };
        let resolution = if happened {
            Resolution::Happened(RecordedResponse::tombstone())
        } else {
            Resolution::DidNotHappen
        };
        let resolve = Transition::Resolve {
            seen: row.grant().fence,
            resolution: &resolution,
            at_least: moment(1),
        };
        let _ = row.apply(resolve, now);
    }

    /// A claim was granted.
    fn grant(&mut self, row: &StoredRecord, token: u8, other: bool, plan: Option<Plan>) {
        let fence = row.grant().fence.get();
        let used = self.has_granted(token);
        self.demand(!used, Broken::I1);
        self.demand(fence > self.ghost.fence, Broken::I2);
        match plan {
            None | Some(Plan::Expired) => {
                self.ghost.epoch += 1;
                self.forget_what_is_on_its_way();
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

    /// A record is kept for longer than anything is on its way.
    fn forget_what_is_on_its_way(&mut self) {
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

    /// What nobody can add to any more makes no difference.
    fn forget_past_epochs(&mut self) {
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

    fn start(&mut self, recovery: Recovery) {
        let epoch = &mut self.ghost.epochs[usize::from(self.ghost.epoch)];
        epoch.starts += 1;
        let once = recovery == Recovery::Rerun || epoch.starts <= 1 + epoch.releases;
        self.demand(once, Broken::I6);
    }

    fn affect(&mut self, epoch: u8) {
        let epoch = &mut self.ghost.epochs[usize::from(epoch)];
        epoch.effects += 1;
        let once = epoch.effects <= 1;
        self.demand(once, Broken::I6);
    }

    fn applied_for(&mut self, token: u8, settled: Transitioned) -> Transitioned {
        if settled == Transitioned::Applied {
            self.demand(token == self.ghost.last, Broken::I1);
        }
        settled
    }

    /// What a record may become in one step.
    fn judge_change(&mut self, before: &Self, step: Step) {
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
            // Its end is shown before it is removed.
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

    /// I10: left alone by everybody but the sweeps, a record is removed.
    fn comes_to_its_end(&self) -> bool {
        let Some(mut row) = self.row.clone() else {
            return true;
        };
        let sweeps = [LATER, LATER * 2].map(|now| row.sweep(moment(UNKNOWN), moment(now)));
        sweeps
            .iter()
            .any(|swept| matches!(swept, Swept::Remove { .. }))
    }

    fn demand(&mut self, holds: bool, otherwise: Broken) {
        if !holds {
            self.ghost.broken |= 1 << otherwise as u16;
        }
    }

    fn keeps(&self, invariant: Broken) -> bool {
        self.ghost.broken & 1 << invariant as u16 == 0
    }
}

impl Plan {
    fn reclaim_as(self) -> ReclaimAs {
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

impl Broken {
    fn name(self) -> &'static str {
        match self {
            Self::I1 => "I1",
            Self::I2 => "I2",
            Self::I3 => "I3",
            Self::I4 => "I4",
            Self::I5 => "I5",
            Self::I6 => "I6",
            Self::I7 => "I7",
            Self::I8 => "I8",
            Self::I11 => "I11",
        }
    }
}

fn view(row: &StoredRecord, now: Duration) -> View {
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
                freed: release == Release::AnyRequest,
            },
            state => unreachable!("{state:?}"),
        },
    }
}

fn marked(marked_by: MarkedBy) -> Transition<'static> {
    Transition::MarkUnknown {
        marked_by,
        retention: moment(UNKNOWN),
    }
}

/// What a request with this token brings.
fn brought(token: u8, other: bool) -> Claim {
    let fingerprint = Fingerprint::from_bytes([u8::from(other); Fingerprint::LENGTH]);
    let mut claim = Claim::new(fingerprint, moment(LEASE), moment(RETENTION));
    claim.token = named(token);
    claim.operation = OperationId::from_bytes([token; 16]);
    claim
}

fn named(token: u8) -> Token {
    Token::from_bytes([token; 16])
}

fn response(token: u8) -> Bytes {
    Bytes::from_static(&RESPONSES).slice(usize::from(token)..usize::from(token) + 1)
}

fn moment(ticks: u8) -> Duration {
    Duration::from_secs(ticks.into())
}

/// A lease lapses with the next tick.
const LEASE: u8 = 0;
const RETENTION: u8 = 1;
const UNKNOWN: u8 = 1;
/// After everything that happens.
const LATER: u8 = 100;
const ATTEMPTS: u32 = 3;
const EPOCHS: usize = 8;
static RESPONSES: [u8; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
