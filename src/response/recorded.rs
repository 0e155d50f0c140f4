//! The response as kept: its versioned bytes.
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
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use thiserror::Error;

use crate::{
    body::{Trailers, whole::WholeBody},
    error::StoreError,
    response::{attributes::Attributes, headers::remove_message_headers},
};

/// A recorded response: its status, end-to-end headers, body and trailers. Or a
/// tombstone, which stands for a response that was too large or too slow to keep. Or the
/// value of work that is not HTTP.
///
/// Operators and hooks make one to [resolve](crate::store::admin::Resolution) an unknown
/// outcome.
///
/// ```
/// use http::{Response, StatusCode};
/// use tower_idempotency::store::admin::RecordedResponse;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let found = Response::builder().status(StatusCode::CREATED).body("paid after all")?;
/// let stored = RecordedResponse::new(found)?.encode();
/// assert_eq!(RecordedResponse::decode(stored)?.status(), Some(StatusCode::CREATED));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RecordedResponse {
    kept: Kept,
    attributes: Attributes,
}

#[derive(Clone, Debug)]
enum Kept {
    Response(WholeResponse),
    Tombstone,
    /// What `value` makes and reads.
    Value(Bytes),
    /// What `Sealing` has made.
    #[cfg(feature = "sealing")]
    Sealed(Bytes),
}

/// Why a response cannot be a [`RecordedResponse`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NotRecordableError {
    /// A client waits for another response after an interim one.
    #[error("a recorded response needs a status of 200 or more, got {0}")]
    InterimStatus(StatusCode),
    /// The body is not in memory as a whole, broke off, or has more than 256 MiB.
    #[error("a recorded response needs a body that is ready as a whole, of up to 256 MiB")]
    BodyNotWhole,
    /// The value cannot be written as JSON.
    #[cfg(feature = "guard")]
    #[error("a recorded value needs to be serialisable as JSON")]
    ValueNotSerializable,
    /// The name of the schema is too long.
    #[cfg(feature = "guard")]
    #[error("a schema has a name of up to 255 bytes, got {0}")]
    SchemaTooLong(usize),
}

/// Status, headers, body and trailers, complete in memory.
#[derive(Clone)]
pub(crate) struct WholeResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Trailers,
}

impl RecordedResponse {
    /// A response for retries. It may be one of a handler, such as that of
    /// `Json(…).into_response()`.
    ///
    /// Headers that describe one message are left out: `Date`, `Content-Length`,
    /// `Connection` and the others that [`KeptHeaders`](crate::KeptHeaders) never
    /// keeps. The settings of the layer that replays it apply to the rest, and to the
    /// trailers.
    ///
    /// # Errors
    ///
    /// A [`NotRecordableError`] if the status is below 200, or the body cannot be read to
    /// its end at once.
    pub fn new<B: WholeBody>(response: Response<B>) -> Result<Self, NotRecordableError> {
        let (mut parts, body) = response.into_parts();
        if parts.status.is_informational() {
            return Err(NotRecordableError::InterimStatus(parts.status));
        }
        remove_message_headers(&mut parts.headers);
        let (body, trailers) = body.into_whole().ok_or(NotRecordableError::BodyNotWhole)?;
        Ok(Self::whole(WholeResponse {
            status: parts.status,
            headers: parts.headers,
            body,
            trailers,
        }))
    }

    /// It happened, but its response was not kept: retries are answered 409
    /// `response-not-replayable`.
    #[must_use]
    pub fn tombstone() -> Self {
        Self::of(Kept::Tombstone)
    }

    /// Sets the attributes that a [`ReplayAuthorizer`](crate::ReplayAuthorizer) sees. None
    /// are kept if they take more than 4 KiB. Defaults to none.
    #[must_use]
    pub fn with_attributes(mut self, attributes: Attributes) -> Self {
        self.attributes = match attributes.fit() {
            true => attributes,
            false => Attributes::new(),
        };
        self
    }

    /// Returns the attributes that were kept with it.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// A value, as `value` has encoded it.
    #[cfg(feature = "guard")]
    pub(super) fn encoded_value(value: Bytes) -> Self {
        Self::of(Kept::Value(value))
    }

    /// A sealed response, which only `Sealing` reads.
    #[cfg(feature = "sealing")]
    pub(crate) fn sealed(bytes: Bytes) -> Self {
        Self::of(Kept::Sealed(bytes))
    }

    pub(crate) fn whole(response: WholeResponse) -> Self {
        Self::of(Kept::Response(response))
    }

    fn of(kept: Kept) -> Self {
        Self {
            kept,
            attributes: Attributes::new(),
        }
    }

    /// The status; `None` for a tombstone, a value, and a sealed response.
    #[must_use]
    pub fn status(&self) -> Option<StatusCode> {
        match &self.kept {
            Kept::Response(response) => Some(response.status),
            Kept::Tombstone | Kept::Value(_) => None,
            #[cfg(feature = "sealing")]
            Kept::Sealed(_) => None,
        }
    }

    /// The length of the body in bytes.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn body_len(&self) -> usize {
        match &self.kept {
            Kept::Response(response) => response.body.len(),
            Kept::Tombstone => 0,
            Kept::Value(value) => value.len(),
            #[cfg(feature = "sealing")]
            Kept::Sealed(sealed) => sealed.len(),
        }
    }

    /// The whole response; `None` for a tombstone and for a value.
    pub(crate) fn into_whole(self) -> Option<WholeResponse> {
        match self.kept {
            Kept::Response(response) => Some(response),
            Kept::Tombstone | Kept::Value(_) => None,
            #[cfg(feature = "sealing")]
            Kept::Sealed(_) => None,
        }
    }

    /// Returns the bytes of the value; `None` if it is none.
    pub(crate) fn value(&self) -> Option<&Bytes> {
        match &self.kept {
            Kept::Value(value) => Some(value),
            Kept::Response(_) | Kept::Tombstone => None,
            #[cfg(feature = "sealing")]
            Kept::Sealed(_) => None,
        }
    }

    /// Returns the bytes of a sealed response; `None` if it is not sealed.
    #[cfg(feature = "sealing")]
    pub(crate) fn as_sealed(&self) -> Option<&Bytes> {
        match &self.kept {
            Kept::Sealed(sealed) => Some(sealed),
            Kept::Response(_) | Kept::Tombstone | Kept::Value(_) => None,
        }
    }

    /// The bytes that a store keeps.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let attributes = &self.attributes;
        match &self.kept {
            Kept::Response(response) => encode(
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

    /// Reads what [`encode`](Self::encode) made. The body shares the memory of
    /// `bytes`.
    ///
    /// # Errors
    ///
    /// [`Corrupt`](crate::StoreErrorKind::Corrupt) if the bytes are damaged or
    /// of a version that is not known here.
    pub fn decode(bytes: Bytes) -> Result<Self, StoreError> {
        let mut rest = Reader(bytes);
        if rest.array()? != MAGIC {
            return Err(StoreError::corrupt("response: not a recorded response"));
        }
        let [version, kind] = rest.array()?;
        if version == SEALED {
            return Err(StoreError::corrupt(
                "response: it is sealed: give its keys to `sealing` of the builder, or `open` it",
            ));
        }
        if version != VERSION {
            return Err(StoreError::corrupt(
                "response: its version is not known here",
            ));
        }
        let checksum = rest.long()?;
        if crc(kind, &rest.0) != checksum {
            return Err(StoreError::corrupt("response: its checksum is wrong"));
        }
        let (kind, attributes) = match kind {
            ATTRIBUTED => {
                let attributes = Attributes::read(&mut rest.0)
                    .ok_or_else(|| StoreError::corrupt("response: attributes"))?;
                let [kind] = rest.array()?;
                (kind, attributes)
            }
            kind => (kind, Attributes::new()),
        };
        let kept = match kind {
            RESPONSE => Kept::Response(WholeResponse {
                status: StatusCode::from_u16(rest.short()?)
                    .map_err(|_| StoreError::corrupt("response: status"))?,
                headers: rest.lines()?.unwrap_or_default(),
                trailers: rest.lines()?.map(Box::new),
                body: rest.0,
            }),
            TOMBSTONE if rest.0.is_empty() => Kept::Tombstone,
            VALUE => Kept::Value(rest.0),
            _ => return Err(StoreError::corrupt("response: kind")),
        };
        Ok(Self { kept, attributes })
    }
}

/// The bytes of a response, with those of its headers and trailers that are kept.
pub(crate) fn encode(
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

impl std::fmt::Debug for WholeResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WholeResponse")
            .field("status", &self.status)
            .field("body", &format_args!("{} bytes", self.body.len()))
            .finish_non_exhaustive()
    }
}

/// Whether encoded bytes are those of a tombstone.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn is_tombstone(encoded: &Bytes) -> bool {
    match encoded[KIND] {
        ATTRIBUTED => RecordedResponse::decode(encoded.clone())
            .is_ok_and(|recorded| matches!(recorded.kept, Kept::Tombstone)),
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

/// Takes bytes off the front; never reads past the end.
struct Reader(Bytes);

impl Reader {
    fn needs(&self, count: usize) -> Result<(), StoreError> {
        if count > self.0.len() {
            return Err(StoreError::corrupt("response: it ends too early"));
        }
        Ok(())
    }

    /// A part of the memory that was read from.
    fn take(&mut self, count: usize) -> Result<Bytes, StoreError> {
        self.needs(count)?;
        Ok(self.0.split_to(count))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], StoreError> {
        self.needs(N)?;
        let mut bytes = [0; N];
        self.0.copy_to_slice(&mut bytes);
        Ok(bytes)
    }

    fn short(&mut self) -> Result<u16, StoreError> {
        self.array().map(u16::from_le_bytes)
    }

    fn long(&mut self) -> Result<u32, StoreError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Returns `None` for no lines.
    fn lines(&mut self) -> Result<Option<HeaderMap>, StoreError> {
        let corrupt = |_| StoreError::corrupt("response: header");
        let count = self.short()?;
        if count == 0 {
            return Ok(None);
        }
        let mut lines = HeaderMap::new();
        for _ in 0..count {
            let length = usize::from(self.short()?);
            self.needs(length)?;
            let name = HeaderName::from_bytes(&self.0[..length])
                .map_err(|_| StoreError::corrupt("response: header name"))?;
            self.0.advance(length);
            let length = self.long()? as usize;
            let value = HeaderValue::from_maybe_shared(self.take(length)?)
                .map_err(|_| StoreError::corrupt("response: header value"))?;
            lines.try_append(name, value).map_err(corrupt)?;
        }
        Ok(Some(lines))
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
