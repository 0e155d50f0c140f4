//! Tells why the body of a request broke, from its error and that error's sources.

use std::io;

use http_body_util::LengthLimitError;
use thiserror::Error;

/// The error of a body, as tower-http's layers require it too.
pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// What broke a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum BodyError {
    /// A limit outside of the layer, as that of tower-http's
    /// `RequestBodyLimitLayer`.
    #[error("the request body exceeds a limit that stands before the idempotency layer")]
    TooLarge,
    /// A timeout outside of the layer, or of the connection.
    #[error("the request body exceeded a timeout that stands before the idempotency layer")]
    TimedOut,
    /// Anything else, as a connection that broke.
    #[error("the request body could not be read to its end")]
    Broken,
}

impl BodyError {
    pub(crate) fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            if error.is::<LengthLimitError>() {
                return Self::TooLarge;
            }
            if is_timeout(error) {
                return Self::TimedOut;
            }
            next = source(error);
        }
        Self::Broken
    }
}

fn is_timeout(error: &(dyn std::error::Error + 'static)) -> bool {
    error.is::<tokio::time::error::Elapsed>()
        || error.is::<tower::timeout::error::Elapsed>()
        || error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
        || error.to_string() == BODY_TIMEOUT
}

/// The error below this one. The source of an `io::Error` is not the error that it
/// wraps, but the source of that one.
fn source<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a (dyn std::error::Error + 'static)> {
    let wrapped = error
        .downcast_ref::<io::Error>()
        .and_then(io::Error::get_ref);
    match wrapped {
        Some(wrapped) => Some(wrapped),
        None => error.source(),
    }
}

/// The text of tower-http's `TimeoutError`. Its type cannot be used: each major
/// version of tower-http has another one, and the application chooses the version.
const BODY_TIMEOUT: &str = "data was not received within the designated timeout";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use http_body_util::{BodyExt as _, Empty, Full, Limited};
    use tower_http::timeout::TimeoutBody;

    use super::*;

    fn of(error: impl Into<BoxError>) -> BodyError {
        BodyError::of(&*error.into())
    }

    async fn over_a_limit() -> BoxError {
        let limited = Limited::new(Full::new(Bytes::from_static(b"12")), 1);
        limited.collect().await.unwrap_err()
    }

    #[tokio::test(start_paused = true)]
    async fn causes_are_found_below_other_errors() {
        assert_eq!(of(over_a_limit().await), BodyError::TooLarge);
        let wrapped = io::Error::other(io::Error::other(over_a_limit().await));
        assert_eq!(of(wrapped), BodyError::TooLarge);

        let pending = Empty::<Bytes>::new().with_trailers(std::future::pending());
        let stalled = TimeoutBody::new(Duration::from_secs(1), pending);
        let late = stalled.collect().await.unwrap_err();
        assert_eq!(of(axum::Error::new(late)), BodyError::TimedOut);
        let late = tower::timeout::error::Elapsed::new();
        assert_eq!(of(io::Error::other(late)), BodyError::TimedOut);
        let late = tokio::time::timeout(Duration::ZERO, std::future::pending::<()>()).await;
        assert_eq!(of(late.unwrap_err()), BodyError::TimedOut);
        assert_eq!(
            of(io::Error::from(io::ErrorKind::TimedOut)),
            BodyError::TimedOut
        );

        assert_eq!(of(io::Error::other("no cause")), BodyError::Broken);
        let reset = io::Error::from(io::ErrorKind::ConnectionReset);
        assert_eq!(of(reset), BodyError::Broken);
    }
}
