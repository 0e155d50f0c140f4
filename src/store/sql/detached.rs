//! Work on a connection that completes without its caller.

use crate::store::StoreError;

/// Runs `work` to its end, even if the caller's future is dropped. A partial response
/// of the database would otherwise reach the connection's next user.
///
/// `work` is boxed at once, so that the caller's future stays small.
pub(crate) fn detached<T, E>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> impl Future<Output = Result<T, E>> + Send
where
    T: Send + 'static,
    E: From<StoreError> + Send + 'static,
{
    let work = Box::pin(work);
    async move {
        #[cfg(feature = "tracing")]
        let work = tracing::Instrument::in_current_span(work);
        match tokio::spawn(work).await {
            Ok(answer) => answer,
            // The message of a panic may quote a key.
            Err(ended) if ended.is_panic() => {
                Err(StoreError::unavailable("a store call panicked").into())
            }
            Err(_) => Err(StoreError::unavailable("the runtime is shutting down").into()),
        }
    }
}
