//! When a call is sent again.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, Request, Response, StatusCode, header};
use http_body_util::{Empty, Full};
use tokio::time::{Sleep, sleep};
use tower::retry::{
    Policy,
    budget::{Budget, TpsBudget},
};

use crate::runtime::backoff::Backoff;

/// Sends a call again where that is safe and may help.
///
/// | what came back | with a key, or a method that is idempotent by itself | POST or PATCH without a key |
/// |---|---|---|
/// | an error of the client | retried | retried if it [surely sent nothing](Self::unsent) |
/// | `Idempotent-Replayed: true` | final, whatever the status | final |
/// | 409 with `Retry-After` | retried: the first attempt still runs | final |
/// | 408, 425, 429 or 5xx | retried | final |
/// | anything else, also 409 without `Retry-After` | final | final |
///
/// A retry waits for a random time, up to a pause that doubles with each attempt. If the
/// `Retry-After` of the response is longer, in seconds or as a date, it waits for that. A
/// response whose `Retry-After` is beyond the [cap](Self::cap) is returned at once.
///
/// A request is retried only if its body can be [cloned](CloneBody). One that is streamed
/// is sent once.
///
/// The last response or error is returned as it came.
#[must_use]
pub struct KeyedRetry<E> {
    left: usize,
    cap: Duration,
    backoff: Backoff,
    budget: Arc<dyn Budget + Send + Sync>,
    header: HeaderName,
    replay_marker: HeaderName,
    unsent: Arc<dyn Fn(&E) -> bool + Send + Sync>,
}

impl<E> Default for KeyedRetry<E> {
    /// [`new`](Self::new).
    fn default() -> Self {
        Self::new()
    }
}

impl<E> KeyedRetry<E> {
    /// Sends a call up to three times, with pauses of up to 100 ms at first.
    pub fn new() -> Self {
        Self {
            left: 2,
            cap: Duration::from_secs(30),
            backoff: Backoff::new(FIRST_PAUSE, Duration::from_secs(30)),
            budget: Arc::new(TpsBudget::default()),
            header: crate::key::HEADER,
            replay_marker: crate::response::REPLAYED,
            unsent: Arc::new(|_| false),
        }
    }

    /// Sends a call up to this many times, the first one included. Zero counts as one.
    /// Defaults to 3.
    pub fn attempts(mut self, attempts: usize) -> Self {
        self.left = attempts.max(1) - 1;
        self
    }

    /// Limits each pause. A response that asks for a longer one is returned at once.
    /// Defaults to 30 seconds.
    pub fn cap(mut self, pause: Duration) -> Self {
        self.cap = pause;
        self.backoff = Backoff::new(FIRST_PAUSE.min(pause), pause);
        self
    }

    /// Shares a budget of retries among all calls that use it, so that a service that is
    /// down does not get each call several times. Clones of this policy share it too.
    ///
    /// Defaults to [`TpsBudget::default`]: 10 retries a second, and one for each five calls
    /// that needed none.
    pub fn budget(mut self, budget: Arc<dyn Budget + Send + Sync>) -> Self {
        self.budget = budget;
        self
    }

    /// Reads the key in this header. Defaults to `Idempotency-Key`.
    pub fn header(mut self, header: HeaderName) -> Self {
        self.header = header;
        self
    }

    /// Sets the header that marks a replay, which is final. Defaults to
    /// `Idempotent-Replayed`. A service with another
    /// [`replay_marker`](crate::IdempotencyBuilder::replay_marker) needs it here too.
    pub fn replay_marker(mut self, name: HeaderName) -> Self {
        self.replay_marker = name;
        self
    }

    /// Says of an error whether nothing of the request was sent, as after a refused
    /// connection. Such a call is retried without a key too. Defaults to never.
    pub fn unsent(mut self, unsent: impl Fn(&E) -> bool + Send + Sync + 'static) -> Self {
        self.unsent = Arc::new(unsent);
        self
    }

    /// Returns how long the service asks to wait, if the call may be sent again; zero if it
    /// does not ask. Returns `None` if the result is final.
    fn retry_after<B, R>(
        &self,
        request: &Request<B>,
        result: &Result<Response<R>, E>,
    ) -> Option<Duration> {
        // Nothing is known of other methods.
        let is_safe =
            request.headers().contains_key(&self.header) || request.method().is_idempotent();
        let response = match result {
            Err(error) => return (is_safe || (self.unsent)(error)).then_some(Duration::ZERO),
            Ok(response) => response,
        };
        let headers = response.headers();
        if !is_safe || headers.contains_key(&self.replay_marker) {
            return None;
        }
        let asked = headers.get(header::RETRY_AFTER).is_some();
        let may_help = match response.status() {
            StatusCode::CONFLICT => asked,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
                true
            }
            status => status.is_server_error(),
        };
        may_help.then(|| asked_pause(headers))
    }
}

impl<B, R, E> Policy<Request<B>, Response<R>, E> for KeyedRetry<E>
where
    B: CloneBody,
{
    type Future = Sleep;

    fn retry(
        &mut self,
        request: &mut Request<B>,
        result: &mut Result<Response<R>, E>,
    ) -> Option<Sleep> {
        let Some(asked) = self.retry_after(request, result) else {
            self.budget.deposit();
            return None;
        };
        if self.left == 0 || asked > self.cap || !self.budget.withdraw() {
            return None;
        }
        self.left -= 1;
        Some(sleep(self.backoff.full_jitter().max(asked)))
    }

    fn clone_request(&mut self, request: &Request<B>) -> Option<Request<B>> {
        let mut clone = Request::new(request.body().try_clone()?);
        *clone.method_mut() = request.method().clone();
        *clone.uri_mut() = request.uri().clone();
        *clone.version_mut() = request.version();
        *clone.headers_mut() = request.headers().clone();
        *clone.extensions_mut() = request.extensions().clone();
        Some(clone)
    }
}

impl<E> Clone for KeyedRetry<E> {
    fn clone(&self) -> Self {
        Self {
            left: self.left,
            cap: self.cap,
            backoff: self.backoff.clone(),
            budget: Arc::clone(&self.budget),
            header: self.header.clone(),
            replay_marker: self.replay_marker.clone(),
            unsent: Arc::clone(&self.unsent),
        }
    }
}

impl<E> fmt::Debug for KeyedRetry<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedRetry")
            .field("attempts", &(self.left + 1))
            .field("cap", &self.cap)
            .field("header", &self.header)
            .field("replay_marker", &self.replay_marker)
            .finish_non_exhaustive()
    }
}

/// A body of a request that may be sent again.
///
/// `Full<Bytes>`, `Empty<Bytes>`, `Bytes` and `String` are such bodies. A boxed body, as that of
/// axum, is not. Make the client for one of these, such as
/// `hyper_util::client::legacy::Client<_, Full<Bytes>>`, or implement this trait for a type of
/// your own.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a body that `KeyedRetry` can send again",
    note = "use `Full<Bytes>`, or implement `CloneBody` for a type of your own"
)]
pub trait CloneBody: Sized {
    /// Returns a body that sends the same bytes, or `None` if that is not possible, as for
    /// one that is streamed.
    fn try_clone(&self) -> Option<Self>;
}

impl CloneBody for Full<Bytes> {
    fn try_clone(&self) -> Option<Self> {
        Some(self.clone())
    }
}

impl CloneBody for Empty<Bytes> {
    fn try_clone(&self) -> Option<Self> {
        Some(*self)
    }
}

impl CloneBody for Bytes {
    fn try_clone(&self) -> Option<Self> {
        Some(self.clone())
    }
}

impl CloneBody for String {
    fn try_clone(&self) -> Option<Self> {
        Some(self.clone())
    }
}

/// Returns the pause of `Retry-After`; RFC 9110 § 10.2.3. A date counts from the response's
/// own `Date`, since the clocks of client and service differ.
fn asked_pause(headers: &HeaderMap) -> Duration {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let date = |text: &str| httpdate::parse_http_date(text).ok();
    let Some(asked) = text(header::RETRY_AFTER).map(str::trim) else {
        return Duration::ZERO;
    };
    if !asked.is_empty() && asked.bytes().all(|digit| digit.is_ascii_digit()) {
        return Duration::from_secs(asked.parse().unwrap_or(u64::MAX));
    }
    let now = text(header::DATE).and_then(date);
    let now = now.unwrap_or_else(SystemTime::now);
    let until = date(asked).and_then(|until| until.duration_since(now).ok());
    until.unwrap_or_default()
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
