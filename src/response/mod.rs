//! What of a response is kept, and for how long.

pub(crate) mod headers;
pub(crate) mod recorded;
mod replay;

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header, response};

use crate::{
    Word,
    config::{Config, LONGEST, RECORDED},
    response::recorded::{RecordedResponse, encode},
    store::Completion,
};

impl Config {
    /// The handler's response without the layer's own headers, which only the
    /// layer may set.
    pub(crate) fn cleaned<B>(&self, mut response: Response<B>) -> Response<B> {
        let headers = response.headers_mut();
        headers.remove(&self.marker);
        headers.remove(RECORDED);
        response
    }

    /// Whether a response is known from its head not to be kept.
    pub(crate) fn goes_out_live(&self, response: &response::Parts) -> bool {
        response.status.is_informational()
            || response
                .headers
                .get(header::CONTENT_TYPE)
                .is_some_and(|value| {
                    self.streamed_types
                        .iter()
                        .any(|live| essence_is(value, live))
                })
    }

    /// Everything that is recorded passes here: a response that was gathered to
    /// its end, or that a hook supplied. It becomes a tombstone if its headers are
    /// out of all proportion, or if its status cannot be that of an answer.
    pub(crate) fn completion(
        &self,
        response: &response::Parts,
        body: &Bytes,
        trailers: Option<&HeaderMap>,
        word: Word,
    ) -> Completion {
        if response.status.is_informational() {
            self.warnings.warn(INTERIM, None, None);
            return self.tombstone(response.status, word);
        }
        let kept = self.kept_headers.of(&response.headers, &self.marker);
        let recorded = encode(
            response.status,
            (&response.headers, |name| kept.header(name)),
            body,
            (trailers, |name| kept.trailer(name)),
        );
        if recorded.len() > self.max_response_body.saturating_add(HEADER_ROOM) {
            self.warnings.warn(TOO_MUCH, None, None);
            return self.tombstone(response.status, word);
        }
        Completion::new(recorded, self.kept_for(response.status, word), self.lease)
    }

    /// What a store keeps of a response that went out live.
    pub(crate) fn tombstone(&self, status: StatusCode, word: Word) -> Completion {
        let recorded = RecordedResponse::tombstone().encode();
        Completion::new(recorded, self.kept_for(status, word), self.lease)
    }

    fn kept_for(&self, status: StatusCode, word: Word) -> Duration {
        word.retention()
            .unwrap_or_else(|| self.retention_of(status))
            .min(LONGEST)
    }
}

fn essence_is(value: &HeaderValue, media_type: &HeaderValue) -> bool {
    let essence = value.as_bytes().split(|&byte| byte == b';').next();
    essence
        .unwrap_or_default()
        .trim_ascii()
        .eq_ignore_ascii_case(media_type.as_bytes())
}

/// hyper sends a handler's `Content-Length` as it is, even when it is wrong,
/// and the connection breaks. A 304 describes another response's length.
pub(crate) fn correct_length(parts: &mut response::Parts, length: Option<u64>) {
    let Some(length) = length else {
        return;
    };
    if !parts.headers.contains_key(header::CONTENT_LENGTH) {
        return;
    }
    match parts.status {
        StatusCode::NOT_MODIFIED => {}
        StatusCode::NO_CONTENT => {
            parts.headers.remove(header::CONTENT_LENGTH);
        }
        _ => {
            parts.headers.insert(header::CONTENT_LENGTH, length.into());
        }
    }
}

/// The length that a server will stop at.
pub(crate) fn declared_length(parts: &response::Parts) -> Option<u64> {
    let length = parts.headers.get(header::CONTENT_LENGTH)?;
    length.to_str().ok()?.parse().ok()
}

/// What the lines of a kept response may take beside its body.
const HEADER_ROOM: usize = 64 << 10;
const INTERIM: &str = "response of a `Reconciler` not recorded, since its status is below 200: \
    retries get 409 response-not-replayable";
const TOO_MUCH: &str = "response not recorded, since its headers and body exceed `max_response_body` by \
    more than 64 KiB: retries get 409 response-not-replayable";
