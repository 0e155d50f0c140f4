//! F110: each failure is a warning with its cause and its remedy.
//!
//! Many failures lead to a handful of events. No event shows a secret.

mod floods;
mod outcomes;
mod panics;
mod requests;
mod stores;

use std::{ops::Deref, thread, time::Duration};

use tower_idempotency::{
    DynStore, MemoryStore, Scope, Store as _,
    store::{Claim, Claimed},
};

use crate::{
    api::{Ask, ask, fingerprint},
    faulty::{Call, Fault, Faulty},
    probe::Probe,
    told::{Event, Told},
};

/// Events and metrics, none of which may show a secret.
struct Log(Told);

impl Log {
    fn listen() -> Self {
        Self(Told::listen())
    }

    /// The only warning whose message has this part.
    #[track_caller]
    fn only(&self, part: &str) -> Event {
        let mut found = self.all(part);
        assert_eq!(found.len(), 1, "{part:?} in {:#?}", self.warnings());
        found.remove(0)
    }

    fn all(&self, part: &str) -> Vec<Event> {
        let mut warnings = self.warnings();
        warnings.retain(|event| event.message().contains(part));
        warnings
    }
}

impl Deref for Log {
    type Target = Told;

    fn deref(&self) -> &Told {
        &self.0
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if thread::panicking() {
            return;
        }
        let (_, _, text) = self.so_far();
        for secret in ["s3cr3t", "k3y", "acct", "b0dy", "answ3r"] {
            assert!(!text.contains(secret), "{secret} in {text}");
        }
    }
}

trait Says {
    fn says(&self, field: &str, part: &str) -> &Self;
    fn names_an_operation(&self) -> &Self;
}

impl Says for Event {
    #[track_caller]
    fn says(&self, field: &str, part: &str) -> &Self {
        assert!(self.field(field).contains(part), "{part:?} in {self:#?}");
        self
    }

    #[track_caller]
    fn names_an_operation(&self) -> &Self {
        assert_eq!(self.field("operation").len(), 32, "{self:#?}");
        self
    }
}

/// A request with secrets in each of its parts.
fn secret(key: &str) -> Ask {
    ask("/count")
        .key(&format!("k3y-s3cr3t-{key}"))
        .from("acct-s3cr3t")
        .body("{\"b0dy\":\"s3cr3t\"}")
}

fn name(key: &str) -> tower_idempotency::store::RecordName {
    let key = tower_idempotency::Key::new(format!("k3y-s3cr3t-{key}"));
    tower_idempotency::store::RecordName::new(Scope::new("acct-s3cr3t").unwrap(), key)
}

/// Claims the key of this request, as a process that has crashed since.
async fn claimed(store: &DynStore, key: &str, lease: Duration) -> Claim {
    let print = fingerprint(ask("/count").key("K").body("{\"b0dy\":\"s3cr3t\"}")).await;
    let claim = Claim::new(print, lease, HOUR);
    let claimed = store.claim(&name(key), &claim).await.unwrap();
    assert!(matches!(claimed, Claimed::Acquired(_)));
    claim
}

fn broken(call: Call, fault: Fault) -> (Faulty<MemoryStore>, DynStore) {
    let faulty = Faulty::new(MemoryStore::new());
    faulty.inject(call, .., fault);
    (faulty.clone(), DynStore::new(faulty))
}

fn answering() -> Probe {
    Probe::answering(|run| {
        let mut response = run.created();
        *response.body_mut() = "answ3r-s3cr3t".into();
        response
    })
}

const CLAIM_FAILED: &str = "claim failed, nothing ran";

const HOUR: Duration = Duration::from_secs(3600);
