//! Walks a history and finds the lines that break an invariant.
//!
//! The oracle has its own record of each key, derived from the invariants rather
//! than from the store. Each call that the store applied must have been allowed.
//! Each call that the store refused must not have been.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use tower_idempotency::{
    Recovery,
    store::{Purged, ReclaimAs, Release},
};

use crate::{
    history::{Answer, Brought, Call, Event, Granted, Line, Shown, ShownState},
    world::{ATTEMPTS, NOBODY, Tally},
};

/// The findings in a history.
pub(crate) struct Findings {
    pub(crate) violations: Vec<Violation>,
    pub(crate) tally: Tally,
}

pub(crate) struct Violation {
    /// The line of the history.
    pub(crate) line: usize,
    pub(crate) what: String,
}

pub(crate) fn examine(history: &[Line], recovery: Recovery) -> Findings {
    let mut oracle = Oracle {
        recovery,
        ..Oracle::default()
    };
    for (line, (now, event)) in history.iter().enumerate() {
        oracle.line = line;
        oracle.now = *now;
        oracle.read(event);
    }
    Findings {
        violations: oracle.violations,
        tally: oracle.tally,
    }
}

#[derive(Default)]
struct Oracle {
    recovery: Recovery,
    line: usize,
    now: Duration,
    records: BTreeMap<usize, Kept>,
    /// Of each key, the largest fence ever granted.
    fences: HashMap<usize, u64>,
    tokens: HashSet<usize>,
    operations: HashSet<usize>,
    /// Every grant, by its token.
    grants: HashMap<usize, Grant>,
    /// The token of each key and fence. A claim that is sent again gets another fence.
    granted: HashMap<(usize, u64), usize>,
    /// The body of each fingerprint that has run.
    bodies: HashMap<usize, &'static str>,
    runs: HashMap<usize, (usize, u64)>,
    epochs: HashMap<(usize, usize), Epoch>,
    last_epoch: HashMap<usize, usize>,
    requests: HashMap<usize, (usize, &'static str)>,
    /// The one final answer of each operation.
    finals: HashMap<usize, Answer>,
    /// The tokens whose response the store keeps or kept.
    completed: HashSet<usize>,
    violations: Vec<Violation>,
    tally: Tally,
}

struct Kept {
    token: usize,
    operation: usize,
    fence: u64,
    attempt: u32,
    takeovers: u32,
    fingerprint: usize,
    claimed_at: Duration,
    expires_at: Duration,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    InProgress { lease_until: Duration },
    Completed { response: u64 },
    Unknown,
    Released(Release),
}

struct Grant {
    operation: usize,
    attempt: u32,
    fingerprint: usize,
    epoch: usize,
    started: bool,
}

/// From a fresh claim until the record expires.
#[derive(Default)]
struct Epoch {
    starts: usize,
    /// Releases, and resolutions as "did not happen".
    releases: usize,
    effects: usize,
    did_not_happen: usize,
    charged: HashSet<usize>,
}

impl Oracle {
    fn read(&mut self, event: &Event) {
        match event {
            Event::Called {
                name,
                call,
                applied: true,
                ..
            } => self.applied(*name, call),
            Event::Called {
                name,
                call,
                applied: false,
                ..
            } => self.turned_away(*name, call),
            Event::Shown { name, shown } => self.shown(*name, shown.as_ref()),
            Event::Swept { purged } => self.swept(*purged),
            Event::Started {
                run,
                name,
                operation,
                attempt,
                fence,
                body,
                ..
            } => self.started(*run, *name, *operation, *attempt, *fence, body),
            Event::Affected { run } => self.affected(*run),
            Event::Finished { .. } => {}
            Event::Sent {
                request,
                name,
                body,
                ..
            } => {
                self.requests.insert(*request, (*name, body));
            }
            Event::Answered { request, answer } => self.answered(*request, answer),
            Event::Left { why, .. } => self.count(why),
            Event::Weather { what, .. } => self.count(what),
            Event::Stood { .. } => self.count("clock jumps"),
        }
    }

    /// Checks a call that the store applied.
    fn applied(&mut self, name: usize, call: &Call) {
        let now = self.now;
        match *call {
            Call::Claim { claim, granted } => {
                let free = !self.records.contains_key(&name);
                self.demand(free, || {
                    "I4: a key with a record was claimed as free".into()
                });
                self.grant(name, claim, granted, None);
            }
            Call::ClaimAgain { token, fence } => self.grant_again(name, token, fence),
            Call::Reclaim {
                seen,
                reclaim_as,
                claim,
                granted,
            } => {
                let Some(kept) = self.records.get(&name) else {
                    return self.violate("a key without a record was reclaimed");
                };
                if kept.is_at_work_by(claim.token) {
                    return self.grant_again(name, claim.token, granted.fence);
                }
                let allowed = kept.fence == seen && kept.allows(reclaim_as, now);
                let (state, takeovers) = (kept.state, kept.takeovers);
                let number = match reclaim_as {
                    ReclaimAs::Takeover => "I3",
                    ReclaimAs::Rerun => "I11",
                    _ => "I4",
                };
                self.demand(allowed, || {
                    format!("{number}: {reclaim_as:?} was granted of {state:?} at {now:?}")
                });
                if matches!(reclaim_as, ReclaimAs::Takeover | ReclaimAs::Rerun) {
                    self.count("takeovers");
                    let wanted =
                        matches!(self.recovery, Recovery::Rerun) && takeovers + 1 < ATTEMPTS;
                    self.demand(wanted, || "I11: an unknown outcome was run again".into());
                }
                self.grant(name, claim, granted, Some(reclaim_as));
            }
            Call::Renew { token, lease } => {
                self.with_owner(name, token, "renewed", |kept| {
                    let State::InProgress { lease_until } = &mut kept.state else {
                        return false;
                    };
                    *lease_until = now + lease;
                    true
                });
                if self.grants.get(&token).is_some_and(|grant| grant.started) {
                    self.count("heartbeats");
                }
            }
            Call::Complete {
                token,
                response,
                retention,
                at_least,
                again,
            } => {
                let mut changed = false;
                self.with_owner(name, token, "completed", |kept| match kept.state {
                    State::InProgress { .. } | State::Unknown => {
                        changed = true;
                        kept.state = State::Completed { response };
                        kept.expires_at = (kept.claimed_at + retention).max(now + at_least);
                        true
                    }
                    State::Completed { .. } => true,
                    State::Released(_) => false,
                });
                self.completed.insert(token);
                if changed && again {
                    self.count("late recordings");
                }
            }
            Call::Release { token, release } => {
                let mut changed = false;
                self.with_owner(name, token, "released", |kept| match kept.state {
                    State::InProgress { .. } => {
                        changed = true;
                        kept.state = State::Released(match kept.takeovers {
                            0 => release,
                            _ => Release::SameRequest,
                        });
                        true
                    }
                    State::Released(_) => true,
                    State::Completed { .. } | State::Unknown => false,
                });
                if changed {
                    self.count("releases");
                    self.epoch(name).releases += 1;
                }
            }
            Call::MarkByOwner { token, retention } => {
                self.with_owner(name, token, "marked unknown by its owner", |kept| {
                    kept.lose(now + retention)
                });
                self.count("unknown outcomes");
            }
            Call::MarkLapsed { seen, retention } => {
                let allowed = self.records.get_mut(&name).is_some_and(|kept| {
                    let lapsed = kept.has_lapsed(now) || kept.state == State::Unknown;
                    kept.fence == seen && lapsed && kept.lose(now + retention)
                });
                self.demand(allowed, || "I3: a live lease was marked unknown".into());
                self.count("unknown outcomes");
            }
            Call::Resolve {
                seen,
                happened,
                at_least,
            } => {
                let allowed = self.records.get_mut(&name).is_some_and(|kept| {
                    let allowed = kept.fence == seen
                        && (kept.state == State::Unknown || kept.has_lapsed(now));
                    kept.expires_at = kept.expires_at.max(now + at_least);
                    kept.state = match happened {
                        Some(response) => {
                            kept.token = NOBODY;
                            State::Completed { response }
                        }
                        None => {
                            kept.takeovers = 0;
                            State::Released(Release::SameRequest)
                        }
                    };
                    allowed
                });
                self.demand(allowed, || {
                    "I4: an outcome that was not unknown was resolved".into()
                });
                if happened.is_none() {
                    let epoch = self.epoch(name);
                    epoch.releases += 1;
                    epoch.did_not_happen += 1;
                }
                self.completed.extend(self.granted.get(&(name, seen)));
                self.count("resolutions");
            }
        }
    }

    /// Checks a call that the store refused.
    fn turned_away(&mut self, name: usize, call: &Call) {
        let now = self.now;
        let kept = self.records.get(&name);
        let owner = |token| kept.filter(|kept| kept.token == token);
        let open = match *call {
            Call::Claim { .. } | Call::ClaimAgain { .. } => false,
            Call::Reclaim {
                seen, reclaim_as, ..
            } => kept.is_some_and(|kept| kept.fence == seen && kept.allows(reclaim_as, now)),
            Call::Renew { token, .. } => {
                owner(token).is_some_and(|kept| matches!(kept.state, State::InProgress { .. }))
            }
            Call::Complete { token, .. } => {
                owner(token).is_some_and(|kept| !matches!(kept.state, State::Released(_)))
            }
            Call::Release { token, .. } => owner(token).is_some_and(|kept| {
                matches!(kept.state, State::InProgress { .. } | State::Released(_))
            }),
            Call::MarkByOwner { token, .. } => owner(token).is_some_and(|kept| {
                matches!(kept.state, State::InProgress { .. } | State::Unknown)
            }),
            Call::MarkLapsed { seen, .. } => kept.is_some_and(|kept| {
                kept.fence == seen && (kept.has_lapsed(now) || kept.state == State::Unknown)
            }),
            Call::Resolve { seen, .. } => kept.is_some_and(|kept| {
                kept.fence == seen && (kept.has_lapsed(now) || kept.state == State::Unknown)
            }),
        };
        if let Call::Complete { token, .. } = *call
            && self.grants.get(&token).is_some_and(|grant| grant.started)
        {
            self.count("fenced zombies");
        }
        self.demand(!open, || {
            format!("I10: turned away although allowed: {call:?}")
        });
    }

    fn grant(
        &mut self,
        name: usize,
        claim: Brought,
        granted: Granted,
        reclaim_as: Option<ReclaimAs>,
    ) {
        let Granted {
            operation,
            fence,
            attempt,
        } = granted;
        let token_is_new = self.tokens.insert(claim.token);
        self.demand(token_is_new, || "I1: a token was granted twice".into());
        let last = self.fences.insert(name, fence);
        self.demand(last.is_none_or(|last| last < fence), || {
            format!("I2: fence {fence} was granted after {last:?}")
        });
        let operation_is_new = self.operations.insert(operation);
        let before = self.records.remove(&name);
        let continued = match reclaim_as {
            Some(
                ReclaimAs::Takeover | ReclaimAs::Rerun | ReclaimAs::Retry | ReclaimAs::Reconcile,
            ) => before,
            Some(ReclaimAs::Replace | ReclaimAs::Expired) | None => None,
        };
        if let Some(before) = &continued {
            let sound = before.operation == operation
                && before.attempt + 1 == attempt
                && before.fingerprint == claim.fingerprint;
            self.demand(sound, || {
                "I8: another attempt is not of the same operation and request".into()
            });
        } else {
            self.demand(operation_is_new && attempt == 1, || {
                "I8: a first attempt has an operation that was used before".into()
            });
        }
        if matches!(reclaim_as, None | Some(ReclaimAs::Expired)) {
            *self.last_epoch.entry(name).or_default() += 1;
        }
        let before = continued.map_or(0, |before| before.takeovers);
        let takeovers = match reclaim_as {
            Some(ReclaimAs::Takeover | ReclaimAs::Rerun) => before + 1,
            Some(ReclaimAs::Retry) => before.min(1),
            _ => before,
        };
        self.records.insert(
            name,
            Kept {
                token: claim.token,
                operation,
                fence,
                attempt,
                takeovers,
                fingerprint: claim.fingerprint,
                claimed_at: self.now,
                expires_at: self.now + claim.retention,
                state: State::InProgress {
                    lease_until: self.now + claim.lease,
                },
            },
        );
        let epoch = self.last_epoch[&name];
        self.granted.insert((name, fence), claim.token);
        self.grants.insert(
            claim.token,
            Grant {
                operation,
                attempt,
                fingerprint: claim.fingerprint,
                epoch,
                started: false,
            },
        );
    }

    /// Checks a claim that was granted before: its answer was lost, or came late.
    fn grant_again(&mut self, name: usize, token: usize, fence: u64) {
        let last = self.fences.insert(name, fence);
        self.demand(last.is_some_and(|last| last < fence), || {
            format!("I2: fence {fence} was granted again after {last:?}")
        });
        self.granted.insert((name, fence), token);
        self.with_owner(name, token, "claimed again", |kept| {
            kept.fence = fence;
            matches!(kept.state, State::InProgress { .. })
        });
    }

    /// Checks a record that the store returned.
    fn shown(&mut self, name: usize, shown: Option<&Shown>) {
        let now = self.now;
        let kept = self.records.get(&name).map(|kept| Shown {
            token: kept.token,
            operation: kept.operation,
            fence: kept.fence,
            attempt: kept.attempt,
            takeovers: kept.takeovers,
            fingerprint: kept.fingerprint,
            expired: kept.expires_at < now,
            state: match kept.state {
                State::InProgress { lease_until } => ShownState::InProgress {
                    lapsed: lease_until < now,
                },
                State::Completed { response } => ShownState::Completed { response },
                State::Unknown => ShownState::Unknown,
                State::Released(release) => ShownState::Released(release),
            },
        });
        self.demand(kept.as_ref() == shown, || {
            format!("I4: {shown:?} was shown in the place of {kept:?}")
        });
    }

    fn swept(&mut self, purged: Purged) {
        let now = self.now;
        let mut due = Purged::default();
        let mut marked = Vec::new();
        self.records.retain(|_, kept| {
            if kept.expires_at >= now {
                return true;
            }
            match kept.state {
                State::InProgress { .. } => {
                    if kept.has_lapsed(now) {
                        due.marked_unknown += 1;
                        marked.push(kept.fence);
                    }
                    true
                }
                State::Unknown => {
                    due.removed += 1;
                    due.removed_unknown += 1;
                    false
                }
                State::Completed { .. } | State::Released(_) => {
                    due.removed += 1;
                    false
                }
            }
        });
        for kept in self.records.values_mut() {
            if marked.contains(&kept.fence) {
                kept.lose(now + crate::world::UNKNOWN_RETENTION);
            }
        }
        self.demand(due == purged, || {
            format!("I11: a sweep did {purged:?} where {due:?} was due")
        });
        *self.tally.entry("swept records").or_default() += purged.removed as usize;
    }

    fn started(
        &mut self,
        run: usize,
        name: usize,
        operation: usize,
        attempt: u32,
        fence: u64,
        body: &'static str,
    ) {
        self.count("runs");
        self.runs.insert(run, (name, fence));
        let token = self.granted.get(&(name, fence));
        let Some(grant) = token.and_then(|token| self.grants.get_mut(token)) else {
            return self.violate("I12: a handler ran without a claim");
        };
        let again = std::mem::replace(&mut grant.started, true);
        let same = grant.operation == operation && grant.attempt == attempt;
        let (fingerprint, epoch) = (grant.fingerprint, grant.epoch);
        self.demand(same, || "I12: a handler was given another claim".into());
        self.demand(!again, || "I6: a claim started two handlers".into());
        let meant = *self.bodies.entry(fingerprint).or_insert(body);
        self.demand(meant == body, || {
            format!("I8: {body} ran under a claim for {meant}")
        });
        let epoch = self.epochs.entry((name, epoch)).or_default();
        epoch.starts += 1;
        let (starts, releases) = (epoch.starts, epoch.releases);
        let once = matches!(self.recovery, Recovery::Rerun) || starts <= releases + 1;
        self.demand(once, || {
            format!("I6: start {starts} of an epoch with {releases} releases")
        });
    }

    fn affected(&mut self, run: usize) {
        let (name, fence) = self.runs[&run];
        let token = self.granted.get(&(name, fence));
        let Some(grant) = token.and_then(|token| self.grants.get(token)) else {
            return;
        };
        let operation = grant.operation;
        let epoch = self.epochs.entry((name, grant.epoch)).or_default();
        epoch.effects += 1;
        epoch.charged.insert(operation);
        let (effects, charged) = (epoch.effects, epoch.charged.len());
        // An operator may resolve an outcome whose owner still runs.
        let excused = epoch.did_not_happen;
        let once = matches!(self.recovery, Recovery::Rerun) || effects <= 1 + excused;
        self.demand(once, || format!("I6: effect {effects} of an epoch"));
        self.demand(charged <= 1 + excused, || {
            format!("I6: an epoch charged under {charged} keys")
        });
        if effects > 1 {
            self.count("repeated effects");
        }
    }

    fn answered(&mut self, request: usize, answer: &Answer) {
        self.count(answer.outcome);
        let (name, body) = self.requests[&request];
        let is_final = matches!(answer.outcome, "recorded" | "replayed");
        let is_own = matches!(answer.outcome, "released" | "unrecorded" | "streamed");
        if !is_final && !is_own {
            return;
        }
        self.demand(
            answer.marked_replay == (answer.outcome == "replayed"),
            || format!("I7: {answer:?} is marked wrongly"),
        );
        let Some(said) = Payload::read(&answer.body) else {
            return self.violate(&format!("I7: {:?} is no handler's answer", answer.body));
        };
        self.demand(said.name == name, || {
            format!("I9: key {name} was shown the answer of key {}", said.name)
        });
        self.demand(said.body == body || said.body == "found", || {
            format!("I8: {body} was shown the answer to {}", said.body)
        });
        if !is_final {
            return;
        }
        let token = self.granted.get(&(name, said.fence));
        let recorded = token.is_some_and(|token| self.completed.contains(token));
        self.demand(recorded, || {
            format!("I7: an answer of fence {} is not recorded", said.fence)
        });
        let shown = Answer {
            outcome: "final",
            marked_replay: false,
            ..answer.clone()
        };
        let first = self.finals.entry(said.operation).or_insert(shown.clone());
        let same = *first == shown;
        let first = first.clone();
        self.demand(same, || format!("I7: {shown:?} after {first:?}"));
    }

    fn with_owner(
        &mut self,
        name: usize,
        token: usize,
        what: &str,
        apply: impl FnOnce(&mut Kept) -> bool,
    ) {
        let kept = self.records.get_mut(&name);
        let Some(kept) = kept.filter(|kept| kept.token == token) else {
            return self.violate(&format!("I1: {what} without the token of the owner"));
        };
        let before = kept.state;
        if !apply(kept) {
            self.violate(&format!("I4: {what} in the state {before:?}"));
        }
    }

    fn epoch(&mut self, name: usize) -> &mut Epoch {
        let last = self.last_epoch.get(&name).copied().unwrap_or_default();
        self.epochs.entry((name, last)).or_default()
    }

    fn demand(&mut self, holds: bool, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.violate(&otherwise());
        }
    }

    fn violate(&mut self, what: &str) {
        self.violations.push(Violation {
            line: self.line,
            what: what.to_owned(),
        });
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }
}

impl Kept {
    fn is_at_work_by(&self, token: usize) -> bool {
        self.token == token && matches!(self.state, State::InProgress { .. })
    }

    fn has_lapsed(&self, now: Duration) -> bool {
        matches!(self.state, State::InProgress { lease_until } if lease_until < now)
    }

    fn allows(&self, reclaim_as: ReclaimAs, now: Duration) -> bool {
        let expired = self.expires_at < now;
        match reclaim_as {
            ReclaimAs::Takeover => self.has_lapsed(now),
            ReclaimAs::Rerun | ReclaimAs::Reconcile => self.state == State::Unknown && !expired,
            ReclaimAs::Retry => matches!(self.state, State::Released(_)) && !expired,
            ReclaimAs::Replace => self.state == State::Released(Release::AnyRequest) && !expired,
            ReclaimAs::Expired => {
                let is_held = matches!(self.state, State::InProgress { .. });
                expired && (!is_held || self.has_lapsed(now))
            }
        }
    }

    fn lose(&mut self, until: Duration) -> bool {
        match self.state {
            State::InProgress { .. } => {
                self.state = State::Unknown;
                self.expires_at = until;
                true
            }
            State::Unknown => true,
            State::Completed { .. } | State::Released(_) => false,
        }
    }
}

/// The parsed body of a handler's answer.
struct Payload<'a> {
    name: usize,
    body: &'a str,
    operation: usize,
    fence: u64,
}

impl<'a> Payload<'a> {
    fn read(text: &'a str) -> Option<Self> {
        let mut words = text.split(' ');
        let read = Self {
            name: words.next()?.parse().ok()?,
            body: words.next()?,
            operation: words.next()?.parse().ok()?,
            fence: words.nth(1)?.parse().ok()?,
        };
        words.next().is_none().then_some(read)
    }
}
