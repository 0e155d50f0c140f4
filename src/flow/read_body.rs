//! Reads the body of a guarded request: up to a limit, and as long as it makes progress.

use std::{
    mem,
    ops::ControlFlow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    task::{coop::Unconstrained, unconstrained},
    time::{Instant, Sleep, sleep_until},
};

use super::{
    config::Oversized,
    limits::{Full, Permit},
    shared::Shared,
};
use crate::{
    body::{
        ReceivedBody,
        error::BodyError,
        read::{BodyReader, ReadEnd},
    },
    operation::request_name::RequestName,
    rejection::{MIN_BYTES_PER_SECOND, Rejection},
};

/// Reads a body into memory.
pub(super) struct ReadBody {
    pub(super) name: RequestName,
    pub(super) reader: BodyReader,
    /// For the bytes that were read.
    pub(super) buffered: Permit,
    /// Whether a body that is too large is handed on. It is read no further.
    hands_on: bool,
    /// Whether the body is read in part.
    pub(super) is_cut: bool,
    /// For a body that was not there at once.
    upload: Option<Permit>,
    progress: ProgressTimeout,
}

impl ReadBody {
    pub(super) fn new<S>(shared: &Shared<S>, name: RequestName, oversized: Oversized) -> Self {
        let config = &shared.config;
        Self {
            name,
            hands_on: oversized != Oversized::Refuse,
            is_cut: false,
            reader: BodyReader::new(config.max_request_body),
            buffered: shared.buffers.empty_permit(),
            upload: None,
            progress: ProgressTimeout::new(config.request_body_timeout),
        }
    }

    /// Reads to the end of the body, or until it is cut.
    pub(super) fn poll_read<B: ReceivedBody, S>(
        &mut self,
        mut body: Pin<&mut B>,
        cx: &mut Context<'_>,
        shared: &Shared<S>,
    ) -> Poll<Result<(), Rejection>> {
        let config = &shared.config;
        if self.hands_on && self.reader.len() == 0 {
            self.is_cut = body.size_hint().lower() > config.max_request_body as u64;
            if self.is_cut {
                return Poll::Ready(Ok(()));
            }
        }
        loop {
            let Poll::Ready(read) = self.reader.poll_frame(body.as_mut(), cx) else {
                let received = self.reader.len();
                if self.upload.is_none() && self.progress.was_pending {
                    match shared.upload_permit(self.name.sent().scope()) {
                        Ok(permit) => self.upload = Some(permit),
                        Err(rejection) => return Poll::Ready(Err(rejection)),
                    }
                }
                ready!(self.progress.poll_elapsed(received, cx));
                let timeout = config.request_body_timeout;
                return Poll::Ready(Err(Rejection::body_timeout(timeout)));
            };
            match read {
                ControlFlow::Continue(length) => {
                    let scope = self.name.sent().scope();
                    if let Err(full) = self.buffered.grow(scope, length) {
                        return Poll::Ready(Err(too_many_bytes(full)));
                    }
                }
                ControlFlow::Break(ReadEnd::Clean) => return Poll::Ready(Ok(())),
                ControlFlow::Break(ReadEnd::TooLarge) if self.hands_on => {
                    self.is_cut = true;
                    let resized = self
                        .buffered
                        .resize(self.name.sent().scope(), self.reader.len());
                    return Poll::Ready(resized.map_err(too_many_bytes));
                }
                ControlFlow::Break(ReadEnd::TooLarge) => {
                    let max = config.max_request_body as u64;
                    return Poll::Ready(Err(Rejection::body_too_large(max)));
                }
                ControlFlow::Break(ReadEnd::Broken(error)) => {
                    let error = BodyError::of(&*error.into());
                    return Poll::Ready(Err(Rejection::body_broken(error)));
                }
            }
        }
    }
}

fn too_many_bytes(full: Full) -> Rejection {
    match full {
        Full::Process(exceeded) => Rejection::overloaded(
            "too many bytes of request bodies are held in memory, request refused with 503: \
             raise `max_buffered_bytes`, or lower `max_request_body`",
        )
        .exceeding(exceeded.numbers("bytes", "this part of a body")),
        Full::Scope(exceeded) => Rejection::scope_overloaded(
            "too many bytes of one scope's request bodies are held in memory, request refused \
             with 429: raise `max_buffered_bytes_per_scope`, or lower `max_request_body`",
        )
        .exceeding(exceeded.numbers(
            "bytes of a scope beyond half of `max_buffered_bytes`",
            "this part of a body",
        )),
    }
}

/// Elapses when a body has stopped or arrives too slowly. Neither reads the clock nor
/// sets a timer before the body is pending for the second time: a server begins to read
/// a body when it is polled first.
struct ProgressTimeout {
    timeout: Duration,
    was_pending: bool,
    watch: Option<Watch>,
}

struct Watch {
    start: Instant,
    /// When the bytes received so far were first seen.
    last: Instant,
    received: usize,
    // Unconstrained, since a body that uses up its task's budget in each poll would keep
    // the timer from being polled.
    timer: Pin<Box<Unconstrained<Sleep>>>,
}

impl ProgressTimeout {
    fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            was_pending: false,
            watch: None,
        }
    }

    /// Is ready once a pending body is late, of which `received` bytes have arrived.
    fn poll_elapsed(&mut self, received: usize, cx: &mut Context<'_>) -> Poll<()> {
        if !mem::replace(&mut self.was_pending, true) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let timeout = self.timeout;
        let watch = self.watch.get_or_insert_with(|| {
            let now = Instant::now();
            Watch {
                start: now,
                last: now,
                received,
                timer: Box::pin(unconstrained(sleep_until(now + timeout))),
            }
        });
        if received > watch.received {
            watch.received = received;
            watch.last = Instant::now();
        }
        loop {
            ready!(watch.timer.as_mut().poll(cx));
            let deadline = watch.deadline(timeout);
            if deadline <= Instant::now() {
                return Poll::Ready(());
            }
            watch.timer.set(unconstrained(sleep_until(deadline)));
        }
    }
}

impl Watch {
    /// Returns the moment at which the next byte has to be there.
    fn deadline(&self, timeout: Duration) -> Instant {
        let at_least_rate = self.received as u64 * 1_000 / MIN_BYTES_PER_SECOND;
        let too_slow = self.start + timeout + Duration::from_millis(at_least_rate);
        let stopped = self.last + timeout;
        too_slow.min(stopped)
    }
}
