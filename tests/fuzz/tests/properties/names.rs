//! Different callers, endpoints and keys have different records.

use std::{collections::BTreeMap, sync::Mutex, time::Duration};

use bytes::Bytes;
use proptest::{collection::vec, prelude::*, sample::select};
use tower_idempotency::{
    Key, Scope, Store as _, StoreError,
    store::{
        Claim, Claimed, Fingerprint, RecordName,
        admin::Filter,
        cas::{CasStore, CompareAndSwap, Listed, Swap, Versioned},
    },
};

use crate::responses::current_thread;

proptest! {
    #[test]
    fn rule_33_different_parts_make_different_names(one in parts(), other in parts()) {
        prop_assert_eq!(name(&one) == name(&other), one == other);
    }

    #[test]
    fn rule_33_different_names_have_different_records(names in vec(parts(), 1..6)) {
        let store = CasStore::new(Engine::default());
        current_thread().block_on(async {
            let mut claimed = BTreeMap::new();
            for name in names.iter().map(name) {
                let hour = Duration::from_secs(3600);
                let fingerprint = Fingerprint::from_bytes([1; Fingerprint::LENGTH]);
                let claim = Claim::new(fingerprint, hour, hour);
                let is_new = claimed.insert(name.clone(), claim.token).is_none();
                let answer = store.claim(&name, &claim).await.unwrap();
                assert_eq!(matches!(answer, Claimed::Acquired(_)), is_new);
            }
            let every = Filter::in_progress_for(Duration::ZERO);
            let listed = store.list(&every, None, 10).await.unwrap().records;
            assert!(listed.iter().map(|(name, _)| name).eq(claimed.keys()));
        });
    }
}

/// A caller, perhaps an endpoint, and a key.
type Parts = (String, Option<String>, String);

fn parts() -> impl Strategy<Value = Parts> {
    let key = vec(select(&["a", "~", "%", ":", "{", "\\", "/"][..]), 1..4);
    (
        caller(),
        prop::option::of(endpoint()),
        key.prop_map(|key| key.concat()),
    )
}

fn caller() -> impl Strategy<Value = String> {
    vec(select(PIECES), 1..4).prop_map(|pieces| pieces.concat())
}

fn endpoint() -> impl Strategy<Value = String> {
    let long = Just("x".repeat(256));
    let pieces = [PIECES, &["\n", "\0"]].concat();
    prop_oneof![9 => vec(select(pieces), 0..4).prop_map(|pieces| pieces.concat()), 1 => long]
}

fn name((caller, endpoint, key): &Parts) -> RecordName {
    let scope = Scope::new(caller).expect("short and printable");
    let scope = match endpoint {
        Some(endpoint) => scope.with_endpoint(endpoint),
        None => scope,
    };
    RecordName::new(scope, Key::new(key.as_str()))
}

const PIECES: &[&str] = &["a", "b", "~", "%", "7E", "25", ":", "é", " ", "%sha256:"];

/// Keys and values in memory, without a second writer.
#[derive(Default)]
struct Engine(Mutex<BTreeMap<String, Versioned<u64>>>);

impl CompareAndSwap for Engine {
    type Version = u64;

    async fn get(&self, key: &str) -> Result<Option<Versioned<u64>>, StoreError> {
        Ok(self.0.lock().unwrap().get(key).cloned())
    }

    async fn put(
        &self,
        key: &str,
        value: Bytes,
        expected: Option<&u64>,
    ) -> Result<Swap<u64>, StoreError> {
        let mut values = self.0.lock().unwrap();
        let found = values.get(key).cloned();
        if found.as_ref().map(|found| &found.version) != expected {
            return Ok(Swap::Lost(found));
        }
        let version = expected.map_or(1, |version| version + 1);
        values.insert(key.to_owned(), Versioned { value, version });
        Ok(Swap::Written(version))
    }

    async fn delete(&self, key: &str, _: &u64) -> Result<bool, StoreError> {
        Ok(self.0.lock().unwrap().remove(key).is_some())
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Listed<u64>, StoreError> {
        let values = self.0.lock().unwrap();
        let values = values.iter().filter(|(key, _)| key.starts_with(prefix));
        let values = values.filter(|(key, _)| after.is_none_or(|after| key.as_str() > after));
        let values = values.map(|(key, value)| (key.clone(), value.clone()));
        Ok(values.take(limit as usize).collect())
    }
}
