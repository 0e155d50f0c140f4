//! Reads the body of a guarded request: up to a limit, and as long as it makes progress.

use std::{
    mem,
    ops::ControlFlow,
    pin::Pin,
    task::{Context, Poll, ready},
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
        progress::ProgressTimeout,
        read::{BodyReader, ReadEnd},
    },
    operation::request_name::RequestName,
    rejection::Rejection,
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
    was_pending: bool,
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
            was_pending: false,
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
                // A server begins to read a body when it is polled first: that costs no
                // permit and no look at the clock.
                if !mem::replace(&mut self.was_pending, true) {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                if self.upload.is_none() {
                    match shared.upload_permit(self.name.sent().scope()) {
                        Ok(permit) => self.upload = Some(permit),
                        Err(rejection) => return Poll::Ready(Err(rejection)),
                    }
                }
                let received = self.reader.len() as u64;
                ready!(self.progress.poll_elapsed(received, cx));
                let timeout = config.request_body_timeout;
                return Poll::Ready(Err(Rejection::body_timeout(timeout)));
            };
            match read {
                ControlFlow::Continue(length) => {
                    if length > 0 {
                        self.progress.progressed();
                    }
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
