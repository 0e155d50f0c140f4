//! A bound on the time of what is mostly ready at once.
//!
//! To read the clock and to set a timer costs more than many of the calls that
//! it would bound: neither is done before there is something to wait for.

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
    /// The output of a future, or `None` if it takes longer than its bound,
    /// counted from the look that finds that there is something to wait for.
    pub(crate) struct Within<F> {
        #[pin]
        future: F,
        bound: Duration,
        // How many looks may find it waiting before the bound counts.
        free_looks: u8,
        // Boxed: it is seldom there. Unconstrained, since a future that uses up
        // its task's budget each time would never be seen to be late.
        timer: Option<Pin<Box<Unconstrained<Sleep>>>>,
    }
}

impl<F: Future> Within<F> {
    pub(crate) fn new(bound: Duration, future: F) -> Self {
        Self {
            future,
            bound,
            free_looks: 0,
            timer: None,
        }
    }

    /// For what is mostly ready when its task is polled again: a body, which a
    /// server begins to read when it is first asked for.
    pub(crate) fn after_a_second_look(bound: Duration, future: F) -> Self {
        Self {
            free_looks: 1,
            ..Self::new(bound, future)
        }
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Option<F::Output>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(cx) {
            return Poll::Ready(Some(output));
        }
        if *this.free_looks > 0 {
            *this.free_looks -= 1;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let timer = this
            .timer
            .get_or_insert_with(|| Box::pin(unconstrained(sleep(*this.bound))));
        timer.as_mut().poll(cx).map(|()| None)
    }
}
