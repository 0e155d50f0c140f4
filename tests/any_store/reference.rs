//! Drives a store and the transition function through the same calls and compares
//! every answer.

use std::{collections::HashSet, time::Duration};

use http::Response;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tower_idempotency::{
    Fence, OperationId, Store,
    store::{
        Claim, Claimed, Completion, Fingerprint, Purged, ReclaimAs, Record, RecordName,
        RecordState, Release, Token, Transitioned,
        admin::{Filter, RecordedResponse, Resolution},
    },
};

use super::{HOUR, fingerprint, name, transitions::TransitionStore};

/// A store, which must be empty, beside the reference.
///
/// Durations are an hour or zero, and each call comes after the durations of zero,
/// so that both clocks agree on which have passed.
pub(crate) struct Compared<'a, S> {
    store: &'a S,
    reference: TransitionStore,
    /// Whether records may expire. Redis removes expired ones by itself.
    pub(crate) expires: bool,
    /// Whether lists are compared after each call. Otherwise they are at the end of a random
    /// walk only, because some stores read a thousand keys for a list.
    pub(crate) lists_often: bool,
}

impl<'a, S: Store> Compared<'a, S> {
    pub(crate) fn new(store: &'a S) -> Self {
        Self {
            store,
            reference: TransitionStore::new(),
            expires: true,
            lists_often: true,
        }
    }

    /// Makes every transition from every state, by the last claim and by an earlier
    /// one.
    pub(crate) async fn every_transition(&self) {
        let mut case = 0;
        let other = if self.expires { NOTHING } else { HOUR };
        for retention in HashSet::from([HOUR, other]) {
            for state in STATES {
                for number in 0..CALLS {
                    for stale in [false, true] {
                        case += 1;
                        let name = name("every", &case.to_string());
                        let context = format!("{state:?}, retention {retention:?}, {stale}");
                        let (earlier, last) = self.put(&name, state, retention, &context).await;
                        let by = if stale { earlier } else { last };
                        let call = a_call(number, by, HOUR, HOUR, other);
                        self.call(&name, &call, &context).await;
                        // The sweeps of other cases find no record.
                        let (ours, theirs) = self.fences(&name).await;
                        let _ = self.store.forget(&name, ours).await.unwrap();
                        let _ = self.reference.forget(&name, theirs).await.unwrap();
                    }
                }
            }
        }
    }

    /// Makes `steps` random calls on a few names.
    pub(crate) async fn random_walk(&self, seed: u64, steps: usize) {
        let mut dice = StdRng::seed_from_u64(seed);
        let mut names: Vec<(RecordName, Vec<Granted>)> = ["a", "b"]
            .iter()
            .flat_map(|key| ["one", "two"].map(|scope| (name(scope, key), Vec::new())))
            .collect();
        for step in 0..steps {
            let chosen = dice.random_range(0..names.len());
            let (name, granted) = &mut names[chosen];
            // Mostly the last claim, sometimes an earlier one.
            let back = usize::from(dice.random_bool(0.2));
            let by = granted.iter().rev().nth(back).copied();
            let [lease, one, other] = [true, self.expires, self.expires].map(|may_be_over| {
                let is_over = dice.random_bool(0.5) && may_be_over;
                if is_over { NOTHING } else { HOUR }
            });
            let call = a_call(
                dice.random_range(0..CALLS),
                by.unwrap_or_else(Granted::none),
                lease,
                one,
                other,
            );
            let context = format!("seed {seed}, step {step}");
            if let Some(grant) = self.call(name, &call, &context).await {
                assert!(
                    granted.iter().all(|earlier| earlier.ours < grant.ours),
                    "{context}: the fence does not grow"
                );
                granted.push(grant);
            }
        }
        self.compare_lists(&format!("seed {seed}")).await;
    }

    /// Makes a record in this state. Returns two claims of it: an earlier one and
    /// the last.
    async fn put(
        &self,
        name: &RecordName,
        state: State,
        retention: Duration,
        context: &str,
    ) -> (Granted, Granted) {
        let lapsed = Claim::new(fingerprint(1), NOTHING, HOUR);
        let earlier = self.call(name, &Call::Claim(lapsed), context).await;
        let earlier = earlier.expect("a free name");
        let lease = if state == State::Lapsed {
            NOTHING
        } else {
            HOUR
        };
        let claim = Claim::new(fingerprint(2), lease, retention);
        let again = Call::Reclaim(earlier, ReclaimAs::Takeover, claim);
        let last = self
            .call(name, &again, context)
            .await
            .expect("a lapsed lease");
        let call = match state {
            State::Leased | State::Lapsed => return (earlier, last),
            State::Completed => {
                Call::Complete(last, Completion::new("kept".into(), retention, NOTHING))
            }
            State::Unknown => Call::MarkByOwner(last, retention),
            State::Bound => Call::Release(last, Release::SameRequest),
            State::Freed => Call::Release(last, Release::AnyRequest),
        };
        self.call(name, &call, context).await;
        (earlier, last)
    }

    /// Makes the call on both, and compares the answers and the records after it.
    async fn call(&self, name: &RecordName, call: &Call, context: &str) -> Option<Granted> {
        let ours = ask(self.store, name, call, |granted| granted.ours).await;
        let theirs = ask(&self.reference, name, call, |granted| granted.theirs).await;
        assert_eq!(ours.0, theirs.0, "{context}: {call:?}");
        // A lease of compare-and-swap lasts from when it was seen.
        let _ = self.store.read(name).await.unwrap();
        tokio::time::sleep(PAUSE).await;
        let (here, there) = (
            self.store.read(name).await.unwrap(),
            self.reference.read(name).await.unwrap(),
        );
        assert_eq!(
            here.as_ref().map(Seen::new),
            there.as_ref().map(Seen::new),
            "{context}: after {call:?}"
        );
        if self.lists_often {
            self.compare_lists(&format!("{context}: after {call:?}"))
                .await;
        }
        let (ours, theirs) = (ours.1?, theirs.1?);
        let (Call::Claim(claim) | Call::Reclaim(_, _, claim)) = call else {
            return None;
        };
        Some(Granted {
            token: claim.token,
            ours,
            theirs,
        })
    }

    async fn compare_lists(&self, context: &str) {
        for filter in [Filter::unknown(), Filter::in_progress_for(NOTHING)] {
            assert_eq!(
                listed(self.store, &filter).await,
                listed(&self.reference, &filter).await,
                "{context}: {filter:?}"
            );
        }
    }

    async fn fences(&self, name: &RecordName) -> (Fence, Fence) {
        let fence = |record: Option<Record>| record.map_or(Fence::from(0), |record| record.fence);
        (
            fence(self.store.read(name).await.unwrap()),
            fence(self.reference.read(name).await.unwrap()),
        )
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Leased,
    Lapsed,
    Completed,
    Unknown,
    Bound,
    Freed,
}

const STATES: [State; 6] = [
    State::Leased,
    State::Lapsed,
    State::Completed,
    State::Unknown,
    State::Bound,
    State::Freed,
];

/// A claim that both stores granted: one token, but each store's own fence.
#[derive(Clone, Copy, Debug)]
struct Granted {
    token: Token,
    ours: Fence,
    theirs: Fence,
}

impl Granted {
    fn none() -> Self {
        Self {
            token: Token::random(),
            ours: Fence::from(u64::MAX),
            theirs: Fence::from(u64::MAX),
        }
    }
}

#[derive(Debug)]
enum Call {
    Claim(Claim),
    Reclaim(Granted, ReclaimAs, Claim),
    Renew(Granted, Duration),
    Complete(Granted, Completion),
    Release(Granted, Release),
    MarkByOwner(Granted, Duration),
    MarkLapsed(Granted, Duration),
    Resolve(Granted, Resolution, Duration),
    Forget(Granted),
    Purge(Duration),
}

/// The call with this number.
fn a_call(number: usize, by: Granted, lease: Duration, one: Duration, other: Duration) -> Call {
    let claim = Claim::new(fingerprint(3), lease, other);
    match number {
        0 => Call::Claim(claim),
        1 => Call::Reclaim(by, ReclaimAs::Takeover, claim),
        2 => Call::Reclaim(by, ReclaimAs::Retry, claim),
        3 => Call::Reclaim(by, ReclaimAs::Replace, claim),
        4 => Call::Reclaim(by, ReclaimAs::Expired, claim),
        5 => Call::Renew(by, lease),
        6 => Call::Complete(by, Completion::new(vec![7; 9_000].into(), one, other)),
        7 => Call::Complete(by, Completion::new("".into(), other, one)),
        8 => Call::Release(by, Release::SameRequest),
        9 => Call::Release(by, Release::AnyRequest),
        10 => Call::MarkByOwner(by, one),
        11 => Call::MarkLapsed(by, one),
        12 => Call::Resolve(
            by,
            Resolution::Happened(RecordedResponse::new(Response::new("it did")).unwrap()),
            one,
        ),
        13 => Call::Resolve(by, Resolution::DidNotHappen, one),
        14 => Call::Forget(by),
        15 => Call::Purge(one),
        16 => Call::Reclaim(by, ReclaimAs::Rerun, claim),
        17 => Call::Reclaim(by, ReclaimAs::Reconcile, claim),
        _ => unreachable!("there are {CALLS} calls"),
    }
}

const CALLS: usize = 18;

#[derive(Debug, PartialEq)]
enum Answer {
    Granted(OperationId, u32),
    NotGranted,
    Occupied(Seen),
    Vanished,
    Settled(Transitioned),
    Purged(Purged),
}

async fn ask(
    store: &impl Store,
    name: &RecordName,
    call: &Call,
    fence: impl Fn(&Granted) -> Fence,
) -> (Answer, Option<Fence>) {
    let settled = match call {
        Call::Claim(claim) => {
            return match store.claim(name, claim).await.unwrap() {
                Claimed::Acquired(grant) => (
                    Answer::Granted(grant.operation, grant.attempt),
                    Some(grant.fence),
                ),
                Claimed::Occupied(record) => (Answer::Occupied(Seen::new(&record)), None),
                Claimed::Vanished => (Answer::Vanished, None),
            };
        }
        Call::Reclaim(by, reclaim_as, claim) => {
            let granted = store.reclaim(name, fence(by), *reclaim_as, claim).await;
            return match granted.unwrap() {
                Some(grant) => (
                    Answer::Granted(grant.operation, grant.attempt),
                    Some(grant.fence),
                ),
                None => (Answer::NotGranted, None),
            };
        }
        Call::Purge(retention) => {
            let purged = store.purge_expired(1_000, *retention).await.unwrap();
            return (Answer::Purged(purged), None);
        }
        Call::Renew(by, lease) => store.renew(name, by.token, *lease).await,
        Call::Complete(by, completion) => store.complete(name, by.token, completion).await,
        Call::Release(by, release) => store.release(name, by.token, *release).await,
        Call::MarkByOwner(by, retention) => store.mark_unknown(name, by.token, *retention).await,
        Call::MarkLapsed(by, retention) => store.mark_lapsed(name, fence(by), *retention).await,
        Call::Resolve(by, resolution, at_least) => {
            store.resolve(name, fence(by), resolution, *at_least).await
        }
        Call::Forget(by) => store.forget(name, fence(by)).await,
    };
    (Answer::Settled(settled.unwrap()), None)
}

async fn listed(store: &impl Store, filter: &Filter) -> Vec<(RecordName, Seen)> {
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = store.list(filter, after.as_ref(), 1_000).await.unwrap();
        let records = page.records.into_iter();
        listed.extend(records.map(|(name, record)| (name, Seen::new(&record))));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    listed.sort_by(|(one, _), (other, _)| one.cmp(other));
    listed
}

/// The parts of a record on which both must agree.
#[derive(Debug, PartialEq)]
struct Seen {
    operation: OperationId,
    attempt: u32,
    takeovers: u32,
    fingerprint: Fingerprint,
    token: Token,
    expired: bool,
    state: String,
    response: Option<bytes::Bytes>,
}

impl Seen {
    fn new(record: &Record) -> Self {
        let response = match &record.state {
            RecordState::Completed { response } => Some(response.clone()),
            _ => None,
        };
        let state = match &record.state {
            RecordState::InProgress { lease_left } => {
                format!("InProgress, lapsed: {}", lease_left.is_none())
            }
            other => format!("{other:?}"),
        };
        Self {
            operation: record.operation,
            attempt: record.attempt,
            takeovers: record.takeovers,
            fingerprint: record.fingerprint,
            token: record.token,
            expired: record.expires_in.is_none(),
            state,
            response,
        }
    }
}

const NOTHING: Duration = Duration::ZERO;

/// More than one tick of the coarsest clock.
const PAUSE: Duration = Duration::from_millis(3);
