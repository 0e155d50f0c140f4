//! Bodies that are in memory as a whole.

use std::{pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http_body::Body;
use http_body_util::{
    Empty, Full,
    combinators::{BoxBody, UnsyncBoxBody},
};

use super::{
    Trailers,
    collect::{Collected, collect},
    read::ReadEnd,
};

/// The body of a response that is in memory as a whole.
///
/// `BoxBody`, `UnsyncBoxBody` and `axum::body::Body` are so if they are ready to be read to
/// their end: that of `Json(…).into_response()` is, a stream is not. Sealed: no other type
/// can be one.
///
/// [`render`](crate::IdempotencyBuilder::render) and
/// [`RecordedResponse::new`](crate::store::admin::RecordedResponse::new) take it.
pub trait WholeBody: sealed::IntoWhole {}

pub(crate) mod sealed {
    use super::*;

    pub trait IntoWhole {
        /// Returns the data and the trailers, or `None` if they are not all there, or are
        /// too large.
        fn into_whole(self) -> Option<(Bytes, Trailers)>;
    }
}

macro_rules! bytes {
    ($($body:ty),*) => {
        $(
            impl WholeBody for $body {}

            impl sealed::IntoWhole for $body {
                fn into_whole(self) -> Option<(Bytes, Trailers)> {
                    Some((self.into(), None))
                }
            }
        )*
    };
}

bytes!(Bytes, String, Vec<u8>, &'static str, &'static [u8]);

impl WholeBody for () {}

impl sealed::IntoWhole for () {
    fn into_whole(self) -> Option<(Bytes, Trailers)> {
        Some((Bytes::new(), None))
    }
}

macro_rules! bodies {
    ($($body:ty $(, $error:ident)?;)*) => {
        $(
            impl$(<$error>)? WholeBody for $body {}

            impl$(<$error>)? sealed::IntoWhole for $body {
                fn into_whole(self) -> Option<(Bytes, Trailers)> {
                    read_at_once(self)
                }
            }
        )*
    };
}

bodies! {
    Full<Bytes>;
    Empty<Bytes>;
    BoxBody<Bytes, E>, E;
    UnsyncBoxBody<Bytes, E>, E;
}

#[cfg(feature = "axum")]
bodies! {
    axum::body::Body;
}

fn read_at_once(body: impl Body<Data = Bytes>) -> Option<(Bytes, Trailers)> {
    // The first poll is the only one, so that no time passes.
    match collect(pin!(body), LARGEST, Duration::ZERO).now_or_never()? {
        Collected {
            data,
            trailers,
            end: Some(ReadEnd::Clean),
        } => Some((data, trailers)),
        _ => None,
    }
}

/// As the largest `max_response_body`.
const LARGEST: usize = 256 << 20;
