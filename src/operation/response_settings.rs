//! How responses are recorded, replayed and refused: one layer's settings.

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header, response};
use http_body::Body;

use crate::{
    body::{ResponseBody, grpc},
    rejection::{Rejection, Renderer, RequestHead},
    response::{
        REPLAYED,
        attributes::Attributes,
        codec::encode_response,
        correct_length,
        headers::{KeptHeaders, RECORDED},
        recorded::RecordedResponse,
    },
    store::Completion,
    telemetry::log::Warnings,
};

/// The settings for responses. They are apart from the others because a handler's
/// commit needs them too.
#[derive(Clone)]
pub(crate) struct ResponseSettings {
    pub(crate) marker: HeaderName,
    pub(crate) kept_headers: KeptHeaders,
    pub(crate) retention: Duration,
    pub(crate) retention_by_status: HashMap<StatusCode, Duration>,
    pub(crate) max_body: usize,
    pub(crate) body_timeout: Duration,
    pub(crate) streamed_types: Vec<HeaderValue>,
    /// A recorded response is kept for one lease from its recording at least.
    pub(crate) lease: Duration,
    pub(crate) store_timeout: Duration,
    /// The schema of the values of a guard. `None` in a layer.
    #[cfg(feature = "guard")]
    pub(crate) schema: Option<String>,
    /// What encrypts the responses, if anything does.
    #[cfg(feature = "sealing")]
    pub(crate) sealing: Option<crate::sealing::settings::Sealing>,
    pub(crate) renderer: Renderer,
    pub(crate) warnings: Warnings,
}

impl Default for ResponseSettings {
    fn default() -> Self {
        Self {
            marker: REPLAYED,
            kept_headers: KeptHeaders::all_but_transient(),
            retention: Duration::from_secs(24 * 3600),
            retention_by_status: HashMap::new(),
            max_body: 1 << 20,
            body_timeout: Duration::from_secs(5),
            streamed_types: vec![HeaderValue::from_static("text/event-stream")],
            lease: Duration::from_secs(30),
            store_timeout: Duration::from_secs(5),
            #[cfg(feature = "guard")]
            schema: None,
            #[cfg(feature = "sealing")]
            sealing: None,
            renderer: Renderer::standard(),
            warnings: Warnings::default(),
        }
    }
}

impl ResponseSettings {
    /// Whether they are those of a guard.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn holds_values(&self) -> bool {
        #[cfg(feature = "guard")]
        return self.schema.is_some();
        #[cfg(not(feature = "guard"))]
        false
    }

    /// Removes the layer's own headers, which only the layer may set, and corrects the
    /// declared length of a body whose length is known.
    pub(crate) fn cleaned<B: Body>(&self, response: Response<B>) -> Response<B> {
        let (mut parts, body) = response.into_parts();
        parts.headers.remove(&self.marker);
        parts.headers.remove(RECORDED);
        correct_length(&mut parts, body.size_hint().exact());
        Response::from_parts(parts, body)
    }

    /// Whether the head of a response says that it is streamed and not kept.
    pub(crate) fn is_streamed(&self, response: &response::Parts) -> bool {
        response.status.is_informational()
            || response
                .headers
                .get(header::CONTENT_TYPE)
                .is_some_and(|value| {
                    let mut types = self.streamed_types.iter();
                    types.any(|streamed| essence_is(value, streamed))
                })
    }

    /// Returns the completion of a response; every recorded response passes here.
    /// It is a tombstone if the headers are too large or the status is an interim
    /// one.
    pub(crate) fn completion(
        &self,
        response: &response::Parts,
        body: &Bytes,
        trailers: Option<&HeaderMap>,
        attributes: &Attributes,
        keep_for: Option<Duration>,
    ) -> Completion {
        if response.status.is_informational() {
            self.warnings.warn(INTERIM, None, None);
            return self.tombstone(response.status, attributes, keep_for);
        }
        let kept = self.kept_headers.of(&response.headers, &self.marker);
        let recorded = encode_response(
            attributes,
            response.status,
            (&response.headers, |name| kept.header(name)),
            body,
            (trailers, |name| kept.trailer(name)),
        );
        if recorded.len() > self.max_body.saturating_add(MAX_HEADERS) {
            self.warnings.warn(TOO_LARGE, None, None);
            return self.tombstone(response.status, attributes, keep_for);
        }
        let status = || grpc::status_of(response.status, &response.headers, trailers);
        let retention = self.retention_of(status, keep_for);
        Completion::new(recorded, retention, self.lease)
    }

    /// Returns the completion of a response that a hook supplied.
    pub(crate) fn completion_of(&self, response: RecordedResponse) -> Completion {
        if let Some(value) = response.value() {
            if value.len() > self.max_body {
                self.warnings.warn(TOO_LARGE, None, None);
                return self.tombstone(StatusCode::OK, response.attributes(), None);
            }
            let retention = self.retention_of(|| StatusCode::OK, None);
            return Completion::new(response.encode(), retention, self.lease);
        }
        #[cfg(feature = "sealing")]
        if let Some(sealed) = response.as_sealed() {
            let retention = self.retention_of(|| StatusCode::OK, None);
            return Completion::new(sealed.clone(), retention, self.lease);
        }
        let attributes = response.attributes().clone();
        let Some(whole) = response.into_whole() else {
            return self.tombstone(StatusCode::OK, &attributes, None);
        };
        let (mut parts, ()) = Response::new(()).into_parts();
        parts.status = whole.status;
        parts.headers = whole.headers;
        let trailers = whole.trailers.as_deref();
        self.completion(&parts, &whole.body, trailers, &attributes, None)
    }

    /// Returns the completion of a response that was streamed.
    pub(crate) fn tombstone(
        &self,
        status: StatusCode,
        attributes: &Attributes,
        keep_for: Option<Duration>,
    ) -> Completion {
        let recorded = RecordedResponse::tombstone().with_attributes(attributes.clone());
        let recorded = recorded.encode();
        Completion::new(recorded, self.retention_of(|| status, keep_for), self.lease)
    }

    /// Returns the completion of a value, or why it cannot be kept.
    #[cfg(feature = "guard")]
    pub(crate) fn completion_of_value<T>(
        &self,
        value: &T,
        keep_for: Option<Duration>,
    ) -> Result<Completion, &'static str>
    where
        T: serde::Serialize + ?Sized,
    {
        let schema = self.schema.as_deref().unwrap_or_default();
        let recorded =
            RecordedResponse::of_value(value, schema).map_err(|_| VALUE_NOT_SERIALIZABLE)?;
        let bytes = recorded.value().map_or(0, Bytes::len);
        if bytes > self.max_body {
            return Err(VALUE_TOO_LARGE);
        }
        let retention = self.retention_of(|| StatusCode::OK, keep_for);
        Ok(Completion::new(recorded.encode(), retention, self.lease))
    }

    fn retention_of(
        &self,
        status: impl FnOnce() -> StatusCode,
        keep_for: Option<Duration>,
    ) -> Duration {
        let by_status = || match self.retention_by_status.is_empty() {
            true => None,
            false => self.retention_by_status.get(&status()).copied(),
        };
        keep_for
            .or_else(by_status)
            .unwrap_or(self.retention)
            .min(LONGEST_RETENTION)
    }

    /// Renders a refusal, and logs its warning.
    pub(crate) fn refuse<R: Body<Data = Bytes>>(
        &self,
        rejection: &Rejection,
        head: &RequestHead,
    ) -> Response<ResponseBody<R>> {
        rejection.log(&self.warnings);
        self.renderer
            .render(rejection, head, &self.warnings)
            .map(|body| ResponseBody::whole(body, None))
    }
}

fn essence_is(value: &HeaderValue, media_type: &HeaderValue) -> bool {
    let essence = value.as_bytes().split(|&byte| byte == b';').next();
    essence
        .unwrap_or_default()
        .trim_ascii()
        .eq_ignore_ascii_case(media_type.as_bytes())
}

/// The longest retention that a handler can ask for: ten years.
const LONGEST_RETENTION: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// What the headers and trailers of a kept response may take beside its body.
const MAX_HEADERS: usize = 64 << 10;
const INTERIM: &str = "response of a `Reconciler` not recorded, since its status is below 200: \
    retries get 409 response-not-replayable";
const TOO_LARGE: &str = "response not recorded, since its headers and body exceed `max_response_body` \
    by more than 64 KiB: retries get 409 response-not-replayable";
#[cfg(feature = "guard")]
const VALUE_NOT_SERIALIZABLE: &str = "value not recorded, since it cannot be written as JSON: calls with \
    its name get `NotReplayable`";
#[cfg(feature = "guard")]
const VALUE_TOO_LARGE: &str =
    "value not recorded, since it exceeds `max_value`: calls with its name get `NotReplayable`";
