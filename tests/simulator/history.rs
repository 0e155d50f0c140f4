//! The events of a round, in their order.

use std::time::Duration;

use tower_idempotency::store::{Purged, ReclaimAs, Release};

/// One line of the history, with the moment on the one clock of the round.
pub(crate) type Line = (Duration, Event);

/// Tokens, operations, fingerprints and names are numbered in the order of
/// their first appearance, so that two rounds of one seed can be compared.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// A call reached the store, and was applied or refused by its guard.
    Called {
        name: usize,
        host: usize,
        call: Call,
        applied: bool,
    },
    /// A call reached the store and was shown the record.
    Shown {
        name: usize,
        shown: Option<Shown>,
    },
    Swept {
        purged: Purged,
    },
    Started {
        run: usize,
        name: usize,
        host: usize,
        operation: usize,
        attempt: u32,
        fence: u64,
        body: &'static str,
        deed: &'static str,
    },
    /// The handler had an effect that cannot be undone.
    Affected {
        run: usize,
    },
    Finished {
        run: usize,
    },
    Sent {
        request: usize,
        name: usize,
        host: usize,
        body: &'static str,
    },
    Answered {
        request: usize,
        answer: Answer,
    },
    /// The client has left, or its connection broke.
    Left {
        request: usize,
        why: &'static str,
    },
    Weather {
        host: usize,
        what: &'static str,
    },
    /// All processes and their timers stood still for this time.
    Stood {
        still: Duration,
    },
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    Claim {
        claim: Brought,
        granted: Granted,
    },
    /// A claim that was granted before got a new fence.
    ClaimAgain {
        token: usize,
        fence: u64,
    },
    Reclaim {
        seen: u64,
        reclaim_as: ReclaimAs,
        claim: Brought,
        granted: Granted,
    },
    Renew {
        token: usize,
        lease: Duration,
    },
    Complete {
        token: usize,
        response: u64,
        retention: Duration,
        at_least: Duration,
        /// It was tried before, and failed or got no answer.
        again: bool,
    },
    Release {
        token: usize,
        release: Release,
    },
    MarkByOwner {
        token: usize,
        retention: Duration,
    },
    MarkLapsed {
        seen: u64,
        retention: Duration,
    },
    Resolve {
        seen: u64,
        /// The response, if it happened.
        happened: Option<u64>,
        /// The shortest time for which the record is kept.
        at_least: Duration,
    },
}

/// The parts of a claim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Brought {
    pub(crate) token: usize,
    pub(crate) fingerprint: usize,
    pub(crate) lease: Duration,
    pub(crate) retention: Duration,
}

/// The grant of a claim; zeros without one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Granted {
    pub(crate) operation: usize,
    pub(crate) fence: u64,
    pub(crate) attempt: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Shown {
    pub(crate) token: usize,
    pub(crate) operation: usize,
    pub(crate) fence: u64,
    pub(crate) attempt: u32,
    pub(crate) takeovers: u32,
    pub(crate) fingerprint: usize,
    pub(crate) expired: bool,
    pub(crate) state: ShownState,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ShownState {
    InProgress { lapsed: bool },
    Completed { response: u64 },
    Unknown,
    Released(Release),
}

/// An answer as its client sees it, and its outcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Answer {
    pub(crate) outcome: &'static str,
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: String,
    pub(crate) trailers: Vec<(String, Vec<u8>)>,
    pub(crate) marked_replay: bool,
}
