//! Reads of records, and of their responses.
//!
//! A batch answers many callers, so the responses in it are small. A large response
//! is named by its length alone, and then read apart from the rest: in batches of
//! their own, which carry about a mebibyte each. So large responses delay neither
//! claims nor the reads of others.

use super::{
    batcher::{Batch, Batches},
    calls::Call,
    locked::Single,
};
use crate::{
    RecordName, StoreError,
    store::{Claim, Claimed, Record, RecordState},
};

/// A read of one record.
pub(crate) struct ReadCall {
    pub(crate) name: RecordName,
    /// The longest response that is read.
    pub(crate) most_bytes: usize,
}

/// The record that a statement found.
#[derive(Clone)]
pub(crate) enum Found {
    Whole(Record),
    /// A completed record whose response is longer than was asked for, and empty
    /// here.
    Large {
        record: Record,
        bytes: usize,
    },
}

/// The answer to a claim, unless it is a large response.
#[derive(Clone)]
pub(crate) enum ClaimAnswer {
    Claimed(Claimed),
    Large { record: Record, bytes: usize },
}

impl Call for ReadCall {
    type Identity = (RecordName, usize);

    fn name(&self) -> &RecordName {
        &self.name
    }

    /// A large response is read once for all callers that wait for it.
    fn identity(&self) -> Option<(RecordName, usize)> {
        (self.most_bytes > SMALL).then(|| (self.name.clone(), self.most_bytes))
    }

    /// Includes the bytes that come back, unless they are small: a full batch of
    /// small responses is no larger than a batch may be.
    fn bytes(&self) -> usize {
        match self.most_bytes {
            SMALL => self.name.bytes(),
            bytes => self.name.bytes() + bytes,
        }
    }

    fn is_for_its_caller(&self) -> bool {
        true
    }
}

impl From<Found> for ClaimAnswer {
    fn from(found: Found) -> Self {
        match found {
            Found::Whole(record) => Self::Claimed(Claimed::Occupied(record)),
            Found::Large { record, bytes } => Self::Large { record, bytes },
        }
    }
}

/// The reads of a store.
pub(crate) struct Reads<B: Batch> {
    pub(crate) small: Batches<B>,
    pub(crate) large: Batches<B>,
}

impl<B: Batch> Clone for Reads<B> {
    fn clone(&self) -> Self {
        Self {
            small: self.small.clone(),
            large: self.large.clone(),
        }
    }
}

impl<B> Reads<B>
where
    B: Batch + Single<Call = ReadCall, Answer = Option<Found>>,
{
    /// Reads a record; a large response only if the caller reads it.
    pub(crate) async fn read(
        &self,
        name: &RecordName,
        reads_response: bool,
    ) -> Result<Option<Record>, StoreError> {
        let call = ReadCall {
            name: name.clone(),
            most_bytes: SMALL,
        };
        match self.small.call(call).await? {
            None => Ok(None),
            Some(Found::Large { bytes, .. }) if reads_response => {
                self.read_large(name, bytes).await
            }
            Some(Found::Whole(record) | Found::Large { record, .. }) => Ok(Some(record)),
        }
    }

    /// The answer to a claim, with its response if the caller reads it.
    pub(crate) async fn whole(
        &self,
        name: &RecordName,
        claim: &Claim,
        answer: ClaimAnswer,
    ) -> Result<Claimed, StoreError> {
        let bytes = match answer {
            ClaimAnswer::Claimed(claimed) => return Ok(claimed),
            ClaimAnswer::Large { bytes, .. } if claim.reads_response => bytes,
            ClaimAnswer::Large { record, .. } => return Ok(Claimed::Occupied(record)),
        };
        Ok(match self.read_large(name, bytes).await? {
            // An earlier try of this claim arrived meanwhile. Only a claim can tell
            // whether its fence will do.
            Some(record) if is_own(&record, claim.token.as_bytes()) => Claimed::Vanished,
            Some(record) => Claimed::Occupied(record),
            None => Claimed::Vanished,
        })
    }

    async fn read_large(
        &self,
        name: &RecordName,
        mut bytes: usize,
    ) -> Result<Option<Record>, StoreError> {
        loop {
            let call = ReadCall {
                name: name.clone(),
                most_bytes: bytes,
            };
            match self.large.call(call).await? {
                None => return Ok(None),
                Some(Found::Whole(record)) => return Ok(Some(record)),
                // Claimed and completed again meanwhile.
                Some(Found::Large { bytes: now, .. }) => bytes = now,
            }
        }
    }
}

/// Whether the record is the claim in progress with this token.
pub(crate) fn is_own(record: &Record, token: &[u8]) -> bool {
    let in_progress = matches!(record.state, RecordState::InProgress { .. });
    in_progress && record.token.as_bytes() == token
}

/// The longest response that travels with the calls of others, in bytes.
pub(crate) const SMALL: usize = 8 << 10;
