//! The bodies that pass through the layer, and reading one up to a limit.

pub(crate) mod error;

use std::{
    fmt,
    future::poll_fn,
    mem,
    ops::ControlFlow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::sync::oneshot;

use crate::timeout::Within;

pin_project! {
    /// The body of a request below the layer: as it came, or read in full for
    /// its fingerprint. All frames, trailers and size hints are forwarded.
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
    }
}

impl<B> RequestBody<B> {
    pub(crate) fn streamed(body: B) -> Self {
        Self {
            inner: RequestInner::Streamed { body },
        }
    }

    pub(crate) fn buffered(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            inner: RequestInner::Buffered {
                whole: Whole::new(data, trailers),
            },
        }
    }
}

impl<B: Body<Data = Bytes>> Body for RequestBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().inner.project() {
            RequestInnerProj::Streamed { body } => body.poll_frame(cx),
            RequestInnerProj::Buffered { whole } => Poll::Ready(whole.next().map(Ok)),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            RequestInner::Streamed { body } => body.is_end_stream(),
            RequestInner::Buffered { whole } => whole.is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            RequestInner::Streamed { body } => body.size_hint(),
            RequestInner::Buffered { whole } => whole.size_hint(),
        }
    }
}

impl<B> fmt::Debug for RequestBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.inner {
            RequestInner::Streamed { .. } => "RequestBody(streamed)",
            RequestInner::Buffered { .. } => "RequestBody(buffered)",
        })
    }
}

pin_project! {
    /// The body of a response above the layer: the inner service's own, a whole
    /// one (recorded, replayed, or a refusal), or one that grew past what is
    /// kept. All frames, trailers and size hints are forwarded.
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
        Live { read: Bytes, rest: Pin<Box<B>>, end: LiveEnd },
        Broken { read: Bytes, flushed: bool, error: Option<B::Error> },
    }
}

impl<B: Body<Data = Bytes>> ResponseBody<B> {
    pub(crate) fn streamed(body: B) -> Self {
        Self {
            inner: ResponseInner::Streamed { body },
        }
    }

    pub(crate) fn whole(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            inner: ResponseInner::Whole {
                whole: Whole::new(data, trailers),
            },
        }
    }

    /// What was read, then the rest as it comes. The receiver learns of a clean
    /// end; it is closed without a message if the body broke or was dropped.
    ///
    /// A server that was told a `length` stops there, without asking for the
    /// end of the body.
    pub(crate) fn live(
        read: Bytes,
        rest: Pin<Box<B>>,
        length: Option<u64>,
    ) -> (Self, oneshot::Receiver<()>) {
        let (clean, ended) = oneshot::channel();
        let mut end = LiveEnd {
            clean: Some(clean),
            left: length,
        };
        if read.is_empty() && rest.is_end_stream() {
            end.clean();
        }
        let inner = ResponseInner::Live { read, rest, end };
        (Self { inner }, ended)
    }

    /// What was read, then the error that broke it.
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

/// An empty body: what outer layers answer with in the layer's place (a timeout,
/// a CORS preflight) has the same type.
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
            ResponseInnerProj::Live { read, rest, end } => {
                if !read.is_empty() {
                    end.sent(read.len());
                    return Poll::Ready(Some(Ok(Frame::data(mem::take(read)))));
                }
                let frame = ready!(rest.as_mut().poll_frame(cx));
                match &frame {
                    None => end.clean(),
                    Some(Err(_)) => end.broken(),
                    // hyper does not poll again once this says that it is over.
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
                // Without a pause before the error, hyper throws away what it
                // has not sent yet, the head of the response included.
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
            ResponseInner::Live { read, rest, .. } => read.is_empty() && rest.is_end_stream(),
            ResponseInner::Broken { .. } => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            ResponseInner::Streamed { body } => body.size_hint(),
            ResponseInner::Whole { whole } => whole.size_hint(),
            ResponseInner::Live { read, rest, .. } => {
                let read = read.len() as u64;
                let rest = rest.size_hint();
                let mut hint = SizeHint::new();
                hint.set_lower(read.saturating_add(rest.lower()));
                if let Some(upper) = rest.upper().and_then(|upper| upper.checked_add(read)) {
                    hint.set_upper(upper);
                }
                hint
            }
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
            ResponseInner::Live { .. } => "ResponseBody(live)",
            ResponseInner::Broken { .. } => "ResponseBody(broken)",
        })
    }
}

/// Data and trailers in memory, handed out once.
struct Whole {
    data: Bytes,
    trailers: Option<HeaderMap>,
}

impl Whole {
    fn new(data: Bytes, trailers: Option<HeaderMap>) -> Self {
        Self {
            data,
            trailers: trailers.filter(|trailers| !trailers.is_empty()),
        }
    }

    fn next(&mut self) -> Option<Frame<Bytes>> {
        if !self.data.is_empty() {
            return Some(Frame::data(mem::take(&mut self.data)));
        }
        self.trailers.take().map(Frame::trailers)
    }

    fn is_over(&self) -> bool {
        self.data.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        let length = self.data.len() as u64;
        match &self.trailers {
            None => SizeHint::with_exact(length),
            // An exact length would become `Content-Length`, and HTTP/1.1 has
            // room for trailers only after chunks (RFC 9112 §7.1.2).
            Some(_) => {
                let mut hint = SizeHint::new();
                hint.set_lower(length);
                hint
            }
        }
    }
}

/// Tells the flow how a live body ended: dropped unsaid, it broke.
struct LiveEnd {
    clean: Option<oneshot::Sender<()>>,
    left: Option<u64>,
}

impl LiveEnd {
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

/// What was read of a body; what was not is still there to be read.
pub(crate) enum Gathered<E> {
    Whole {
        data: Bytes,
        trailers: Option<HeaderMap>,
    },
    /// It has more bytes than the limit.
    Outgrown {
        read: Bytes,
    },
    /// It took longer than the time it was given.
    Late {
        read: Bytes,
    },
    Broken {
        read: Bytes,
        error: E,
    },
}

/// Reads up to `limit` bytes of a body, losing nothing.
pub(crate) async fn gather<B: Body<Data = Bytes>>(
    mut body: Pin<&mut B>,
    limit: usize,
    within: Duration,
) -> Gathered<B::Error> {
    let mut reading = Reading::up_to(limit);
    if body.size_hint().lower() > limit as u64 {
        return Gathered::Outgrown { read: Bytes::new() };
    }
    let end = poll_fn(|cx| {
        loop {
            if let ControlFlow::Break(end) = ready!(reading.poll_frame(body.as_mut(), cx)) {
                return Poll::Ready(end);
            }
        }
    });
    let end = Within::after_a_second_look(within, end).await;
    let (read, trailers) = reading.take();
    match end {
        Some(End::Clean) => Gathered::Whole {
            data: read,
            trailers,
        },
        Some(End::Outgrown) => Gathered::Outgrown { read },
        Some(End::Broken(error)) => Gathered::Broken { read, error },
        None => Gathered::Late { read },
    }
}

/// A body that is being read, up to a limit.
pub(crate) struct Reading {
    limit: usize,
    read: Collected,
    trailers: Option<HeaderMap>,
}

/// Why nothing more of a body is read.
pub(crate) enum End<E> {
    Clean,
    /// It has more bytes than the limit.
    Outgrown,
    Broken(E),
}

impl Reading {
    pub(crate) fn up_to(limit: usize) -> Self {
        Self {
            limit,
            read: Collected::default(),
            trailers: None,
        }
    }

    /// Reads one frame, and returns how many bytes of data it had.
    pub(crate) fn poll_frame<B: Body<Data = Bytes>>(
        &mut self,
        body: Pin<&mut B>,
        cx: &mut Context<'_>,
    ) -> Poll<ControlFlow<End<B::Error>, usize>> {
        let frame = match ready!(body.poll_frame(cx)) {
            None => return Poll::Ready(ControlFlow::Break(End::Clean)),
            Some(Err(error)) => return Poll::Ready(ControlFlow::Break(End::Broken(error))),
            Some(Ok(frame)) => frame,
        };
        let data = match frame.into_data() {
            Ok(data) => data,
            Err(frame) => {
                self.trailers = frame.into_trailers().ok();
                return Poll::Ready(ControlFlow::Continue(0));
            }
        };
        let length = data.len();
        self.read.push(data);
        Poll::Ready(match self.len() > self.limit {
            true => ControlFlow::Break(End::Outgrown),
            false => ControlFlow::Continue(length),
        })
    }

    /// How many bytes have been read.
    pub(crate) fn len(&self) -> usize {
        self.read.len()
    }

    pub(crate) fn take(self) -> (Bytes, Option<HeaderMap>) {
        (self.read.take(), self.trailers)
    }
}

/// The data read so far. One frame is kept as it came; more are copied
/// together, so that a body of many small frames takes no more memory than its
/// bytes.
#[derive(Default)]
struct Collected {
    first: Bytes,
    joined: BytesMut,
}

impl Collected {
    fn push(&mut self, data: Bytes) {
        if self.len() == 0 {
            self.first = data;
            return;
        }
        self.joined.extend_from_slice(&mem::take(&mut self.first));
        self.joined.extend_from_slice(&data);
    }

    fn len(&self) -> usize {
        self.first.len() + self.joined.len()
    }

    fn take(self) -> Bytes {
        if self.joined.is_empty() {
            self.first
        } else {
            self.joined.freeze()
        }
    }
}
