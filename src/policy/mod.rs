//! What happens without a key, when the client leaves, when the store fails, and with a body
//! that is declared or too large.

pub(crate) mod authorizer;
pub(crate) mod quota;

/// Whether a request without a key is refused or passes unguarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Requirement {
    Required,
    Optional,
}

/// What happens to a running handler when its client leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disconnect {
    /// The handler runs to its end, and its response is recorded for the retry.
    #[default]
    Finish,
    /// The handler is stopped, and the outcome is unknown. If it was not called yet, its key
    /// is free again.
    Cancel,
}

/// What happens to a request when the store cannot answer its claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// 503 with `Retry-After`; the handler does not run.
    #[default]
    Refuse,
    /// **The handler runs unguarded**, without an [`Operation`](crate::Operation), and the
    /// response says `Idempotent-Recorded: false`. A retry runs it again. Not
    /// while a store is only [too busy](crate::StoreErrorKind::Overloaded). A
    /// request that had seen a record of its key before the store broke does not
    /// run, since the work may have been done.
    RunUnguarded,
}

/// What the layer does with the header `Content-Digest` (RFC 9530) of a request with a key.
///
/// The algorithms `sha-256` and `sha-512` count; if both are there, the body must have both.
/// A header with other algorithms alone counts as absent, and so does `Repr-Digest`. The
/// digest is that of the bytes that the layer sees: a layer that decompresses the body
/// stands inside.
///
/// | request | receives |
/// |---|---|
/// | the header is malformed | 400 `digest-invalid`; the key is unused |
/// | the body, up to `max_request_body`, has another digest | 400 `digest-mismatch`; the key is unused |
///
/// With [`Fingerprinting::bytes`](crate::Fingerprinting::bytes), the declared digest stands
/// for the body in the fingerprint. Other forms compare the body itself where they have it.
///
/// # Uploads
///
/// With [`Stream`](Self::Stream), a body over `max_request_body` streams to the handler if it
/// has a digest. The key is claimed before the body is read, and the digest stands for the
/// body in the fingerprint, whatever its form. A retry of a recorded upload is answered
/// without reading its body.
///
/// The layer hashes the body on its way and holds the last data back until the digest is
/// verified. If the digest is wrong, or the upload breaks, is too slow or too large, the
/// handler reads an error in place of the end. Such an upload is never recorded:
///
/// | the handler | the record | the client receives |
/// |---|---|---|
/// | answers 4xx or 5xx, or fails | released for the same request | the refusal of a smaller body: 400 `digest-mismatch` or `body-invalid`, 413, 408 |
/// | answers 2xx or 3xx | outcome unknown | its response, with `Idempotent-Recorded: false` |
/// | answers 408, 502 or 504, panics, or called [`effects_started`](crate::Operation::effects_started) | outcome unknown | its response |
///
/// If a handler answers 2xx or 3xx before it has read the body to its end, the layer reads
/// and verifies the rest within the same limits. It records and answers after that. If the handler
/// keeps the body without reading it for `request_body_timeout`, the outcome is unknown. A 4xx
/// or 5xx before the end of the body releases the key. `commit` of a SQL store fails before
/// the body is verified, and the transaction is rolled back.
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use bytes::Bytes;
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use tower_idempotency::ContentDigest;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
///     .max_request_body(4)
///     .content_digest(ContentDigest::Stream { max_upload: 1 << 30 })
///     .build()?;
/// # let handler = async |body: Bytes| body.len().to_string();
/// # let app = Router::new().route("/", post(handler).layer(layer));
/// # let digest = "sha-256=:LPJNul+wow4m6DsqxbninhsWHlwfp0JecwQzYpOLmCQ=:";
/// # let wrong = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";
/// # for (key, digest, status) in [
/// #     ("k", Some(digest), StatusCode::OK),
/// #     ("k", Some(digest), StatusCode::OK),
/// #     ("l", Some(wrong), StatusCode::BAD_REQUEST),
/// #     ("m", None, StatusCode::PAYLOAD_TOO_LARGE),
/// # ] {
/// #     let mut request = Request::post("/").header("idempotency-key", key);
/// #     if let Some(digest) = digest {
/// #         request = request.header("content-digest", digest);
/// #     }
/// #     let response = app.clone().oneshot(request.body(Body::from("hello"))?).await?;
/// #     assert_eq!(response.status(), status, "{key}");
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ContentDigest {
    /// The header does not count.
    #[default]
    Ignore,
    /// Bodies are verified. One over `max_request_body` receives 413.
    Verify,
    /// Bodies are verified, and larger ones stream to the handler if they have a digest.
    Stream {
        /// The largest upload, in bytes. A larger one receives 413. Must be at least
        /// `max_request_body`.
        max_upload: u64,
    },
}

/// What happens to a request with a key whose body is over `max_request_body`, unless it
/// streams by its [`ContentDigest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OversizedBody {
    /// 413 `body-too-large`; the handler does not run.
    #[default]
    Refuse,
    /// **The handler runs unguarded**, without an [`Operation`](crate::Operation), and the response says
    /// `Idempotent-Recorded: false`. A retry runs it again. The body streams untouched.
    ///
    /// For optional routes, where a client's software adds a key to uploads by itself: a
    /// layer that requires keys is not built with it. A request whose key has a record is
    /// refused with 413, since its work may have been done.
    RunUnguarded,
}
