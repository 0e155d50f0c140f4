//! The parts of a recorded response.

use std::fmt;

use bytes::Bytes;
use http::{HeaderMap, StatusCode};

use crate::body::Trailers;

/// What a recorded response has kept.
#[derive(Clone, Debug)]
pub(super) enum Kept {
    Response(WholeResponse),
    Tombstone,
    /// What `value` makes and reads.
    Value(Bytes),
    /// What `Sealing` has made.
    #[cfg(feature = "sealing")]
    Sealed(Bytes),
}

/// Status, headers, body and trailers, complete in memory.
#[derive(Clone)]
pub(crate) struct WholeResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) trailers: Trailers,
}

impl fmt::Debug for WholeResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WholeResponse")
            .field("status", &self.status)
            .field("body", &format_args!("{} bytes", self.body.len()))
            .finish_non_exhaustive()
    }
}
