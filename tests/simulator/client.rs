//! Clients that retry, leave early and reuse keys.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body::Body;
use http_body_util::{BodyExt as _, Full};
use tokio::time::sleep;
use tower::{Service as _, ServiceExt as _};
use tower_idempotency::Outcome;

use crate::{
    history::{Answer, Event},
    world::World,
};

/// Sends requests until the chaos is over.
pub(crate) async fn client(world: Arc<World>) {
    while !world.is_calm() {
        let (name, other) = world.intention();
        let body = if other { OTHER } else { USUAL };
        let patience = world.patience();
        request(&world, name, body, patience).await;
        sleep(world.up_to(Duration::from_millis(900))).await;
    }
}

/// Sends one request to a host that is up, and returns the answer that the client
/// gets.
pub(crate) async fn request(
    world: &World,
    name: usize,
    body: &'static str,
    patience: Duration,
) -> Option<Answer> {
    let (host, mut service, life) = world.some_host()?;
    let request = world.request();
    world.push(Event::Sent {
        request,
        name,
        host,
        body,
    });
    let (scope, key) = world.spelled(name);
    let sent = Request::post("/charges")
        .header("x-account", scope)
        .header("idempotency-key", format!("\"{key}\""))
        .body(
            Full::new(Bytes::from_static(body.as_bytes()))
                .map_err(|never| match never {})
                .boxed_unsync(),
        )
        .expect("the request is well-formed");
    let exchange = async {
        let response = service.ready().await.ok()?.call(sent).await.ok()?;
        let outcome = response.extensions().get::<Outcome>()?.name();
        let (parts, body) = response.into_parts();
        let mut body = pin!(body);
        let (mut data, mut trailers) = (Vec::new(), HeaderMap::new());
        while let Some(frame) = std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            match frame.ok()?.into_data() {
                Ok(bytes) => data.extend_from_slice(&bytes),
                Err(frame) => trailers = frame.into_trailers().ok()?,
            }
        }
        let mut headers = parts.headers;
        let marked_replay = headers.remove("idempotent-replayed").is_some();
        headers.remove("idempotent-recorded");
        headers.remove("trailer");
        Some(Answer {
            outcome,
            status: parts.status.as_u16(),
            headers: lines(&headers),
            body: String::from_utf8_lossy(&data).trim_end().to_owned(),
            trailers: lines(&trailers),
            marked_replay,
        })
    };
    let ended = tokio::select! {
        biased;
        () = life.cancelled() => Err("its host died"),
        () = sleep(patience) => Err("impatient"),
        answer = exchange => answer.ok_or("the answer broke"),
    };
    match ended {
        Ok(answer) => {
            world.push(Event::Answered {
                request,
                answer: answer.clone(),
            });
            Some(answer)
        }
        Err(why) => {
            world.push(Event::Left { request, why });
            None
        }
    }
}

fn lines(headers: &HeaderMap) -> Vec<(String, Vec<u8>)> {
    headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.as_bytes().to_vec()))
        .collect()
}

pub(crate) const USUAL: &str = "amount=100";
pub(crate) const OTHER: &str = "amount=999";
