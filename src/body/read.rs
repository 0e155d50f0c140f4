//! Reads a body up to a limit.

use std::{
    mem,
    ops::ControlFlow,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use http_body::Body;

use super::Trailers;

/// The part of a body that was read so far.
///
/// A single frame is kept unchanged. More frames are copied together, so that a body of
/// many small frames takes no more memory than its bytes.
pub(crate) struct BodyReader {
    max: usize,
    first: Bytes,
    joined: BytesMut,
    trailers: Trailers,
}

/// Why nothing more of a body is read.
pub(crate) enum ReadEnd<E> {
    Clean,
    /// It has more bytes than the limit.
    TooLarge,
    Broken(E),
}

impl BodyReader {
    pub(crate) fn new(max: usize) -> Self {
        Self {
            max,
            first: Bytes::new(),
            joined: BytesMut::new(),
            trailers: None,
        }
    }

    /// Reads one frame, and returns the length of its data.
    pub(crate) fn poll_frame<B: Body<Data = Bytes>>(
        &mut self,
        body: Pin<&mut B>,
        cx: &mut Context<'_>,
    ) -> Poll<ControlFlow<ReadEnd<B::Error>, usize>> {
        let frame = match ready!(body.poll_frame(cx)) {
            None => return Poll::Ready(ControlFlow::Break(ReadEnd::Clean)),
            Some(Err(error)) => return Poll::Ready(ControlFlow::Break(ReadEnd::Broken(error))),
            Some(Ok(frame)) => frame,
        };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => {
                self.trailers = frame.into_trailers().ok().map(Box::new);
                return Poll::Ready(ControlFlow::Continue(0));
            }
        };
        let length = data.len();
        self.push(data);
        Poll::Ready(match self.len() > self.max {
            true => ControlFlow::Break(ReadEnd::TooLarge),
            false => ControlFlow::Continue(length),
        })
    }

    /// Returns how many bytes have been read.
    pub(crate) fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    /// Returns the data and the trailers.
    pub(crate) fn into_parts(self) -> (Bytes, Trailers) {
        let data = match self.joined.is_empty() {
            true => self.first,
            false => self.joined.freeze(),
        };
        (data, self.trailers)
    }

    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        self.joined.extend_from_slice(&mem::take(&mut self.first));
        self.joined.extend_from_slice(&data);
    }
}
