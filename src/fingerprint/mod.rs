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
    schemes: Vec<(Scheme, Fingerprinting)>,
    /// That in force, with a digest of the body in its place.
    by_digest: Option<ByDigest>,
}

#[derive(Debug)]
struct ByDigest {
    sha256: (Scheme, Fingerprinting),
    sha512: (Scheme, Fingerprinting),
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
        let with_scheme = |each: Fingerprinting| (each.scheme(), each);
        let by_digest = |each: &Fingerprinting| {
            Some(ByDigest {
                sha256: with_scheme(each.by_digest(DigestAlgorithm::Sha256)?),
                sha512: with_scheme(each.by_digest(DigestAlgorithm::Sha512)?),
            })
        };
        let current_by_digest = by_digest(&current);
        let mut schemes: Vec<(Scheme, Fingerprinting)> = Vec::new();
        let mut add = |each: (Scheme, Fingerprinting)| {
            if schemes.iter().all(|(known, _)| *known != each.0) {
                schemes.push(each);
            }
        };
        let is_keyed = current.is_keyed();
        let plain = plain.into_iter().filter(|_| !is_keyed);
        let all = std::iter::once(current).chain(earlier).chain(plain);
        let all: Vec<_> = all.map(with_scheme).collect();
        all.iter().cloned().for_each(&mut add);
        for ByDigest { sha256, sha512 } in all.iter().filter_map(|(_, each)| by_digest(each)) {
            add(sha256);
            add(sha512);
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
        let (Some(digests), Some(by_digest)) = (body.digests, &self.by_digest) else {
            return plain;
        };
        match digests.algorithm() {
            _ if body.bytes.is_some() && !plain.1.compares_bytes() => plain,
            DigestAlgorithm::Sha256 => &by_digest.sha256,
            DigestAlgorithm::Sha512 => &by_digest.sha512,
        }
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
mod tests {
    use bytes::Bytes;
    use http::{HeaderMap, Request, header};

    use super::*;
    use crate::body::digests::DeclaredDigests;

    fn identify(
        settings: &Fingerprinting,
        parts: &request::Parts,
        body: &Bytes,
    ) -> (Fingerprint, Option<BodyFault>) {
        settings.identify(settings.scheme(), Target::of(parts), parts, body.into())
    }

    fn identified(
        settings: &Fingerprinting,
        uri: &str,
        media_type: &str,
        body: &str,
    ) -> Result<Fingerprint, BodyFault> {
        let request = Request::post(uri).header(header::CONTENT_TYPE, media_type);
        let (parts, body) = request.body(body.to_owned().into()).unwrap().into_parts();
        let (fingerprint, fault) = identify(settings, &parts, &body);
        fault.map_or(Ok(fingerprint), Err)
    }

    #[test]
    fn the_border_between_parts_counts() {
        let of = |uri, body| identified(&Fingerprinting::bytes(), uri, "text/plain", body).unwrap();
        assert_ne!(of("/ab", "c"), of("/a", "bc"));
        assert_ne!(of("/a?b", "c"), of("/a", "?bc"));
        assert_ne!(of("/a?", ""), of("/a", ""));
    }

    #[test]
    fn rule_29_the_media_type_counts_and_its_spelling_does_not() {
        let of = |media_type| identified(&Fingerprinting::bytes(), "/", media_type, "x");
        assert_eq!(
            of("application/json;charset=utf-8;a=\"b\""),
            of("Application/JSON ; A=b")
        );
        assert_ne!(of("application/json"), of("application/xml"));
        assert_ne!(of("text/plain"), of("text/plain;charset=utf-8"));
    }

    #[cfg(feature = "multipart")]
    #[test]
    fn rule_37_a_boundary_counts_unless_parts_are_compared() {
        let of = |settings: &Fingerprinting, media_type: &str, boundary: &str| {
            let media_type = format!("{media_type}; boundary={boundary}");
            identified(settings, "/", &media_type, "x").unwrap()
        };
        for (settings, media_type) in [
            (Fingerprinting::bytes(), "multipart/form-data"),
            (Fingerprinting::json(), "multipart/form-data"),
            (Fingerprinting::multipart(), "multipart/mixed"),
        ] {
            let [one, other] = ["a", "b"].map(|boundary| of(&settings, media_type, boundary));
            assert_ne!(one, other, "{settings:?} {media_type}");
        }
    }

    #[test]
    fn debug_output_shows_the_form_and_its_pointers() {
        let shown = |settings: Fingerprinting| format!("{settings:?}");
        assert!(shown(Fingerprinting::bytes()).contains("form: Bytes"));
        assert!(shown(Fingerprinting::json()).contains("Json(all [])"));
        let pointers = ["/b", "/a"];
        let only = r#"Json(only ["/a", "/b"])"#;
        assert!(shown(Fingerprinting::json_only(pointers)).contains(only));
        let without = r#"Json(without ["/a", "/b"])"#;
        assert!(shown(Fingerprinting::json_without(pointers)).contains(without));
        let custom = shown(Fingerprinting::custom("one", |_, _| Vec::new()));
        assert!(custom.contains(r#"Custom("one")"#), "{custom}");
    }

    #[test]
    fn a_digest_never_stands_for_what_a_function_returns() {
        let custom = Fingerprinting::custom("one", |_, body| body.to_vec());
        for algorithm in [DigestAlgorithm::Sha256, DigestAlgorithm::Sha512] {
            assert!(custom.by_digest(algorithm).is_none());
        }
    }

    #[test]
    fn json_that_cannot_be_compared_is_refused() {
        let of = |media_type, body| identified(&Fingerprinting::json(), "/", media_type, body);
        assert!(of("application/problem+json", "{").is_err());
        assert!(of("application/json", r#"{"x":{"a":1,"\u0061":1}}"#).is_err());
        assert!(of("text/plain", "{").is_ok());
        assert!(of("application/json", "").is_ok());
    }

    #[cfg(feature = "multipart")]
    #[test]
    fn a_new_boundary_is_the_same_multipart_body() {
        let parts = |boundary: &str, value: &str| {
            let body = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n"
            );
            let media_type = format!("multipart/form-data; boundary={boundary}");
            identified(&Fingerprinting::multipart(), "/", &media_type, &body)
        };
        assert_eq!(parts("XX", "1").unwrap(), parts("yy", "1").unwrap());
        assert_ne!(parts("XX", "1").unwrap(), parts("XX", "2").unwrap());
        let nameless = "multipart/form-data";
        assert!(identified(&Fingerprinting::multipart(), "/", nameless, "x").is_err());
    }

    #[test]
    fn an_earlier_scheme_is_recomputed_and_an_unknown_one_reported() {
        let (parts, ()) = Request::post("/").body(()).unwrap().into_parts();
        let body = Bytes::from_static(b"x");
        let old = Fingerprinter::new(Fingerprinting::custom("one", |_, b| b.to_vec()), vec![]);
        let new = Fingerprinter::new(
            Fingerprinting::bytes(),
            vec![Fingerprinting::custom("one", |_, b| b.to_vec())],
        );
        let stranger = Fingerprinter::new(Fingerprinting::json(), vec![]);
        let recorded = old.current(&parts, &body).0;
        let current = new.current(&parts, &body).0;
        let compare = |by: &Fingerprinter, recorded, body: &Bytes| {
            let current = by.current(&parts, body).0;
            by.compare(&recorded, &current, &parts, body)
        };
        assert!(matches!(compare(&new, recorded, &body), Comparison::Same));
        let other = Bytes::from_static(b"y");
        let Comparison::Different(mismatch) = compare(&new, recorded, &other) else {
            panic!("another body is the same request");
        };
        assert_eq!(mismatch.differs, [RequestPart::Custom]);
        let unknown = compare(&stranger, recorded, &body);
        assert!(matches!(unknown, Comparison::SchemeUnknown));
        assert!(matches!(
            compare(&stranger, current, &body),
            Comparison::Same
        ));
    }

    /// A request whose client sent the target `sent`, as the layer sees it.
    #[cfg(feature = "axum")]
    fn request(sent: &str, seen: &str) -> request::Parts {
        let (mut parts, ()) = Request::post(seen).body(()).unwrap().into_parts();
        parts
            .extensions
            .insert(axum::extract::OriginalUri(sent.parse().unwrap()));
        parts
    }

    /// The same in a build that cannot read what the client sent.
    fn unread(seen: &str) -> request::Parts {
        let (parts, ()) = Request::post(seen).body(()).unwrap().into_parts();
        parts
    }

    #[cfg(feature = "axum")]
    fn compared(recorded: &request::Parts, retry: &request::Parts) -> Comparison {
        let by = Fingerprinter::new(Fingerprinting::bytes(), vec![]);
        let body = Bytes::new();
        let current = by.current(retry, &body).0;
        by.compare(&by.current(recorded, &body).0, &current, retry, &body)
    }

    #[cfg(feature = "axum")]
    #[test]
    fn rule_28_two_requests_that_one_router_sees_alike_differ() {
        for (recorded, retry) in [("/v1/a", "/v2/a"), ("/a", "/v1/a"), ("/v1/a", "/a")] {
            let (recorded, retry) = (request(recorded, "/a"), request(retry, "/a"));
            let Comparison::Different(mismatch) = compared(&recorded, &retry) else {
                panic!("another path is the same request");
            };
            assert_eq!(mismatch.differs, [RequestPart::Path]);
        }
        let (recorded, retry) = (request("/v1/a", "/a"), request("/v1/a", "/v1/a"));
        assert!(matches!(compared(&recorded, &retry), Comparison::Same));
    }

    #[cfg(feature = "axum")]
    #[test]
    fn builds_with_and_without_axum_agree_outside_of_nested_routers() {
        let (with, without) = (request("/a?b", "/a?b"), unread("/a?b"));
        assert!(matches!(compared(&with, &without), Comparison::Same));
        assert!(matches!(compared(&without, &with), Comparison::Same));
        for other in ["/a?c", "/b?b"] {
            let other = compared(&with, &unread(other));
            assert!(matches!(other, Comparison::Different(_)));
        }
    }

    #[cfg(feature = "axum")]
    #[test]
    fn a_record_of_the_nested_path_is_compared_by_it() {
        let recorded = unread("/a");
        let same = compared(&recorded, &request("/v1/a", "/a"));
        assert!(matches!(same, Comparison::Same));
        let other = compared(&recorded, &request("/v1/b", "/b"));
        assert!(matches!(other, Comparison::Different(_)));
    }

    #[cfg(feature = "axum")]
    #[test]
    fn a_path_that_cannot_be_read_is_never_guessed() {
        let recorded = request("/v1/a", "/a");
        for seen in ["/a", "/v1/a", "/b"] {
            let unknown = compared(&recorded, &unread(seen));
            assert!(matches!(unknown, Comparison::SchemeUnknown));
        }
    }

    #[test]
    fn an_unknown_source_of_the_target_is_not_guessed() {
        let parts = unread("/a");
        let body = Bytes::new();
        let by = Fingerprinter::new(Fingerprinting::bytes(), vec![]);
        let current = by.current(&parts, &body).0;
        let mut later = *current.as_bytes();
        later[7] = 3;
        let unknown = by.compare(&Fingerprint::from_bytes(later), &current, &parts, &body);
        assert!(matches!(unknown, Comparison::SchemeUnknown));
    }

    fn by_digest(algorithm: DigestAlgorithm) -> Fingerprinting {
        Fingerprinting::bytes().by_digest(algorithm).unwrap()
    }

    #[test]
    fn a_declared_digest_stands_for_the_bytes() {
        let (parts, body) = (unread("/a"), Bytes::from_static(b"hello"));
        let mut headers = HeaderMap::new();
        let digest = "sha-256=:LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=:";
        headers.insert("content-digest", digest.parse().unwrap());
        let digests = DeclaredDigests::of(&headers).unwrap().unwrap();
        let by = Fingerprinter::new(Fingerprinting::bytes(), vec![]);
        let contents = [
            Content::declared(&digests),
            Content::whole(&body, Some(&digests)),
            Content::whole(&body, None),
        ];
        for recorded in contents {
            let recorded = by.current(&parts, recorded).0;
            for retry in [contents[1], contents[2]] {
                let current = by.current(&parts, retry).0;
                let same = by.compare(&recorded, &current, &parts, retry);
                assert!(matches!(same, Comparison::Same));
            }
        }
        // A digest does not say whether the recorded bytes were the same.
        let recorded = by.current(&parts, contents[2]).0;
        let current = by.current(&parts, contents[0]).0;
        let unknown = by.compare(&recorded, &current, &parts, contents[0]);
        assert!(matches!(unknown, Comparison::SchemeUnknown));
    }

    #[test]
    fn schemes_keep_their_ids() {
        let id = |settings: &Fingerprinting, parts: &request::Parts| {
            let (fingerprint, _) = identify(settings, parts, &Bytes::new());
            hex::encode(&fingerprint.as_bytes()[..8])
        };
        for (settings, expected) in [
            (Fingerprinting::bytes(), "c872a9ec95f27600"),
            (Fingerprinting::bytes().authority(), "ad0865f456333100"),
            (
                Fingerprinting::bytes().header(header::CONTENT_LANGUAGE),
                "a3aa2c05181b3300",
            ),
            (by_digest(DigestAlgorithm::Sha256), "df2edaabadb0d200"),
            (by_digest(DigestAlgorithm::Sha512), "46e2772c469a0a00"),
            (Fingerprinting::json(), "b7bbd593a6d87500"),
            (Fingerprinting::json_only(["/b", "/a"]), "da035ad77d5d4c00"),
            (
                Fingerprinting::json_without(["/a", "/b"]),
                "be3dabc89d41c800",
            ),
            #[cfg(feature = "multipart")]
            (Fingerprinting::multipart(), "f5217bcd5b269900"),
            (
                Fingerprinting::custom("one", |_, _| Vec::new()),
                "63d4fec5d2019e00",
            ),
        ] {
            assert_eq!(id(&settings, &unread("/a")), expected);
        }
        #[cfg(feature = "axum")]
        for (sent, expected) in [("/a", "c872a9ec95f27601"), ("/v1/a", "c872a9ec95f27602")] {
            assert_eq!(id(&Fingerprinting::bytes(), &request(sent, "/a")), expected);
        }
    }

    #[test]
    fn a_request_with_many_chosen_headers_keeps_its_fingerprint() {
        let names = ["x-a", "x-b", "x-c", "x-d", "x-e", "x-f"].map(header::HeaderName::from_static);
        let (mut settings, mut request) = (Fingerprinting::bytes(), Request::post("/"));
        for name in names {
            request = request.header(&name, name.as_str());
            settings = settings.header(name);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        let (fingerprint, _) = identify(&settings, &parts, &Bytes::new());
        // The fifth shares a place with the first, and the sixth with the second.
        assert_eq!(
            hex::encode(&fingerprint.as_bytes()[68..]),
            "6896d7012d62a07ca6535f1161c51e5e"
        );
    }

    #[test]
    fn a_request_keeps_its_fingerprint() {
        let (parts, ()) = Request::post("/orders?dry=1")
            .header(header::CONTENT_TYPE, "application/json; charset=utf-8")
            .header(header::CONTENT_LANGUAGE, "de")
            .header(header::HOST, "Example:443")
            .body(())
            .unwrap()
            .into_parts();
        let body = Bytes::from_static(b"{\"b\":[1],\"a\":\"x\"}");
        let settings = Fingerprinting::json()
            .header(header::CONTENT_LANGUAGE)
            .authority();
        let (fingerprint, _) = identify(&settings, &parts, &body);
        assert_eq!(
            format!("{fingerprint:?}"),
            "Fingerprint(4c7a4506424b7100..)"
        );
        assert_eq!(
            hex::encode(fingerprint.as_bytes()),
            concat!(
                "4c7a4506424b7100",
                "7657e199aa1aac89915eb3c0f368ec159d060fc6b2d7970c51c763dc924ffaa5",
                "39811f6c46ca74f03928b9bd125ebcdc00000000dd64095262a9f71a12ccc048000000000000000000000000",
            )
        );
    }
}
