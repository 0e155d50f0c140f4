//! The key of a fingerprint.

use crate::secret::{Secret, mac::MacKey};

/// Turns a fingerprint into one that only the service can make.
#[derive(Debug)]
pub(crate) struct FingerprintKey {
    mac: MacKey,
    /// Tells the keys of two secrets apart, and nothing of either.
    id: [u8; 16],
}

impl FingerprintKey {
    pub(crate) fn new(secret: &Secret) -> Self {
        let id = MacKey::derive(secret, "fingerprint id/1").start().finish();
        Self {
            mac: MacKey::derive(secret, "fingerprints/1"),
            id: *id.first_chunk().expect("a MAC is longer"),
        }
    }

    pub(crate) fn id(&self) -> &[u8; 16] {
        &self.id
    }

    /// Returns the MAC of a fingerprint's scheme and digest.
    pub(crate) fn digest(&self, made: &[u8]) -> [u8; 32] {
        self.mac_of(0, made)
    }

    /// Returns bytes to hide the prints of the parts behind, for a MAC of
    /// [`digest`](Self::digest).
    pub(crate) fn mask(&self, digest: &[u8]) -> impl Iterator<Item = u8> {
        let masks = [self.mac_of(1, digest), self.mac_of(2, digest)];
        masks.into_iter().flatten()
    }

    fn mac_of(&self, purpose: u8, bytes: &[u8]) -> [u8; 32] {
        let mut mac = self.mac.start();
        mac.write(&[purpose]);
        mac.write(bytes);
        mac.finish()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{Request, request};

    use super::*;
    use crate::fingerprint::{Comparison, Fingerprint, Fingerprinter, Fingerprinting, RequestPart};

    fn secret(filled: u8) -> Secret {
        Secret::from_bytes(&[filled; 32]).unwrap()
    }

    fn parts(uri: &str) -> request::Parts {
        Request::post(uri).body(()).unwrap().into_parts().0
    }

    fn made(by: &Fingerprinting, uri: &str, body: &'static str) -> Fingerprint {
        let by = Fingerprinter::new(by.clone(), Vec::new());
        by.current(&parts(uri), &body.into()).0
    }

    fn compared(by: &Fingerprinter, recorded: &Fingerprint, uri: &str, body: &str) -> Comparison {
        let (parts, body) = (parts(uri), Bytes::from(body.to_owned()));
        let current = by.current(&parts, &body).0;
        by.compare(recorded, &current, &parts, &body)
    }

    #[test]
    fn a_keyed_request_keeps_its_fingerprint() {
        let keyed = Fingerprinting::bytes().keyed(&secret(7));
        let fingerprint = made(&keyed, "/orders?dry=1", "x");
        assert_eq!(hex::encode(fingerprint.as_bytes()), GOLDEN);
    }

    #[test]
    fn a_mismatch_under_a_secret_names_the_parts_that_differ() {
        for form in [
            Fingerprinting::bytes(),
            Fingerprinting::json().authority(),
            Fingerprinting::json_only(["/a"]).header(http::header::ACCEPT),
        ] {
            let keyed = form.keyed(&secret(7));
            let recorded = made(&keyed, "/a?b", "{\"a\":1}");
            let by = Fingerprinter::new(keyed, Vec::new());
            let compare = |uri, body| compared(&by, &recorded, uri, body);
            assert!(matches!(compare("/a?b", "{\"a\":1}"), Comparison::Same));
            for (uri, body, expected) in [
                ("/b?b", "{\"a\":1}", RequestPart::Path),
                ("/a?c", "{\"a\":1}", RequestPart::Query),
                ("/a?b", "{\"a\":2}", RequestPart::Body),
            ] {
                let Comparison::Different(mismatch) = compare(uri, body) else {
                    panic!("another request is the same");
                };
                assert_eq!(mismatch.differs, [expected]);
            }
        }
    }

    #[test]
    fn without_its_secret_no_part_of_a_fingerprint_can_be_guessed() {
        let plain = made(&Fingerprinting::bytes(), "/a?b", "1234");
        let keyed = made(&Fingerprinting::bytes().keyed(&secret(7)), "/a?b", "1234");
        let other = made(&Fingerprinting::bytes().keyed(&secret(8)), "/a?b", "1234");
        // Another request with the same body shows another print of it.
        let same_body = made(&Fingerprinting::bytes().keyed(&secret(7)), "/c?b", "1234");
        for guess in [&plain, &other, &same_body] {
            let prints = |of: &Fingerprint| -> Vec<[u8; 4]> {
                let prints = of.as_bytes()[8..].chunks_exact(4);
                prints.map(|print| print.try_into().unwrap()).collect()
            };
            let equal = prints(guess).into_iter().zip(prints(&keyed));
            assert_eq!(equal.filter(|(guess, keyed)| guess == keyed).count(), 0);
        }
    }

    #[test]
    fn a_secret_understands_other_forms_only_if_they_are_named() {
        let plain = Fingerprinting::bytes();
        let [old, new] = [7, 8].map(|filled| plain.clone().keyed(&secret(filled)));
        let alone = Fingerprinter::new(new.clone(), Vec::new());
        for recorded_by in [&old, &plain] {
            let recorded = made(recorded_by, "/a", "x");
            let unknown = compared(&alone, &recorded, "/a", "x");
            assert!(matches!(unknown, Comparison::SchemeUnknown));
        }
        let rotating = Fingerprinter::new(new.clone(), vec![old.clone(), plain.clone()]);
        // A process that learns the secret as an earlier one, and still makes plain ones.
        let first_step = Fingerprinter::new(plain.clone(), vec![new.clone()]);
        for (by, recorded_by) in [(&rotating, &old), (&rotating, &plain), (&first_step, &new)] {
            let recorded = made(recorded_by, "/a", "x");
            let same = compared(by, &recorded, "/a", "x");
            assert!(matches!(same, Comparison::Same));
            let other = compared(by, &recorded, "/a", "y");
            assert!(matches!(other, Comparison::Different(_)));
        }
    }

    #[cfg(feature = "guard")]
    #[test]
    fn a_keyed_input_is_compared_under_each_named_secret() {
        let of = |by: &Fingerprinter, json: &str| by.of_input(json.as_bytes()).unwrap();
        let keyed = |filled| Fingerprinting::bytes().keyed(&secret(filled));
        let plain = Fingerprinter::new(Fingerprinting::bytes(), Vec::new());
        let old = Fingerprinter::new(keyed(7), Vec::new());
        let new = Fingerprinter::new(keyed(8), vec![keyed(7), Fingerprinting::bytes()]);
        for recorded in [of(&plain, "1").current, of(&old, "1").current] {
            assert!(matches!(of(&new, "1").compare(&recorded), Comparison::Same));
            let other = of(&new, "2").compare(&recorded);
            assert!(matches!(other, Comparison::Different(_)));
        }
        let recorded = of(&new, "1").current;
        for stranger in [&old, &plain] {
            let unknown = of(stranger, "1").compare(&recorded);
            assert!(matches!(unknown, Comparison::SchemeUnknown));
        }
    }

    /// Made by Python's `hmac`.
    const GOLDEN: &str = concat!(
        "37d95cb63cb66b00",
        "4ddace9043c3e7581ca4014f41e6e2db9715c01cc34ca3062978927ea24c8e50",
        "7f16b0107244ef1b23c92a052e09190e213ab2f2f6d78b33571ce4493f47c6c52ca7d5216932045a244875dc",
    );
}
