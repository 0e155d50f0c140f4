use std::time::Duration;

use bytes::Bytes;

use super::{
    HOUR, Subject, Trial, beyond,
    calls::Call,
    good,
    lists::listed,
    long_claim,
    states::{Status, response_of, superseded},
};
use crate::{
    key::{Key, RecordName, Scope},
    store::{ReclaimAs, Store, Token, admin::Filter},
};

/// # Names and scopes
impl<S: Subject> Trial<S> {
    /// The same key in two scopes names two records. A call for one leaves the other,
    /// even with the right token and fence.
    pub async fn i9_calls_in_one_scope_leave_the_others(&self) {
        for call in Call::ALL {
            let key = Key::new(format!("{call:?}"));
            let [ours, theirs, free] = ["ours", "theirs", "free"]
                .map(|scope| RecordName::new(Scope::from_stored(scope), key.clone()));
            let our = self.hold(&ours, HOUR, HOUR).await;
            let their = self.hold(&theirs, HOUR, HOUR).await;
            let before = self.peek(&theirs).await;
            let what = format!("{call:?} in another scope");
            for name in [&theirs, &free] {
                let fence = if our.grant.fence == their.grant.fence {
                    beyond(our.grant.fence)
                } else {
                    our.grant.fence
                };
                let answer = call.make(&self.store, name, our.token, fence).await;
                superseded(answer, &what);
            }
            let _ = call
                .make(&self.store, &ours, our.token, our.grant.fence)
                .await;
            self.stays(&theirs, &before, &what).await;
            assert!(
                self.peek(&free).await.is_none(),
                "{what}: makes no record there"
            );
        }
    }

    /// Scopes and keys are compared byte for byte, without joining, folding of case,
    /// trimming or normalization.
    pub async fn i9_similar_names_name_different_records(&self) {
        let parts = [
            ("a", "bc"),
            ("ab", "c"),
            ("abc", "c"),
            ("", "abc"),
            ("a", "b:c"),
            ("a:b", "c"),
            ("a~b", "c"),
            ("a", "~bc"),
            ("case", "Key"),
            ("case", "key"),
            ("Case", "key"),
            ("space", "key"),
            ("space", "key "),
            ("space", " key"),
            ("space ", "key"),
            ("form", "\u{e9}"),
            ("form", "e\u{301}"),
            ("form", "e"),
            ("number", "1"),
            ("number", "01"),
            ("number", "1.0"),
            ("number", "1e0"),
        ];
        self.are_different_records(parts).await;
    }

    /// Names may have any character but NUL, up to the longest key and scope.
    pub async fn unusual_names_are_kept_as_given(&self) {
        let long_key = noise(1024);
        let longer_by_its_end = format!("{}!", &long_key[..1023]);
        let long_scope = format!("{}~{}", noise(255), noise(255));
        let parts = [
            ("quotes", r#"'; DROP TABLE "records"; --"#),
            ("quotes", "`''`\"\""),
            ("backslash", r"\"),
            ("backslash", r"\\"),
            ("backslash", r"\x00\u0000\n"),
            ("pattern", "%"),
            ("pattern", "_"),
            ("pattern", "*?[a-z]{a,b}"),
            ("parameters", "$1 ?1 :name @p1 {} %s"),
            ("control", "\t\r\n\u{7f}"),
            ("separator", "\u{1f}"),
            ("separator\u{1f}~", "key"),
            ("не ascii ~платежи", "ключ"),
            ("\u{1f980}\u{10ffff}", "\u{1f980}"),
            ("null", "NULL"),
            ("", "single tenant"),
            (&long_scope, &long_key),
            (&long_scope, &longer_by_its_end),
        ];
        self.are_different_records(parts).await;
    }

    async fn are_different_records<const N: usize>(&self, parts: [(&str, &str); N]) {
        let names =
            parts.map(|(scope, key)| RecordName::new(Scope::from_stored(scope), Key::new(key)));
        let mut held = Vec::new();
        for (name, retention) in names.iter().zip(1..) {
            let owner = self
                .hold(name, HOUR, HOUR + Duration::from_secs(retention))
                .await;
            held.push(owner);
        }
        for (index, held) in held.iter().enumerate() {
            let record = good(self.peer.read(&held.name).await)
                .unwrap_or_else(|| panic!("read: {:?} names a record", parts[index]));
            assert!(
                record.token == held.token && record.fence == held.grant.fence,
                "names are compared byte for byte, and {:?} named another's record",
                parts[index]
            );
            superseded(
                Call::Renew
                    .make(&self.store, &held.name, Token::random(), held.grant.fence)
                    .await,
                "renew by a stranger",
            );
            self.complete(held, bytes(index), HOUR).await;
        }
        for (index, held) in held.iter().enumerate() {
            assert!(
                response_of(&self.record(&held.name).await) == Some(&bytes(index)),
                "names are compared byte for byte, and {:?} showed another's response",
                parts[index]
            );
        }
        // Forget every other name. The rest must stay.
        for held in held.iter().step_by(2) {
            self.forget(held).await;
        }
        for (index, held) in held.iter().enumerate() {
            assert_eq!(
                self.status(&held.name).await == Status::Free,
                index % 2 == 0,
                "names are compared byte for byte, and {:?} was taken for another",
                parts[index]
            );
        }
        for held in held.iter().step_by(2) {
            self.hold_again(held, ReclaimAs::Replace, long_claim(2))
                .await;
        }
        self.lapse().await;
        let listed = listed(&self.peer, &Filter::in_progress_for(S::SHORT), 100).await;
        for (name, parts) in names.iter().zip(parts).step_by(2) {
            assert_eq!(
                listed.iter().filter(|(listed, _)| listed == name).count(),
                1,
                "list: names come back byte for byte, and {parts:?} did not"
            );
        }
    }
}

fn bytes(index: usize) -> Bytes {
    Bytes::from(vec![index as u8; index])
}

/// Returns printable text that cannot be compressed.
fn noise(length: usize) -> String {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from(b'!' + (state % 94) as u8)
    })
    .take(length)
    .collect()
}
