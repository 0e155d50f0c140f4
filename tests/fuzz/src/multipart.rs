//! Multipart bodies, against the list of their parts.

use arbitrary::Unstructured;
use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use http::Request;
use multer::Multipart;
use tower_idempotency::{Fingerprinting, store::Fingerprint};

use crate::probe::fingerprint;

/// A body as it stands, and two bodies made of parts.
pub fn multipart(data: &[u8]) {
    raw(data);
    let _ = made(&mut Unstructured::new(data));
}

/// Two bodies have one fingerprint exactly if a parser finds the same parts in them.
fn raw(data: &[u8]) {
    let mut bodies = data.splitn(2, |&byte| byte == 0);
    let [one, other] = [bodies.next(), bodies.next()]
        .map(Option::unwrap_or_default)
        .map(Bytes::copy_from_slice);
    let read = [&one, &other].map(|body| (parsed(body), identify("b", body)));
    for (parts, fingerprint) in &read {
        assert_eq!(parts.is_some(), fingerprint.is_some(), "{one:?} {other:?}");
    }
    if let [(Some(parts), own), (Some(other_parts), theirs)] = &read {
        assert_eq!(own == theirs, parts == other_parts, "{one:?} {other:?}");
    }
}

/// Rule 37: the boundary does not count, and each part does.
fn made(input: &mut Unstructured<'_>) -> arbitrary::Result<()> {
    let parts = parts(input)?;
    let [one, other] = ["b", "XYZ-9"].map(|boundary| identify(boundary, &body(&parts, boundary)));
    assert!(one.is_some(), "{parts:?}");
    assert_eq!(one, other, "{parts:?}");
    let others = self::parts(input)?;
    let third = identify("b", &body(&others, "b"));
    assert_eq!(one == third, parts == others, "{parts:?} {others:?}");
    Ok(())
}

/// The lines before the content, and the content.
type Part = (String, Vec<u8>);

fn parts(input: &mut Unstructured<'_>) -> arbitrary::Result<Vec<Part>> {
    let count = input.int_in_range(0..=3)?;
    let parts = (0..count).map(|_| {
        let name = ["a", "b", ""][input.int_in_range(0..=2)?];
        let mut head = format!("content-disposition: form-data; name=\"{name}\"");
        if input.arbitrary()? {
            head.push_str("; filename=\"f\"\r\ncontent-type: text/plain");
        }
        let length = input.int_in_range(0..=4)?;
        let content = (0..length).map(|_| input.choose(CONTENT).copied());
        Ok((head, content.collect::<Result<_, _>>()?))
    });
    parts.collect()
}

fn body(parts: &[Part], boundary: &str) -> Bytes {
    let mut body = Vec::new();
    for (head, content) in parts {
        body.extend(format!("--{boundary}\r\n{head}\r\n\r\n").as_bytes());
        body.extend(content);
        body.extend(b"\r\n");
    }
    body.extend(format!("--{boundary}--\r\n").as_bytes());
    body.into()
}

/// The lines of a part, and its content.
type Parsed = (Vec<(String, Vec<u8>)>, Bytes);

fn parsed(body: &Bytes) -> Option<Vec<Parsed>> {
    let whole = stream::iter([Ok::<_, std::io::Error>(body.clone())]);
    let mut multipart = Multipart::new(whole, "b");
    async {
        let mut parts = Vec::new();
        while let Some(field) = multipart.next_field().await.ok()? {
            let lines = field.headers().iter();
            let lines = lines
                .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
                .collect();
            parts.push((lines, field.bytes().await.ok()?));
        }
        Some(parts)
    }
    .now_or_never()
    .flatten()
}

fn identify(boundary: &str, body: &Bytes) -> Option<Fingerprint> {
    let media_type = format!("multipart/form-data; boundary={boundary}");
    let request = Request::post("/")
        .header("idempotency-key", "k")
        .header("content-type", media_type)
        .body(body.clone());
    fingerprint(
        Fingerprinting::multipart(),
        request.expect("a valid request"),
    )
}

const CONTENT: &[u8] = b"ab-\r\n:\x00\xff";
