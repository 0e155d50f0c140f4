//! What a guard returns when the work is done.

/// What [`Guard::run`](crate::Guard::run) returns when the work is done.
///
/// Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Ran<T> {
    /// The work ran now, and its value is recorded.
    Now(T),
    /// The work ran before, and this is its recorded value.
    Replayed(T),
    /// The work ran now, and its value is not recorded: the store did not take it yet, or
    /// the work chose so by [`Operation::set_disposition`](crate::Operation::set_disposition).
    ///
    /// In the first case the guard tries to record it for
    /// [`late_recording_timeout`](crate::GuardBuilder::late_recording_timeout); until then the
    /// outcome is unknown to others.
    Unrecorded(T),
}

impl<T> Ran<T> {
    /// Returns the value.
    pub fn into_inner(self) -> T {
        match self {
            Self::Now(value) | Self::Replayed(value) | Self::Unrecorded(value) => value,
        }
    }
}
