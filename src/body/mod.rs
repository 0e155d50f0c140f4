//! The bodies that pass through the layer.

pub(crate) mod collect;
pub(crate) mod digests;
pub(crate) mod error;
pub(crate) mod grpc;
pub(crate) mod progress;
pub(crate) mod read;
pub(crate) mod timeout;
pub(crate) mod upload;
pub(crate) mod whole;

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::oneshot;

use self::{error::BoxError, upload::Upload};

/// The trailers of a body in memory. Few bodies have any: boxed, they make no other larger.
pub(crate) type Trailers = Option<Box<HeaderMap>>;

/// The body of a guarded request.
pub(crate) trait ReceivedBody: Body<Data = Bytes, Error: Into<BoxError>> {}

impl<B: Body<Data = Bytes, Error: Into<BoxError>>> ReceivedBody for B {}

/// The body of a handler's response.
pub(crate) trait SentBody: Body<Data = Bytes, Error: Send> + Send + 'static {}

impl<R: Body<Data = Bytes, Error: Send> + Send + 'static> SentBody for R {}

pin_project! {
    /// The body of a request below the layer: unchanged, read in full for its
    /// fingerprint, or an upload whose digest is verified while it streams. Forwards all
    /// frames, trailers and size hints.
    ///
    /// An upload ends with an error in place of its last data if it is not what
    /// `Content-Digest` declares; see [`ContentDigest`](crate::ContentDigest).
    pub struct RequestBody<B> {
        #[pin]
        inner: RequestInner<B>,
    }
}

pin_project! {
    #[project = RequestInnerProj]
    enum RequestInner<B> {
        Streamed { #[pin] body: B },
        Buffered { whole: Whole },
        // The bytes that were read before go first.
        Resumed { read: Bytes, rest: Pin<Box<B>> },
        Upload { upload: Box<Upload<B>> },
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn streamed(body: B) -> Self {
        Self {
            inner: RequestInner::Streamed { body },
        }
    }

    pub(crate) fn buffered(data: Bytes, trailers: Trailers) -> Self {
        Self {
            inner: RequestInner::Buffered {
                whole: Whole::new(data, trailers),
            },
        }
    }

    pub(crate) fn resumed(read: Bytes, rest: Pin<Box<B>>) -> Self {
        Self {
            inner: RequestInner::Resumed { read, rest },
        }
    }

    pub(crate) fn upload(upload: Box<Upload<B>>) -> Self {
        Self {
            inner: RequestInner::Upload { upload },
        }
    }
}

#[cfg(feature = "axum")]
impl<B> RequestBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    /// Returns axum's body. One that is axum's already, and streamed, is not boxed again.
    pub(crate) fn into_axum(self) -> axum::body::Body {
        match self.inner {
            RequestInner::Streamed { body } => axum::body::Body::new(body),
            inner => axum::body::Body::new(Self { inner }),
        }
    }
}

impl<B> Body for RequestBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError>>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match self.project().inner.project() {
            RequestInnerProj::Streamed { body } => ready!(body.poll_frame(cx)),
            RequestInnerProj::Buffered { whole } => return Poll::Ready(whole.next().map(Ok)),
            RequestInnerProj::Resumed { read, .. } if !read.is_empty() => {
                return Poll::Ready(Some(Ok(Frame::data(mem::take(read)))));
            }
            RequestInnerProj::Resumed { rest, .. } => ready!(rest.as_mut().poll_frame(cx)),
            RequestInnerProj::Upload { upload } => return upload.poll_frame(cx),
        };
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            RequestInner::Streamed { body } => body.is_end_stream(),
            RequestInner::Buffered { whole } => whole.is_over(),
            RequestInner::Resumed { read, rest } => read.is_empty() && rest.is_end_stream(),
            RequestInner::Upload { upload } => upload.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            RequestInner::Streamed { body } => body.size_hint(),
            RequestInner::Buffered { whole } => whole.size_hint(),
            RequestInner::Resumed { read, rest } => after(read.len(), &rest.size_hint()),
            RequestInner::Upload { upload } => upload.size_hint(),
        }
    }
}

/// Returns the hint for `read` bytes with the rest behind them.
fn after(read: usize, rest: &SizeHint) -> SizeHint {
    let read = read as u64;
    let mut hint = SizeHint::new();
    hint.set_lower(read.saturating_add(rest.lower()));
    if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
        hint.set_upper(upper);
    }
    hint
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.inner {
            RequestInner::Streamed { .. } => "RequestBody(streamed)",
            RequestInner::Buffered { .. } => "RequestBody(buffered)",
            RequestInner::Resumed { .. } => "RequestBody(resumed)",
            RequestInner::Upload { .. } => "RequestBody(upload)",
        })
    }
}

pin_project! {
    /// The body of a response above the layer: the inner service's own, one in memory
    /// (recorded, replayed, or a refusal), or one that is streamed. Forwards all frames,
    /// trailers and size hints.
    pub struct ResponseBody<B>
    where
        B: Body,
    {
        #[pin]
        inner: ResponseInner<B>,
    }
}

pin_project! {
    #[project = ResponseInnerProj]
    enum ResponseInner<B>
    where
        B: Body,
    {
        Streamed { #[pin] body: B },
        Whole { whole: Whole },
        Observed { read: Bytes, rest: Pin<Box<B>>, end: EndObserver },
        Broken { read: Bytes, flushed: bool, error: Option<B::Error> },
    }
}

impl<B: Body<Data = Bytes>> ResponseBody<B> {
    pub(crate) fn streamed(body: B) -> Self {
        Self {
            inner: ResponseInner::Streamed { body },
        }
    }

    pub(crate) fn whole(data: Bytes, trailers: Trailers) -> Self {
        Self {
            inner: ResponseInner::Whole {
                whole: Whole::new(data, trailers),
            },
        }
    }

    /// Returns a body of the read bytes and then the rest, streamed. The receiver gets a
    /// message at a clean end. It is closed without one if the body broke off, was
    /// dropped, or has the code of a gRPC error in its trailers.
    ///
    /// A server that knows the `length` stops there, without polling for the end of the
    /// body.
    pub(crate) fn observed(
        read: Bytes,
        rest: Pin<Box<B>>,
        length: Option<u64>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (clean, ended) = oneshot::channel();
        let mut end = EndObserver {
            clean: Some(clean),
            left: length,
        };
        if read.is_empty() && rest.is_end_stream() {
            end.clean();
        }
        let inner = ResponseInner::Observed { read, rest, end };
        (Self { inner }, ended)
    }

    /// Returns a body of the read bytes, and then the error that broke it.
    pub(crate) fn broken(read: Bytes, error: B::Error) -> Self {
        Self {
            inner: ResponseInner::Broken {
                read,
                flushed: false,
                error: Some(error),
            },
        }
    }
}

#[cfg(feature = "axum")]
impl<B> ResponseBody<B>
where
    B: Body<Data = Bytes, Error: Into<BoxError> + Send> + Send + 'static,
{
    /// As [`RequestBody::into_axum`].
    pub(crate) fn into_axum(self) -> axum::body::Body {
        match self.inner {
            ResponseInner::Streamed { body } => axum::body::Body::new(body),
            inner => axum::body::Body::new(Self { inner }),
        }
    }
}

/// An empty body, for the responses of outer layers, such as a timeout or a CORS
/// preflight.
impl<B: Body<Data = Bytes>> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::whole(Bytes::new(), None)
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            ResponseInnerProj::Streamed { body } => body.poll_frame(cx),
            ResponseInnerProj::Whole { whole } => Poll::Ready(whole.next().map(Ok)),
            ResponseInnerProj::Observed { read, rest, end } => {
                if !read.is_empty() {
                    end.sent(read.len());
                    return Poll::Ready(Some(Ok(Frame::data(mem::take(read)))));
                }
                let frame = ready!(rest.as_mut().poll_frame(cx));
                match &frame {
                    None => end.clean(),
                    Some(Err(_)) => end.broken(),
                    // A gRPC error is an end that leaves the outcome unknown, too.
                    Some(Ok(frame)) if frame.trailers_ref().is_some_and(grpc::is_error) => {
                        end.broken();
                    }
                    // hyper does not poll again once the body is at its end.
                    Some(Ok(_)) if rest.is_end_stream() => end.clean(),
                    Some(Ok(frame)) => end.sent(frame.data_ref().map_or(0, Bytes::len)),
                }
                Poll::Ready(frame)
            }
            ResponseInnerProj::Broken {
                read,
                flushed,
                error,
            } => {
                if !read.is_empty() {
                    return Poll::Ready(Some(Ok(Frame::data(mem::take(read)))));
                }
                // Without a pause before the error, hyper discards unsent bytes,
                // including the head of the response.
                if !mem::replace(flushed, true) {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(error.take().map(Err))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            ResponseInner::Streamed { body } => body.is_end_stream(),
            ResponseInner::Whole { whole } => whole.is_over(),
            ResponseInner::Observed { read, rest, .. } => read.is_empty() && rest.is_end_stream(),
            ResponseInner::Broken { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            ResponseInner::Streamed { body } => body.size_hint(),
            ResponseInner::Whole { whole } => whole.size_hint(),
            ResponseInner::Observed { read, rest, .. } => after(read.len(), &rest.size_hint()),
            ResponseInner::Broken { read, .. } => {
                let mut hint = SizeHint::new();
                hint.set_lower(read.len() as u64);
                hint
            }
        }
    }
}

impl<B: Body> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.inner {
            ResponseInner::Streamed { .. } => "ResponseBody(streamed)",
            ResponseInner::Whole { .. } => "ResponseBody(whole)",
            ResponseInner::Observed { .. } => "ResponseBody(observed)",
            ResponseInner::Broken { .. } => "ResponseBody(broken)",
        })
    }
}

/// Data and trailers in memory.
struct Whole {
    data: Bytes,
    trailers: Trailers,
}

impl Whole {
    fn new(data: Bytes, trailers: Trailers) -> Self {
        Self {
            data,
            trailers: trailers.filter(|trailers| !trailers.is_empty()),
        }
    }

    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.data.is_empty() {
            return Some(Frame::data(mem::take(&mut self.data)));
        }
        let trailers = self.trailers.take()?;
        Some(Frame::trailers(*trailers))
    }

    fn is_over(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.data.len() as u64;
        match &self.trailers {
            None => SizeHint::with_exact(length),
            // An exact length would become `Content-Length`, and HTTP/1.1 allows
            // trailers only after chunks (RFC 9112 §7.1.2).
            Some(_) => {
                let mut hint = SizeHint::new();
                hint.set_lower(length);
                hint
            }
        }
    }
}

/// Reports how a streamed body ended. Dropped without a report, it broke off.
struct EndObserver {
    clean: Option<oneshot::Sender<()>>,
    left: Option<u64>,
}

impl EndObserver {
    fn sent(&mut self, bytes: usize) {
        if let Some(left) = &mut self.left {
            *left = left.saturating_sub(bytes as u64);
            if *left == 0 {
                self.clean();
            }
        }
    }

    fn clean(&mut self) {
        if let Some(clean) = self.clean.take() {
            let _ = clean.send(());
        }
    }

    fn broken(&mut self) {
        self.clean = None;
    }
}
