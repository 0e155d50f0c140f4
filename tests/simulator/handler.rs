//! The guarded handlers: they succeed, fail and hang.

use std::{future::pending, panic::resume_unwind, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody, combinators::UnsyncBoxBody};
use thiserror::Error;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower_idempotency::{Disposition, Operation, Release, RequestBody};

use crate::{
    history::Event,
    world::{LEASE, LONGEST_RUN, RESPONSE_LIMIT, World},
};

pub(crate) type SimBody = UnsyncBoxBody<Bytes, Broken>;

/// A service or a body that breaks.
#[derive(Debug, Error)]
#[error("broken")]
pub(crate) struct Broken;

/// What one run of a handler does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Deed {
    Quick,
    /// Runs for longer than a lease, so that it needs heartbeats.
    Slow,
    /// Runs past `max_run_time`, loses its lease, and has its effect.
    Hang,
    /// As `Hang`, but stops once `lease_lost` resolves.
    Heed,
    Panic,
    PanicAfterEffect,
    Fail,
    /// Answers 500 without an effect.
    Sorry,
    /// Answers 429 without an effect.
    Busy,
    /// Answers 400 and releases the key for any request.
    ReleaseForAny,
    /// Answers 500 after `effects_started` and an effect.
    SorryAfterEffect,
    /// Answers 502 after an effect.
    BadGateway,
    /// Keeps its answer for one lease.
    KeepShortly,
    /// Answers with more than `max_response_body`.
    Live,
    /// Answers with a body that breaks in the middle.
    BreakOff,
}

impl Deed {
    /// The weight of each in a random choice.
    pub(crate) const ALL: [(Self, u32); 15] = [
        (Self::Quick, 8),
        (Self::Slow, 6),
        (Self::Hang, 1),
        (Self::Heed, 1),
        (Self::Panic, 1),
        (Self::PanicAfterEffect, 1),
        (Self::Fail, 1),
        (Self::Sorry, 2),
        (Self::Busy, 2),
        (Self::ReleaseForAny, 2),
        (Self::SorryAfterEffect, 1),
        (Self::BadGateway, 1),
        (Self::KeepShortly, 1),
        (Self::Live, 2),
        (Self::BreakOff, 1),
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Slow => "slow",
            Self::Hang => "hang",
            Self::Heed => "heed",
            Self::Panic => "panic",
            Self::PanicAfterEffect => "panic after effect",
            Self::Fail => "fail",
            Self::Sorry => "500",
            Self::Busy => "429",
            Self::ReleaseForAny => "release for any",
            Self::SorryAfterEffect => "500 after effect",
            Self::BadGateway => "502",
            Self::KeepShortly => "keep shortly",
            Self::Live => "streamed",
            Self::BreakOff => "break off",
        }
    }

    fn time(self) -> Duration {
        match self {
            Self::Slow => LEASE * 2,
            Self::Hang | Self::Heed => LONGEST_RUN + LEASE * 2,
            _ => Duration::from_millis(60),
        }
    }

    /// A response that releases the key follows no effect.
    fn has_effect(self) -> bool {
        !matches!(
            self,
            Self::Panic | Self::Sorry | Self::Busy | Self::ReleaseForAny
        )
    }

    fn status(self) -> StatusCode {
        match self {
            Self::Sorry | Self::SorryAfterEffect => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::ReleaseForAny => StatusCode::BAD_REQUEST,
            Self::BadGateway => StatusCode::BAD_GATEWAY,
            _ => StatusCode::CREATED,
        }
    }
}

/// Runs until it ends or its host dies; a dead host's handler has no effects.
pub(crate) async fn handle(
    world: Arc<World>,
    host: usize,
    life: CancellationToken,
    request: Request<RequestBody<SimBody>>,
) -> Result<Response<SimBody>, Broken> {
    match life.run_until_cancelled(work(&world, host, request)).await {
        Some(answered) => answered,
        None => pending().await,
    }
}

async fn work(
    world: &Arc<World>,
    host: usize,
    request: Request<RequestBody<SimBody>>,
) -> Result<Response<SimBody>, Broken> {
    let operation = request.extensions().get::<Operation>().cloned();
    let operation = operation.expect("I12: nothing runs unguarded here");
    let name = world.numbered(operation.scope(), operation.key());
    let sent = request.into_body().collect().await.map_err(|_| Broken)?;
    let sent = sent.to_bytes();
    let body = World::body_of(&sent);
    let deed = world.deed();
    let run = world.run();
    let (id, attempt, fence) = (
        world.operation(operation.id()),
        operation.attempt(),
        operation.fence().get(),
    );
    world.push(Event::Started {
        run,
        name,
        host,
        operation: id,
        attempt,
        fence,
        body,
        deed: deed.name(),
    });
    if deed == Deed::Heed {
        tokio::select! {
            biased;
            () = operation.lease_lost() => {
                world.push(Event::Finished { run });
                return Err(Broken);
            }
            () = sleep(deed.time()) => {}
        }
    } else {
        sleep(world.up_to(deed.time())).await;
    }
    if deed.has_effect() {
        operation.effects_started();
        world.push(Event::Affected { run });
        world.charge(&operation.derive("charge"));
        sleep(world.up_to(deed.time())).await;
    }
    world.push(Event::Finished { run });
    match deed {
        Deed::Panic | Deed::PanicAfterEffect => resume_unwind(Box::new("a handler's panic")),
        Deed::Fail => return Err(Broken),
        Deed::KeepShortly => operation.keep_for(LEASE),
        _ => {}
    }
    let said = world.payload(name, body, id, attempt, fence);
    let mut response = Response::new(answer_body(deed, said));
    *response.status_mut() = deed.status();
    let headers = response.headers_mut();
    headers.append("link", HeaderValue::from_static("</a>, </b>"));
    headers.append("x-attempt", HeaderValue::from(attempt));
    headers.append("link", HeaderValue::from_static("</c>"));
    if deed == Deed::ReleaseForAny {
        response
            .extensions_mut()
            .insert(Disposition::Release(Release::AnyRequest));
    }
    Ok(response)
}

/// The payload in two frames, and trailers.
fn answer_body(deed: Deed, said: String) -> SimBody {
    let said = Bytes::from(said);
    let half = said.len() / 2;
    let mut frames = vec![
        Ok(Frame::data(said.slice(..half))),
        Ok(Frame::data(said.slice(half..))),
    ];
    match deed {
        Deed::Live => {
            let more = Bytes::from(vec![b' '; RESPONSE_LIMIT / 4]);
            frames.extend((0..8).map(|_| Ok(Frame::data(more.clone()))));
        }
        Deed::BreakOff => frames.push(Err(Broken)),
        _ => {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-length", HeaderValue::from(said.len()));
            frames.push(Ok(Frame::trailers(trailers)));
        }
    }
    let frames = stream::iter(frames).then(|frame| async {
        sleep(Duration::from_millis(7)).await;
        frame
    });
    StreamBody::new(frames).boxed_unsync()
}
