//! Is it the same request again?

mod json;
mod media_type;
mod multipart;

use std::{fmt, sync::Arc};

use bytes::Bytes;
use http::{HeaderName, header, request};
use sha2::{Digest as _, Sha256};

use self::json::Selection;

/// The digest that says whether a request with a used key is the same request
/// again, with the id of the scheme that made it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 40]);

impl Fingerprint {
    /// The fingerprint that a store kept.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 40]) -> Self {
        Self(bytes)
    }

    /// The bytes for a store to keep.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 40] {
        &self.0
    }

    fn new(scheme: Scheme, digest: impl AsRef<[u8]>) -> Self {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&scheme.0);
        bytes[8..].copy_from_slice(digest.as_ref());
        Self(bytes)
    }

    pub(crate) fn scheme(&self) -> Scheme {
        let mut id = [0; 8];
        id.copy_from_slice(&self.0[..8]);
        Scheme(id)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fingerprint(..)")
    }
}

/// Identifies how a fingerprint was made: two layers with the same settings
/// agree on it, whatever process or version they run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme([u8; 8]);

/// What makes two requests the same request.
///
/// Every form but [`custom`](Self::custom) covers the method, the original path
/// and query, the media type and the body; the `Authorization`, `User-Agent`,
/// `Date`, `Signature` or tracing headers never count. All parts are
/// length-prefixed and hashed with SHA-256.
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
    /// not matter, the spelling of numbers does (`1` is not `1.0`). Other media
    /// types count byte for byte.
    ///
    /// A body that says it is JSON and is not, has a duplicate member, or nests
    /// deeper than 64 levels is answered 400 `body-invalid`.
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
    /// 6901) do not count, present or absent.
    #[must_use]
    pub fn json_without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::of(Form::Json(Selection::without(pointers)))
    }

    /// `multipart/form-data` bodies count part by part, so that a new boundary
    /// does not matter; the order, headers and content of the parts do. Other
    /// media types count byte for byte.
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

    /// This request header counts too; absent is different from empty.
    /// Defaults to none.
    #[must_use]
    pub fn header(mut self, name: HeaderName) -> Self {
        self.headers.push(name);
        self.headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        self.headers.dedup();
        self
    }

    fn of(form: Form) -> Self {
        Self {
            form,
            headers: Vec::new(),
        }
    }

    /// What is wrong with this configuration, if anything.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        match &self.form {
            Form::Custom { scheme, .. } if scheme.is_empty() => {
                Some("a custom fingerprint needs a name for its scheme")
            }
            Form::Json(selection) => selection.fault(),
            Form::Bytes | Form::Multipart | Form::Custom { .. } => None,
        }
    }

    fn describe(&self) -> String {
        let form = match &self.form {
            Form::Bytes => "bytes/1".to_owned(),
            Form::Json(selection) => format!("json/1 {selection:?}"),
            Form::Multipart => "multipart/1".to_owned(),
            Form::Custom { scheme, .. } => format!("custom {scheme:?}"),
        };
        format!("{form} {:?}", self.headers)
    }

    fn scheme(&self) -> Scheme {
        let digest = Sha256::digest(self.describe());
        let mut id = [0; 8];
        id.copy_from_slice(&digest[..8]);
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
        write!(f, "Fingerprinting({})", self.describe())
    }
}

/// The scheme in force and those whose records it can still compare with.
#[derive(Debug)]
pub(crate) struct Fingerprinter {
    schemes: Vec<(Scheme, Fingerprinting)>,
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

    /// The request's fingerprint under the scheme in force.
    pub(crate) fn current(
        &self,
        parts: &request::Parts,
        body: &Bytes,
    ) -> Result<Fingerprint, BodyFault> {
        let (scheme, settings) = &self.schemes[0];
        settings.compute(*scheme, parts, body)
    }

    /// Whether the request is the one that made `recorded`; `None` if its
    /// scheme is not known here.
    pub(crate) fn matches(
        &self,
        recorded: Fingerprint,
        current: Fingerprint,
        parts: &request::Parts,
        body: &Bytes,
    ) -> Option<bool> {
        if recorded.scheme() == current.scheme() {
            return Some(recorded == current);
        }
        self.schemes
            .iter()
            .find(|(scheme, _)| *scheme == recorded.scheme())
            .map(|(scheme, settings)| {
                settings
                    .compute(*scheme, parts, body)
                    .is_ok_and(|again| again == recorded)
            })
    }
}

/// Why a body has no fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyFault(pub(crate) &'static str);

impl Fingerprinting {
    fn compute(
        &self,
        scheme: Scheme,
        parts: &request::Parts,
        body: &Bytes,
    ) -> Result<Fingerprint, BodyFault> {
        let mut framed = Framed::default();
        if let Form::Custom { identify, .. } = &self.form {
            framed.field(&identify(parts, body));
            return Ok(Fingerprint::new(scheme, framed.digest()));
        }
        framed.field(parts.method.as_str().as_bytes());
        framed.field(original_target(parts).as_bytes());
        let by_parts = matches!(self.form, Form::Multipart);
        framed.count(parts.headers.get_all(header::CONTENT_TYPE).iter().count());
        for value in parts.headers.get_all(header::CONTENT_TYPE) {
            framed.field(&media_type::canonical(value.as_bytes(), by_parts));
        }
        for name in &self.headers {
            framed.count(parts.headers.get_all(name).iter().count());
            for value in parts.headers.get_all(name) {
                framed.field(value.as_bytes());
            }
        }
        match &self.form {
            Form::Json(selection) if !body.is_empty() && media_type::is_json(&parts.headers) => {
                framed.field(b"json");
                json::hash(body, selection, &mut framed)?;
            }
            Form::Multipart if media_type::is_multipart(&parts.headers) => {
                framed.field(b"parts");
                multipart::hash(&parts.headers, body, &mut framed)?;
            }
            _ => {
                framed.field(b"bytes");
                framed.field(body);
            }
        }
        Ok(Fingerprint::new(scheme, framed.digest()))
    }
}

/// SHA-256 over fields that cannot run into one another.
#[derive(Default)]
struct Framed(Sha256);

impl Framed {
    fn field(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.0.update(bytes);
    }

    fn count(&mut self, count: usize) {
        self.0.update((count as u64).to_le_bytes());
    }

    fn tag(&mut self, tag: u8) {
        self.0.update([tag]);
    }

    fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// The path and query that the client sent. A nested axum router sees a
/// shortened one; two routers under different prefixes are different requests.
fn original_target(parts: &request::Parts) -> &str {
    #[cfg(feature = "axum")]
    let uri = parts
        .extensions
        .get::<axum::extract::OriginalUri>()
        .map_or(&parts.uri, |original| &original.0);
    #[cfg(not(feature = "axum"))]
    let uri = &parts.uri;
    uri.path_and_query().map_or("", |target| target.as_str())
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn fingerprint(
        settings: &Fingerprinting,
        uri: &str,
        media_type: &str,
        body: &str,
    ) -> Result<Fingerprint, BodyFault> {
        let (parts, ()) = Request::post(uri)
            .header(header::CONTENT_TYPE, media_type)
            .body(())
            .unwrap()
            .into_parts();
        settings.compute(
            settings.scheme(),
            &parts,
            &Bytes::copy_from_slice(body.as_bytes()),
        )
    }

    fn same(settings: &Fingerprinting, one: &str, other: &str) -> bool {
        let of = |body| fingerprint(settings, "/", "application/json", body).unwrap();
        of(one) == of(other)
    }

    #[test]
    fn the_border_between_path_and_body_counts() {
        let bytes = Fingerprinting::bytes();
        assert_ne!(
            fingerprint(&bytes, "/ab", "text/plain", "c"),
            fingerprint(&bytes, "/a", "text/plain", "bc"),
        );
    }

    #[test]
    fn spelling_of_the_media_type_does_not_count_but_the_type_does() {
        let of = |media_type| fingerprint(&Fingerprinting::bytes(), "/", media_type, "x");
        assert_eq!(
            of("application/json;charset=utf-8"),
            of("Application/JSON ; Charset=\"UTF-8\"")
        );
        assert_ne!(of("application/json"), of("application/xml"));
        assert_ne!(of("text/plain"), of("text/plain;charset=utf-8"));
    }

    #[test]
    fn json_counts_by_structure() {
        let json = Fingerprinting::json();
        assert!(same(
            &json,
            r#"{"a":1,"b":{"c":2,"d":3}}"#,
            r#"{ "b":{"d":3,"c":2},"a" : 1 }"#
        ));
        assert!(same(&json, r#"{"a":"\u00e9"}"#, r#"{"a":"é"}"#));
        assert!(!same(&json, "[1,2]", "[2,1]"));
        assert!(!same(&json, "[[1],2]", "[1,[2]]"));
        assert!(!same(&json, "1", "1.0"));
        assert!(!same(&json, r#"{"a":null}"#, "{}"));
        assert!(!same(&json, "9007199254740993", "9007199254740992"));
        assert!(!same(&json, r#""1""#, "1"));
    }

    #[test]
    fn json_that_cannot_be_compared_is_refused() {
        let json = Fingerprinting::json();
        let deep = "[".repeat(65) + &"]".repeat(65);
        for body in [
            r#"{"a":1,"a":2}"#,
            r#"{"x":{"a":1,"\u0061":1}}"#,
            "{",
            "{}x",
            &deep,
        ] {
            assert!(
                fingerprint(&json, "/", "application/json", body).is_err(),
                "{body}"
            );
        }
        assert!(fingerprint(&json, "/", "application/problem+json", "{").is_err());
        assert!(fingerprint(&json, "/", "text/plain", "{").is_ok());
        assert!(fingerprint(&json, "/", "application/json", "").is_ok());
    }

    #[test]
    fn excluded_fields_do_not_count_and_their_siblings_do() {
        let without = Fingerprinting::json_without(["/meta/attempt", "/list/0"]);
        let base = r#"{"amount":1,"meta":{"attempt":1,"id":7},"list":[1,2]}"#;
        assert!(same(
            &without,
            base,
            r#"{"amount":1,"meta":{"attempt":2,"id":7},"list":[9,2]}"#
        ));
        assert!(same(
            &without,
            base,
            r#"{"amount":1,"meta":{"id":7},"list":[1,2]}"#
        ));
        assert!(!same(
            &without,
            base,
            r#"{"amount":2,"meta":{"attempt":1,"id":7},"list":[1,2]}"#
        ));
        assert!(!same(
            &without,
            base,
            r#"{"amount":1,"meta":{"attempt":1,"id":8},"list":[1,2]}"#
        ));
    }

    #[test]
    fn a_chosen_field_that_is_present_but_falsy_is_a_value() {
        let only = Fingerprinting::json_only(["/a"]);
        let values = [
            "{}",
            r#"{"a":null}"#,
            r#"{"a":false}"#,
            r#"{"a":0}"#,
            r#"{"a":""}"#,
            r#"{"a":[]}"#,
        ];
        for (i, one) in values.iter().enumerate() {
            for (j, other) in values.iter().enumerate() {
                assert_eq!(same(&only, one, other), i == j, "{one} {other}");
            }
        }
        assert!(same(&only, r#"{"a":1,"b":2}"#, r#"{"a":1,"b":3}"#));
    }

    #[test]
    fn a_new_boundary_is_the_same_multipart_body() {
        let parts = |boundary: &str, value: &str| {
            let body = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n{value}\r\n--{boundary}--\r\n"
            );
            fingerprint(
                &Fingerprinting::multipart(),
                "/",
                &format!("multipart/form-data; boundary={boundary}"),
                &body,
            )
        };
        assert_eq!(parts("XX", "1").unwrap(), parts("yy", "1").unwrap());
        assert_ne!(parts("XX", "1").unwrap(), parts("XX", "2").unwrap());
        assert!(
            fingerprint(
                &Fingerprinting::multipart(),
                "/",
                "multipart/form-data",
                "x"
            )
            .is_err()
        );
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
        let recorded = old.current(&parts, &body).unwrap();
        let current = new.current(&parts, &body).unwrap();
        let other = Bytes::from_static(b"y");
        assert_eq!(new.matches(recorded, current, &parts, &body), Some(true));
        assert_eq!(new.matches(recorded, current, &parts, &other), Some(false));
        assert_eq!(stranger.matches(recorded, current, &parts, &body), None);
        assert_eq!(
            stranger.matches(
                current,
                stranger.current(&parts, &body).unwrap(),
                &parts,
                &body
            ),
            Some(true)
        );
    }
}
