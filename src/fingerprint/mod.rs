//! Is it the same request again?

mod content;
mod digest;
mod form;
#[cfg(feature = "guard")]
mod input;
mod json;
#[cfg(feature = "sealing")]
mod key;
mod layout;
mod media_type;
#[cfg(feature = "multipart")]
mod multipart;
mod parts;
mod settings;
mod target;

use http::request;

#[cfg(feature = "guard")]
pub(crate) use self::input::InputFingerprints;
pub(crate) use self::{content::Content, digest::BodyFault, parts::Mismatch};
pub use self::{layout::Fingerprint, parts::RequestPart, settings::Fingerprinting};
use self::{layout::Scheme, target::Target};
use crate::body::digests::DigestAlgorithm;

/// The scheme in force and those whose records it can still compare with.
#[derive(Debug)]
pub(crate) struct Fingerprinter {
    /// The first one is in force.
    schemes: Vec<(Scheme, Fingerprinting)>,
    /// That in force, with a digest of the body in its place. None if a function of the
    /// application decides.
    by_digest: Vec<(Scheme, Fingerprinting)>,
}

/// Whether a request is the one that a record was made for.
pub(crate) enum Comparison {
    Same,
    Different(Mismatch),
    /// The record's scheme, or the source of its target, is not known here.
    SchemeUnknown,
}

impl Fingerprinter {
    pub(crate) fn new(current: Fingerprinting, earlier: Vec<Fingerprinting>) -> Self {
        // The plain forms are understood, so that a change between them does not turn the
        // retries of the last day into errors. Beside a keyed form they are not: a plain
        // fingerprint can be made without the secret.
        let plain = [
            Fingerprinting::bytes(),
            Fingerprinting::json(),
            #[cfg(feature = "multipart")]
            Fingerprinting::multipart(),
        ];
        let is_keyed = current.is_keyed();
        let plain = plain.into_iter().filter(|_| !is_keyed);
        let forms: Vec<_> = std::iter::once(current)
            .chain(earlier)
            .chain(plain)
            .collect();
        let with_scheme = |each: Fingerprinting| (each.scheme(), each);
        let by_digest = |each: &Fingerprinting| -> Vec<(Scheme, Fingerprinting)> {
            let digests = [DigestAlgorithm::Sha256, DigestAlgorithm::Sha512].into_iter();
            let forms = digests.filter_map(|digest| each.by_digest(digest));
            forms.map(with_scheme).collect()
        };
        let by_digests: Vec<_> = forms.iter().map(by_digest).collect();
        let current_by_digest = by_digests[0].clone();
        let all = forms.into_iter().map(with_scheme);
        let mut schemes: Vec<(Scheme, Fingerprinting)> = Vec::new();
        for each in all.chain(by_digests.into_iter().flatten()) {
            if schemes.iter().all(|(known, _)| *known != each.0) {
                schemes.push(each);
            }
        }
        Self {
            schemes,
            by_digest: current_by_digest,
        }
    }

    /// Returns the fingerprints of a guard's input in JSON: under the key in force, and
    /// under each other one.
    #[cfg(feature = "guard")]
    pub(crate) fn of_input(&self, json: &[u8]) -> Result<InputFingerprints, BodyFault> {
        #[cfg(feature = "sealing")]
        if self.schemes.iter().any(|(_, form)| form.is_keyed()) {
            let keys = self.schemes.iter().map(|(_, form)| form.key());
            return InputFingerprints::keyed(json, keys);
        }
        InputFingerprints::plain(json)
    }

    /// The request's fingerprint under the scheme in force, and the fault of a
    /// body that cannot be compared.
    pub(crate) fn current<'r>(
        &self,
        parts: &request::Parts,
        body: impl Into<Content<'r>>,
    ) -> (Fingerprint, Option<BodyFault>) {
        let body = body.into();
        let (scheme, settings) = self.in_force(body);
        settings.identify(*scheme, Target::of(parts), parts, body)
    }

    /// A declared digest stands for a body that is not in memory, and for one that is
    /// compared by its bytes.
    fn in_force(&self, body: Content<'_>) -> &(Scheme, Fingerprinting) {
        let plain = &self.schemes[0];
        let counts_bytes = plain.1.compares_bytes() || body.bytes.is_none();
        if body.digests.is_none() || !counts_bytes {
            return plain;
        }
        let mut by_digest = self.by_digest.iter();
        by_digest
            .find(|(_, form)| form.is_declared(body))
            .unwrap_or(plain)
    }

    /// Compares the request, whose fingerprint is `current`, with the one that
    /// made `recorded`.
    pub(crate) fn compare<'r>(
        &self,
        recorded: &Fingerprint,
        current: &Fingerprint,
        parts: &request::Parts,
        body: impl Into<Content<'r>>,
    ) -> Comparison {
        if recorded == current {
            return Comparison::Same;
        }
        let body = body.into();
        let known = |(scheme, _): &&(Scheme, Fingerprinting)| *scheme == recorded.scheme();
        let known = self.schemes.iter().find(known);
        let target = recorded.source();
        let target = target.and_then(|source| Target::from(source, parts));
        let (Some((scheme, settings)), Some(target)) = (known, target) else {
            return Comparison::SchemeUnknown;
        };
        let again = if recorded.is_made_as(current) {
            *current
        } else if !settings.can_identify(body) {
            return Comparison::SchemeUnknown;
        } else {
            settings.identify(*scheme, target, parts, body).0
        };
        if again == *recorded {
            Comparison::Same
        } else {
            Comparison::Different(settings.difference(recorded, &again, body))
        }
    }
}

#[cfg(test)]
mod tests;
