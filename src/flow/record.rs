//! Records the outcome of a run, whatever was run.

use std::any::Any;

use bytes::Bytes;

use super::{
    heartbeat::Heartbeat,
    judge::Undone,
    limits::Permit,
    owned::OwnedClaim,
    reply::{Reply, RunAnswer},
    spawn,
};
use crate::{
    error::StoreError,
    flow::outcome::Outcome,
    operation::{Operation, Transacted, response_settings::ResponseSettings},
    rejection::Rejection,
    store::{Completion, OwnerTransition, Release, Store, Transitioned},
    telemetry::notice::Notice,
};

/// A running request, until its outcome is recorded.
pub(super) struct Run<S> {
    pub(super) claim: OwnedClaim<S>,
    pub(super) heartbeat: Heartbeat<S>,
    pub(super) permit: Permit,
}

/// The handler panicked.
pub(super) struct Panicked;

impl From<Box<dyn Any + Send>> for Panicked {
    /// The panic's message may quote anything. Rust's panic hook prints it.
    fn from(_: Box<dyn Any + Send>) -> Self {
        Self
    }
}

/// What the end of a run means, before the result of its work is looked at.
pub(super) enum Ended<C> {
    Returned {
        result: C,
        /// Whether its transaction was rolled back.
        is_aborted: bool,
    },
    /// What the work's own transaction has recorded is the answer.
    Committed {
        called: Result<C, Panicked>,
        recorded: Bytes,
        completion: Completion,
    },
    /// Another claim's answer counts.
    Superseded,
    Unknown(Rejection),
}

/// A finished run: its transition is recorded, and then the caller gets the result.
pub(super) struct Finished<A, E> {
    pub(super) transition: OwnerTransition,
    pub(super) result: Result<A, E>,
    outcome: Outcome,
    /// Says why the outcome is unknown, unless a warning has said so before.
    warning: Option<&'static str>,
}

impl<S: Store> Run<S> {
    /// Returns what the end of a run means. What the work's own transaction has recorded
    /// goes before what the work returned.
    pub(super) fn ended<C>(&self, transacted: Transacted, called: Result<C, Panicked>) -> Ended<C> {
        let rejection = match (transacted, called) {
            (
                Transacted::Committed {
                    response,
                    completion,
                },
                called,
            ) => {
                return Ended::Committed {
                    called,
                    recorded: response,
                    completion,
                };
            }
            (Transacted::Superseded, _) => return Ended::Superseded,
            (Transacted::Unknown, _) => Rejection::commit_unknown(),
            (transacted, Ok(result)) => {
                return Ended::Returned {
                    result,
                    is_aborted: matches!(transacted, Transacted::Aborted),
                };
            }
            (_, Err(Panicked)) => Rejection::handler_panicked(),
        };
        self.claim.operation.log_failure();
        Ended::Unknown(rejection)
    }

    /// Returns the reply of a run whose transition was applied, or failed with this error.
    /// One that failed is made again in the background.
    pub(super) fn recorded<A: RunAnswer, E>(
        self,
        finished: Finished<A, E>,
        failure: Option<StoreError>,
    ) -> Reply<A, E> {
        let Finished {
            transition,
            result,
            outcome,
            warning,
        } = finished;
        if let Some(warning) = warning {
            self.settings()
                .warnings
                .warn(warning, None, self.claim.id());
        }
        let mut reply = Reply::new(result, outcome, self.claim.id());
        if let Some(error) = failure {
            self.claim.warn_late(&error);
            if let OwnerTransition::Complete(_) = transition {
                reply = reply.unrecorded();
            }
            spawn(self.record_late(transition));
        }
        reply
    }

    /// Why a success is not to be recorded, if the work's transaction is not committed.
    pub(super) fn undone(&self, is_aborted: bool) -> Option<Undone> {
        match is_aborted {
            true => Some(Undone::RolledBack),
            false => {
                let is_uncommitted = self.claim.operation.is_uncommitted();
                is_uncommitted.then_some(Undone::Uncommitted)
            }
        }
    }

    pub(super) fn unknown<A, E>(
        &self,
        result: Result<A, E>,
        warning: Option<&'static str>,
    ) -> Finished<A, E> {
        Finished {
            transition: self.claim.shared.config.mark_unknown(),
            result,
            outcome: Outcome::Unknown,
            warning,
        }
    }

    pub(super) fn settings(&self) -> &ResponseSettings {
        &self.claim.shared.config.responses
    }

    /// Records the transition late. Heartbeats keep the lease meanwhile.
    async fn record_late(self, transition: OwnerTransition) {
        self.claim.record_late(&transition, self.permit).await;
        drop(self.heartbeat);
    }
}

impl<A, E> Finished<A, E> {
    pub(super) fn released(release: Release, result: Result<A, E>) -> Self {
        Self {
            transition: OwnerTransition::Release(release),
            result,
            outcome: Outcome::Released,
            warning: None,
        }
    }

    /// Says that the answer is not recorded.
    pub(super) fn unrecorded(self) -> Self
    where
        A: RunAnswer,
    {
        Self {
            result: self.result.map(A::unrecorded),
            ..self
        }
    }

    pub(super) fn completed(
        operation: &Operation,
        completion: Completion,
        result: Result<A, E>,
    ) -> Self {
        Self {
            transition: OwnerTransition::Complete(operation.kept(completion)),
            result,
            outcome: Outcome::Recorded,
            warning: None,
        }
    }
}

/// Records the outcome of a run whose client was answered or has left.
pub(super) async fn record_in_background<S: Store>(run: Run<S>, transition: OwnerTransition) {
    match run.claim.end(&transition).await {
        Ok(Transitioned::Applied) => {}
        Ok(Transitioned::Superseded) => {
            Notice::Superseded.tell(&run.settings().warnings, run.claim.id());
        }
        Err(error) => {
            run.claim.warn_late(&error);
            run.record_late(transition).await;
        }
    }
}
