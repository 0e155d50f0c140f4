//! The settings of a fingerprint, and the requests that count as the same.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, header, request, uri::PathAndQuery};

#[cfg(feature = "sealing")]
use super::key::FingerprintKey;
use super::{
    content::Content,
    digest::{BodyFault, Framed},
    form::Form,
    json::Selection,
    layout::{Builder, Fingerprint, Place, Scheme},
    media_type,
    parts::{Mismatch, RequestPart},
    target::{Source, Target, authority},
};
use crate::body::digests::DigestAlgorithm;
#[cfg(feature = "sealing")]
use crate::secret::Secret;

/// Decides which requests with the same key are the same request.
///
/// | form | the body counts |
/// |---|---|
/// | [`bytes`](Self::bytes), the default | byte for byte |
/// | [`json`](Self::json) | by its JSON structure |
/// | [`json_only`](Self::json_only), [`json_without`](Self::json_without) | by chosen JSON values, or without them |
/// | `multipart` (feature `multipart`) | part by part, without the boundary |
/// | [`custom`](Self::custom) | as a function of yours decides |
///
/// Every form but [`custom`](Self::custom) covers the method, the path and query,
/// the media type, the content encoding and the body. Other headers count only if
/// [`header`](Self::header) adds them. All parts are hashed with SHA-256, each with
/// its length in front. `keyed` (feature `sealing`) makes an HMAC of it. A mismatch names the parts that were compared and those
/// that differ; see [`Rejection::differs`](crate::Rejection::differs).
///
/// ```
/// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
/// # use tower::ServiceExt;
/// # use tower_idempotency::{IdempotencyLayer, MemoryStore, Scope};
/// use http::header::CONTENT_LANGUAGE;
/// use tower_idempotency::Fingerprinting;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // The bytes of the body count, and the language does too.
/// let exact = Fingerprinting::bytes().header(CONTENT_LANGUAGE);
/// // The order of members and white space do not count.
/// let structural = Fingerprinting::json();
/// // Nor does a field that changes from try to try.
/// let without = Fingerprinting::json_without(["/meta/attempt"]);
/// // The amount alone counts.
/// let only = Fingerprinting::json_only(["/amount"]);
/// // The host name counts too.
/// let host = Fingerprinting::json().authority();
/// // The value of one header alone counts.
/// let own = Fingerprinting::custom("order/1", |parts, _body| {
///     let order = parts.headers.get("x-order");
///     order.map_or_else(Vec::new, |order| order.as_bytes().to_vec())
/// });
///
/// let first = r#"{"amount":5,"meta":{"attempt":1}}"#;
/// let spaced = r#"{"meta": {"attempt": 1}, "amount": 5}"#;
/// let second_try = r#"{"amount":5,"meta":{"attempt":2}}"#;
/// let other_amount = r#"{"amount":6,"meta":{"attempt":1}}"#;
/// # let (one, other) = (("a.example", "de", "7"), ("b.example", "en", "8"));
/// # let expected = [
/// #     // Is it the same request?       spaced, tried again, other amount, other headers
/// #     (exact, [false, false, false, false]),
/// #     (structural, [true, false, false, true]),
/// #     (without, [true, true, false, true]),
/// #     (only, [true, true, false, true]),
/// #     (host, [true, false, false, false]),
/// #     (own, [true, true, true, false]),
/// # ];
/// # for (form, same) in expected {
/// #     let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// #     let layer = layer.fingerprint(form).build()?;
/// #     let app = Router::new().route("/", post(StatusCode::OK).layer(layer));
/// #     let send = async |(host, language, order), body: &'static str| {
/// #         let request = Request::post("/")
/// #             .header("idempotency-key", "k")
/// #             .header("content-type", "application/json")
/// #             .header("host", host)
/// #             .header("content-language", language)
/// #             .header("x-order", order);
/// #         let request = request.body(Body::from(body)).unwrap();
/// #         app.clone().oneshot(request).await.unwrap().status()
/// #     };
/// #     assert_eq!(send(one, first).await, StatusCode::OK);
/// #     let retries = [(one, spaced), (one, second_try), (one, other_amount), (other, first)];
/// #     for ((headers, body), same) in retries.into_iter().zip(same) {
/// #         let is_same = send(headers, body).await == StatusCode::OK;
/// #         assert_eq!(is_same, same, "{body}");
/// #     }
/// # }
/// # Ok(())
/// # }
/// ```
///
/// # Media type and content encoding
///
/// The spelling of a media type does not count: case, white space, quotes and the
/// order of its parameters. Nor does `charset=utf-8` on `application/json` and
/// `+json` types. A body with a `Content-Encoding` other than `identity` is
/// compared coded, byte for byte, in every form.
///
/// # Path
///
/// Nested routers shorten the path. With the feature `axum`, the path that the
/// client sent counts: `axum::extract::OriginalUri` of **axum 0.8** keeps it.
/// Routers of another version of axum keep it in a type that this crate does not
/// know. With those, and without the feature, place the layer outside of nested
/// routers, or use [`custom`](Self::custom) with a function that reads that type.
///
/// A record names the source of its path. With the feature, a record that was made
/// without it is compared by the path that the layer sees. Where a record needs
/// `OriginalUri` and the request has none, the request is refused with 503
/// `store-unavailable`.
///
/// # Authority
///
/// The authority (the `Host` header, `:authority` over HTTP/2) does not count: a
/// retry may reach the service under another name. If one service answers for
/// several hosts, add it with [`authority`](Self::authority), or make it part of
/// the [`Scope`](crate::Scope).
#[derive(Clone, Debug)]
pub struct Fingerprinting {
    form: Form,
    headers: Vec<HeaderName>,
    authority: bool,
    #[cfg(feature = "sealing")]
    key: Option<Arc<FingerprintKey>>,
}

/// [`bytes`](Self::bytes).
impl Default for Fingerprinting {
    fn default() -> Self {
        Self::bytes()
    }
}

impl Fingerprinting {
    /// Compares bodies byte for byte. The default of a layer.
    #[must_use]
    pub fn bytes() -> Self {
        Self::of(Form::Bytes)
    }

    /// Compares JSON bodies by structure.
    ///
    /// The order of members and white space do not count. The spelling of numbers
    /// does: `1` is not `1.0`. Strings are compared unescaped; half a surrogate pair
    /// (`"\ud800"`) equals itself. Bodies of another media type, and those with a
    /// content encoding, are compared byte for byte.
    ///
    /// Every document that the grammar of RFC 8259 allows is accepted, at any depth,
    /// unless an object in it has two members of the same name. Such a body, and one
    /// that is no JSON despite its media type, is refused with 400 `body-invalid`.
    #[must_use]
    pub fn json() -> Self {
        Self::of(Form::Json(Selection::All))
    }

    /// As [`json`](Self::json), but compares only the values at these JSON Pointers
    /// (RFC 6901).
    ///
    /// An absent value differs from every value, also from `null`, `false`, `0` and
    /// `""`. The layer is not built without a pointer or with an invalid one.
    #[must_use]
    pub fn json_only<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::of(Form::Json(Selection::only(pointers)))
    }

    /// As [`json`](Self::json), but ignores the values at these JSON Pointers (RFC
    /// 6901), present or absent.
    ///
    /// The index of an element is its index in the document, ignored elements
    /// included. The layer is not built without a pointer or with an invalid one.
    #[must_use]
    pub fn json_without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::of(Form::Json(Selection::without(pointers)))
    }

    /// Compares `multipart/form-data` bodies part by part, so that a new boundary
    /// does not matter.
    ///
    /// The order, headers and content of the parts count. Bodies of another media
    /// type, and those with a content encoding, are compared byte for byte. A body
    /// that cannot be parsed is refused with 400 `body-invalid`.
    ///
    /// ```
    /// # use axum::{Router, body::Body, http::{Request, StatusCode}, routing::post};
    /// # use tower::ServiceExt;
    /// use tower_idempotency::{Fingerprinting, IdempotencyLayer, MemoryStore, Scope};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .fingerprint(Fingerprinting::multipart())
    ///     .build()?;
    /// let app = Router::new().route("/", post(StatusCode::CREATED).layer(layer));
    /// // Browsers choose a new boundary for each try.
    /// for (boundary, is_replay) in [("one", false), ("two", true)] {
    ///     let form = format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1\r\n--{boundary}--");
    ///     let request = Request::post("/")
    ///         .header("idempotency-key", "k")
    ///         .header("content-type", format!("multipart/form-data; boundary={boundary}"));
    ///     let response = app.clone().oneshot(request.body(Body::from(form))?).await?;
    ///     assert_eq!(response.status(), StatusCode::CREATED);
    ///     assert_eq!(response.headers().contains_key("idempotent-replayed"), is_replay);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "multipart")]
    #[must_use]
    pub fn multipart() -> Self {
        Self::of(Form::Multipart)
    }

    /// Compares what `identify` returns, and nothing else.
    ///
    /// `scheme` names the function and its version, and must not be empty. Change it
    /// whenever the function changes: records that an earlier one made are then
    /// never compared with it.
    #[must_use]
    pub fn custom(
        scheme: impl Into<String>,
        identify: impl Fn(&request::Parts, &Bytes) -> Vec<u8> + Send + Sync + 'static,
    ) -> Self {
        Self::of(Form::Custom {
            scheme: scheme.into(),
            identify: Arc::new(identify),
        })
    }

    /// Adds a request header; absent is different from empty. Has no effect on
    /// [`custom`](Self::custom). Defaults to none.
    ///
    /// A mismatch names each of the first four headers by itself. From the fifth
    /// on, headers are named together with another one.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.headers.push(name);
        self.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        self.headers.dedup();
        self
    }

    /// Adds the authority: `:authority` over HTTP/2, over HTTP/1.1 the authority of
    /// an absolute request target, else the `Host` header. Has no effect on
    /// [`custom`](Self::custom). Defaults to ignoring it.
    ///
    /// Case does not matter, nor do user information and the ports 80 and 443: a
    /// request over HTTP/1.1 does not tell which of the two is the default.
    #[must_use]
    pub fn authority(mut self) -> Self {
        self.authority = true;
        self
    }

    /// Makes the fingerprints with HMAC-SHA-256 under this secret, in place of SHA-256.
    /// Defaults to none.
    ///
    /// A reader of the store can then not guess a short body by trying. A record only shows
    /// whether its request equals another one in all parts.
    ///
    /// The secret is part of the form. To change it, or to begin with one, name the form of
    /// before with [`earlier_fingerprint`](crate::IdempotencyBuilder::earlier_fingerprint),
    /// also if it is a plain one. First let every process know the new form as an earlier
    /// one; see the guide on [sealing](crate::guide::sealing).
    ///
    /// ```
    /// use tower_idempotency::{
    ///     Fingerprinting, IdempotencyLayer, MemoryStore, Scope, sealing::Secret,
    /// };
    ///
    /// # fn main() -> Result<(), tower_idempotency::BuildError> {
    /// # let secret = Secret::random();
    /// let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()))
    ///     .fingerprint(Fingerprinting::json().keyed(&secret))
    ///     .earlier_fingerprint(Fingerprinting::json()) // until its records have expired
    ///     .build()?;
    /// # Ok(())
    /// # }
    /// ```
    #[cfg(feature = "sealing")]
    #[must_use]
    pub fn keyed(mut self, secret: &Secret) -> Self {
        self.key = Some(Arc::new(FingerprintKey::new(secret)));
        self
    }

    #[cfg(all(feature = "guard", feature = "sealing"))]
    pub(super) fn key(&self) -> Option<&FingerprintKey> {
        self.key.as_deref()
    }

    /// Whether only the service can make these fingerprints.
    pub(super) fn is_keyed(&self) -> bool {
        #[cfg(feature = "sealing")]
        return self.key.is_some();
        #[cfg(not(feature = "sealing"))]
        false
    }

    fn of(form: Form) -> Self {
        Self {
            form,
            headers: Vec::new(),
            authority: false,
            #[cfg(feature = "sealing")]
            key: None,
        }
    }

    /// The same settings, with a digest of the body in its place. `None` if a function of
    /// the application decides.
    pub(super) fn by_digest(&self, algorithm: DigestAlgorithm) -> Option<Self> {
        match self.form {
            Form::Custom { .. } => None,
            _ => Some(Self {
                form: Form::Digest(algorithm),
                ..self.clone()
            }),
        }
    }

    pub(crate) fn is_custom(&self) -> bool {
        matches!(self.form, Form::Custom { .. })
    }

    /// Whether two bodies are the same exactly if their bytes are.
    pub(super) fn compares_bytes(&self) -> bool {
        matches!(self.form, Form::Bytes)
    }

    /// Whether these settings can identify this body.
    pub(super) fn can_identify(&self, body: Content<'_>) -> bool {
        body.bytes.is_some() || self.is_declared(body)
    }

    /// Whether a declared digest stands for this body.
    pub(super) fn is_declared(&self, body: Content<'_>) -> bool {
        self.form.declared(body).is_some()
    }

    /// The rule that these settings break, if any.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        self.form.fault()
    }

    pub(super) fn scheme(&self) -> Scheme {
        let mut framed = Framed::default();
        self.form.spell(&mut framed);
        framed.count(self.headers.len());
        for name in &self.headers {
            framed.field(name.as_str().as_bytes());
        }
        framed.count(usize::from(self.authority));
        #[cfg(feature = "sealing")]
        if let Some(key) = &self.key {
            framed.field(b"keyed/1");
            framed.field(key.id());
        }
        Scheme::new(framed.digest())
    }

    /// Returns the fingerprint of a request. That of a body with a fault equals none
    /// that was recorded.
    pub(super) fn identify(
        &self,
        scheme: Scheme,
        target: Target<'_>,
        parts: &request::Parts,
        body: Content<'_>,
    ) -> (Fingerprint, Option<BodyFault>) {
        let identified = self.plain(scheme, target, parts, body);
        #[cfg(feature = "sealing")]
        if let Some(key) = &self.key {
            let (fingerprint, fault) = identified;
            return (fingerprint.keyed(key), fault);
        }
        identified
    }

    /// As [`identify`](Self::identify), without a key.
    fn plain(
        &self,
        scheme: Scheme,
        target: Target<'_>,
        parts: &request::Parts,
        body: Content<'_>,
    ) -> (Fingerprint, Option<BodyFault>) {
        if let (Form::Custom { identify, .. }, Some(body)) = (&self.form, body.bytes) {
            let identified = Framed::of(&identify(parts, body));
            let fingerprint = Builder::new(scheme, Source::Seen, b'c', identified);
            return (fingerprint.build(), None);
        }
        let headers = &parts.headers;
        let (path, query) = target.uri.path_and_query().map_or(("", None), |target| {
            (PathAndQuery::path(target), PathAndQuery::query(target))
        });
        let coding = media_type::coding(headers);
        let (form, hash) = self.form.hash(headers, body, &coding);
        let (form, hash, fault) = match hash {
            Ok(hash) => (form, hash, None),
            Err(fault) => (b'!', Framed::of(b"fault"), Some(fault)),
        };
        let mut fingerprint = Builder::new(scheme, target.source, form, hash);
        let types = headers.get_all(header::CONTENT_TYPE).iter();
        let types = types.map(|line| self.form.media_type(line));
        fingerprint.part(Place::METHOD, parts.method.as_str().as_bytes());
        fingerprint.part(Place::PATH, path.as_bytes());
        fingerprint.list(Place::QUERY, query);
        fingerprint.list(Place::MEDIA_TYPE, types);
        fingerprint.part(Place::CONTENT_ENCODING, &coding);
        for (index, name) in self.headers.iter().enumerate() {
            fingerprint.list(Place::header(index), headers.get_all(name));
        }
        if self.authority {
            fingerprint.list(Place::AUTHORITY, authority(target.uri, headers));
        }
        (fingerprint.build(), fault)
    }

    /// Which parts differ between the request of the record and this one, two
    /// fingerprints of this scheme.
    pub(super) fn difference(
        &self,
        recorded: &Fingerprint,
        current: &Fingerprint,
        body: Content<'_>,
    ) -> Mismatch {
        #[cfg(feature = "sealing")]
        let (recorded, current) = match &self.key {
            Some(key) => (&recorded.masked(key), &current.masked(key)),
            None => (recorded, current),
        };
        let mut mismatch = Mismatch::default();
        for (place, part) in self.compared() {
            let print = recorded.print(place);
            let is_same = print == current.print(place)
                || (place == Place::BODY && self.form.is_another_form(print, body.bytes));
            if !is_same {
                mismatch.differs.push(part.clone());
            }
            mismatch.compared.push(part);
        }
        mismatch
    }

    fn compared(&self) -> Vec<(Place, RequestPart)> {
        if let Form::Custom { .. } = self.form {
            return vec![(Place::BODY, RequestPart::Custom)];
        }
        let mut compared = vec![
            (Place::METHOD, RequestPart::Method),
            (Place::PATH, RequestPart::Path),
            (Place::QUERY, RequestPart::Query),
            (Place::MEDIA_TYPE, RequestPart::MediaType),
            (Place::CONTENT_ENCODING, RequestPart::ContentEncoding),
        ];
        for (index, name) in self.headers.iter().enumerate() {
            compared.push((Place::header(index), RequestPart::Header(name.clone())));
        }
        if self.authority {
            compared.push((Place::AUTHORITY, RequestPart::Authority));
        }
        compared.push((Place::BODY, RequestPart::Body));
        compared
    }
}
