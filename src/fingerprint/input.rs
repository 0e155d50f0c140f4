//! Fingerprints of inputs of work that is not HTTP.

use super::{
    Comparison, Fingerprint, Mismatch,
    digest::{BodyFault, Framed},
    json::{self, Selection},
    layout::{Builder, Scheme},
    target::Source,
};

/// Inputs whose records hold values. No scheme of requests equals theirs, so that neither
/// of the two records is replayed as the other.
pub(crate) struct InputKind;

impl InputKind {
    /// Returns the fingerprint of an input in JSON: the order of members does not count.
    pub(crate) fn fingerprint(json: &[u8]) -> Result<Fingerprint, BodyFault> {
        let input = json::hash(json, &Selection::All)?;
        Ok(Builder::new(Self::scheme(), Source::Seen, b'v', input).build())
    }

    pub(crate) fn compare(recorded: &Fingerprint, own: &Fingerprint) -> Comparison {
        if recorded == own {
            Comparison::Same
        } else if recorded.is_made_as(own) {
            Comparison::Different(Mismatch::default())
        } else {
            Comparison::SchemeUnknown
        }
    }

    fn scheme() -> Scheme {
        let mut framed = Framed::default();
        framed.field(b"value/1");
        Scheme::new(framed.digest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_keeps_its_fingerprint_in_any_order_of_members() {
        let of = |json: &str| InputKind::fingerprint(json.as_bytes()).unwrap();
        let fingerprint = of(r#"{"item":"pen","pieces":2}"#);
        assert_eq!(of(r#"{"pieces":2,"item":"pen"}"#), fingerprint);
        assert_ne!(of(r#"{"pieces":3,"item":"pen"}"#), fingerprint);
        assert_eq!(hex::encode(&fingerprint.as_bytes()[..40]), GOLDEN);
    }

    const GOLDEN: &str =
        "60659ae249a520001b949be1702cb45ac9ec734d55df84c0a714b4a0be393f7509d9ec459eb46f88";
}
