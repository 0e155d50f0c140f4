//! Golden values, and the sources of a target.

use bytes::Bytes;
use http::{Request, header};

use super::*;

fn identify(settings: &Fingerprinting, parts: &request::Parts, body: &Bytes) -> Fingerprint {
    let (scheme, target) = (settings.scheme(), Target::of(parts));
    settings.identify(scheme, target, parts, body.into()).0
}

#[test]
fn debug_output_shows_the_form_and_its_pointers() {
    for (settings, shown) in [
        (Fingerprinting::bytes(), "form: Bytes"),
        (Fingerprinting::json(), "Json(all [])"),
        (
            Fingerprinting::json_only(["/b", "/a"]),
            r#"Json(only ["/a", "/b"])"#,
        ),
        (
            Fingerprinting::json_without(["/b", "/a"]),
            r#"Json(without ["/a", "/b"])"#,
        ),
        (
            Fingerprinting::custom("one", |_, _| Vec::new()),
            r#"Custom("one")"#,
        ),
    ] {
        assert!(format!("{settings:?}").contains(shown), "{shown}");
    }
}

/// A request as the layer sees it, whose client sent the target `sent`.
#[cfg(feature = "axum")]
fn request(sent: &str, seen: &str) -> request::Parts {
    let mut parts = unread(seen);
    let sent = axum::extract::OriginalUri(sent.parse().unwrap());
    parts.extensions.insert(sent);
    parts
}

/// The same in a build that cannot read what the client sent.
fn unread(seen: &str) -> request::Parts {
    Request::post(seen).body(()).unwrap().into_parts().0
}

#[cfg(feature = "axum")]
#[test]
fn rule_28_a_record_is_compared_by_the_source_of_its_target() {
    let (same, different, unknown) = ("same", "different", "unknown");
    for (recorded, retry, expected) in [
        // Builds with and without axum agree outside of nested routers.
        (request("/a?b", "/a?b"), unread("/a?b"), same),
        (unread("/a?b"), request("/a?b", "/a?b"), same),
        (request("/a?b", "/a?b"), unread("/a?c"), different),
        (request("/a?b", "/a?b"), unread("/b?b"), different),
        // A record of the nested path.
        (unread("/a"), request("/v1/a", "/a"), same),
        (unread("/a"), request("/v1/b", "/b"), different),
        // A path that cannot be read is not guessed.
        (request("/v1/a", "/a"), unread("/a"), unknown),
        (request("/v1/a", "/a"), unread("/v1/a"), unknown),
        (request("/v1/a", "/a"), unread("/b"), unknown),
    ] {
        let by = Fingerprinter::new(Fingerprinting::bytes(), vec![]);
        let made = |parts| by.current(parts, &Bytes::new()).0;
        let compared = by.compare(&made(&recorded), &made(&retry), &retry, &Bytes::new());
        let compared = match compared {
            Comparison::Same => same,
            Comparison::Different(_) => different,
            Comparison::SchemeUnknown => unknown,
        };
        assert_eq!(compared, expected, "{recorded:?} {retry:?}");
    }
}

#[test]
fn an_unknown_source_of_the_target_is_not_guessed() {
    let parts = unread("/a");
    let by = Fingerprinter::new(Fingerprinting::bytes(), vec![]);
    let current = by.current(&parts, &Bytes::new()).0;
    let mut later = *current.as_bytes();
    later[7] = 3;
    let later = Fingerprint::from_bytes(later);
    let unknown = by.compare(&later, &current, &parts, &Bytes::new());
    assert!(matches!(unknown, Comparison::SchemeUnknown));
}

fn by_digest(algorithm: DigestAlgorithm) -> Fingerprinting {
    Fingerprinting::bytes().by_digest(algorithm).unwrap()
}

#[test]
fn a_digest_never_stands_for_what_a_function_returns() {
    let custom = Fingerprinting::custom("one", |_, body| body.to_vec());
    for algorithm in [DigestAlgorithm::Sha256, DigestAlgorithm::Sha512] {
        assert!(custom.by_digest(algorithm).is_none());
    }
}

#[test]
fn spellings_of_a_coding_are_one_coding() {
    let coding = |lines: &[&'static str]| {
        let lines = lines.iter().map(|line| {
            let line = header::HeaderValue::from_static(line);
            (header::CONTENT_ENCODING, line)
        });
        String::from_utf8(media_type::coding(&lines.collect())).unwrap()
    };
    for (lines, expected) in [
        (&[][..], ""),
        (&["Identity, identity"], ""),
        (&[", ,"], ""),
        (&["GZIP"], "gzip"),
        (&["gzip", "br"], "gzip,br"),
        (&["gzip\t,, identity , BR"], "gzip,br"),
        (&["br, gzip"], "br,gzip"),
    ] {
        assert_eq!(coding(lines), expected, "{lines:?}");
    }
}

#[cfg(feature = "multipart")]
#[test]
fn rule_37_a_boundary_counts_unless_parts_are_compared() {
    for (settings, media_type) in [
        (Fingerprinting::bytes(), "multipart/form-data"),
        (Fingerprinting::json(), "multipart/form-data"),
        (Fingerprinting::multipart(), "multipart/mixed"),
    ] {
        let [one, other] = ["a", "b"].map(|boundary| {
            let media_type = format!("{media_type}; boundary={boundary}");
            let request = Request::post("/").header(header::CONTENT_TYPE, media_type);
            let (parts, body) = request.body(Bytes::from_static(b"x")).unwrap().into_parts();
            identify(&settings, &parts, &body)
        });
        assert_ne!(one, other, "{settings:?} {media_type}");
    }
}

#[test]
fn schemes_keep_their_ids() {
    let id = |settings: &Fingerprinting, parts: &request::Parts| {
        let fingerprint = identify(settings, parts, &Bytes::new());
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
    let fingerprint = identify(&settings, &parts, &Bytes::new());
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
    let fingerprint = identify(&settings, &parts, &body);
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
