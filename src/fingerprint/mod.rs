//! Is it the same request again?

mod json;
mod media_type;
mod multipart;
mod parts;

use std::{borrow::Cow, fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Uri, header, request, uri::PathAndQuery};
use sha2::{Digest as _, Sha256};

pub(crate) use self::parts::Mismatch;
pub use self::parts::RequestPart;
use self::{
    json::Selection,
    media_type::MediaType,
    parts::{BodyForm, Parted, Place, Prints},
};

/// Says whether a request with a used key is the same request again.
///
/// It holds the id of the scheme that made it, a digest of the request, and four
/// bytes for each part of the request. With those, a mismatch can name the parts
/// that differ. Stores keep the bytes and never look into them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; Self::LENGTH]);

impl Fingerprint {
    /// How many bytes a fingerprint has: 84.
    pub const LENGTH: usize = PRINTS_START + parts::PRINTS_LENGTH;

    /// The fingerprint that a store kept.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LENGTH]) -> Self {
        Self(bytes)
    }

    /// The bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; Self::LENGTH] {
        &self.0
    }

    fn new(scheme: Scheme, digest: [u8; 32], prints: &Prints) -> Self {
        let mut bytes = [0; Self::LENGTH];
        bytes[..DIGEST_START].copy_from_slice(&scheme.0);
        bytes[DIGEST_START..PRINTS_START].copy_from_slice(&digest);
        bytes[PRINTS_START..].copy_from_slice(prints.as_bytes());
        Self(bytes)
    }

    pub(crate) fn scheme(&self) -> Scheme {
        let mut id = [0; DIGEST_START];
        id.copy_from_slice(&self.0[..DIGEST_START]);
        Scheme(id)
    }

    fn prints(&self) -> Prints {
        Prints::from_slice(&self.0[PRINTS_START..])
    }
}

const DIGEST_START: usize = 8;
const PRINTS_START: usize = DIGEST_START + 32;

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint(..)")
    }
}

/// Identifies how a fingerprint was made: two layers with the same settings
/// agree on it, whatever process or version they run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme([u8; DIGEST_START]);

/// What makes two requests the same request.
///
/// Every form but [`custom`](Self::custom) covers the method, the original path
/// and query, the media type, the content encoding and the body. The
/// `Authorization`, `User-Agent`, `Date`, `Signature` and tracing headers never
/// count. All parts are length-prefixed and hashed with SHA-256. A mismatch names
/// the parts that were compared and those that differ; see
/// [`Rejection::differs`](crate::Rejection::differs).
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
/// With the feature `axum`, the path is the one before nested routers shortened
/// it: `axum::extract::OriginalUri` of **axum 0.8**. Routers of another version of
/// axum keep the original path in a type that this crate does not know. With
/// those, and without the feature, let the layer stand outside of nested routers,
/// or use [`custom`](Self::custom) with a function that reads that type.
///
/// # Authority
///
/// The authority (the `Host` header, `:authority` over HTTP/2) does not count: a
/// retry may reach the service under another name. Add it with
/// [`authority`](Self::authority), or make it part of the
/// [`Scope`](crate::Scope), if one service answers for several hosts.
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
/// // Byte for byte, and the language counts too.
/// let exact = Fingerprinting::bytes().header(CONTENT_LANGUAGE);
/// // Member order and white space do not count, nor does a volatile field.
/// let structural = Fingerprinting::json_without(["/meta/attempt"]);
/// # for (form, retry) in [(exact, StatusCode::UNPROCESSABLE_ENTITY), (structural, StatusCode::OK)] {
/// #     let layer = IdempotencyLayer::required(MemoryStore::new(), |_| Some(Scope::single_tenant()));
/// #     let layer = layer.fingerprint(form).build()?;
/// #     let app = Router::new().route("/", post(StatusCode::OK).layer(layer));
/// #     for (body, status) in [
/// #         (r#"{"amount":5,"meta":{"attempt":1}}"#, StatusCode::OK),
/// #         (r#"{"meta": {"attempt":2}, "amount":5}"#, retry),
/// #     ] {
/// #         let request = Request::post("/").header("idempotency-key", "k");
/// #         let request = request.header("content-type", "application/json").body(Body::from(body))?;
/// #         assert_eq!(app.clone().oneshot(request).await?.status(), status);
/// #     }
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Fingerprinting {
    form: Form,
    headers: Vec<HeaderName>,
    authority: bool,
}

#[derive(Clone)]
enum Form {
    Bytes,
    Json(Selection),
    Multipart,
    Custom { scheme: String, identify: Identify },
}

type Identify = Arc<dyn Fn(&request::Parts, &Bytes) -> Vec<u8> + Send + Sync>;

impl Fingerprinting {
    /// The body counts byte for byte. This is the default of a layer.
    #[must_use]
    pub fn bytes() -> Self {
        Self::of(Form::Bytes)
    }

    /// JSON bodies count by structure: the order of members and white space do
    /// not matter, the spelling of numbers does (`1` is not `1.0`). Strings are
    /// compared unescaped; half a surrogate pair (`"\ud800"`) equals itself. Other
    /// media types count byte for byte, and so do bodies with a content encoding.
    ///
    /// Every document that the grammar of RFC 8259 allows is accepted, however
    /// deep it is, except one with two members of the same name in an object.
    /// Such a body, and one that says it is JSON and is not, is answered 400
    /// `body-invalid`.
    #[must_use]
    pub fn json() -> Self {
        Self::of(Form::Json(Selection::All))
    }

    /// As [`json`](Self::json), but only the values at these JSON Pointers (RFC
    /// 6901) count. A value that is absent differs from `null`, `false`, `0`,
    /// `""` and every other value.
    #[must_use]
    pub fn json_only<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::of(Form::Json(Selection::only(pointers)))
    }

    /// As [`json`](Self::json), but the values at these JSON Pointers (RFC
    /// 6901) do not count, present or absent. The index of an element is that in
    /// the document, with the elements that do not count.
    #[must_use]
    pub fn json_without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::of(Form::Json(Selection::without(pointers)))
    }

    /// `multipart/form-data` bodies count part by part, so that a new boundary
    /// does not matter; the order, headers and content of the parts do. Other
    /// media types count byte for byte, and so do bodies with a content encoding.
    ///
    /// A body that cannot be taken apart is answered 400 `body-invalid`.
    #[must_use]
    pub fn multipart() -> Self {
        Self::of(Form::Multipart)
    }

    /// `identify` alone decides: requests for which it returns the same bytes
    /// are the same request. `scheme` names the function and its version;
    /// change it whenever the function changes.
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

    /// This request header counts too; absent is different from empty. Has no
    /// effect on [`custom`](Self::custom). Defaults to none.
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

    /// The authority counts too: `:authority` over HTTP/2, over HTTP/1.1 the
    /// authority of an absolute request target, else the `Host` header. Has no
    /// effect on [`custom`](Self::custom). Defaults to not counting.
    ///
    /// Case does not matter, nor do user information and the ports 80 and 443: a
    /// request over HTTP/1.1 does not tell which of the two is the default.
    #[must_use]
    pub fn authority(mut self) -> Self {
        self.authority = true;
        self
    }

    fn of(form: Form) -> Self {
        Self {
            form,
            headers: Vec::new(),
            authority: false,
        }
    }

    /// What is wrong with this configuration, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        match &self.form {
            Form::Custom { scheme, .. } if scheme.is_empty() => {
                Some("must have a scheme with a name")
            }
            Form::Json(selection) => selection.fault(),
            Form::Bytes | Form::Multipart | Form::Custom { .. } => None,
        }
    }

    /// The name of the form changes with its meaning, so that no record is
    /// compared under a meaning that it was not made with.
    fn scheme(&self) -> Scheme {
        let mut framed = Framed::default();
        match &self.form {
            Form::Bytes => framed.field(b"bytes/2"),
            Form::Json(selection) => {
                let (kind, pointers) = selection.spelled();
                framed.field(b"json/2");
                framed.field(kind.as_bytes());
                framed.count(pointers.len());
                for pointer in pointers {
                    framed.field(pointer.as_bytes());
                }
            }
            Form::Multipart => framed.field(b"multipart/2"),
            Form::Custom { scheme, .. } => {
                framed.field(b"custom/2");
                framed.field(scheme.as_bytes());
            }
        }
        framed.count(self.headers.len());
        for name in &self.headers {
            framed.field(name.as_str().as_bytes());
        }
        framed.count(usize::from(self.authority));
        let mut id = [0; DIGEST_START];
        id.copy_from_slice(&framed.digest()[..DIGEST_START]);
        Scheme(id)
    }
}

impl Default for Fingerprinting {
    fn default() -> Self {
        Self::bytes()
    }
}

impl fmt::Debug for Fingerprinting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Fingerprinting");
        match &self.form {
            Form::Bytes => shown.field("form", &"bytes"),
            Form::Json(selection) => shown.field("form", &"json").field("values", selection),
            Form::Multipart => shown.field("form", &"multipart"),
            Form::Custom { scheme, .. } => shown.field("form", &"custom").field("scheme", scheme),
        };
        shown
            .field("headers", &self.headers)
            .field("authority", &self.authority)
            .finish()
    }
}

/// The scheme in force and those whose records it can still compare with.
#[derive(Debug)]
pub(crate) struct Fingerprinter {
    schemes: Vec<(Scheme, Fingerprinting)>,
}

/// Whether a request is the one that a record was made for.
pub(crate) enum Comparison {
    Same,
    Different(Mismatch),
    /// The record's scheme is not known here.
    SchemeUnknown,
}

impl Fingerprinter {
    pub(crate) fn new(current: Fingerprinting, earlier: Vec<Fingerprinting>) -> Self {
        // The plain forms are always understood, so that a change between them
        // does not turn the retries of the last day into errors.
        let plain = [
            Fingerprinting::bytes(),
            Fingerprinting::json(),
            Fingerprinting::multipart(),
        ];
        let mut schemes: Vec<(Scheme, Fingerprinting)> = Vec::new();
        for each in std::iter::once(current).chain(earlier).chain(plain) {
            let scheme = each.scheme();
            if schemes.iter().all(|(known, _)| *known != scheme) {
                schemes.push((scheme, each));
            }
        }
        Self { schemes }
    }

    /// The request's fingerprint under the scheme in force, and the fault of a
    /// body that cannot be compared.
    pub(crate) fn current(
        &self,
        parts: &request::Parts,
        body: &Bytes,
    ) -> (Fingerprint, Option<BodyFault>) {
        let (scheme, settings) = &self.schemes[0];
        settings.identify(*scheme, parts, body)
    }

    /// Compares the request, whose fingerprint is `current`, with the one that
    /// made `recorded`.
    pub(crate) fn compare(
        &self,
        recorded: &Fingerprint,
        current: &Fingerprint,
        parts: &request::Parts,
        body: &Bytes,
    ) -> Comparison {
        if recorded == current {
            return Comparison::Same;
        }
        let known = |(scheme, _): &&(Scheme, Fingerprinting)| *scheme == recorded.scheme();
        let Some((scheme, settings)) = self.schemes.iter().find(known) else {
            return Comparison::SchemeUnknown;
        };
        let again = if *scheme == current.scheme() {
            *current
        } else {
            settings.identify(*scheme, parts, body).0
        };
        if again == *recorded {
            Comparison::Same
        } else {
            Comparison::Different(settings.difference(recorded, &again, body))
        }
    }
}

/// Why a body has no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyFault(pub(crate) &'static str);

impl Fingerprinting {
    /// The fingerprint of a request. That of a body with a fault equals none
    /// that was recorded.
    fn identify(
        &self,
        scheme: Scheme,
        parts: &request::Parts,
        body: &Bytes,
    ) -> (Fingerprint, Option<BodyFault>) {
        let mut parted = Parted::default();
        if let Form::Custom { identify, .. } = &self.form {
            parted.body(
                BodyForm::Custom,
                Sha256::digest(identify(parts, body)).into(),
            );
            return (parted.fingerprint(scheme), None);
        }
        let uri = original_uri(parts);
        let target = uri.path_and_query();
        let coding = media_type::coding(&parts.headers);
        parted.part(Place::Method, parts.method.as_str().as_bytes());
        parted.part(
            Place::Path,
            target.map_or("", PathAndQuery::path).as_bytes(),
        );
        parted.list(Place::Query, target.and_then(PathAndQuery::query));
        let types = parts.headers.get_all(header::CONTENT_TYPE).iter();
        parted.list(Place::MediaType, types.map(|line| self.counted(line)));
        parted.part(Place::ContentEncoding, &coding);
        for (index, name) in self.headers.iter().enumerate() {
            parted.list(Place::header(index), parts.headers.get_all(name));
        }
        if self.authority {
            parted.list(Place::Authority, authority(uri, parts));
        }
        let (form, digest) = self.digest(&parts.headers, body, &coding);
        match digest {
            Ok(digest) => {
                parted.body(form, digest);
                (parted.fingerprint(scheme), None)
            }
            Err(fault) => (parted.fingerprint(scheme), Some(fault)),
        }
    }

    /// A media type, as it counts: without a boundary where parts are compared.
    fn counted<'v>(&self, line: &'v HeaderValue) -> Cow<'v, [u8]> {
        let media_type = MediaType::parse(line.as_bytes());
        let by_parts = matches!(self.form, Form::Multipart) && media_type.is_form();
        if by_parts {
            media_type.without_boundary().canonical()
        } else {
            media_type.canonical()
        }
    }

    /// The form in which a body is compared, and its digest.
    fn digest(
        &self,
        headers: &HeaderMap,
        body: &Bytes,
        coding: &[u8],
    ) -> (BodyForm, Result<[u8; 32], BodyFault>) {
        let media_type = || sole_media_type(headers).filter(|_| coding.is_empty());
        match &self.form {
            Form::Json(selection) if !body.is_empty() => {
                if media_type().is_some_and(|media_type| media_type.is_json()) {
                    return (BodyForm::Json, json::digest(body, selection));
                }
            }
            Form::Multipart => {
                if let Some(media_type) = media_type().filter(MediaType::is_form) {
                    return (BodyForm::Parts, multipart::digest(&media_type, body));
                }
            }
            Form::Json(_) | Form::Bytes | Form::Custom { .. } => {}
        }
        (BodyForm::Bytes, Ok(Sha256::digest(body).into()))
    }

    /// Which parts differ between the request of the record and this one, two
    /// fingerprints of this scheme.
    fn difference(&self, recorded: &Fingerprint, current: &Fingerprint, body: &Bytes) -> Mismatch {
        let (recorded, current) = (recorded.prints(), current.prints());
        let mut mismatch = Mismatch::default();
        for (place, part) in self.compared() {
            let is_same = recorded.at(place) == current.at(place)
                || (place == Place::Body && self.is_another_form(recorded.at(place), body));
            if !is_same {
                mismatch.differs.push(part.clone());
            }
            mismatch.compared.push(part);
        }
        mismatch
    }

    /// Whether the record keeps this very body, compared in another form because
    /// of another media type or content encoding.
    fn is_another_form(&self, recorded: [u8; 4], body: &Bytes) -> bool {
        let begins = |digest: [u8; 32]| digest.starts_with(&recorded);
        match &self.form {
            Form::Json(selection) => {
                begins(Sha256::digest(body).into())
                    || json::digest(body, selection).is_ok_and(begins)
            }
            Form::Multipart => begins(Sha256::digest(body).into()),
            Form::Bytes | Form::Custom { .. } => false,
        }
    }

    fn compared(&self) -> Vec<(Place, RequestPart)> {
        if let Form::Custom { .. } = self.form {
            return vec![(Place::Body, RequestPart::Custom)];
        }
        let headers = self.headers.iter().enumerate();
        let headers =
            headers.map(|(index, name)| (Place::header(index), RequestPart::Header(name.clone())));
        let authority = self
            .authority
            .then_some((Place::Authority, RequestPart::Authority));
        let mut compared = vec![
            (Place::Method, RequestPart::Method),
            (Place::Path, RequestPart::Path),
            (Place::Query, RequestPart::Query),
            (Place::MediaType, RequestPart::MediaType),
            (Place::ContentEncoding, RequestPart::ContentEncoding),
        ];
        compared.extend(headers);
        compared.extend(authority);
        compared.push((Place::Body, RequestPart::Body));
        compared
    }
}

/// The media type of a request that has no more than one.
fn sole_media_type(headers: &HeaderMap) -> Option<MediaType<'_>> {
    let mut lines = headers.get_all(header::CONTENT_TYPE).iter();
    let line = lines.next()?;
    let is_sole = lines.next().is_none();
    is_sole.then(|| MediaType::parse(line.as_bytes()))
}

/// SHA-256 over fields that cannot run into one another.
#[derive(Default)]
struct Framed(Sha256);

impl Framed {
    fn field(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.update(bytes);
    }

    fn tag(&mut self, tag: u8) {
        self.0.update([tag]);
    }

    /// A body has up to 256 MiB, and a head much less.
    fn count(&mut self, count: usize) {
        self.0.update((count as u32).to_le_bytes());
    }

    /// Ends a list: no field is as long.
    fn end(&mut self) {
        self.0.update(u32::MAX.to_le_bytes());
    }

    fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// The target that the client sent. A nested axum router sees a shortened one;
/// two routers under different prefixes are different requests.
fn original_uri(parts: &request::Parts) -> &Uri {
    #[cfg(feature = "axum")]
    let uri = parts
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&parts.uri, |original| &original.0);
    #[cfg(not(feature = "axum"))]
    let uri = &parts.uri;
    uri
}

/// The authority that the client sent; several if it sent several `Host` lines.
fn authority(uri: &Uri, parts: &request::Parts) -> Vec<Vec<u8>> {
    if let Some(authority) = uri.authority() {
        return vec![canonical_authority(authority.as_str().as_bytes())];
    }
    let lines = parts.headers.get_all(header::HOST).iter();
    lines
        .map(|line| canonical_authority(line.as_bytes()))
        .collect()
}

/// Host and port in lower case; without user information and a port that may be
/// the default one.
fn canonical_authority(authority: &[u8]) -> Vec<u8> {
    let host = authority
        .rsplit(|&byte| byte == b'@')
        .next()
        .unwrap_or_default();
    let host = [&b":443"[..], b":80", b":"]
        .into_iter()
        .find_map(|port| host.strip_suffix(port))
        .unwrap_or(host);
    host.to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn identified(
        settings: &Fingerprinting,
        uri: &str,
        media_type: &str,
        body: &str,
    ) -> Result<Fingerprint, BodyFault> {
        let request = Request::post(uri).header(header::CONTENT_TYPE, media_type);
        let (parts, body) = request.body(body.to_owned().into()).unwrap().into_parts();
        let (fingerprint, fault) = settings.identify(settings.scheme(), &parts, &body);
        fault.map_or(Ok(fingerprint), Err)
    }

    #[test]
    fn the_border_between_parts_counts() {
        let of = |uri, body| identified(&Fingerprinting::bytes(), uri, "text/plain", body).unwrap();
        assert_ne!(of("/ab", "c"), of("/a", "bc"));
        assert_ne!(of("/a?b", "c"), of("/a", "?bc"));
        assert_ne!(of("/a?", ""), of("/a", ""));
    }

    #[test]
    fn rule_29_spelling_of_the_media_type_does_not_count_but_the_type_does() {
        let of = |media_type| identified(&Fingerprinting::bytes(), "/", media_type, "x");
        assert_eq!(
            of("application/json;charset=utf-8;a=\"b\""),
            of("Application/JSON ; A=b")
        );
        assert_ne!(of("application/json"), of("application/xml"));
        assert_ne!(of("text/plain"), of("text/plain;charset=utf-8"));
    }

    #[test]
    fn json_that_cannot_be_compared_is_refused() {
        let of = |media_type, body| identified(&Fingerprinting::json(), "/", media_type, body);
        assert!(of("application/problem+json", "{").is_err());
        assert!(of("application/json", r#"{"x":{"a":1,"\u0061":1}}"#).is_err());
        assert!(of("text/plain", "{").is_ok());
        assert!(of("application/json", "").is_ok());
    }

    #[test]
    fn a_new_boundary_is_the_same_multipart_body() {
        let parts = |boundary: &str, value: &str| {
            let body = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n"
            );
            let media_type = format!("multipart/form-data; boundary={boundary}");
            identified(&Fingerprinting::multipart(), "/", &media_type, &body)
        };
        assert_eq!(parts("XX", "1").unwrap(), parts("yy", "1").unwrap());
        assert_ne!(parts("XX", "1").unwrap(), parts("XX", "2").unwrap());
        let nameless = "multipart/form-data";
        assert!(identified(&Fingerprinting::multipart(), "/", nameless, "x").is_err());
    }

    #[test]
    fn rule_30_an_authority_has_no_case_no_user_and_no_default_port() {
        for spelling in [
            "a.example",
            "A.Example",
            "a.example:",
            "a.example:80",
            "u:p@a.example:443",
        ] {
            assert_eq!(canonical_authority(spelling.as_bytes()), b"a.example");
        }
        assert_eq!(
            canonical_authority(b"[2001:DB8::80]:443"),
            b"[2001:db8::80]"
        );
        assert_eq!(canonical_authority(b"a:8080"), b"a:8080");
    }

    #[test]
    fn an_earlier_scheme_is_recomputed_and_an_unknown_one_is_not_guessed() {
        let (parts, ()) = Request::post("/").body(()).unwrap().into_parts();
        let body = Bytes::from_static(b"x");
        let old = Fingerprinter::new(Fingerprinting::custom("one", |_, b| b.to_vec()), vec![]);
        let new = Fingerprinter::new(
            Fingerprinting::bytes(),
            vec![Fingerprinting::custom("one", |_, b| b.to_vec())],
        );
        let stranger = Fingerprinter::new(Fingerprinting::json(), vec![]);
        let recorded = old.current(&parts, &body).0;
        let current = new.current(&parts, &body).0;
        let compare = |by: &Fingerprinter, recorded, body: &Bytes| {
            let current = by.current(&parts, body).0;
            by.compare(&recorded, &current, &parts, body)
        };
        assert!(matches!(compare(&new, recorded, &body), Comparison::Same));
        let other = Bytes::from_static(b"y");
        let Comparison::Different(mismatch) = compare(&new, recorded, &other) else {
            panic!("another body is the same request");
        };
        assert_eq!(mismatch.differs, [RequestPart::Custom]);
        let unknown = compare(&stranger, recorded, &body);
        assert!(matches!(unknown, Comparison::SchemeUnknown));
        assert!(matches!(
            compare(&stranger, current, &body),
            Comparison::Same
        ));
    }

    #[test]
    fn schemes_keep_their_ids() {
        let ids = [
            Fingerprinting::bytes(),
            Fingerprinting::bytes().authority(),
            Fingerprinting::bytes().header(header::CONTENT_LANGUAGE),
            Fingerprinting::json(),
            Fingerprinting::json_only(["/b", "/a"]),
            Fingerprinting::json_without(["/a", "/b"]),
            Fingerprinting::multipart(),
            Fingerprinting::custom("one", |_, _| Vec::new()),
        ]
        .map(|settings| hex::encode(settings.scheme().0));
        assert_eq!(
            ids,
            [
                "64edbe595d6e0c9f",
                "c08856113a85cb33",
                "80711762726365bc",
                "1ceefd387acc0d9c",
                "20222a77ffb92375",
                "775b137e20f8d0fd",
                "22b69c7831086210",
                "0cab6711593e020e",
            ]
        );
    }

    #[test]
    fn a_request_keeps_its_fingerprint() {
        let (parts, ()) = Request::post("/orders?dry=1")
            .header(header::CONTENT_TYPE, "application/json; charset=utf-8")
            .header(header::CONTENT_LANGUAGE, "de")
            .header(header::HOST, "Example:443")
            .body(())
            .unwrap()
            .into_parts();
        let body = Bytes::from_static(b"{\"b\":[1],\"a\":\"x\"}");
        let settings = Fingerprinting::json()
            .header(header::CONTENT_LANGUAGE)
            .authority();
        let (fingerprint, _) = settings.identify(settings.scheme(), &parts, &body);
        assert_eq!(
            hex::encode(fingerprint.as_bytes()),
            concat!(
                "9797d2d497749c11",
                "d6563ac03da0092d40b360854e6c46c121c2c5bb87b4c7527840f659635f9bf0",
                "39811f6c46ca74f03928b9bd125ebcdc00000000dd64095262a9f71a12ccc048000000000000000000000000",
            )
        );
    }
}
