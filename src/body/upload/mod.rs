//! A request body that streams to the handler while its digest is verified.

mod state;

use std::{
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, combinators::UnsyncBoxBody};
use thiserror::Error;

pub(crate) use self::state::UploadState;
use super::{
    ReceivedBody, after,
    digests::DigestCheck,
    error::{BodyError, BoxError},
    progress::{MIN_BYTES_PER_SECOND, ProgressTimeout},
};

/// Why an upload is not the declared body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum UploadFault {
    #[error("the request body is not the one that `Content-Digest` declares")]
    WrongDigest,
    #[error("the request body has more than the {max} bytes that an upload may have")]
    TooLarge { max: u64 },
    #[error(
        "the request body came too slowly: no byte for {} seconds, or fewer than \
         {MIN_BYTES_PER_SECOND} bytes a second",
        timeout.as_secs_f64()
    )]
    TooSlow { timeout: Duration },
    #[error("too many bytes of request bodies are held in memory")]
    Overloaded,
    /// The connection, or a layer outside, broke it.
    #[error("{0}")]
    Broken(BodyError),
    /// The handler did not read it to its end.
    #[error("the request body was not read to its end")]
    Unread,
}

/// What an upload may take.
#[derive(Clone, Copy)]
pub(crate) struct UploadLimits {
    pub(crate) max_bytes: u64,
    /// How long the body may pause while it is waited for.
    pub(crate) timeout: Duration,
}

/// Sets how many bytes are held in memory. Returns false if that is over the limit.
pub(crate) type Hold = Box<dyn FnMut(usize) -> bool + Send + Sync>;

/// The body of an upload, for its handler.
pub(crate) struct Upload<B> {
    /// `None` after its end.
    stream: Option<VerifiedStream<B>>,
    erase: fn(VerifiedStream<B>) -> ErasedStream,
    state: Arc<UploadState>,
}

/// An upload that its handler has dropped.
pub(crate) type ErasedStream = VerifiedStream<UnsyncBoxBody<Bytes, BoxError>>;

impl<B: ReceivedBody + Send + 'static> Upload<B> {
    /// `read`: the bytes that were read from the body before, which are held already.
    pub(crate) fn new(
        read: Bytes,
        rest: Pin<Box<B>>,
        check: DigestCheck,
        limits: UploadLimits,
        hold: Hold,
    ) -> Self {
        Self {
            stream: Some(VerifiedStream {
                rest,
                verified: Verified {
                    read,
                    held: Bytes::new(),
                    trailers: None,
                    check,
                    length: 0,
                    max_length: limits.max_bytes,
                    is_whole: false,
                    hold,
                },
                progress: ProgressTimeout::new(limits.timeout),
            }),
            erase: VerifiedStream::erase,
            state: Arc::default(),
        }
    }
}

impl<B> Upload<B> {
    pub(crate) fn state(&self) -> Arc<UploadState> {
        Arc::clone(&self.state)
    }

    /// Whether some of the body was read.
    pub(crate) fn was_read(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_none_or(|stream| !stream.verified.read.is_empty())
    }

    /// Returns the rest of a body that is not handed to a handler.
    pub(crate) fn into_rest(mut self) -> Option<Pin<Box<B>>> {
        self.stream.take().map(|stream| stream.rest)
    }
}

impl<B: ReceivedBody> Upload<B> {
    pub(in crate::body) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(None);
        };
        let frame = ready!(stream.poll_frame(cx));
        if stream.verified.is_whole {
            self.state.end(Ok(()));
        }
        Poll::Ready(match frame {
            Some(Ok(frame)) => Some(Ok(frame)),
            Some(Err(broken)) => {
                self.state.end(Err(broken.fault));
                self.leave();
                Some(Err(broken.error))
            }
            None => {
                self.stream = None;
                None
            }
        })
    }

    pub(in crate::body) fn is_end_stream(&self) -> bool {
        let is_over = |stream: &VerifiedStream<B>| stream.verified.is_over();
        self.stream.as_ref().is_none_or(is_over)
    }

    pub(in crate::body) fn size_hint(&self) -> SizeHint {
        match &self.stream {
            Some(stream) => stream.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}

impl<B> Upload<B> {
    /// Leaves the rest to the layer, which verifies it or reads it for its connection.
    fn leave(&mut self) {
        if let Some(stream) = self.stream.take() {
            self.state.leave((self.erase)(stream));
        }
    }
}

impl<B> Drop for Upload<B> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A body whose last data is held back until its digest is verified.
pub(crate) struct VerifiedStream<B> {
    rest: Pin<Box<B>>,
    verified: Verified,
    progress: ProgressTimeout,
}

/// The part of an upload that has arrived.
struct Verified {
    /// What was read before the upload began, until it is taken.
    read: Bytes,
    held: Bytes,
    trailers: Option<HeaderMap>,
    check: DigestCheck,
    length: u64,
    max_length: u64,
    /// Whether the whole body has arrived, and has its digest.
    is_whole: bool,
    hold: Hold,
}

/// The error of a body, as the layer and the handler see it.
pub(crate) struct Broken {
    pub(crate) fault: UploadFault,
    error: BoxError,
}

impl From<UploadFault> for Broken {
    fn from(fault: UploadFault) -> Self {
        Self {
            fault,
            error: fault.into(),
        }
    }
}

impl<B: ReceivedBody> VerifiedStream<B> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        while !self.verified.is_whole {
            let data = match ready!(self.poll_data(cx)) {
                Err(broken) => return Poll::Ready(Some(Err(broken))),
                Ok(data) => data,
            };
            if let Err(fault) = self.verified.take(&data) {
                return Poll::Ready(Some(Err(fault.into())));
            }
            // An empty frame must not release the last data.
            if !data.is_empty() {
                let before = mem::replace(&mut self.verified.held, data);
                if !before.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(before))));
                }
            }
        }
        let held = mem::take(&mut self.verified.held);
        let frame = match held.is_empty() {
            true => self.verified.trailers.take().map(Frame::trailers),
            false => Some(Frame::data(held)),
        };
        Poll::Ready(frame.map(Ok))
    }

    /// Returns the next data, which is empty at the end of the body.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, Broken>> {
        let verified = &mut self.verified;
        if !verified.read.is_empty() {
            return Poll::Ready(Ok(mem::take(&mut verified.read)));
        }
        let Poll::Ready(frame) = self.rest.as_mut().poll_frame(cx) else {
            ready!(self.progress.poll_elapsed(verified.length, cx));
            let timeout = self.progress.timeout();
            return Poll::Ready(Err(UploadFault::TooSlow { timeout }.into()));
        };
        self.progress.progressed();
        Poll::Ready(match frame {
            None => verified.end(None),
            Some(Err(error)) => {
                let error = error.into();
                let fault = UploadFault::Broken(BodyError::of(&*error));
                Err(Broken { fault, error })
            }
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => Ok(data),
                Err(frame) => verified.end(frame.into_trailers().ok()),
            },
        })
    }

    /// Reads the rest of a body that its handler has dropped.
    pub(crate) fn poll_verified(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), UploadFault>> {
        loop {
            match ready!(self.poll_frame(cx)) {
                Some(Ok(_)) => {}
                None => return Poll::Ready(Ok(())),
                Some(Err(broken)) => return Poll::Ready(Err(broken.fault)),
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        let rest = match self.verified.is_whole {
            true => SizeHint::with_exact(0),
            false => self.rest.size_hint(),
        };
        after(self.verified.read.len() + self.verified.held.len(), &rest)
    }
}

impl Verified {
    /// Counts and hashes data that is held from now on.
    fn take(&mut self, data: &Bytes) -> Result<(), UploadFault> {
        self.length += data.len() as u64;
        let max = self.max_length;
        if self.length > max {
            return Err(UploadFault::TooLarge { max });
        }
        self.check.update(data);
        match data.is_empty() || (self.hold)(data.len()) {
            true => Ok(()),
            false => Err(UploadFault::Overloaded),
        }
    }

    /// Verifies the body at its end. Returns no data.
    fn end(&mut self, trailers: Option<HeaderMap>) -> Result<Bytes, Broken> {
        self.trailers = trailers;
        self.is_whole = self.check.holds();
        match self.is_whole {
            true => Ok(Bytes::new()),
            false => Err(UploadFault::WrongDigest.into()),
        }
    }

    /// Whether nothing is left for the handler.
    fn is_over(&self) -> bool {
        self.is_whole && self.held.is_empty() && self.trailers.is_none()
    }
}

impl<B> VerifiedStream<B> {
    /// Returns the unread rest of the body.
    pub(crate) fn into_rest(self) -> Pin<Box<B>> {
        self.rest
    }
}

impl<B: ReceivedBody + Send + 'static> VerifiedStream<B> {
    fn erase(self) -> ErasedStream {
        VerifiedStream {
            rest: Box::pin(self.rest.map_err(Into::into).boxed_unsync()),
            verified: self.verified,
            progress: self.progress,
        }
    }
}
