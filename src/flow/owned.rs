//! Writing down what became of a claim: at once, or late.

use std::time::Duration;

use tokio::time::{self, Instant};

use crate::{
    Fingerprint, OperationId, RecordName, Store, StoreError, Token,
    flow::claim::{Claimant, Found, Seen},
    flow::shared::{Host, Share},
    jitter::jittered,
    outcome::{GaveUp, Notice},
    store::{Completion, Grant, MarkedBy, RecordState, Release, Transitioned},
};

/// A claim that was granted, to be settled.
pub(crate) struct Owned<'a, S> {
    pub(crate) host: &'a Host<S>,
    pub(crate) name: RecordName,
    pub(crate) token: Token,
    pub(crate) operation: Option<OperationId>,
    fingerprint: Fingerprint,
}

/// What became of a claim.
pub(crate) enum Ending {
    Completed(Completion),
    Released(Release),
    Unknown,
}

impl<'a, S: Store> Owned<'a, S> {
    /// The claim as it was granted.
    pub(crate) fn new(host: &'a Host<S>, claimant: &Claimant, grant: Grant) -> Self {
        Self {
            host,
            name: claimant.name.clone(),
            token: claimant.claim.token,
            operation: Some(grant.operation),
            fingerprint: claimant.claim.fingerprint,
        }
    }

    /// One try, within the store timeout; wakes who waits for it.
    pub(crate) async fn settle(&self, ending: &Ending) -> Result<Transitioned, StoreError> {
        let (store, name, token) = (&self.host.store, &self.name, self.token);
        let settled = match ending {
            Ending::Completed(completion) => {
                self.host
                    .timely(store.complete(name, token, completion))
                    .await
            }
            Ending::Released(release) => {
                self.host.timely(store.release(name, token, *release)).await
            }
            Ending::Unknown => {
                let retention = self.host.config.unknown_retention;
                let owner = MarkedBy::Owner(token);
                self.host
                    .timely(store.mark_unknown(name, owner, retention))
                    .await
            }
        };
        self.host.waiters.wake(&self.name);
        settled
    }

    /// Tries again until the store answers, bounded in time, and in tasks and
    /// bytes over all requests of the layer. Until then the outcome is unknown to
    /// others. The request gives its `place` among the running back.
    pub(crate) async fn settle_late(&self, ending: &Ending, place: Option<Share>) {
        let bytes = match ending {
            Ending::Completed(completion) => completion.response.len(),
            Ending::Released(_) | Ending::Unknown => 0,
        };
        let host = self.host;
        let warnings = &host.config.warnings;
        let task = host.late.take(1);
        let room = host.late_bytes.take(bytes);
        // Not before: whoever drains the layer counts the one or the other.
        drop(place);
        let too_many = match (&task, &room) {
            (Some(_), Some(_)) => None,
            (None, _) => Some(GaveUp::TooMany),
            (_, None) => Some(GaveUp::TooManyBytes),
        };
        if let Some(too_many) = too_many {
            return Notice::GaveUpRecording(too_many).tell(warnings, self.operation);
        }
        let end = Instant::now() + host.config.late_recording_timeout;
        let mut pause = FIRST_PAUSE;
        let mut failure = None;
        while Instant::now() < end {
            time::sleep(jittered(pause)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            match self.settle(ending).await {
                Ok(Transitioned::Applied) => {
                    return Notice::RecordedLate.tell(warnings, self.operation);
                }
                Ok(Transitioned::Superseded) => {
                    return Notice::Superseded.tell(warnings, self.operation);
                }
                Err(error) => {
                    self.warn_late(&error);
                    failure = Some(error);
                }
            }
        }
        let gave_up = Notice::GaveUpRecording(GaveUp::TimedOut);
        gave_up.tell_because(warnings, self.operation, failure.as_ref());
    }

    pub(crate) fn warn_late(&self, error: &StoreError) {
        self.host.config.warnings.warn(
            "recording of an outcome failed, it is tried again in the background",
            Some(error),
            self.operation,
        );
    }

    /// What the claim that superseded this one has to say; `None` if there is
    /// nothing left that it could say.
    pub(crate) async fn winner(&self) -> Result<Option<Seen>, StoreError> {
        let record = self.host.timely(self.host.store.read(&self.name)).await?;
        Ok(record
            .filter(|record| record.fingerprint == self.fingerprint)
            .map(|record| Seen {
                operation: record.operation,
                found: match record.state {
                    RecordState::Completed { response } => Found::Completed { response },
                    RecordState::InProgress {
                        lease_left: Some(lease_left),
                    } => Found::InProgress {
                        age: record.age,
                        lease_left,
                    },
                    _ => Found::Unknown,
                },
            }))
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
