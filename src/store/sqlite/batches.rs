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
        Claim, Claimed, Fence, Grant, ReclaimAs, StoreError, Transition, Transitioned,
        sql::{
            batcher::{Answers, Batch},
            calls::{Call, Identity, ReadCall, SMALL_RESPONSE},
            columns::{Found, LoadedRecord},
            reads::ClaimAnswer,
            single::{Attempt, Single},
        },
        transition::StoredRecord,
    },
};

/// A call that may write.
pub(crate) struct WriteCall {
    pub(super) name: RecordName,
    pub(super) change: Change,
}

/// The change of a record that a call asks for.
pub(super) enum Change {
    Claim(Claim),
    Reclaim(Fence, ReclaimAs, Claim),
    Transition(Transition),
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
        &self.name
    }

    fn identity(&self) -> Option<Identity> {
        match &self.change {
            Change::Transition(Transition::Owner(token, transition)) => {
                Identity::of_outcome(&self.name, *token, transition)
            }
            _ => None,
        }
    }

    fn bytes(&self) -> usize {
        self.name.bytes() + self.response_len()
    }

    fn is_droppable(&self) -> bool {
        match &self.change {
            Change::Transition(Transition::Owner(_, transition)) => transition.is_renewal(),
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
        match &self.change {
            Change::Transition(Transition::Owner(_, transition)) => transition.response_len(),
            Change::Transition(Transition::Fenced(_, transition)) => transition.response_len(),
            Change::Claim(_) | Change::Reclaim(..) => 0,
        }
    }

    /// Returns the longest response that the call needs of its record.
    fn max_response(&self) -> usize {
        match &self.change {
            Change::Claim(_) => SMALL_RESPONSE,
            Change::Reclaim(..) | Change::Transition(_) => 0,
        }
    }
}

impl Change {
    /// Returns the answer, and the record if it is changed.
    fn apply(
        &self,
        loaded: Option<LoadedRecord>,
        now: Duration,
    ) -> (Written, Option<StoredRecord>) {
        let Some(mut loaded) = loaded else {
            return match self {
                Self::Claim(claim) => {
                    let record = StoredRecord::claimed(claim, now);
                    let claimed = Claimed::Acquired(record.grant());
                    (Written::Claimed(claimed.into()), Some(record))
                }
                Self::Reclaim(..) => (Written::Reclaimed(None), None),
                Self::Transition(_) => (Written::Transitioned(Transitioned::Superseded), None),
            };
        };
        let before = loaded.record.clone();
        let written = match self {
            Self::Claim(claim) => {
                loaded.record.claim(claim, now);
                Written::Claimed(loaded.read(now).into())
            }
            Self::Reclaim(seen, reclaim_as, claim) => {
                Written::Reclaimed(loaded.record.reclaim(*seen, *reclaim_as, claim, now))
            }
            Self::Transition(transition) => {
                Written::Transitioned(loaded.record.apply(transition, now))
            }
        };
        let changed = (loaded.record != before).then_some(loaded.record);
        (written, changed)
    }
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
    let names = calls.iter().map(|call| (&call.name, call.max_response()));
    let loaded = load_all(on, &names.collect::<Vec<_>>()).await?;
    let now = now();
    let (mut answers, mut changed) = (Vec::with_capacity(calls.len()), Vec::new());
    for (call, loaded) in calls.iter().zip(loaded) {
        answers.push(loaded.map(|loaded| {
            let (answer, record) = call.change.apply(loaded, now);
            changed.extend(record.map(|record| (&call.name, record)));
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
        store::{Completion, SqliteStore, Store as _},
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
            let change = Change::Claim(claim);
            claims.push(WriteCall { name, change });
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
