//! The steps of a sequence, made of the input's bytes.

use std::time::Duration;

use arbitrary::Unstructured;
use http::StatusCode;
use tower_idempotency::{Disposition, Release};

/// A caller and a key.
pub(super) type Name = (u8, u8);

#[derive(Debug)]
pub(super) enum Step {
    Send {
        name: Name,
        /// Which of several requests it is.
        request: u8,
        plan: Plan,
        fault: Option<StoreFault>,
    },
    Wait(Duration),
    Sweep,
    Forget(Name),
    Resolve {
        name: Name,
        happened: bool,
    },
}

/// What the handler does if it is called.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) end: End,
    pub(super) is_slow: bool,
    /// Whether the client of a slow handler leaves.
    pub(super) client_leaves: bool,
    pub(super) disposition: Option<Disposition>,
    pub(super) keeps_short: bool,
    pub(super) starts_effects: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum End {
    Answers(StatusCode),
    /// Answers with more than is recorded.
    Streams(StatusCode),
    Panics,
    Fails,
    /// The body of the response breaks off.
    Breaks(StatusCode),
    Hangs,
}

/// Which calls to the store fail while a request is answered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum StoreFault {
    Claim,
    /// It is made, and its answer is lost.
    ClaimAnswer,
    /// Those that end a run.
    End,
}

pub(super) fn step(input: &mut Unstructured<'_>) -> arbitrary::Result<Step> {
    let name = (input.int_in_range(0..=1)?, input.int_in_range(0..=1)?);
    Ok(match input.int_in_range(0..=15)? {
        0 => Step::Sweep,
        1 => Step::Forget(name),
        2 => Step::Resolve {
            name,
            happened: input.arbitrary()?,
        },
        3..=6 => Step::Wait(*input.choose(&WAITS)?),
        _ => {
            let plan = plan(input)?;
            let faults = [StoreFault::Claim, StoreFault::ClaimAnswer, StoreFault::End];
            let fault = match input.int_in_range(0..=7)? {
                0 if !plan.takes_time() => Some(*input.choose(&faults)?),
                _ => None,
            };
            Step::Send {
                name,
                request: *input.choose(&REQUESTS)?,
                plan,
                fault,
            }
        }
    })
}

fn plan(input: &mut Unstructured<'_>) -> arbitrary::Result<Plan> {
    let status = StatusCode::from_u16(*input.choose(&STATUSES)?).expect("a valid status");
    let end = match input.int_in_range(0..=15)? {
        0 => End::Panics,
        1 => End::Fails,
        2 => End::Breaks(status),
        3 => End::Hangs,
        4 => End::Streams(status),
        _ => End::Answers(status),
    };
    let disposition = match input.int_in_range(0..=11)? {
        0 => Some(Disposition::Record),
        1 => Some(Disposition::Unknown),
        2 => Some(Disposition::Release(Release::SameRequest)),
        3 => Some(Disposition::Release(Release::AnyRequest)),
        _ => None,
    };
    Ok(Plan {
        end,
        is_slow: input.ratio(1, 6)?,
        client_leaves: input.ratio(1, 2)?,
        disposition,
        keeps_short: input.ratio(1, 6)?,
        starts_effects: input.ratio(1, 6)?,
    })
}

impl Plan {
    pub(super) fn takes_time(&self) -> bool {
        self.is_slow || self.end == End::Hangs
    }
}

/// Mostly the same one.
const REQUESTS: [u8; 6] = [0, 0, 0, 0, 1, 2];

/// No sum of them is close to a retention.
const WAITS: [Duration; 3] = [
    Duration::from_secs(10),
    Duration::from_secs(7 * 3600),
    Duration::from_secs(25 * 3600),
];

const STATUSES: [u16; 24] = [
    200, 201, 200, 201, 202, 301, 303, 307, 308, 400, 401, 404, 407, 408, 409, 413, 415, 422, 429,
    500, 501, 502, 503, 504,
];
