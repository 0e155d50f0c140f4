//! The possible steps of a state, and their effects.

use stateright::{Model, Property};
use tower_idempotency::store::{Release, Transitioned};

use crate::{
    protocol::{Broken, Effects, Protocol, Recovery},
    world::{Actor, Ending, Ghost, Late, Plan, View, ViewState, World, response, view},
};

#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Step {
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

/// The fate of a call.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub(crate) enum Way {
    Answered,
    /// It is applied, and its answer is lost.
    Lost,
    /// It is applied at a later step.
    Late,
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
        let can_be_resolved =
            |view: &View| matches!(view.state, ViewState::Unknown | ViewState::InProgress(None));
        if world.view.as_ref().is_some_and(can_be_resolved) {
            steps.push(Step::Resolve { happened: true });
            if !world.has_owner() && world.epoch().effects == 0 {
                steps.push(Step::Resolve { happened: false });
            }
        }
        for (number, actor) in world.actors.iter().enumerate() {
            // Of hosts in the same state, one stands for all.
            if world.actors[..number].contains(actor) {
                continue;
            }
            self.steps_of(world, number, actor, steps);
        }
    }

    fn next_state(&self, before: &World, step: Step) -> Option<World> {
        let mut world = before.clone();
        self.step(&mut world, step);
        world.view = world.row.as_ref().map(|row| view(row, world.now()));
        world.forget_past_epochs();
        world.forget_past_fences();
        world.actors.sort();
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
            Property::always("I10", |_, world: &World| world.is_removed_in_the_end()),
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
    pub(crate) fn steps_of(
        &self,
        world: &World,
        actor: usize,
        state: &Actor,
        steps: &mut Vec<Step>,
    ) {
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
                    // The first request is the usual one, by definition.
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
                // A handler with an effect does not release its key.
                let nothing_done = [
                    Ending::ReleasedForSame,
                    Ending::ReleasedForAny,
                    Ending::Unknown,
                ];
                let done = [Ending::Completed, Ending::Unknown];
                let endings = match (outside, affected) {
                    (true, false) => &nothing_done[..],
                    (true, true) => &done[..],
                    (false, _) => &[
                        Ending::Completed,
                        Ending::ReleasedForSame,
                        Ending::ReleasedForAny,
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

    pub(crate) fn step(&self, world: &mut World, step: Step) {
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
            Step::Continue { actor, way } => self.proceed(world, actor, way),
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
