//! The name of a request's record, beside the scope and the key that were sent.

use std::ops::Deref;

use crate::key::RecordName;
#[cfg(feature = "sealing")]
use crate::sealing::names::NameDigests;

/// The name under which a record is kept, which it dereferences to.
#[derive(Clone)]
pub(crate) struct RequestName {
    kept: RecordName,
    /// The scope and the key that were sent, if digests stand in their place.
    #[cfg(feature = "sealing")]
    sent: Option<Box<RecordName>>,
}

impl RequestName {
    /// The record is kept under the scope and the key that were sent.
    pub(crate) fn readable(sent: RecordName) -> Self {
        Self {
            kept: sent,
            #[cfg(feature = "sealing")]
            sent: None,
        }
    }

    /// The record is kept under digests.
    #[cfg(feature = "sealing")]
    pub(crate) fn digested(digests: &NameDigests, sent: RecordName) -> Self {
        Self {
            kept: digests.of(&sent),
            sent: Some(Box::new(sent)),
        }
    }

    /// Returns the scope and the key that were sent.
    pub(crate) fn sent(&self) -> &RecordName {
        #[cfg(feature = "sealing")]
        if let Some(sent) = &self.sent {
            return sent;
        }
        &self.kept
    }

    pub(crate) fn into_kept(self) -> RecordName {
        self.kept
    }
}

impl Deref for RequestName {
    type Target = RecordName;

    fn deref(&self) -> &RecordName {
        &self.kept
    }
}
