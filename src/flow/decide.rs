//! Decides what a record means for a request: the one place where the two are compared.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

use bytes::Bytes;

use super::{
    config::Config,
    request::{Comparable, Keyed},
};
#[cfg(feature = "sealing")]
use crate::{error::StoreError, fingerprint::Fingerprint, key::RecordName};
use crate::{
    fingerprint::{Comparison, Mismatch},
    key::OperationId,
    operation::recovery::Recovery,
    policy::authorizer::ReplayedRecord,
    store::{Fence, Grant, ReclaimAs, Record, RecordState, Release, transition::NO_OWNER},
};

/// What a request may do about a record.
pub(super) enum Decision {
    /// The record is that of an earlier attempt of this very claim, whose answer was
    /// lost.
    Own(Grant),
    Reclaim(ReclaimAs),
    /// Its lease has lapsed: it is to be marked unknown.
    MarkUnknown,
    Answer(Answer),
}

/// What a record answers to a request that may not run.
pub(super) enum Answer {
    InProgress {
        age: Duration,
        lease_left: Duration,
    },
    Completed {
        response: Bytes,
        /// For a `ReplayAuthorizer` only.
        record: Option<Box<ReplayedRecord>>,
        /// The fingerprint of the record, for which the response is to be opened.
        #[cfg(feature = "sealing")]
        sealed_for: Option<Box<Fingerprint>>,
    },
    /// The sealed response does not open.
    #[cfg(feature = "sealing")]
    Unreadable(StoreError),
    Unknown,
    /// The record is another request's.
    Mismatch(Box<Mismatch>),
    /// The record was made with a form of fingerprint that is not known here.
    UnknownScheme,
    /// The function of an earlier fingerprint panicked.
    FingerprintPanicked,
}

impl Answer {
    /// What a completed record answers.
    pub(super) fn completed(config: &Config, record: &Record, response: &Bytes) -> Self {
        #[cfg(feature = "sealing")]
        let fingerprint = || Box::new(record.fingerprint);
        let replayed = || Box::new(ReplayedRecord::new(record));
        Self::Completed {
            response: response.clone(),
            record: config.authorizer.is_some().then(replayed),
            #[cfg(feature = "sealing")]
            sealed_for: config.responses.sealing.is_some().then(fingerprint),
        }
    }
}

/// A record's answer, and the claim of the record.
pub(super) struct Answered {
    pub(super) operation: OperationId,
    pub(super) fence: Fence,
    pub(super) answer: Answer,
}

impl Answered {
    pub(super) fn of(record: &Record, answer: Answer) -> Self {
        Self {
            operation: record.operation,
            fence: record.fence,
            answer,
        }
    }

    /// Opens the response of the record with this name, if it is to be opened.
    #[cfg(feature = "sealing")]
    pub(super) async fn opened(mut self, config: &Config, name: &RecordName) -> Self {
        let Answer::Completed {
            response,
            sealed_for,
            ..
        } = &mut self.answer
        else {
            return self;
        };
        let (Some(sealing), Some(fingerprint)) = (&config.responses.sealing, sealed_for.take())
        else {
            return self;
        };
        let bytes = response.clone();
        let opened = sealing.open_bytes(name, &fingerprint, self.operation, bytes);
        match Box::pin(opened).await {
            Ok(opened) => *response = opened,
            Err(error) => self.answer = Answer::Unreadable(error),
        }
        self
    }

    pub(super) fn is_in_progress(&self) -> bool {
        matches!(self.answer, Answer::InProgress { .. })
    }
}

/// A mismatch goes before every state but "released for any request", as long as the
/// record has not expired.
pub(super) fn decide<W: Comparable>(
    request: &Keyed<W>,
    config: &Config,
    record: &Record,
) -> Decision {
    let is_in_progress = matches!(record.state, RecordState::InProgress { .. });
    if is_in_progress && record.token == request.claim.token {
        return Decision::Own(Grant {
            operation: record.operation,
            fence: record.fence,
            attempt: record.attempt,
        });
    }
    let has_expired = record.expires_in.is_none();
    if has_expired && !is_in_progress {
        return Decision::Reclaim(ReclaimAs::Expired);
    }
    let is_free = matches!(record.state, RecordState::Released(Release::AnyRequest));
    // It was forgotten: the next request begins a new operation, even if it is the same.
    if is_free && record.token == NO_OWNER {
        return Decision::Reclaim(ReclaimAs::Replace);
    }
    let claim = &request.claim;
    let fingerprinter = &config.fingerprinter;
    let compared = catch_unwind(AssertUnwindSafe(|| {
        let (recorded, own) = (&record.fingerprint, &claim.fingerprint);
        request.what.compare(fingerprinter, recorded, own)
    }));
    let Ok(compared) = compared else {
        return Decision::Answer(Answer::FingerprintPanicked);
    };
    // A crashed claim keeps its key until it expires, whether it was swept or not.
    let has_lapsed = matches!(record.state, RecordState::InProgress { lease_left: None });
    let is_over = has_lapsed && has_expired;
    match compared {
        Comparison::Same => {}
        _ if is_free => return Decision::Reclaim(ReclaimAs::Replace),
        Comparison::SchemeUnknown if is_over => return Decision::MarkUnknown,
        Comparison::SchemeUnknown => return Decision::Answer(Answer::UnknownScheme),
        Comparison::Different(_) if is_over => return Decision::Reclaim(ReclaimAs::Expired),
        Comparison::Different(mismatch) => {
            return Decision::Answer(Answer::Mismatch(Box::new(mismatch)));
        }
    }
    let reruns = matches!(config.recovery, Recovery::Rerun) && config.has_attempts_left(record);
    match &record.state {
        RecordState::Released(_) => Decision::Reclaim(ReclaimAs::Retry),
        RecordState::Completed { response } => {
            Decision::Answer(Answer::completed(config, record, response))
        }
        RecordState::Unknown if reruns => Decision::Reclaim(ReclaimAs::Rerun),
        RecordState::Unknown if matches!(config.recovery, Recovery::Reconcile(_)) => {
            Decision::Reclaim(ReclaimAs::Reconcile)
        }
        RecordState::Unknown => Decision::Answer(Answer::Unknown),
        RecordState::InProgress {
            lease_left: Some(lease_left),
        } => Decision::Answer(Answer::InProgress {
            age: record.age,
            lease_left: *lease_left,
        }),
        RecordState::InProgress { lease_left: None } if reruns => {
            Decision::Reclaim(ReclaimAs::Takeover)
        }
        RecordState::InProgress { lease_left: None } => Decision::MarkUnknown,
    }
}
