//! Reads on after a refusal.
//!
//! Many clients write their whole request before they read. If a server stops reading,
//! such a client sees a broken connection instead of the refusal. So the rest of a
//! refused body is read and discarded while the answer is sent, within limits.

use std::{
    future::poll_fn,
    panic::AssertUnwindSafe,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderMap, header};
use tokio::runtime::Handle;

use super::limits::Limit;
use crate::{
    body::{ReceivedBody, error::BodyError, timeout::LazyTimeout},
    telemetry::log::{self, LogLimit},
};

/// Reads the rest of a refused body in the background. The body is dropped at once if
/// `limit` is reached, and outside of a runtime.
pub(crate) fn discard<B>(limit: &Limit, body: B)
where
    B: ReceivedBody + Send + 'static,
{
    if body.is_end_stream() {
        return;
    }
    let (Some(permit), Ok(runtime)) = (limit.try_acquire(1), Handle::try_current()) else {
        return;
    };
    runtime.spawn(async move {
        let read = LazyTimeout::after_two_polls(DISCARD_TIMEOUT, read_to_end(body));
        if AssertUnwindSafe(read).catch_unwind().await.is_err() {
            log::warn(&PANICS, PANICKED, None, None);
        }
        drop(permit);
    });
}

/// Whether the client waits for `100 Continue` before it sends its body. It sends none
/// after a refusal, so there is nothing to read.
pub(crate) fn waits_for_continue(headers: &HeaderMap) -> bool {
    headers
        .get(header::EXPECT)
        .is_some_and(|expected| expected.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

async fn read_to_end<B: ReceivedBody>(body: B) {
    let mut body = pin!(body);
    let mut left = MAX_DISCARDED_BYTES;
    while let Some(length) = poll_fn(|cx| poll_length(body.as_mut(), cx)).await {
        match left.checked_sub(length.max(MIN_FRAME)) {
            Some(fewer) => left = fewer,
            None => return,
        }
    }
}

/// Returns the length of the next frame, or `None` if nothing more can be read.
fn poll_length<B: ReceivedBody>(body: Pin<&mut B>, cx: &mut Context<'_>) -> Poll<Option<usize>> {
    body.poll_frame(cx).map(|frame| match frame? {
        Ok(frame) => Some(frame.data_ref().map_or(0, Bytes::len)),
        Err(error) => {
            // An outer limit reads each further frame and reports it as an error,
            // without its length: it counts as `MIN_FRAME`.
            let is_too_large = BodyError::of(&*error.into()) == BodyError::TooLarge;
            is_too_large.then_some(0)
        }
    })
}

static PANICS: LogLimit = LogLimit::new();
const PANICKED: &str = "body of a refused request panicked, the rest of it is not read";
/// How many refused bodies are read at a time.
pub(crate) const MAX_DISCARDS: usize = 256;
/// How many bytes of a refused body are read, if their number is known.
const MAX_DISCARDED_BYTES: usize = 64 << 20;
/// How long a refused body is read.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);
/// What a frame counts at least, so that empty frames come to an end too.
const MIN_FRAME: usize = 4 << 10;
