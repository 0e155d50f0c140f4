//! A record becomes a response again.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode, header};
use http_body::Body;

use super::{
    headers::{KeptHeaders, retain},
    kept::WholeResponse,
};
use crate::body::ResponseBody;

impl WholeResponse {
    /// Everything that is replayed passes here: the recorded response, marked as a
    /// replay. `None` if its status cannot be that of an answer.
    ///
    /// An operator may have recorded it, or a layer with other settings: the rules
    /// for headers apply once more. Its length and date are left to the server,
    /// which knows the connection.
    pub(crate) fn replay<B: Body<Data = Bytes>>(
        self,
        kept_headers: &KeptHeaders,
        marker: &HeaderName,
    ) -> Option<Response<ResponseBody<B>>> {
        let Self {
            status,
            mut headers,
            mut body,
            mut trailers,
        } = self;
        if status.is_informational() {
            return None;
        }
        let kept = kept_headers.of(&headers, marker);
        retain(&mut headers, |name| kept.header(name));
        if let Some(trailers) = &mut trailers {
            retain(trailers, |name| kept.trailer(name));
        }
        if matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED) {
            body.clear();
            trailers = None;
        }
        headers.insert(marker, HeaderValue::from_static("true"));
        // hyper sends trailers over HTTP/1.1 only if they were announced.
        if let Some(announced) = trailers.as_deref().and_then(announcement) {
            headers.insert(header::TRAILER, announced);
        }
        let mut response = Response::new(ResponseBody::whole(body, trailers));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        Some(response)
    }
}

fn announcement(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    if names.is_empty() {
        return None;
    }
    HeaderValue::try_from(names.join(", ")).ok()
}
