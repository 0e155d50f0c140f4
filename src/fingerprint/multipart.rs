//! Multipart bodies part by part, so that the boundary does not count.

use std::convert::Infallible;

use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use multer::Multipart;

use super::{
    digest::{BodyFault, Framed},
    media_type::MediaType,
};

pub(super) fn hash(media_type: &MediaType<'_>, body: &Bytes) -> Result<Framed, BodyFault> {
    let boundary = media_type.boundary().ok_or(NO_BOUNDARY)?;
    let whole = stream::iter([Ok::<_, Infallible>(body.clone())]);
    let mut parts = Multipart::new(whole, boundary);
    let mut framed = Framed::default();
    // The body is here in full, so that nothing is ever waited for.
    async {
        while let Some(part) = parts.next_field().await? {
            framed.count(part.headers().len());
            for (name, value) in part.headers() {
                framed.field(name.as_str().as_bytes());
                framed.field(value.as_bytes());
            }
            framed.field(&part.bytes().await?);
        }
        Ok::<_, multer::Error>(framed)
    }
    .now_or_never()
    .and_then(Result::ok)
    .ok_or(BodyFault("it is not valid multipart"))
}

const NO_BOUNDARY: BodyFault = BodyFault("its media type does not name one multipart boundary");
