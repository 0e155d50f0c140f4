//! The bounds of an exploration, the recovery, and the broken guard.

use std::{env, thread};

use stateright::{Checker as _, HasDiscoveries, Model};

pub(crate) struct Protocol {
    pub(crate) actors: usize,
    pub(crate) faults: u8,
    pub(crate) ticks: u8,
    /// The number of claims, takeovers included.
    pub(crate) claims: u8,
    pub(crate) recovery: Recovery,
    pub(crate) effects: Effects,
    pub(crate) bug: Option<Bug>,
}

/// One guard of a transition, broken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Bug {
    TakesOverLive,
    ReclaimsAnyFence,
    KeepsTheToken,
    CompletesForAnyToken,
    CompletesAgain,
    ReleasesForAnyToken,
    RenewsForAnyToken,
    MarksLive,
    FencesStartAgain,
    SweepsLeased,
    SweepsLapsed,
    ReleasesUnknown,
}

/// Where a handler's effect happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Effects {
    /// In the middle of its run, and for good.
    Outside,
    /// In the transaction that completes the record.
    Committed,
}

/// The layer's recoveries that decide by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Recovery {
    Refuse,
    Rerun,
}

/// The invariant that a step has broken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Broken {
    /// A token was granted twice, or something was applied for a token that is
    /// not the last one granted.
    I1,
    /// A fence was not larger than the last.
    I2,
    /// A live lease was taken over, marked or swept.
    I3,
    /// A completed record changed before it expired.
    I4,
    /// An effect was committed without its record, or the other way round.
    I5,
    /// An epoch has two effects, or more starts than its releases allow.
    I6,
    /// A completion was applied, and another response is kept.
    I7,
    /// Another request's claim continued an operation.
    I8,
    /// An unknown outcome ended without a completion, a reclaim or a resolution.
    I11,
}

impl Broken {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::I1 => "I1",
            Self::I2 => "I2",
            Self::I3 => "I3",
            Self::I4 => "I4",
            Self::I5 => "I5",
            Self::I6 => "I6",
            Self::I7 => "I7",
            Self::I8 => "I8",
            Self::I11 => "I11",
        }
    }
}

impl Protocol {
    pub(crate) fn new(recovery: Recovery, effects: Effects) -> Self {
        let set = |variable, otherwise| match env::var(variable) {
            Ok(text) => text.parse().expect("a number"),
            Err(_) => otherwise,
        };
        Self {
            actors: usize::from(set("ACTORS", 3)),
            faults: set("FAULTS", 1),
            ticks: set("TICKS", 2),
            claims: set("CLAIMS", 3),
            recovery,
            effects,
            bug: None,
        }
    }

    pub(crate) fn with(self, bug: Bug) -> Self {
        Self {
            bug: Some(bug),
            ..self
        }
    }

    #[expect(clippy::print_stdout, reason = "how much a passing test has explored")]
    pub(crate) fn holds(self) {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let checker = self
            .checker()
            .threads(threads)
            .finish_when(HasDiscoveries::AnyFailures)
            .spawn_bfs()
            .join();
        println!(
            "{} states, {} of them unique, depth {}",
            checker.state_count(),
            checker.unique_state_count(),
            checker.max_depth()
        );
        checker.assert_properties();
    }

    pub(crate) fn finds(self, broken: Broken) {
        let name = broken.name();
        let checker = self
            .checker()
            .finish_when(HasDiscoveries::AnyOf([name].into()))
            .spawn_bfs()
            .join();
        assert!(checker.discovery(name).is_some(), "{name} is not noticed");
    }
}
