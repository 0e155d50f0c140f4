//! The body of a request, as its fingerprint sees it.

use bytes::Bytes;

use crate::body::digests::DeclaredDigests;

/// The bytes of a body, its digests, or both.
#[derive(Clone, Copy)]
pub(crate) struct Content<'r> {
    /// `None` if the body is not in memory as a whole.
    pub(super) bytes: Option<&'r Bytes>,
    /// Those that the client declares. The bytes, if they are there, have them.
    pub(super) digests: Option<&'r DeclaredDigests>,
}

impl<'r> Content<'r> {
    /// A whole body, which has the declared digests.
    pub(crate) fn whole(bytes: &'r Bytes, digests: Option<&'r DeclaredDigests>) -> Self {
        Self {
            bytes: Some(bytes),
            digests,
        }
    }

    /// A body that is not read yet. It is verified before it counts as read.
    pub(crate) fn declared(digests: &'r DeclaredDigests) -> Self {
        Self {
            bytes: None,
            digests: Some(digests),
        }
    }
}

impl<'r> From<&'r Bytes> for Content<'r> {
    fn from(bytes: &'r Bytes) -> Self {
        Self::whole(bytes, None)
    }
}
