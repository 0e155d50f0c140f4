//! Collects a body up to a limit and within a timeout.

use std::{
    future::poll_fn,
    ops::ControlFlow,
    pin::Pin,
    task::{Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;

use super::{
    Trailers,
    read::{BodyReader, ReadEnd},
    timeout::LazyTimeout,
};

/// A body that was read in part or in whole. The rest can still be read from it.
pub(crate) struct Collected<E> {
    pub(crate) data: Bytes,
    pub(crate) trailers: Trailers,
    /// `None` if the body did not end within the timeout.
    pub(crate) end: Option<ReadEnd<E>>,
}

/// Reads up to `max` bytes of a body.
pub(crate) async fn collect<B: Body<Data = Bytes>>(
    mut body: Pin<&mut B>,
    max: usize,
    timeout: Duration,
) -> Collected<B::Error> {
    let mut reader = BodyReader::new(max);
    let end = match body.size_hint().lower() > max as u64 {
        true => Some(ReadEnd::TooLarge),
        false => {
            let end = poll_fn(|cx| {
                loop {
                    let frame = ready!(reader.poll_frame(body.as_mut(), cx));
                    if let ControlFlow::Break(end) = frame {
                        return Poll::Ready(end);
                    }
                }
            });
            LazyTimeout::after_two_polls(timeout, end).await
        }
    };
    let (data, trailers) = reader.into_parts();
    Collected {
        data,
        trailers,
        end,
    }
}
