//! Multipart bodies part by part, so that the boundary does not count.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use http::{HeaderMap, header};
use multer::Multipart;

use super::{BodyFault, Framed};

pub(super) fn hash(
    headers: &HeaderMap,
    body: &Bytes,
    framed: &mut Framed,
) -> Result<(), BodyFault> {
    let boundary = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| multer::parse_boundary(value).ok())
        .ok_or(BodyFault("its media type names no multipart boundary"))?;
    let whole = stream::iter([Ok::<_, Infallible>(body.clone())]);
    let mut parts = Multipart::new(whole, boundary);
    // The body is here in full, so that nothing is ever waited for.
    async {
        while let Some(part) = parts.next_field().await? {
            framed.tag(b'+');
            framed.count(part.headers().len());
            for (name, value) in part.headers() {
                framed.field(name.as_str().as_bytes());
                framed.field(value.as_bytes());
            }
            framed.field(&part.bytes().await?);
        }
        Ok::<_, multer::Error>(())
    }
    .now_or_never()
    .and_then(Result::ok)
    .ok_or(BodyFault("its multipart body cannot be taken apart"))
}
