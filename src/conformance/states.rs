//! The states of a record.

use std::time::Duration;

use bytes::Bytes;

use crate::store::{ReclaimAs, Record, RecordState, Release, Transitioned};

/// The status of a record, and whether it has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub(super) status: Status,
    pub(super) expired: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// There is no record.
    Absent,
    Live,
    Lapsed,
    Completed,
    Unknown,
    /// Released for the same request.
    Released,
    /// Released for any request.
    Free,
}

impl Status {
    /// This status, in a record that has not expired.
    pub(super) fn live(self) -> State {
        State {
            status: self,
            expired: false,
        }
    }

    /// This status, in an expired record.
    pub(super) fn expired(self) -> State {
        State {
            status: self,
            expired: true,
        }
    }
}

impl State {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let records = [
            Status::Live,
            Status::Lapsed,
            Status::Completed,
            Status::Unknown,
            Status::Released,
            Status::Free,
        ];
        let live = records.into_iter().map(Status::live);
        let expired = records.into_iter().map(Status::expired);
        live.chain(expired)
    }

    /// Returns whether a reclaim is granted in this state.
    pub(super) fn allows(self, reclaim_as: ReclaimAs) -> bool {
        match (reclaim_as, self.status) {
            (ReclaimAs::Takeover, Status::Lapsed) => true,
            (ReclaimAs::Rerun | ReclaimAs::Reconcile, Status::Unknown)
            | (ReclaimAs::Retry, Status::Released | Status::Free)
            | (ReclaimAs::Replace, Status::Free) => !self.expired,
            (
                ReclaimAs::Expired,
                Status::Lapsed
                | Status::Completed
                | Status::Unknown
                | Status::Released
                | Status::Free,
            ) => self.expired,
            _ => false,
        }
    }
}

#[track_caller]
pub(super) fn applied(answer: Transitioned, what: &str) {
    assert_eq!(answer, Transitioned::Applied, "{what}: is applied");
}

#[track_caller]
pub(super) fn superseded(answer: Transitioned, what: &str) {
    assert_eq!(
        answer,
        Transitioned::Superseded,
        "{what}: its guard does not hold"
    );
}

pub(super) fn same_claim(before: &Record, after: &Record, what: &str) {
    assert!(
        before.operation == after.operation
            && before.fence == after.fence
            && before.attempt == after.attempt
            && before.takeovers == after.takeovers
            && before.fingerprint == after.fingerprint
            && before.token == after.token,
        "{what}: the claim stays what it is, and {before:?} became {after:?}"
    );
}

pub(super) fn status_of(record: &Record) -> Status {
    match &record.state {
        RecordState::InProgress {
            lease_left: Some(_),
        } => Status::Live,
        RecordState::InProgress { lease_left: None } => Status::Lapsed,
        RecordState::Completed { .. } => Status::Completed,
        RecordState::Unknown => Status::Unknown,
        RecordState::Released(Release::SameRequest) => Status::Released,
        RecordState::Released(Release::AnyRequest) => Status::Free,
    }
}

/// Returns the status of a record, or `Absent` if there is none.
pub(super) fn status_in(record: &Option<Record>) -> Status {
    record.as_ref().map_or(Status::Absent, status_of)
}

pub(super) fn lease_left(record: &Record) -> Option<Duration> {
    match record.state {
        RecordState::InProgress { lease_left } => lease_left,
        _ => None,
    }
}

pub(super) fn response_of(record: &Record) -> Option<&Bytes> {
    match &record.state {
        RecordState::Completed { response } => Some(response),
        _ => None,
    }
}
