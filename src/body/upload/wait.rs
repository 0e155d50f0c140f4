//! How long the data of an upload is waited for.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Instant, Sleep, sleep_until};

use super::UploadLimits;

/// Elapses when a body is waited for in vain. The time in which its reader does not ask for
/// more does not count.
pub(super) struct WaitTimeout {
    limits: UploadLimits,
    /// The waits that are over.
    waited: Duration,
    wait: Option<Wait>,
}

struct Wait {
    start: Instant,
    timer: Pin<Box<Sleep>>,
}

impl WaitTimeout {
    pub(super) fn new(limits: UploadLimits) -> Self {
        Self {
            limits,
            waited: Duration::ZERO,
            wait: None,
        }
    }

    /// Is ready once a pending body is late, of which `received` bytes have arrived.
    pub(super) fn poll_elapsed(&mut self, received: u64, cx: &mut Context<'_>) -> Poll<()> {
        let UploadLimits {
            timeout,
            min_bytes_per_second,
            ..
        } = self.limits;
        let waited = self.waited;
        let wait = self.wait.get_or_insert_with(|| {
            let at_least_rate = Duration::from_secs(received / min_bytes_per_second);
            let left = (timeout + at_least_rate).saturating_sub(waited);
            let start = Instant::now();
            Wait {
                start,
                timer: Box::pin(sleep_until(start + left.min(timeout))),
            }
        });
        wait.timer.as_mut().poll(cx)
    }

    pub(super) fn stop(&mut self) {
        if let Some(wait) = self.wait.take() {
            self.waited += wait.start.elapsed();
        }
    }
}
