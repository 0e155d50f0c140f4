//! The store's connections, kept ready from one call to the next.
//!
//! sqlx's pool is not used. It pings a connection each time it is returned, which
//! costs a round trip for each call, and it repeats a refused attempt to connect
//! until the acquire timeout. Another pool would replace the semaphore and the stack
//! here, but not the rules for a server that does not answer.

use std::{
    mem,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection as _, PgConnection, SqlStr};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, timeout},
};

use super::{
    connector::{ConnectError, Connector},
    error::failure,
    session::Session,
};
use crate::{runtime::backoff::Backoff, store::StoreError};

pub(crate) struct Pool {
    connector: Arc<Connector>,
    permits: Arc<Semaphore>,
    max: u32,
    /// Names the limit, for errors.
    limit: String,
    /// The limit of a call's statements.
    pub(crate) call_timeout: Duration,
    /// How many calls wait for an answer of the server before they have a connection.
    connecting: AtomicU32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Ends with the connection that was used last.
    idle: Vec<Idle>,
    /// When a call last succeeded.
    answered: Option<Instant>,
    /// When a connection last broke or did not answer. Those used before may be
    /// broken too.
    suspected: Option<Instant>,
    is_closed: bool,
}

struct Idle {
    connection: PgConnection,
    opened: Instant,
    used: Instant,
}

/// A connection that a call uses.
struct Used {
    connection: PgConnection,
    opened: Instant,
    permit: OwnedSemaphorePermit,
}

impl Pool {
    /// Returns a pool of up to `max` connections, with a description of this limit.
    pub(super) fn new(
        connector: Arc<Connector>,
        max: u32,
        limit: String,
        call_timeout: Duration,
    ) -> Self {
        Self {
            connector,
            permits: Arc::new(Semaphore::new(max as usize)),
            max,
            limit,
            call_timeout,
            connecting: AtomicU32::new(0),
            state: Mutex::default(),
        }
    }

    /// Runs a call on one of the connections.
    ///
    /// Must be awaited in a task that is not dropped: a partial response would reach
    /// the next call.
    pub(crate) async fn run<T>(
        self: &Arc<Self>,
        call: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut used = self.acquire().await.map_err(StoreError::unsent)?;
        let begin = &self.connector.settings.begin;
        let answer = async {
            let connection = &mut used.connection;
            match begin {
                Some(begin) => in_transaction(connection, begin, call).await,
                None => {
                    let persistent = true;
                    call(&mut Session {
                        connection,
                        persistent,
                    })
                    .await
                }
            }
        };
        let Some(answer) = self.answer(answer).await else {
            // The server observes its own timeouts, so the network is at fault. A late
            // response must not reach the next call.
            self.suspect();
            return Err(StoreError::timed_out().because("the server did not answer"));
        };
        match &answer {
            Ok(_) => self.release(used),
            // The connection may be inside the transaction.
            Err(_) if begin.is_some() => drop(used),
            Err(_) => self.release_if_alive(used),
        }
        answer.map_err(|error| self.connector.schema.explain(error))
    }

    /// Fails if the server cannot be reached, unless a connection is idle or was
    /// answered a moment ago.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let Some(error) = self.connector.unreachable() else {
            return Ok(());
        };
        let state = self.state();
        if state.answered.is_some_and(is_recent) || !state.idle.is_empty() {
            return Ok(());
        }
        Err(error.unsent())
    }

    /// Awaits `future` for up to `limit`, or until the server cannot be reached.
    /// Returns `None` after `limit`.
    pub(crate) async fn while_reachable<F: Future>(
        &self,
        limit: Duration,
        future: F,
    ) -> Result<Option<F::Output>, StoreError> {
        let mut future = pin!(future);
        let mut left = limit;
        while !left.is_zero() {
            let soon = left.min(SLOW);
            if let Ok(output) = timeout(soon, &mut future).await {
                return Ok(Some(output));
            }
            self.connector.check_server();
            self.check()?;
            left -= soon;
        }
        Ok(None)
    }

    /// Returns how long large calls pause after one that took `elapsed`.
    ///
    /// Large calls would otherwise occupy a processor. While other calls are under way,
    /// large ones take about half of the time.
    pub(super) fn pause_after_large(&self, elapsed: Duration) -> Duration {
        match self.permits.available_permits() < self.max as usize {
            true => elapsed.min(LONGEST_YIELD),
            false => Duration::ZERO,
        }
    }

    /// Returns how many connections are idle.
    pub(super) fn idle(&self) -> usize {
        self.state().idle.len()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Closes the connections, each after its call.
    pub(super) async fn close(&self) {
        let idle = {
            let mut state = self.state();
            state.is_closed = true;
            mem::take(&mut state.idle)
        };
        for Idle { connection, .. } in idle {
            let _ = timeout(self.call_timeout, connection.close()).await;
        }
        self.connector.close();
        // A call holds its permit until its connection is closed.
        let _all = self.permits.acquire_many(self.max).await;
    }

    /// Returns `None` after the timeout of a call. A slow call makes the connector
    /// check the server.
    async fn answer<F: Future>(&self, call: F) -> Option<F::Output> {
        let mut call = pin!(call);
        let soon = self.call_timeout.min(SLOW);
        if let Ok(answer) = timeout(soon, &mut call).await {
            return Some(answer);
        }
        self.connector.check_server();
        timeout(self.call_timeout - soon, call).await.ok()
    }

    async fn acquire(&self) -> Result<Used, StoreError> {
        let mut busy = None;
        let used = timeout(self.connector.acquire_timeout, self.connection(&mut busy)).await;
        used.unwrap_or_else(|_| Err(busy.unwrap_or_else(|| self.timed_out())))
    }

    /// Returns a connection. While it waits for one, `busy` holds the server's
    /// reason to refuse another.
    async fn connection(&self, busy: &mut Option<StoreError>) -> Result<Used, StoreError> {
        // The semaphore is never closed.
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| failure(sqlx::Error::PoolClosed))?;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let found = match self.take_idle().await? {
                Some(idle) => Ok((idle.connection, idle.opened)),
                None => {
                    let connected = self.wait_for_server(self.connector.connect()).await;
                    connected.map(|connection| (connection, Instant::now()))
                }
            };
            match found {
                Ok((connection, opened)) => {
                    return Ok(Used {
                        connection,
                        opened,
                        permit,
                    });
                }
                Err(ConnectError::Failed(error)) => return Err(error),
                Err(ConnectError::Busy(error)) => *busy = Some(error),
            }
            // A connection of this pool may become idle sooner.
            sleep(backoff.pause()).await;
        }
    }

    /// Returns an idle connection that answers.
    async fn take_idle(&self) -> Result<Option<Idle>, StoreError> {
        loop {
            let (idle, suspected) = {
                let mut state = self.state();
                if state.is_closed {
                    return Err(failure(sqlx::Error::PoolClosed));
                }
                (state.idle.pop(), state.suspected)
            };
            let Some(mut idle) = idle else {
                return Ok(None);
            };
            // A ping before each call would double its time. One after a pause finds
            // the connections that a firewall dropped.
            let is_doubtful = suspected.is_some_and(|then| idle.used <= then);
            if !is_doubtful && idle.used.elapsed() <= TRUSTED_IDLE {
                return Ok(Some(idle));
            }
            if self.wait_for_server(answers(&mut idle.connection)).await {
                return Ok(Some(idle));
            }
            // Those used no later are probably broken too. To ping each of them would
            // take as long again.
            self.state().idle.retain(|other| other.used > idle.used);
        }
    }

    /// Awaits an answer of the server. If the wait is dropped, the server counts as
    /// silent.
    async fn wait_for_server<F: Future>(&self, answer: F) -> F::Output {
        struct Wait<'a>(&'a Pool, bool);

        impl Drop for Wait<'_> {
            fn drop(&mut self) {
                let Self(pool, is_answered) = self;
                if !*is_answered {
                    pool.suspect();
                }
                pool.connecting.fetch_sub(1, Ordering::Release);
            }
        }

        self.connecting.fetch_add(1, Ordering::Relaxed);
        let mut wait = Wait(self, false);
        let answer = answer.await;
        wait.1 = true;
        answer
    }

    /// Returns the error of a call that got no connection.
    fn timed_out(&self) -> StoreError {
        if let Some(error) = self.connector.unreachable() {
            return error;
        }
        let limit = self.connector.acquire_timeout;
        // Calls that wait for a permit end at the same moment as the one that waits
        // for the server.
        let is_silent = self.connecting.load(Ordering::Acquire) > 0
            || self.state().suspected.is_some_and(is_recent);
        let reason = match is_silent {
            true => format!("{} did not answer", self.connector.address()),
            false => format!("{}, and all are in use", self.limit),
        };
        StoreError::timed_out().because(format!(
            "no connection within `acquire_timeout` ({limit:?}): {reason}"
        ))
    }

    /// Keeps the connection, unless it has been open for long. Closes one that has
    /// been idle for long.
    fn release(&self, used: Used) {
        let now = Instant::now();
        let Used {
            connection,
            opened,
            permit,
        } = used;
        let surplus = {
            let mut state = self.state();
            state.answered = Some(now);
            if state.is_closed || opened + LONGEST_OPEN < now {
                Some(connection)
            } else {
                state.idle.push(Idle {
                    connection,
                    opened,
                    used: now,
                });
                let is_old = state.idle[0].used + LONGEST_IDLE < now;
                is_old.then(|| state.idle.remove(0).connection)
            }
        };
        if let Some(connection) = surplus {
            let limit = self.call_timeout;
            tokio::spawn(async move {
                let _ = timeout(limit, connection.close()).await;
                drop(permit);
            });
        }
    }

    /// Keeps the connection of a failed call if it still answers.
    fn release_if_alive(self: &Arc<Self>, mut used: Used) {
        let pool = Arc::clone(self);
        tokio::spawn(async move {
            if answers(&mut used.connection).await {
                pool.release(used);
            } else {
                pool.suspect();
            }
        });
    }

    fn suspect(&self) {
        self.state().suspected = Some(Instant::now());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_recent(then: Instant) -> bool {
    then.elapsed() < SLOW
}

async fn answers(connection: &mut PgConnection) -> bool {
    matches!(timeout(PING, connection.ping()).await, Ok(Ok(())))
}

/// Runs a call as a transaction, which leaves nothing behind on a server connection
/// that another client may get next.
async fn in_transaction<T>(
    connection: &mut PgConnection,
    begin: &SqlStr,
    call: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let begun = connection.begin_with(begin.clone()).await;
    let mut transaction = begun.map_err(failure)?;
    let mut session = Session {
        connection: &mut transaction,
        persistent: false,
    };
    let answer = call(&mut session).await;
    let ended = match answer.is_ok() {
        true => transaction.commit().await,
        false => transaction.rollback().await,
    };
    ended.map_err(failure)?;
    answer
}

/// A call that takes longer is slow.
const SLOW: Duration = Duration::from_secs(1);
const LONGEST_YIELD: Duration = Duration::from_millis(20);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
const PING: Duration = Duration::from_secs(1);
const TRUSTED_IDLE: Duration = Duration::from_secs(1);
const LONGEST_IDLE: Duration = Duration::from_secs(10 * 60);
const LONGEST_OPEN: Duration = Duration::from_secs(30 * 60);
