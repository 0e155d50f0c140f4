//! How long the data of a body is waited for.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    task::{coop::Unconstrained, unconstrained},
    time::{Instant, Sleep, sleep_until},
};

/// Elapses when a body is waited for without progress for the timeout, or for longer than
/// that in all while it arrives more slowly than [`MIN_BYTES_PER_SECOND`]. The time in which
/// its reader does not ask for more does not count.
pub(crate) struct ProgressTimeout {
    timeout: Duration,
    /// The waits that are over.
    waited: Duration,
    /// When the present wait began.
    since: Option<Instant>,
    // Unconstrained, since a body that uses up its task's budget in each poll would keep the
    // timer from being polled.
    timer: Option<Pin<Box<Unconstrained<Sleep>>>>,
}

impl ProgressTimeout {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            waited: Duration::ZERO,
            since: None,
            timer: None,
        }
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Is ready once a pending body is late, of which `received` bytes have arrived.
    pub(crate) fn poll_elapsed(&mut self, received: u64, cx: &mut Context<'_>) -> Poll<()> {
        let at_least_rate = Duration::from_millis(received * 1_000 / MIN_BYTES_PER_SECOND);
        let left = (self.timeout + at_least_rate).saturating_sub(self.waited);
        let since = *self.since.get_or_insert_with(Instant::now);
        let deadline = since + left.min(self.timeout);
        let sleep = || unconstrained(sleep_until(deadline));
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep()));
        loop {
            ready!(timer.as_mut().poll(cx));
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            // It was set for an earlier wait, whose deadline is never later.
            timer.set(sleep());
        }
    }

    /// Ends the present wait: the body made progress.
    pub(crate) fn progressed(&mut self) {
        if let Some(since) = self.since.take() {
            self.waited += since.elapsed();
        }
    }
}

/// The least average rate at which the body of a request has to arrive.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 1 << 10;
