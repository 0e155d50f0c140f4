//! Reads of records and their responses.
//!
//! A batch answers many callers, so it carries small responses only. A large
//! response is reported by its length and then read in a batch of its own kind,
//! which carries about 1 MiB. So large responses delay neither claims nor other
//! reads.

use super::{
    batcher::{Batch, Batcher},
    calls::{ReadCall, SMALL_RESPONSE},
    columns::Found,
    single::Single,
};
use crate::{
    key::RecordName,
    store::{Claim, Claimed, Record, RecordState, StoreError},
};

/// The answer to a claim, which lacks a large response.
#[derive(Clone)]
pub(crate) struct ClaimAnswer {
    pub(crate) claimed: Claimed,
    /// The length of the response, if it was left out.
    pub(crate) omitted: Option<usize>,
}

impl From<Claimed> for ClaimAnswer {
    fn from(claimed: Claimed) -> Self {
        Self {
            claimed,
            omitted: None,
        }
    }
}

impl From<Found> for ClaimAnswer {
    fn from(Found { record, omitted }: Found) -> Self {
        Self {
            claimed: Claimed::Occupied(record),
            omitted,
        }
    }
}

/// The batchers for reads.
pub(crate) struct Reads<B: Batch> {
    pub(crate) small: Batcher<B>,
    pub(crate) large: Batcher<B>,
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
    /// Reads a record. Without `reads_response`, a large response is left empty.
    pub(crate) async fn read(
        &self,
        name: &RecordName,
        reads_response: bool,
    ) -> Result<Option<Record>, StoreError> {
        let call = ReadCall {
            name: name.clone(),
            max_response: SMALL_RESPONSE,
        };
        let found = self.small.call(call).await?;
        match found.as_ref().and_then(|found| found.omitted) {
            Some(bytes) if reads_response => self.read_large(name, bytes).await,
            _ => Ok(found.map(|found| found.record)),
        }
    }

    /// Adds the large response that a claim's caller reads.
    pub(crate) async fn with_response(
        &self,
        name: &RecordName,
        claim: &Claim,
        answer: ClaimAnswer,
    ) -> Result<Claimed, StoreError> {
        let Some(bytes) = answer.omitted.filter(|_| claim.reads_response) else {
            return Ok(answer.claimed);
        };
        Ok(match self.read_large(name, bytes).await? {
            // An earlier try of this claim has arrived. Only another claim finds
            // out whether its fence is large enough.
            Some(record) if is_own(&record, claim.token.as_bytes()) => Claimed::Vanished,
            Some(record) => Claimed::Occupied(record),
            None => Claimed::Vanished,
        })
    }

    async fn read_large(
        &self,
        name: &RecordName,
        mut max_response: usize,
    ) -> Result<Option<Record>, StoreError> {
        loop {
            let call = ReadCall {
                name: name.clone(),
                max_response,
            };
            match self.large.call(call).await? {
                // A later claim has recorded a longer response.
                Some(Found {
                    omitted: Some(bytes),
                    ..
                }) => max_response = bytes,
                found => return Ok(found.map(|found| found.record)),
            }
        }
    }
}

/// Returns whether the record is the claim in progress with this token.
pub(crate) fn is_own(record: &Record, token: &[u8]) -> bool {
    let in_progress = matches!(record.state, RecordState::InProgress { .. });
    in_progress && record.token.as_bytes() == token
}
