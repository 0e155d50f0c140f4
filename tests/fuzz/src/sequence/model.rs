//! The contract of `docs/contract.md` for one key after another, as a client sees it.

use std::{collections::BTreeMap, time::Duration};

use http::StatusCode;
use tokio::time::Instant;
use tower_idempotency::{Disposition, Release};

use super::steps::{End, Name, Plan};

/// What the contract has of each record.
pub(super) struct Model {
    pub(super) reruns: bool,
    pub(super) records: BTreeMap<Name, Record>,
}

pub(super) struct Record {
    request: u8,
    state: State,
    claimed_at: Instant,
    expires_at: Instant,
    pub(super) attempt: u32,
    /// Whether its last run began an operation.
    pub(super) is_new: bool,
    /// How many runs before this one have an unknown outcome.
    takeovers: u32,
}

enum State {
    /// Until its lease lapses, if it does before its end.
    Running {
        lapses_at: Option<Instant>,
    },
    Completed(Response),
    Tombstone,
    Unknown,
    Released {
        any_request: bool,
    },
    /// An operator has forgotten it.
    Forgotten,
}

/// A run that may begin.
struct Run {
    attempt: u32,
    takeovers: u32,
}

impl Run {
    const FIRST: Self = Self {
        attempt: 1,
        takeovers: 0,
    };
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Response {
    pub(super) status: StatusCode,
    pub(super) text: String,
}

/// The answer to a request.
pub(super) enum Answer {
    Runs,
    Replay(Response),
    Refused(StatusCode, &'static str),
}

impl Model {
    /// Decides about a request, and claims the key if it runs. `marks` unless the store
    /// cannot record that an outcome is unknown.
    pub(super) fn send(
        &mut self,
        name: Name,
        request: u8,
        plan: &Plan,
        now: Instant,
        marks: bool,
    ) -> Answer {
        let run = match self.decide(name, request, now, marks) {
            Ok(run) => run,
            Err(answer) => return answer,
        };
        let lapses_at = match plan.end {
            End::Hangs => Some(now + LONGEST_RUN + LEASE),
            _ => None,
        };
        let record = Record {
            request,
            state: State::Running { lapses_at },
            claimed_at: now,
            expires_at: now + RETENTION,
            attempt: run.attempt,
            is_new: run.attempt == 1,
            takeovers: run.takeovers,
        };
        self.records.insert(name, record);
        Answer::Runs
    }

    /// A claim of a name without a record was withdrawn. It counts as an attempt.
    pub(super) fn withdraw(&mut self, name: Name, request: u8, now: Instant) {
        self.records.entry(name).or_insert(Record {
            request,
            state: State::Released { any_request: true },
            claimed_at: now,
            expires_at: now + RETENTION,
            attempt: 1,
            is_new: true,
            takeovers: 0,
        });
    }

    /// Returns the run of a request, or the answer of one that does not run.
    fn decide(
        &mut self,
        name: Name,
        request: u8,
        now: Instant,
        marks: bool,
    ) -> Result<Run, Answer> {
        let Some(record) = self.records.get_mut(&name) else {
            return Ok(Run::FIRST);
        };
        let has_expired = record.expires_at < now;
        let has_lapsed = record.has_lapsed(now);
        let is_running = matches!(record.state, State::Running { .. });
        if has_expired && !is_running || matches!(record.state, State::Forgotten) {
            return Ok(Run::FIRST);
        }
        if record.request != request {
            let is_free = matches!(record.state, State::Released { any_request: true });
            return match is_free || (has_expired && has_lapsed) {
                true => Ok(Run::FIRST),
                false => Err(refused(422, "key-reused")),
            };
        }
        let may_rerun = self.reruns && record.takeovers + 1 < ATTEMPTS;
        match &record.state {
            State::Released { .. } => Ok(record.next_run(record.takeovers.min(1))),
            State::Completed(response) => Err(Answer::Replay(response.clone())),
            State::Tombstone => Err(refused(409, "response-not-replayable")),
            State::Running { .. } if !has_lapsed => Err(refused(409, "request-in-progress")),
            State::Unknown | State::Running { .. } if may_rerun => {
                Ok(record.next_run(record.takeovers + 1))
            }
            State::Running { .. } if marks => {
                record.mark_unknown(now);
                Err(refused(409, "outcome-unknown"))
            }
            State::Unknown | State::Running { .. } => Err(refused(409, "outcome-unknown")),
            State::Forgotten => Ok(Run::FIRST),
        }
    }

    /// A run has ended.
    pub(super) fn end(&mut self, name: Name, plan: &Plan, run: usize, now: Instant) {
        let record = self.records.get_mut(&name).expect("it ran");
        let retention = if plan.keeps_short {
            SHORT_RETENTION
        } else {
            RETENTION
        };
        let kept_until = (record.claimed_at + retention).max(now + LEASE);
        let state = match plan.end {
            End::Hangs => return,
            End::Panics | End::Fails => State::Unknown,
            End::Answers(status) | End::Streams(status) | End::Breaks(status) => {
                match plan.disposition_of(status) {
                    Disposition::Unknown => State::Unknown,
                    Disposition::Record if plan.is_never_read() => State::Unknown,
                    Disposition::Release(release) => State::Released {
                        any_request: release == Release::AnyRequest && record.takeovers == 0,
                    },
                    Disposition::Record => {
                        record.expires_at = kept_until;
                        match plan.end {
                            End::Streams(_) => State::Tombstone,
                            _ => State::Completed(Response {
                                status,
                                text: plan.text(run),
                            }),
                        }
                    }
                }
            }
        };
        match state {
            State::Unknown => record.mark_unknown(now),
            state => record.state = state,
        }
    }

    /// An operator forgets the record.
    pub(super) fn forget(&mut self, name: Name) {
        if let Some(record) = self.records.get_mut(&name) {
            record.state = State::Forgotten;
        }
    }

    /// An operator resolves a record. Returns whether that is possible.
    pub(super) fn resolve(&mut self, name: Name, response: Option<Response>, now: Instant) -> bool {
        let Some(record) = self.records.get_mut(&name) else {
            return false;
        };
        if !matches!(record.state, State::Unknown) && !record.has_lapsed(now) {
            return false;
        }
        record.expires_at = record.expires_at.max(now + RESOLVED_FOR);
        match response {
            Some(response) => record.state = State::Completed(response),
            None => {
                record.takeovers = 0;
                record.state = State::Released { any_request: false };
            }
        }
        true
    }

    pub(super) fn sweep(&mut self, now: Instant) {
        self.records.retain(|_, record| match record.state {
            _ if record.expires_at >= now => true,
            // It is kept for a day, and claimed as if there were none.
            State::Forgotten => true,
            State::Running { .. } => {
                if record.has_lapsed(now) {
                    record.mark_unknown(now);
                }
                true
            }
            _ => false,
        });
    }

    /// Whether a lease lapses about now.
    pub(super) fn is_about_to_lapse(&self, now: Instant) -> bool {
        self.records.values().any(|record| {
            let State::Running {
                lapses_at: Some(at),
            } = record.state
            else {
                return false;
            };
            now + ABOUT > at && now < at + ABOUT
        })
    }
}

impl Record {
    fn next_run(&self, takeovers: u32) -> Run {
        Run {
            attempt: self.attempt + 1,
            takeovers,
        }
    }

    fn has_lapsed(&self, now: Instant) -> bool {
        matches!(self.state, State::Running { lapses_at: Some(at) } if at < now)
    }

    fn mark_unknown(&mut self, now: Instant) {
        self.state = State::Unknown;
        self.expires_at = now + UNKNOWN_RETENTION;
    }
}

impl Plan {
    /// Rules 50 to 53.
    pub(super) fn disposition_of(&self, status: StatusCode) -> Disposition {
        if let Some(disposition) = self.disposition {
            return disposition;
        }
        let release = match status.as_u16() {
            408 | 502 | 504 => return Disposition::Unknown,
            307 | 308 | 401 | 407 | 413 | 415 | 421 | 425 | 429 => Release::AnyRequest,
            500.. => Release::SameRequest,
            _ => return Disposition::Record,
        };
        match self.starts_effects {
            true => Disposition::Unknown,
            false => Disposition::Release(release),
        }
    }

    /// Whether the body of a response breaks off, or its client has left before it is
    /// streamed.
    fn is_never_read(&self) -> bool {
        match self.end {
            End::Breaks(_) => true,
            End::Streams(_) => self.is_slow && self.client_leaves,
            _ => false,
        }
    }

    /// The body of the response.
    pub(super) fn text(&self, run: usize) -> String {
        match self.end {
            End::Streams(_) => format!("{run:>width$}", width = LARGEST + 1),
            _ => format!("run {run}"),
        }
    }
}

fn refused(status: u16, slug: &'static str) -> Answer {
    let status = StatusCode::from_u16(status).expect("a valid status");
    Answer::Refused(status, slug)
}

const HOUR: Duration = Duration::from_secs(3600);
pub(super) const LEASE: Duration = Duration::from_secs(30);
pub(super) const LONGEST_RUN: Duration = Duration::from_secs(15 * 60);
pub(super) const RETENTION: Duration = HOUR.saturating_mul(24);
pub(super) const SHORT_RETENTION: Duration = HOUR.saturating_mul(2);
pub(super) const UNKNOWN_RETENTION: Duration = HOUR.saturating_mul(72);
pub(super) const RESOLVED_FOR: Duration = HOUR;
/// The largest response that is recorded.
pub(super) const LARGEST: usize = 100;
pub(super) const ATTEMPTS: u32 = 3;
/// Longer than the model's times may be off.
const ABOUT: Duration = Duration::from_secs(60);
