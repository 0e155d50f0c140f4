//! A guarded service that shows what the layer made of a request.

use std::{
    cell::RefCell,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use http::{Request, Response, response};
use http_body_util::{BodyExt as _, Full};
use tokio::runtime::{Builder, Runtime};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    Fingerprinting, IdempotencyBuilder, IdempotencyLayer, MemoryStore, Operation, RequestBody,
    Scope, Store,
    store::{Fingerprint, RecordName},
};

/// Runs a future on this thread, under a paused clock.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    thread_local! {
        static RUNTIME: RefCell<Runtime> = RefCell::new(
            Builder::new_current_thread()
                .enable_time()
                .start_paused(true)
                .build()
                .expect("a runtime of one thread needs nothing"),
        );
    }
    RUNTIME.with_borrow(|runtime| runtime.block_on(future))
}

/// The end of a request.
pub(crate) enum Probed {
    /// It ran under this name.
    Ran(RecordName),
    /// It was answered by the layer.
    Answered(response::Parts, Bytes),
}

/// Sends one request to a handler behind the layer.
pub(crate) fn probe<S: Store>(builder: IdempotencyBuilder<S>, request: Request<Bytes>) -> Probed {
    let layer = builder.build().expect("the settings are valid");
    let ran = Arc::new(Mutex::new(None));
    let seen = Arc::clone(&ran);
    let service = layer.layer(service_fn(
        move |request: Request<RequestBody<Full<Bytes>>>| {
            let operation = request.extensions().get::<Operation>();
            let name = operation.map(|operation| {
                RecordName::new(operation.scope().clone(), operation.key().clone())
            });
            *seen.lock().expect("nothing panics under this lock") = name;
            async { Ok::<_, http::Error>(Response::new(Full::<Bytes>::default())) }
        },
    ));
    let (parts, body) = block_on(async {
        let request = request.map(Full::new);
        let response = service
            .oneshot(request)
            .await
            .expect("the handler does not fail");
        let (parts, body) = response.into_parts();
        let body = body.collect().await.expect("the body is whole").to_bytes();
        (parts, body)
    });
    let ran = ran.lock().expect("nothing panics under this lock").take();
    match ran {
        Some(name) => Probed::Ran(name),
        None => Probed::Answered(parts, body),
    }
}

/// The fingerprint of a request with a key; `None` if its body has none.
pub(crate) fn fingerprint(
    fingerprinting: Fingerprinting,
    request: Request<Bytes>,
) -> Option<Fingerprint> {
    let store = MemoryStore::new();
    let builder = IdempotencyLayer::required(store.clone(), |_| Some(Scope::single_tenant()))
        .fingerprint(fingerprinting);
    match probe(builder, request) {
        Probed::Ran(name) => {
            let record = block_on(store.read(&name)).expect("memory answers");
            Some(record.expect("the request ran").fingerprint)
        }
        Probed::Answered(parts, body) => {
            let body = String::from_utf8_lossy(&body);
            assert!(
                parts.status == 400 && body.contains("body-invalid"),
                "{parts:?} {body}"
            );
            None
        }
    }
}
