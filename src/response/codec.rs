//! The versioned bytes of a recorded response.
//!
//! ```text
//! "ti" version kind  crc32 of all that follows
//!   kind 0, a response:
//!     status u16 · headers · trailers · body, to the end
//!     headers, trailers: count u16, then name length u16, name,
//!                        value length u32, value
//!   kind 1, a tombstone: nothing more
//!   kind 2, a value of work that is not HTTP: see `value`
//!   kind 3, one of the others with attributes: see `attributes`, then its kind,
//!     and what that kind has
//! ```
//! Version 2 is a sealed response: see `sealing::sealed`.
//!
//! Numbers are little-endian. Bytes of another version, or whose checksum is
//! wrong, are an error and never "absent".

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

use super::{
    attributes::Attributes,
    kept::{Kept, WholeResponse},
};
use crate::error::StoreError;

pub(super) fn encode(kept: &Kept, attributes: &Attributes) -> Bytes {
    match kept {
        Kept::Response(response) => encode_response(
            attributes,
            response.status,
            (&response.headers, |_| true),
            &response.body,
            (response.trailers.as_deref(), |_| true),
        ),
        Kept::Tombstone => Encoder::new(TOMBSTONE, attributes, 0).finish(),
        Kept::Value(value) => {
            let mut encoder = Encoder::new(VALUE, attributes, value.len());
            encoder.bytes.put_slice(value);
            encoder.finish()
        }
        #[cfg(feature = "sealing")]
        Kept::Sealed(sealed) => sealed.clone(),
    }
}

/// The bytes of a response, with those of its headers and trailers that are kept.
pub(crate) fn encode_response(
    attributes: &Attributes,
    status: StatusCode,
    (headers, keeps_header): (&HeaderMap, impl Fn(&HeaderName) -> bool),
    body: &[u8],
    (trailers, keeps_trailer): (Option<&HeaderMap>, impl Fn(&HeaderName) -> bool),
) -> Bytes {
    let headers = || headers.iter().filter(|(name, _)| keeps_header(name));
    let trailers = || {
        let lines = trailers.into_iter().flatten();
        lines.filter(|(name, _)| keeps_trailer(name))
    };
    let lines: usize = headers()
        .chain(trailers())
        .map(|(name, value)| LINE + name.as_str().len() + value.len())
        .sum();
    let mut encoder = Encoder::new(RESPONSE, attributes, HEAD + lines + body.len());
    let bytes = &mut encoder.bytes;
    bytes.put_u16_le(status.as_u16());
    put_lines(bytes, headers().count(), headers());
    put_lines(bytes, trailers().count(), trailers());
    bytes.put_slice(body);
    encoder.finish()
}

/// Reads what [`encode`] made.
pub(super) fn decode(mut bytes: Bytes) -> Result<(Kept, Attributes), StoreError> {
    let corrupt = StoreError::corrupt;
    let mut prefix = [0; PREFIX];
    if bytes.try_copy_to_slice(&mut prefix).is_err() {
        return Err(corrupt("response: it ends too early"));
    }
    let [magic @ .., version, kind, c0, c1, c2, c3] = prefix;
    if magic != MAGIC {
        return Err(corrupt("response: not a recorded response"));
    }
    if version == SEALED {
        return Err(corrupt(
            "response: it is sealed: give its keys to `sealing` of the builder, or `open` it",
        ));
    }
    if version != VERSION {
        return Err(corrupt("response: its version is not known here"));
    }
    if crc(kind, &bytes).to_le_bytes() != [c0, c1, c2, c3] {
        return Err(corrupt("response: its checksum is wrong"));
    }
    let (kind, attributes) = match kind {
        ATTRIBUTED => {
            let mut read = || Some((Attributes::read(&mut bytes)?, bytes.try_get_u8().ok()?));
            let (attributes, kind) = read().ok_or_else(|| corrupt("response: attributes"))?;
            (kind, attributes)
        }
        kind => (kind, Attributes::new()),
    };
    let kept = match kind {
        RESPONSE => read_response(bytes).map(Kept::Response),
        TOMBSTONE => bytes.is_empty().then_some(Kept::Tombstone),
        VALUE => Some(Kept::Value(bytes)),
        _ => return Err(corrupt("response: kind")),
    };
    let kept = kept.ok_or_else(|| corrupt("response: status, headers or trailers"))?;
    Ok((kept, attributes))
}

fn read_response(mut bytes: Bytes) -> Option<WholeResponse> {
    let status = StatusCode::from_u16(bytes.try_get_u16_le().ok()?).ok()?;
    let headers = read_lines(&mut bytes)?;
    let trailers = Some(read_lines(&mut bytes)?).filter(|trailers| !trailers.is_empty());
    Some(WholeResponse {
        status,
        headers,
        body: bytes,
        trailers: trailers.map(Box::new),
    })
}

fn read_lines(bytes: &mut Bytes) -> Option<HeaderMap> {
    let mut lines = HeaderMap::new();
    for _ in 0..bytes.try_get_u16_le().ok()? {
        let length = usize::from(bytes.try_get_u16_le().ok()?);
        let name = HeaderName::from_bytes(bytes.get(..length)?).ok()?;
        bytes.advance(length);
        let length = bytes.try_get_u32_le().ok()? as usize;
        let value = (length <= bytes.len()).then(|| bytes.split_to(length))?;
        let value = HeaderValue::from_maybe_shared(value).ok()?;
        lines.try_append(name, value).ok()?;
    }
    Some(lines)
}

/// Whether encoded bytes are those of a tombstone.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn is_tombstone(encoded: &Bytes) -> bool {
    match encoded[KIND] {
        ATTRIBUTED => {
            decode(encoded.clone()).is_ok_and(|(kept, _)| matches!(kept, Kept::Tombstone))
        }
        kind => kind == TOMBSTONE,
    }
}

/// What a response is encoded into: a free prefix, and its attributes if it has any.
struct Encoder {
    kind: u8,
    bytes: BytesMut,
}

impl Encoder {
    /// `length`: of all that follows.
    fn new(kind: u8, attributes: &Attributes, length: usize) -> Self {
        if attributes.is_empty() {
            let mut bytes = BytesMut::with_capacity(PREFIX + length);
            bytes.put_bytes(0, PREFIX);
            return Self { kind, bytes };
        }
        let before = PREFIX + attributes.encoded_len() + size_of_val(&kind);
        let mut bytes = BytesMut::with_capacity(before + length);
        bytes.put_bytes(0, PREFIX);
        attributes.put(&mut bytes);
        bytes.put_u8(kind);
        Self {
            kind: ATTRIBUTED,
            bytes,
        }
    }

    /// Fills in the prefix.
    fn finish(self) -> Bytes {
        let Self { kind, mut bytes } = self;
        let checksum = crc(kind, &bytes[PREFIX..]);
        bytes[..2].copy_from_slice(&MAGIC);
        bytes[2] = VERSION;
        bytes[KIND] = kind;
        bytes[4..PREFIX].copy_from_slice(&checksum.to_le_bytes());
        bytes.freeze()
    }
}

fn crc(kind: u8, rest: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&[VERSION, kind]);
    hasher.update(rest);
    hasher.finalize()
}

fn put_lines<'a>(
    bytes: &mut BytesMut,
    count: usize,
    lines: impl Iterator<Item = (&'a HeaderName, &'a HeaderValue)>,
) {
    // http bounds a HeaderMap at 32,768 lines and a name at 65,535 bytes.
    bytes.put_u16_le(count as u16);
    for (name, value) in lines {
        bytes.put_u16_le(name.as_str().len() as u16);
        bytes.put_slice(name.as_str().as_bytes());
        bytes.put_u32_le(value.len() as u32);
        bytes.put_slice(value.as_bytes());
    }
}

pub(crate) const MAGIC: [u8; 2] = *b"ti";
const VERSION: u8 = 1;
pub(crate) const SEALED: u8 = 2;
const PREFIX: usize = 8;
/// The position of the kind.
const KIND: usize = 3;
/// Status and the counts of lines.
const HEAD: usize = 6;
/// The lengths of a name and its value.
const LINE: usize = 6;
const RESPONSE: u8 = 0;
const TOMBSTONE: u8 = 1;
const VALUE: u8 = 2;
const ATTRIBUTED: u8 = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::response::recorded::RecordedResponse;

    fn response() -> RecordedResponse {
        let mut headers = HeaderMap::new();
        headers.append("link", HeaderValue::from_static("<a>, <b>"));
        headers.append("x-obs", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        headers.append("link", HeaderValue::from_static("<c>"));
        let mut trailers = HeaderMap::new();
        trailers.append("x-sum", HeaderValue::from_static("1"));
        RecordedResponse::whole(WholeResponse {
            status: StatusCode::CREATED,
            headers,
            body: Bytes::from_iter(0..=255),
            trailers: Some(Box::new(trailers)),
        })
    }

    #[test]
    fn recorded_bytes_of_version_1_stay_readable() {
        let golden = hex::decode(GOLDEN).unwrap();
        let decoded = RecordedResponse::decode(golden.into()).unwrap();
        assert_eq!(decoded.encode(), response().encode());
        let whole = decoded.into_whole().unwrap();
        assert_eq!(whole.headers.get_all("link").iter().count(), 2);
        assert_eq!(whole.headers["x-obs"].as_bytes(), b"caf\xe9");
        assert_eq!(whole.body.len(), 256);
        assert_eq!(whole.trailers.unwrap()["x-sum"], "1");
    }

    #[test]
    fn attributes_of_version_1_stay_readable() {
        let attributes = || Attributes::new().with("user", "u_7").with("role", "");
        let golden = hex::decode(GOLDEN_ATTRIBUTES).unwrap();
        let decoded = RecordedResponse::decode(golden.clone().into()).unwrap();
        assert_eq!(*decoded.attributes(), attributes());
        assert_eq!(decoded.encode(), golden);
        assert_eq!(decoded.status(), None);

        let whole = response().with_attributes(attributes());
        let decoded = RecordedResponse::decode(whole.encode()).unwrap();
        assert_eq!(*decoded.attributes(), attributes());
        assert_eq!(
            decoded.with_attributes(Attributes::new()).encode(),
            response().encode()
        );
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    #[test]
    fn response_has_the_length_of_its_body() {
        let attributes = || Attributes::new().with("user", "u_7");
        let value = RecordedResponse::of(Kept::Value(vec![7; 9].into()));
        for (recorded, length, is_without_response) in [
            (response(), 256, false),
            (RecordedResponse::tombstone(), 0, true),
            (value, 9, false),
        ] {
            assert_eq!(recorded.body_len(), length);
            assert_eq!(is_tombstone(&recorded.encode()), is_without_response);
            let attributed = recorded.with_attributes(attributes());
            assert_eq!(attributed.body_len(), length);
            assert_eq!(is_tombstone(&attributed.encode()), is_without_response);
        }
    }

    #[test]
    fn attributes_that_are_too_large_are_left_out() {
        let large = Attributes::new().with("a", "x".repeat(5_000));
        assert!(response().with_attributes(large).attributes().is_empty());
    }

    #[test]
    fn every_damaged_byte_and_every_cut_is_noticed() {
        let attributes = Attributes::new().with("user", "u_7");
        let bytes = response().with_attributes(attributes).encode();
        for index in 0..bytes.len() {
            let mut damaged = bytes.to_vec();
            damaged[index] ^= 0x10;
            assert!(
                RecordedResponse::decode(damaged.into()).is_err(),
                "byte {index}"
            );
            assert!(
                RecordedResponse::decode(bytes.slice(..index)).is_err(),
                "cut at {index}"
            );
        }
    }

    const GOLDEN_ATTRIBUTES: &str = "74690103e10ca79a02000400757365720300755f370400726f6c65000001";
    const GOLDEN: &str = concat!(
        "74690100440e3711c900030004006c696e6b080000003c613e2c203c623e04006c696e6b03000000",
        "3c633e0500782d6f627304000000636166e901000500782d73756d01000000310001020304050607",
        "08090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f",
        "303132333435363738393a3b3c3d3e3f404142434445464748494a4b4c4d4e4f5051525354555657",
        "58595a5b5c5d5e5f606162636465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f",
        "808182838485868788898a8b8c8d8e8f909192939495969798999a9b9c9d9e9fa0a1a2a3a4a5a6a7",
        "a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebfc0c1c2c3c4c5c6c7c8c9cacbcccdcecf",
        "d0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7",
        "f8f9fafbfcfdfeff",
    );
}
