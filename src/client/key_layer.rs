//! Gives each request its key.

use std::task::{Context, Poll};

use http::{HeaderName, Method, Request};
use tower::{Layer, Service};

use super::OperationKey;

/// Gives requests the key of their operation.
///
/// A request that has the header keeps it. Otherwise it gets the [`OperationKey`] of its
/// extensions, or a new one if its method is POST or PATCH. Other methods are idempotent
/// by themselves, and get no key.
#[derive(Clone, Debug)]
#[must_use]
pub struct KeyLayer {
    header: HeaderName,
    is_quoted: bool,
}

impl KeyLayer {
    /// Makes keys that are UUIDs of version 7, and sends them as `Idempotency-Key`, without
    /// quotes.
    pub fn uuid_v7() -> Self {
        Self {
            header: crate::key::HEADER,
            is_quoted: false,
        }
    }

    /// Sends the key in this header. Defaults to `Idempotency-Key`.
    pub fn header(mut self, header: HeaderName) -> Self {
        self.header = header;
        self
    }

    /// Sends the key in quotes, as a String of RFC 9651. Services that follow the IETF
    /// draft to the letter require it; many others take the quotes as part of the key.
    /// Defaults to no quotes.
    pub fn quoted(mut self) -> Self {
        self.is_quoted = true;
        self
    }
}

impl<C> Layer<C> for KeyLayer {
    type Service = Keyed<C>;

    fn layer(&self, client: C) -> Keyed<C> {
        Keyed {
            client,
            settings: self.clone(),
        }
    }
}

/// A client whose requests have a key. Made by a [`KeyLayer`].
#[derive(Clone, Debug)]
pub struct Keyed<C> {
    client: C,
    settings: KeyLayer,
}

impl<C, B> Service<Request<B>> for Keyed<C>
where
    C: Service<Request<B>>,
{
    type Response = C::Response;
    type Error = C::Error;
    type Future = C::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.client.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> C::Future {
        let KeyLayer { header, is_quoted } = &self.settings;
        if !request.headers().contains_key(header) {
            let is_unsafe = matches!(*request.method(), Method::POST | Method::PATCH);
            let key = request.extensions().get::<OperationKey>().cloned();
            if let Some(key) = key.or_else(|| is_unsafe.then(OperationKey::uuid_v7)) {
                let value = key.header(*is_quoted);
                request.headers_mut().insert(header.clone(), value);
            }
        }
        self.client.call(request)
    }
}
