//! The claim that a running request owns, and the transitions that end it.

use std::{sync::Arc, time::Duration};

use tokio::time::{self, Instant};

use super::{
    claim::Granted,
    decide::{Answer, Answered},
    limits::Permit,
    quotas::Quotas,
    request::Keyed,
    shared::Shared,
    usage::ScopeUsage,
};
use crate::{
    error::StoreError,
    fingerprint::Fingerprint,
    key::OperationId,
    operation::Operation,
    rejection::RequestHead,
    runtime::backoff::Backoff,
    store::{Completion, OwnerTransition, RecordState, Store, Transitioned},
    telemetry::notice::{GaveUp, Notice},
};

pub(super) struct OwnedClaim<S> {
    pub(super) shared: Arc<Shared<S>>,
    pub(super) operation: Operation,
    fingerprint: Fingerprint,
    /// That of the scope, if it has a quota.
    usage: Option<Arc<ScopeUsage>>,
}

impl<S: Store> OwnedClaim<S> {
    pub(super) fn new<W>(
        shared: Arc<Shared<S>>,
        request: &Keyed<W>,
        granted: Granted,
        head: RequestHead,
    ) -> Self {
        let operation = Operation::new(
            Arc::clone(&shared.config.responses),
            head,
            request.name.clone(),
            &request.claim,
            granted.grant,
            granted.since,
        );
        Self {
            shared,
            operation,
            fingerprint: request.claim.fingerprint,
            usage: request.quota.as_ref().map(|quota| Arc::clone(&quota.usage)),
        }
    }

    pub(super) fn id(&self) -> Option<OperationId> {
        Some(self.operation.id())
    }

    /// Applies the transition once, within the store timeout, and wakes the waiters.
    pub(super) async fn end(
        &self,
        transition: &OwnerTransition,
    ) -> Result<Transitioned, StoreError> {
        let (name, token) = (self.operation.name(), self.operation.token());
        let ended = self.shared.end(name, token, transition.clone()).await;
        if let (Ok(Transitioned::Applied), Some((quotas, usage))) = (&ended, self.quota()) {
            let since = self.operation.lease().granted;
            quotas.ended(usage, name, since, transition);
        }
        ended
    }

    /// Notes that the operation's own transaction has recorded its response, and wakes the
    /// waiters.
    pub(super) fn committed(&self, completion: Completion) {
        if let Some((quotas, usage)) = self.quota() {
            let (name, since) = (self.operation.name(), self.operation.lease().granted);
            let transition = OwnerTransition::Complete(completion);
            quotas.ended(usage, name, since, &transition);
        }
        self.shared.waiters.wake(self.operation.name());
    }

    fn quota(&self) -> Option<(&Arc<Quotas<S>>, &Arc<ScopeUsage>)> {
        Some((self.shared.quotas.as_ref()?, self.usage.as_ref()?))
    }

    /// Applies the transition in the background, with pauses that grow, until the store
    /// answers or `late_recording_timeout` has passed. Until then the outcome is unknown
    /// to others. `permit` is that of the running request.
    pub(super) async fn record_late(&self, transition: &OwnerTransition, permit: Permit) {
        let bytes = match transition {
            OwnerTransition::Complete(completion) => completion.response.len(),
            _ => 0,
        };
        let shared = &*self.shared;
        let warnings = shared.config.warnings();
        let late_permit = shared.late.try_acquire(1);
        let bytes_permit = shared.late_bytes.try_acquire(bytes);
        // `drain` counts one of the two permits at any moment.
        drop(permit);
        let limit = match (&late_permit, &bytes_permit) {
            (Some(_), Some(_)) => None,
            (None, _) => Some(GaveUp::TooMany),
            (_, None) => Some(GaveUp::TooManyBytes),
        };
        if let Some(limit) = limit {
            return Notice::GaveUpRecording(limit).tell(warnings, self.id());
        }
        let deadline = Instant::now() + shared.config.late_recording_timeout;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let mut failure = None;
        while Instant::now() < deadline {
            time::sleep(backoff.pause()).await;
            match self.end(transition).await {
                Ok(Transitioned::Applied) => {
                    return Notice::RecordedLate.tell(warnings, self.id());
                }
                Ok(Transitioned::Superseded) => {
                    return Notice::Superseded.tell(warnings, self.id());
                }
                Err(error) => {
                    self.warn_late(&error);
                    failure = Some(error);
                }
            }
        }
        let gave_up = Notice::GaveUpRecording(GaveUp::TimedOut);
        gave_up.tell_because(warnings, self.id(), failure.as_ref());
    }

    pub(super) fn warn_late(&self, error: &StoreError) {
        self.shared.config.warnings().warn(
            "recording of an outcome failed, it is tried again in the background",
            Some(error),
            self.id(),
        );
    }

    /// Returns what the claim that superseded this one answers, or `None` if there is
    /// nothing left that could answer.
    pub(super) async fn superseding(&self) -> Result<Option<Answered>, StoreError> {
        let shared = &*self.shared;
        let record = shared
            .call(|store| store.read(self.operation.name()))
            .await?;
        let own = record.filter(|record| record.fingerprint == self.fingerprint);
        Ok(own.map(|record| {
            let answer = match &record.state {
                RecordState::Completed { response } => {
                    Answer::completed(&shared.config, &record, response)
                }
                RecordState::InProgress {
                    lease_left: Some(lease_left),
                } => Answer::InProgress {
                    age: record.age,
                    lease_left: *lease_left,
                },
                _ => Answer::Unknown,
            };
            Answered::of(&record, answer)
        }))
    }
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
