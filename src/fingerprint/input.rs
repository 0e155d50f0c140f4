//! Fingerprints of inputs of work that is not HTTP.

#[cfg(feature = "sealing")]
use super::key::FingerprintKey;
use super::{
    Comparison, Fingerprint, Mismatch,
    digest::{BodyFault, Framed},
    json::{self, Selection},
    layout::{Builder, Scheme},
    target::Source,
};

/// The fingerprints of one input, whose record holds a value. No scheme of requests equals
/// theirs, so that neither of the two records is replayed as the other.
pub(crate) struct InputFingerprints {
    pub(crate) current: Fingerprint,
    /// Those under earlier keys.
    earlier: Vec<Fingerprint>,
}

impl InputFingerprints {
    /// Those of an input in JSON: the order of members does not count.
    pub(crate) fn plain(json: &[u8]) -> Result<Self, BodyFault> {
        let hash = json::hash(json, &Selection::All)?;
        Ok(Self {
            current: unkeyed(hash),
            earlier: Vec::new(),
        })
    }

    /// The same under each of these keys, of which the first one is in force. `None` is no
    /// key. A key may come several times.
    #[cfg(feature = "sealing")]
    pub(crate) fn keyed<'k>(
        json: &[u8],
        keys: impl Iterator<Item = Option<&'k FingerprintKey>>,
    ) -> Result<Self, BodyFault> {
        let hash = json::hash(json, &Selection::All)?;
        let mut made: Vec<(Option<&[u8; 16]>, Fingerprint)> = Vec::new();
        for key in keys {
            let id = key.map(FingerprintKey::id);
            if made.iter().all(|(other, _)| *other != id) {
                let fingerprint = match key {
                    None => unkeyed(hash.clone()),
                    Some(key) => {
                        let builder = Builder::new(scheme(id), Source::Seen, b'v', hash.clone());
                        builder.build().keyed(key)
                    }
                };
                made.push((id, fingerprint));
            }
        }
        let mut made = made.into_iter().map(|(_, fingerprint)| fingerprint);
        let current = made.next().unwrap_or_else(|| unkeyed(hash));
        Ok(Self {
            current,
            earlier: made.collect(),
        })
    }

    pub(crate) fn compare(&self, recorded: &Fingerprint) -> Comparison {
        let mut known = std::iter::once(&self.current).chain(&self.earlier);
        match known.find(|own| recorded.is_made_as(own)) {
            Some(own) if own == recorded => Comparison::Same,
            Some(_) => Comparison::Different(Mismatch::default()),
            None => Comparison::SchemeUnknown,
        }
    }
}

fn unkeyed(hash: Framed) -> Fingerprint {
    Builder::new(scheme(None), Source::Seen, b'v', hash).build()
}

fn scheme(key: Option<&[u8; 16]>) -> Scheme {
    let mut framed = Framed::default();
    framed.field(b"value/1");
    if let Some(key) = key {
        framed.field(b"keyed/1");
        framed.field(key);
    }
    Scheme::new(framed.digest())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_keeps_its_fingerprint_in_any_order_of_members() {
        let of = |json: &str| InputFingerprints::plain(json.as_bytes()).unwrap().current;
        let fingerprint = of(r#"{"item":"pen","pieces":2}"#);
        assert_eq!(of(r#"{"pieces":2,"item":"pen"}"#), fingerprint);
        assert_ne!(of(r#"{"pieces":3,"item":"pen"}"#), fingerprint);
        assert_eq!(hex::encode(&fingerprint.as_bytes()[..40]), GOLDEN);
    }

    const GOLDEN: &str =
        "60659ae249a520001b949be1702cb45ac9ec734d55df84c0a714b4a0be393f7509d9ec459eb46f88";
}
