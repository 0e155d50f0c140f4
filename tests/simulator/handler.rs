//! What is guarded: handlers that do well, fail, hang and lie.

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

/// What a handler does when it runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Deed {
    Quick,
    /// Longer than a lease: the heartbeat is needed.
    Slow,
    /// Longer than the longest run: the lease is lost, and the effect happens.
    Hang,
    /// As `Hang`, but it stops when it is told that its lease is lost.
    Heed,
    Panic,
    PanicAfterEffect,
    Fail,
    /// 500 before it did anything.
    Sorry,
    /// 429 before it did anything.
    Busy,
    /// 400, and the key is free for another request.
    ReleaseByWord,
    /// 500 after it did something, and said that it would.
    SorryAfterEffect,
    /// 502: somebody behind it gave up.
    BadGateway,
    /// Its answer is kept for a shorter time.
    KeepShortly,
    /// An answer that grows past what is kept.
    Live,
    /// An answer that breaks in the middle.
    BreakOff,
}

impl Deed {
    /// With how many parts in all each is drawn in the chaos.
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
        (Self::ReleaseByWord, 2),
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
            Self::ReleaseByWord => "release by word",
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

    /// A failure that says "nothing was done" has done nothing.
    fn has_effect(self) -> bool {
        !matches!(
            self,
            Self::Panic | Self::Sorry | Self::Busy | Self::ReleaseByWord
        )
    }

    fn status(self) -> StatusCode {
        match self {
            Self::Sorry | Self::SorryAfterEffect => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Busy => StatusCode::TOO_MANY_REQUESTS,
            Self::ReleaseByWord => StatusCode::BAD_REQUEST,
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
    let sent = request.into_body().collect().await?.to_bytes();
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
    if deed == Deed::ReleaseByWord {
        response
            .extensions_mut()
            .insert(Disposition::Release(Release::AnyRequest));
    }
    Ok(response)
}

/// The payload in two parts, trailers, and what else belongs to the deed.
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
