//! The response that a handler commits.

use std::pin::pin;

use bytes::Bytes;
use http::Response;
use http_body::Body;
use http_body_util::Full;

use crate::{
    body::{
        collect::{self, Collected},
        read::ReadEnd,
    },
    operation::{AsCommitted, Operation, disposition::HandlerChoice},
    response::correct_length,
    store::Completion,
};

/// A response that was committed together with the handler's writes.
///
/// Return it from the handler. If the handler returns another response, the client
/// still receives this one, as retries do.
#[derive(Debug)]
#[must_use = "the response is what the handler should return"]
pub struct Committed {
    response: Response<Full<Bytes>>,
}

impl Committed {
    pub(crate) fn new(mut response: Response<Full<Bytes>>) -> Self {
        response.extensions_mut().insert(AsCommitted);
        Self { response }
    }

    /// Returns the response, for services that are not axum's.
    #[must_use]
    pub fn into_http(self) -> Response<Full<Bytes>> {
        self.response
    }
}

/// A response that a store's `commit` takes.
///
/// Every [`http::Response`] is one if its body is `Send + 'static`, has
/// [`Bytes`] as its data, and has an error that is `Send` and converts into a boxed
/// error. With the feature `axum`, everything that is `IntoResponse` is one too. The
/// trait is sealed.
///
/// ```
/// use bytes::Bytes;
/// use http::Response;
/// use http_body::Body;
/// use tower_idempotency::{CommitError, Committed, Operation, SqliteStore, SqliteTransaction};
///
/// /// Compiles with and without the feature `axum`.
/// async fn commit<B>(
///     store: &SqliteStore,
///     operation: &Operation,
///     transaction: SqliteTransaction,
///     response: Response<B>,
/// ) -> Result<Committed, CommitError>
/// where
///     B: Body<Data = Bytes, Error: Into<tower::BoxError> + Send> + Send + 'static,
/// {
///     store.commit(operation, transaction, response).await
/// }
/// ```
pub trait CommitResponse: sealed::IntoHttp {}

impl<T: sealed::IntoHttp> CommitResponse for T {}

pub(crate) mod sealed {
    use http::Response;

    pub trait IntoHttp {
        type Body: http_body::Body<Data = bytes::Bytes, Error: Send> + Send + 'static;

        fn into_http(self) -> Response<Self::Body>;
    }

    // The bounds of the second implementation imply those of the first, so that
    // the feature takes no type away.

    #[cfg(feature = "axum")]
    impl<T: ::axum::response::IntoResponse> IntoHttp for T {
        type Body = ::axum::body::Body;

        fn into_http(self) -> Response<Self::Body> {
            self.into_response()
        }
    }

    #[cfg(not(feature = "axum"))]
    impl<B> IntoHttp for Response<B>
    where
        B: http_body::Body<Data = bytes::Bytes, Error: Into<tower::BoxError> + Send>
            + Send
            + 'static,
    {
        type Body = B;

        fn into_http(self) -> Response<Self::Body> {
            self
        }
    }
}

/// The response to send, and its completion for the store.
pub(crate) type WithCompletion = (Response<Full<Bytes>>, Completion);

/// Reads the response, and returns it with its completion, or the reason why it
/// cannot be kept.
pub(super) async fn collect<B>(
    response: Response<B>,
    operation: &Operation,
) -> Result<WithCompletion, String>
where
    B: Body<Data = Bytes, Error: Send> + Send,
{
    let settings = operation.settings();
    let (mut parts, body) = settings.cleaned(response).into_parts();
    let choice = HandlerChoice::take_from(&mut parts.extensions).or(operation.choice());
    let (max, timeout) = (settings.max_body, settings.body_timeout);
    if settings.is_streamed(&parts) {
        return Err(
            "its status is below 200, or its media type is one of `streamed_types`".to_owned(),
        );
    }
    let Collected {
        data,
        trailers,
        end,
    } = collect::collect(pin!(body), max, timeout).await;
    match end {
        Some(ReadEnd::Clean) if trailers.is_none() => {}
        // A trailer cannot follow a body of known length, and none is dropped silently.
        Some(ReadEnd::Clean) => return Err("it has trailers".to_owned()),
        Some(ReadEnd::TooLarge) => {
            return Err(format!(
                "its body exceeds `max_response_body` ({max} bytes)"
            ));
        }
        Some(ReadEnd::Broken(_)) => return Err("its body broke off".to_owned()),
        None => {
            return Err(format!(
                "its body took longer than `response_body_timeout` ({timeout:?})"
            ));
        }
    }
    correct_length(&mut parts, Some(data.len() as u64));
    let attributes = operation.head().attributes();
    let completion = settings.completion(&parts, &data, None, attributes, choice.keep_for);
    // A tombstone would commit the work without its response.
    match completion.is_tombstone() {
        true => Err(format!(
            "with its headers it exceeds `max_response_body` ({max} bytes)"
        )),
        false => Ok((Response::from_parts(parts, Full::new(data)), completion)),
    }
}
