//! A record becomes a response again.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header};
use http_body::Body;

use crate::{ResponseBody, record::WholeResponse};

/// The recorded response, marked as a replay.
///
/// Its length and date are left to the server, which knows the connection.
pub(crate) fn replay<B: Body<Data = Bytes>>(
    recorded: WholeResponse,
    marker: &HeaderName,
) -> Response<ResponseBody<B>> {
    let mut headers = recorded.headers;
    headers.insert(marker, HeaderValue::from_static("true"));
    // hyper sends trailers over HTTP/1.1 only if they were announced.
    if let Some(announced) = announcement(&recorded.trailers) {
        headers.insert(header::TRAILER, announced);
    }
    let body = ResponseBody::whole(recorded.body, Some(recorded.trailers));
    let mut response = Response::new(body);
    *response.status_mut() = recorded.status;
    *response.headers_mut() = headers;
    response
}

fn announcement(trailers: &HeaderMap) -> Option<HeaderValue> {
    let names: Vec<_> = trailers.keys().map(HeaderName::as_str).collect();
    if names.is_empty() {
        return None;
    }
    HeaderValue::try_from(names.join(", ")).ok()
}
