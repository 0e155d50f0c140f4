//! A timeout for futures that are mostly ready at once.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use pin_project_lite::pin_project;
use tokio::{
    task::{coop::Unconstrained, unconstrained},
    time::{Sleep, sleep},
};

pin_project! {
    /// The output of a future, or `None` if the timeout elapses first.
    ///
    /// The clock is not read, and no timer is set, before a poll leaves the future
    /// pending. The timeout counts from that poll. Reading the clock and setting a
    /// timer cost more than many of the calls that this limits.
    pub(crate) struct LazyTimeout<F> {
        #[pin]
        future: F,
        timeout: Duration,
        // How many pending polls do not start the timeout.
        free_polls: u8,
        // Boxed, since few futures need it. Unconstrained, since a future that uses up
        // its task's budget in each poll would keep the timer from being polled.
        timer: Option<Pin<Box<Unconstrained<Sleep>>>>,
    }
}

impl<F: Future> LazyTimeout<F> {
    pub(crate) fn new(timeout: Duration, future: F) -> Self {
        Self {
            future,
            timeout,
            free_polls: 0,
            timer: None,
        }
    }

    /// Polls the future twice before the timeout starts. A server begins to read a
    /// body at the first poll, and most bodies are there at the second.
    pub(crate) fn after_two_polls(timeout: Duration, future: F) -> Self {
        Self {
            free_polls: 1,
            ..Self::new(timeout, future)
        }
    }
}

impl<F: Future> Future for LazyTimeout<F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Some(output));
        }
        if *this.free_polls > 0 {
            *this.free_polls -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let timer = this
            .timer
            .get_or_insert_with(|| Box::pin(unconstrained(sleep(*this.timeout))));
        timer.as_mut().poll(cx).map(|()| None)
    }
}
