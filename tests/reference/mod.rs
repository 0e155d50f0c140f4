//! Drives a store and the memory store through the same calls and compares
//! every answer.

use std::time::Duration;

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tower_idempotency::{
    Fence, Fingerprint, Key, MemoryStore, RecordName, Scope, Store, Token,
    store::{
        Claim, Claimed, Completion, Filter, Grant, Record, RecordState, Release, Resolution,
        Succession, Witness,
    },
};

/// What the two stores answered about one claim: the same token, but each
/// store's own fence.
#[derive(Clone, Copy)]
struct Granted {
    token: Token,
    ours: Fence,
    theirs: Fence,
}

/// The names in play and the claims granted for each, the latest last.
type Names = Vec<(RecordName, Vec<Granted>)>;

/// Compares `store`, which must be empty, with the memory store over `calls`
/// random calls. Durations are an hour or nothing, and each call comes later
/// than what lasted nothing, so that both clocks agree on what is over.
pub(crate) async fn compare(store: &impl Store, seed: u64, calls: usize) {
    let memory = MemoryStore::new();
    let mut dice = StdRng::seed_from_u64(seed);
    let mut names: Names = ["a", "b", "c"]
        .iter()
        .flat_map(|key| ["one", "two"].map(|scope| (name(scope, key), Vec::new())))
        .collect();
    for call in 0..calls {
        let context = format!("seed {seed}, call {call}");
        step(store, &memory, &mut names, &mut dice, &context).await;
    }
}

async fn step(
    store: &impl Store,
    memory: &MemoryStore,
    names: &mut Names,
    dice: &mut StdRng,
    context: &str,
) {
    let chosen = dice.random_range(0..names.len());
    let (name, granted) = &mut names[chosen];
    let known = match granted.len() {
        0 => stranger(),
        // Mostly the last claim, sometimes one before it, or nobody's.
        claims => match dice.random_range(0..8) {
            0 => stranger(),
            1 | 2 => granted[dice.random_range(0..claims)],
            _ => granted[claims - 1],
        },
    };
    let (token, ours, theirs) = (known.token, known.ours, known.theirs);
    let mut span = || {
        if dice.random_bool(0.5) {
            Duration::ZERO
        } else {
            HOUR
        }
    };
    let (one, other) = (span(), span());
    match dice.random_range(0..14) {
        0 | 1 => {
            let claim = a_claim(dice, one, other);
            let answers = (
                store.claim(name, &claim).await.unwrap(),
                memory.claim(name, &claim).await.unwrap(),
            );
            match answers {
                (Claimed::Acquired(here), Claimed::Acquired(there)) => {
                    remember(granted, &claim, here, there, context);
                }
                (Claimed::Occupied(here), Claimed::Occupied(there)) => {
                    assert_eq!(spelled(&here), spelled(&there), "{context}: claim");
                }
                (here, there) => panic!("{context}: claim {here:?} {there:?}"),
            }
        }
        2..=4 => {
            let succession = [
                Succession::TakeOver,
                Succession::Retry,
                Succession::Replace,
                Succession::Expired,
            ][dice.random_range(0..4)];
            let claim = a_claim(dice, one, other);
            let here = store.reclaim(name, ours, succession, &claim).await.unwrap();
            let there = memory
                .reclaim(name, theirs, succession, &claim)
                .await
                .unwrap();
            match (here, there) {
                (Some(here), Some(there)) => remember(granted, &claim, here, there, context),
                (None, None) => {}
                (here, there) => panic!("{context}: {succession:?} {here:?} {there:?}"),
            }
        }
        5 => assert_eq!(
            store.renew(name, token, one).await.unwrap(),
            memory.renew(name, token, one).await.unwrap(),
            "{context}: renew"
        ),
        6 | 7 => {
            let completion = Completion::new(a_response(dice), one, other);
            assert_eq!(
                store.complete(name, token, &completion).await.unwrap(),
                memory.complete(name, token, &completion).await.unwrap(),
                "{context}: complete"
            );
        }
        8 | 9 => {
            let release = [Release::Bound, Release::Freed][dice.random_range(0..2)];
            assert_eq!(
                store.release(name, token, release).await.unwrap(),
                memory.release(name, token, release).await.unwrap(),
                "{context}: {release:?}"
            );
        }
        10 => {
            let (here, there) = if dice.random_bool(0.5) {
                (Witness::Owner(token), Witness::Owner(token))
            } else {
                (Witness::Lapsed(ours), Witness::Lapsed(theirs))
            };
            assert_eq!(
                store.mark_unknown(name, here, one).await.unwrap(),
                memory.mark_unknown(name, there, one).await.unwrap(),
                "{context}: {here:?}"
            );
        }
        11 => {
            let resolution = if dice.random_bool(0.5) {
                Resolution::Happened(a_response(dice))
            } else {
                Resolution::DidNotHappen
            };
            assert_eq!(
                store.resolve(name, ours, &resolution).await.unwrap(),
                memory.resolve(name, theirs, &resolution).await.unwrap(),
                "{context}: {resolution:?}"
            );
        }
        12 => assert_eq!(
            store.forget(name, ours).await.unwrap(),
            memory.forget(name, theirs).await.unwrap(),
            "{context}: forget"
        ),
        _ => assert_eq!(
            store.purge_expired(1_000, one).await.unwrap(),
            memory.purge_expired(1_000, one).await.unwrap(),
            "{context}: purge"
        ),
    }
    tokio::time::sleep(PAUSE).await;
    let here = store.read(name).await.unwrap();
    let there = memory.read(name).await.unwrap();
    assert_eq!(
        here.as_ref().map(spelled),
        there.as_ref().map(spelled),
        "{context}: read"
    );
    for filter in [Filter::Unknown, Filter::InProgressFor(Duration::ZERO)] {
        let mut here: Vec<_> = store.list(filter, 1_000).await.unwrap();
        let mut there: Vec<_> = memory.list(filter, 1_000).await.unwrap();
        here.sort_by(|(one, _), (other, _)| one.cmp(other));
        there.sort_by(|(one, _), (other, _)| one.cmp(other));
        let spell = |listed: Vec<(RecordName, Record)>| -> Vec<_> {
            listed
                .into_iter()
                .map(|(name, record)| (name, spelled(&record)))
                .collect()
        };
        assert_eq!(spell(here), spell(there), "{context}: {filter:?}");
    }
}

fn remember(granted: &mut Vec<Granted>, claim: &Claim, here: Grant, there: Grant, context: &str) {
    assert_eq!(
        (here.operation, here.attempt),
        (there.operation, there.attempt),
        "{context}"
    );
    assert!(
        granted.iter().all(|earlier| earlier.ours < here.fence),
        "{context}: the fence does not grow"
    );
    granted.push(Granted {
        token: claim.token,
        ours: here.fence,
        theirs: there.fence,
    });
}

/// Everything about a record that the two stores must agree on.
fn spelled(record: &Record) -> impl PartialEq + std::fmt::Debug + use<> {
    let (state, response) = match &record.state {
        RecordState::InProgress { lease_left: None } => ("lapsed", None),
        RecordState::InProgress { .. } => ("leased", None),
        RecordState::Completed { response } => ("completed", Some(response.clone())),
        RecordState::Unknown => ("unknown", None),
        RecordState::Released(Release::Bound) => ("bound", None),
        RecordState::Released(Release::Freed) => ("freed", None),
        other => panic!("{other:?}"),
    };
    (
        record.operation,
        record.attempt,
        record.takeovers,
        *record.fingerprint.as_bytes(),
        *record.token.as_bytes(),
        record.expires_in.map(|left| left > HOUR / 2),
        state,
        response,
    )
}

fn a_claim(dice: &mut StdRng, lease: Duration, retention: Duration) -> Claim {
    Claim::new(
        Fingerprint::from_bytes([dice.random_range(0..3); 40]),
        lease,
        retention,
    )
}

fn a_response(dice: &mut StdRng) -> bytes::Bytes {
    let length = [0, 1, 300, 9_000][dice.random_range(0..4)];
    vec![dice.random(); length].into()
}

fn stranger() -> Granted {
    Granted {
        token: Token::random(),
        ours: Fence::new(u64::MAX),
        theirs: Fence::new(u64::MAX),
    }
}

pub(crate) fn name(scope: &str, key: &str) -> RecordName {
    RecordName::new(Scope::from_stored(scope), Key::new(key))
}

const HOUR: Duration = Duration::from_secs(3600);

/// More than one tick of the coarsest clock.
const PAUSE: Duration = Duration::from_millis(3);
