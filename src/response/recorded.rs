//! A recorded response.

use bytes::Bytes;
use http::{Response, StatusCode};
use thiserror::Error;

use super::{
    attributes::Attributes,
    codec,
    headers::remove_message_headers,
    kept::{Kept, WholeResponse},
};
use crate::{body::whole::WholeBody, error::StoreError};

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

    /// A sealed response, which only `Sealing` reads.
    #[cfg(feature = "sealing")]
    pub(crate) fn sealed(bytes: Bytes) -> Self {
        Self::of(Kept::Sealed(bytes))
    }

    pub(crate) fn whole(response: WholeResponse) -> Self {
        Self::of(Kept::Response(response))
    }

    pub(super) fn of(kept: Kept) -> Self {
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
            _ => None,
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
            _ => None,
        }
    }

    /// Returns the bytes of the value; `None` if it is none.
    pub(crate) fn value(&self) -> Option<&Bytes> {
        match &self.kept {
            Kept::Value(value) => Some(value),
            _ => None,
        }
    }

    /// Returns the bytes of a sealed response; `None` if it is not sealed.
    #[cfg(feature = "sealing")]
    pub(crate) fn as_sealed(&self) -> Option<&Bytes> {
        match &self.kept {
            Kept::Sealed(sealed) => Some(sealed),
            _ => None,
        }
    }

    /// The bytes that a store keeps.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        codec::encode(&self.kept, &self.attributes)
    }

    /// Reads what [`encode`](Self::encode) made. The body shares the memory of
    /// `bytes`.
    ///
    /// # Errors
    ///
    /// [`Corrupt`](crate::StoreErrorKind::Corrupt) if the bytes are damaged or
    /// of a version that is not known here.
    pub fn decode(bytes: Bytes) -> Result<Self, StoreError> {
        let (kept, attributes) = codec::decode(bytes)?;
        Ok(Self { kept, attributes })
    }
}
