//! Sealed responses, of which no changed byte opens.

use std::time::Duration;

use bytes::Bytes;
use http::Response;
use tower_idempotency::{
    Fence, Key, OperationId, Scope, StoreErrorKind,
    sealing::{Sealing, SealingKey, Secret},
    store::{Fingerprint, Record, RecordName, RecordState, Token, admin::RecordedResponse},
};

use crate::probe::block_on;

/// The first four bytes choose a change. The rest is the body of a response, and once more
/// the bytes of a store.
pub fn sealed(data: &[u8]) {
    let Some((&[high, low, bit, length], body)) = data.split_first_chunk() else {
        return;
    };
    let secret =
        Secret::from_hex("b1d5c6e80e2f43b9a0d7f1c24e6a8890b1d5c6e80e2f43b9a0d7f1c24e6a8890");
    let key = SealingKey::new("1", &secret.expect("32 bytes")).expect("a valid id");
    let sealing = Sealing::new("fuzz", key);
    let name = RecordName::new(Scope::single_tenant(), Key::new("k"));
    let response = RecordedResponse::new(Response::new(body.to_vec())).expect("it is whole");
    let plain = response.encode();
    let sealed = block_on(sealing.seal(&name, &record(Bytes::new()), &response));
    let sealed = sealed.expect("the key is here").encode();
    let open = |bytes: Bytes| {
        let opened = block_on(sealing.open(&name, &record(bytes)));
        opened.map(|opened| opened.expect("the record is completed").encode())
    };
    assert_eq!(open(sealed.clone()).expect("it was sealed here"), plain);

    let mut changed = sealed.to_vec();
    let at = (usize::from(high) << 8 | usize::from(low)) % changed.len();
    changed[at] ^= 1 << (bit % 8);
    let longer = [&sealed[..], &[length]].concat();
    for bytes in [
        changed.into(),
        sealed.slice(..at),
        longer.into(),
        plain,
        Bytes::copy_from_slice(body),
    ] {
        let error = open(bytes).expect_err("it was not sealed so");
        assert_eq!(error.kind(), StoreErrorKind::Corrupt);
    }
}

fn record(response: Bytes) -> Record {
    Record {
        operation: OperationId::from_bytes([1; 16]),
        fence: Fence::from(1),
        attempt: 1,
        takeovers: 0,
        fingerprint: Fingerprint::from_bytes([1; Fingerprint::LENGTH]),
        token: Token::from_bytes([1; 16]),
        age: Duration::ZERO,
        expires_in: Some(Duration::from_secs(1)),
        state: RecordState::Completed { response },
    }
}
