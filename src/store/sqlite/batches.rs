//! Calls for many records in one transaction, which flushes the file once.

use std::{slice, time::Duration};

use sqlx::{SqliteConnection, SqlitePool};

use super::{
    error::failure,
    statements::{Loaded, load_all, now, store_all},
    writer::Writer,
};
use crate::{
    key::RecordName,
    store::{
        Claimed, Fence, FencedTransition, Grant, ReclaimAs, StoreError, Transitioned,
        sql::{
            batcher::{Answers, Batch},
            calls::{Call, ClaimCall, Identity, ReadCall, SMALL_RESPONSE, TransitionCall},
            columns::{Found, LoadedRecord},
            reads::ClaimAnswer,
            single::{Attempt, Single},
        },
        transition::StoredRecord,
    },
};

/// A call that may write.
pub(crate) enum WriteCall {
    Claim(ClaimCall),
    Reclaim {
        call: ClaimCall,
        seen: Fence,
        reclaim_as: ReclaimAs,
    },
    Owner(TransitionCall),
    Fenced {
        name: RecordName,
        seen: Fence,
        transition: FencedTransition,
    },
}

/// The answer to a [`WriteCall`].
#[derive(Clone)]
pub(crate) enum Written {
    Claimed(ClaimAnswer),
    Reclaimed(Option<Grant>),
    Transitioned(Transitioned),
}

impl Call for WriteCall {
    fn name(&self) -> &RecordName {
        match self {
            Self::Claim(call) | Self::Reclaim { call, .. } => call.name(),
            Self::Owner(call) => call.name(),
            Self::Fenced { name, .. } => name,
        }
    }

    fn identity(&self) -> Option<Identity> {
        match self {
            Self::Owner(call) => call.identity(),
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        self.name().bytes() + self.response_len()
    }

    fn is_droppable(&self) -> bool {
        match self {
            Self::Owner(call) => call.is_droppable(),
            _ => true,
        }
    }
}

impl WriteCall {
    /// Returns whether the call would delay the others of its batch.
    pub(super) fn is_large(&self) -> bool {
        self.response_len() > SMALL_RESPONSE
    }

    fn response_len(&self) -> usize {
        match self {
            Self::Owner(call) => call.transition.response_len(),
            Self::Fenced { transition, .. } => transition.response_len(),
            _ => 0,
        }
    }

    /// Returns the longest response that the call needs of its record.
    fn max_response(&self) -> usize {
        match self {
            Self::Claim(_) => SMALL_RESPONSE,
            _ => 0,
        }
    }

    /// Returns the answer, and the record if the call changes it.
    fn apply(
        &self,
        loaded: Option<LoadedRecord>,
        now: Duration,
    ) -> (Written, Option<StoredRecord>) {
        match self {
            Self::Claim(ClaimCall { claim, .. }) => {
                let (claimed, record) = match loaded {
                    Some(mut loaded) => {
                        let before = loaded.record.grant();
                        loaded.record.claim(claim, now);
                        let found = loaded.read(now).into();
                        let record = loaded.record;
                        (found, (record.grant() != before).then_some(record))
                    }
                    None => {
                        let record = StoredRecord::claimed(claim, now);
                        let claimed = Claimed::Acquired(record.grant());
                        (claimed.into(), Some(record))
                    }
                };
                (Written::Claimed(claimed), record)
            }
            Self::Reclaim {
                call: ClaimCall { claim, .. },
                seen,
                reclaim_as,
            } => {
                let mut record = loaded.map(|loaded| loaded.record);
                let grant = record
                    .as_mut()
                    .and_then(|record| record.reclaim(*seen, *reclaim_as, claim, now));
                let record = record.filter(|_| grant.is_some());
                (Written::Reclaimed(grant), record)
            }
            Self::Owner(call) => transition(loaded, |record| {
                record.apply_owner(call.token, &call.transition, now)
            }),
            Self::Fenced {
                seen,
                transition: fenced,
                ..
            } => transition(loaded, |record| record.apply_fenced(*seen, fenced, now)),
        }
    }
}

/// Returns the answer, and the record if `apply` changes it.
fn transition(
    loaded: Option<LoadedRecord>,
    apply: impl FnOnce(&mut StoredRecord) -> Transitioned,
) -> (Written, Option<StoredRecord>) {
    let Some(LoadedRecord { record, .. }) = loaded else {
        return (Written::Transitioned(Transitioned::Superseded), None);
    };
    let mut changed = record.clone();
    let transitioned = apply(&mut changed);
    let changed = (changed != record).then_some(changed);
    (Written::Transitioned(transitioned), changed)
}

impl Batch for Writer {
    async fn execute(&self, calls: &[WriteCall]) -> Result<Answers<Written>, StoreError> {
        let answers = self.write(async |on| write_all(on, calls).await).await?;
        Ok(answers.into_iter().map(Some).collect())
    }
}

impl Single for Writer {
    type Call = WriteCall;
    type Answer = Written;

    /// Waits for the write lock of the file, as a batch does.
    async fn attempt(&self, call: &WriteCall) -> Result<Attempt<Written>, StoreError> {
        let calls = slice::from_ref(call);
        let answers = self.write(async |on| write_all(on, calls).await).await?;
        only(answers).map(Attempt::Made)
    }
}

async fn write_all(
    on: &mut SqliteConnection,
    calls: &[WriteCall],
) -> Result<Vec<Result<Written, StoreError>>, StoreError> {
    let names = calls.iter().map(|call| (call.name(), call.max_response()));
    let loaded = load_all(on, &names.collect::<Vec<_>>()).await?;
    let now = now();
    let (mut answers, mut changed) = (Vec::with_capacity(calls.len()), Vec::new());
    for (call, loaded) in calls.iter().zip(loaded) {
        answers.push(loaded.map(|loaded| {
            let (answer, record) = call.apply(loaded, now);
            changed.extend(record.map(|record| (call.name(), record)));
            answer
        }));
    }
    store_all(on, &changed).await?;
    Ok(answers)
}

/// Reads records on a connection that does not write.
pub(super) struct Reader(pub(super) SqlitePool);

impl Batch for Reader {
    async fn execute(&self, calls: &[ReadCall]) -> Result<Answers<Option<Found>>, StoreError> {
        let mut connection = self.0.acquire().await.map_err(failure)?;
        let names = calls.iter().map(|call| (&call.name, call.max_response));
        let loaded = load_all(&mut connection, &names.collect::<Vec<_>>()).await?;
        let now = now();
        let read = |loaded: Loaded| loaded.map(|loaded| Some(loaded?.read(now)));
        Ok(loaded
            .into_iter()
            .map(|loaded| Some(read(loaded)))
            .collect())
    }
}

impl Single for Reader {
    type Call = ReadCall;
    type Answer = Option<Found>;

    async fn attempt(&self, call: &ReadCall) -> Result<Attempt<Option<Found>>, StoreError> {
        let answers = self.execute(slice::from_ref(call)).await?;
        only(answers.into_iter().flatten().collect()).map(Attempt::Made)
    }
}

/// Returns the answer to the only call.
fn only<A>(mut answers: Vec<Result<A, StoreError>>) -> Result<A, StoreError> {
    let none = || Err(StoreError::unavailable("the call was not answered"));
    answers.pop().unwrap_or_else(none)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        fingerprint::Fingerprint,
        key::{Key, Scope},
        store::{Claim, Completion, SqliteStore, Store as _},
    };

    #[tokio::test]
    async fn f104_a_batch_leaves_large_responses_out() {
        let file = std::env::temp_dir().join(format!("large-{}.db", std::process::id()));
        let store = SqliteStore::open(&file).await.unwrap();
        let hour = Duration::from_secs(3600);
        let fingerprint = Fingerprint::from_bytes([1; Fingerprint::LENGTH]);
        let (mut reads, mut claims) = (Vec::new(), Vec::new());
        for bytes in [SMALL_RESPONSE, SMALL_RESPONSE + 1] {
            let claim = Claim::new(fingerprint, hour, hour);
            let name = RecordName::new(Scope::single_tenant(), Key::new(bytes.to_string()));
            store.claim(&name, &claim).await.unwrap();
            let completion = Completion::new(vec![0; bytes].into(), hour, hour);
            let _ = store.complete(&name, claim.token, &completion).await;
            reads.push(ReadCall {
                name: name.clone(),
                max_response: SMALL_RESPONSE,
            });
            let claim = Claim::new(fingerprint, hour, hour);
            claims.push(WriteCall::Claim(ClaimCall { name, claim }));
        }
        let reader = Reader(store.readers.clone());
        let omitted = async |calls: &[ReadCall]| {
            let answers = reader.execute(calls).await.unwrap();
            let omitted = answers.into_iter().map(|answer| match answer {
                Some(Ok(Some(found))) => found.omitted,
                _ => panic!("a record is missing"),
            });
            omitted.collect::<Vec<_>>()
        };
        let large = Some(SMALL_RESPONSE + 1);
        assert_eq!(omitted(&reads).await, [None, large]);
        assert_eq!(omitted(&reads[1..]).await, [large]);
        // A claim whose name has a record returns the same.
        let omitted = async |calls: &[WriteCall]| {
            let answers = store.writer.execute(calls).await.unwrap();
            let omitted = answers.into_iter().map(|answer| match answer {
                Some(Ok(Written::Claimed(ClaimAnswer {
                    claimed: Claimed::Occupied(_),
                    omitted,
                }))) => omitted,
                _ => panic!("a record is missing"),
            });
            omitted.collect::<Vec<_>>()
        };
        assert_eq!(omitted(&claims).await, [None, large]);
        assert_eq!(omitted(&claims[1..]).await, [large]);
        store.close().await;
        std::fs::remove_file(&file).unwrap();
    }
}
