//! The store's connections: at most so many, kept ready from one call to the
//! next.

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
    failure,
    opener::{OpenError, Opener},
    schema::Statements,
    session::Session,
};
use crate::{backoff::jittered, store::StoreError};

pub(super) struct Connections {
    opener: Arc<Opener>,
    /// How long a call waits for a connection.
    patience: Duration,
    places: Arc<Semaphore>,
    most: u32,
    /// Says how many there are, and the setting that bounds them.
    bound: String,
    /// How many of the calls with a place wait for the server.
    asking: AtomicU32,
    ready: Mutex<Ready>,
    /// For the statements of a call, and the way there.
    pub(super) deadline: Duration,
    /// What begins the transaction of a call behind a pooler.
    begin: Option<SqlStr>,
    pub(super) sql: Arc<Statements>,
}

#[derive(Default)]
struct Ready {
    /// The one used last is the last.
    idle: Vec<Idle>,
    /// When a call last succeeded.
    answered: Option<Instant>,
    /// A connection broke then: those that were used before may be broken too.
    suspected: Option<Instant>,
    is_closed: bool,
}

struct Idle {
    connection: PgConnection,
    opened: Instant,
    used: Instant,
}

/// What a call without a connection waits for.
enum Wait<'a> {
    /// One of the store's connections, which others use.
    Free,
    /// The server, which is asked on one of them or for a new one.
    Answer {
        since: Instant,
        /// Until the call has given its place back.
        _asking: Asking<'a>,
    },
    /// The server, which has no room for another connection.
    Room(StoreError),
}

/// Counts a call that waits for the server.
struct Asking<'a>(&'a AtomicU32);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// A connection for one call.
struct Line {
    connection: PgConnection,
    opened: Instant,
    place: OwnedSemaphorePermit,
}

impl Connections {
    /// As many as `most`; `bound` says so in errors.
    pub(super) fn of(
        opener: Arc<Opener>,
        (most, bound): (u32, String),
        patience: Duration,
        deadline: Duration,
        begin: Option<SqlStr>,
        sql: Arc<Statements>,
    ) -> Self {
        Self {
            opener,
            patience,
            places: Arc::new(Semaphore::new(most as usize)),
            most,
            bound,
            asking: AtomicU32::new(0),
            ready: Mutex::default(),
            deadline,
            begin,
            sql,
        }
    }

    /// Runs work on one of the connections. To be called from a task that is
    /// never dropped: half a conversation would be the next call's to hear.
    pub(super) async fn run<T>(
        self: &Arc<Self>,
        work: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut wait = Wait::Free;
        let line = timeout(self.patience, self.line(&mut wait)).await;
        let line = line.unwrap_or_else(|_| Err(self.timed_out(wait)));
        let mut line = line.map_err(StoreError::unsent)?;
        let call = async {
            match &self.begin {
                None => work(&mut Session::lasting(&mut line.connection, &self.sql)).await,
                Some(begin) => in_transaction(&mut line.connection, &self.sql, begin, work).await,
            }
        };
        let Some(answer) = self.within(self.deadline, call).await else {
            // The server keeps to its own timeouts, so the network does not
            // answer. What still comes is not for the next call to read.
            self.suspect();
            return Err(StoreError::timed_out().because("the server did not answer"));
        };
        match &answer {
            Ok(_) => self.keep(line),
            // What began a transaction may have left it open.
            Err(_) if self.begin.is_some() => drop(line),
            Err(_) => Arc::clone(self).examine(line),
        }
        answer.map_err(|error| self.sql.explain(error))
    }

    /// Fails if a call could only wait in vain: the server cannot be reached, and
    /// no connection is free or has been answered lately.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        let Some(error) = self.opener.unreachable() else {
            return Ok(());
        };
        let ready = self.ready();
        let is_answered = ready.answered.is_some_and(|then| then.elapsed() < SLOW);
        if is_answered || !ready.idle.is_empty() {
            return Ok(());
        }
        Err(error.unsent())
    }

    /// Returns `None` if the call takes longer than `bound`. A slow call makes the
    /// store look for the server.
    async fn within<F: Future>(&self, bound: Duration, call: F) -> Option<F::Output> {
        let mut call = pin!(call);
        let soon = bound.min(SLOW);
        if let Ok(answer) = timeout(soon, &mut call).await {
            return Some(answer);
        }
        self.opener.doubt();
        timeout(bound - soon, call).await.ok()
    }

    /// As [`within`](Self::within), and fails once the server cannot be reached.
    pub(super) async fn while_reachable<F: Future>(
        &self,
        bound: Duration,
        call: F,
    ) -> Result<Option<F::Output>, StoreError> {
        let mut call = pin!(call);
        let mut left = bound;
        while !left.is_zero() {
            let soon = left.min(SLOW);
            if let Ok(answer) = timeout(soon, &mut call).await {
                return Ok(Some(answer));
            }
            self.opener.doubt();
            self.check()?;
            left -= soon;
        }
        Ok(None)
    }

    /// The error of a call that got no connection within `acquire_timeout`.
    fn timed_out(&self, wait: Wait<'_>) -> StoreError {
        let patience = self.patience;
        let reason = match wait {
            Wait::Room(error) => return error,
            Wait::Answer { since, .. } => {
                self.suspect();
                let waited = Duration::from_millis(since.elapsed().as_millis() as u64);
                format!(
                    "{} did not answer in {waited:?}, the rest of `acquire_timeout` ({patience:?})",
                    self.opener.address()
                )
            }
            Wait::Free => {
                if let Some(error) = self.opener.unreachable() {
                    return error;
                }
                let bound = &self.bound;
                let none = format!(
                    "no connection was free within `acquire_timeout` ({patience:?}): {bound}"
                );
                match self.is_silent() {
                    true => format!("{none}, while {} did not answer", self.opener.address()),
                    false => none,
                }
            }
        };
        StoreError::timed_out().because(reason)
    }

    /// How many are ready.
    pub(super) fn num_idle(&self) -> usize {
        self.ready().idle.len()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.ready().is_closed
    }

    /// Closes the connections, each after its call.
    pub(super) async fn close(&self) {
        let idle = {
            let mut ready = self.ready();
            ready.is_closed = true;
            mem::take(&mut ready.idle)
        };
        for Idle { connection, .. } in idle {
            let _ = timeout(self.deadline, connection.close()).await;
        }
        self.opener.close();
        // Each call that is under way has a place, and closes its connection.
        let _all = self.places.acquire_many(self.most).await;
    }

    /// Keeps `wait` up to date, for the error of a call that runs out of time.
    async fn line<'a>(&'a self, wait: &mut Wait<'a>) -> Result<Line, StoreError> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(|_| failure(sqlx::Error::PoolClosed))?;
        let mut pause = FIRST_PAUSE;
        loop {
            let (idle, suspected) = {
                let mut ready = self.ready();
                if ready.is_closed {
                    return Err(failure(sqlx::Error::PoolClosed));
                }
                (ready.idle.pop(), ready.suspected)
            };
            let Some(Idle {
                mut connection,
                opened,
                used,
            }) = idle
            else {
                self.asks(wait);
                match self.opener.open().await {
                    Ok(connection) => {
                        return Ok(Line {
                            connection,
                            opened: Instant::now(),
                            place,
                        });
                    }
                    Err(OpenError::Failed(error)) => return Err(error),
                    Err(OpenError::Busy(error)) => *wait = Wait::Room(error),
                }
                // One of the store's own may be free sooner.
                sleep(jittered(pause)).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            };
            // A question before every call would double the time of each; one
            // after a pause finds the connections that a firewall forgot.
            let is_doubtful = suspected.is_some_and(|then| used <= then);
            if is_doubtful || used.elapsed() > TRUSTED_IDLE {
                self.asks(wait);
                if !answers(&mut connection).await {
                    self.forget_used_before(used);
                    continue;
                }
            }
            return Ok(Line {
                connection,
                opened,
                place,
            });
        }
    }

    fn asks<'a>(&'a self, wait: &mut Wait<'a>) {
        // A server without room may well be asked again when the time is over.
        if !matches!(wait, Wait::Room(_)) {
            self.asking.fetch_add(1, Ordering::Relaxed);
            *wait = Wait::Answer {
                since: Instant::now(),
                _asking: Asking(&self.asking),
            };
        }
    }

    /// Keeps the connection ready, unless it has been open for long, and closes one
    /// that has been idle for long.
    fn keep(&self, line: Line) {
        let now = Instant::now();
        let Line {
            connection,
            opened,
            place,
        } = line;
        let mut leaving = None;
        {
            let mut ready = self.ready();
            ready.answered = Some(now);
            if ready.is_closed || opened + LONGEST_OPEN < now {
                leaving = Some(connection);
            } else {
                ready.idle.push(Idle {
                    connection,
                    opened,
                    used: now,
                });
                if ready.idle[0].used + LONGEST_IDLE < now {
                    leaving = Some(ready.idle.remove(0).connection);
                }
            }
        }
        if let Some(connection) = leaving {
            let deadline = self.deadline;
            tokio::spawn(async move {
                let _ = timeout(deadline, connection.close()).await;
                drop(place);
            });
        }
    }

    /// Keeps the connection of a call that failed only if it still answers; one
    /// with a statement on its way does not at once.
    fn examine(self: Arc<Self>, mut line: Line) {
        tokio::spawn(async move {
            if answers(&mut line.connection).await {
                self.keep(line);
            } else {
                self.suspect();
            }
        });
    }

    /// What was used no later than a connection that is broken is broken too, in
    /// all likelihood: to ask each of them would take as long for each.
    fn forget_used_before(&self, used: Instant) {
        self.ready().idle.retain(|idle| idle.used > used);
    }

    /// Whether a call waits for the server in vain, or lately has. Such calls end at
    /// the same moment as those behind them.
    fn is_silent(&self) -> bool {
        let is_asked = self.asking.load(Ordering::Acquire) > 0;
        let suspected = self.ready().suspected;
        is_asked || suspected.is_some_and(|then| then.elapsed() < SLOW)
    }

    fn suspect(&self) {
        self.ready().suspected = Some(Instant::now());
    }

    fn ready(&self) -> MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether there is still a server at the other end.
async fn answers(connection: &mut PgConnection) -> bool {
    matches!(timeout(PING, connection.ping()).await, Ok(Ok(())))
}

/// One call as a transaction of its own, with statements that leave nothing
/// behind on a server connection that the next call may not get.
async fn in_transaction<T>(
    connection: &mut PgConnection,
    sql: &Statements,
    begin: &SqlStr,
    work: impl AsyncFnOnce(&mut Session<'_>) -> Result<T, StoreError>,
) -> Result<T, StoreError> {
    let begun = connection.begin_with(begin.clone()).await;
    let mut transaction = begun.map_err(failure)?;
    let answer = work(&mut Session::passing(&mut transaction, sql)).await;
    if answer.is_ok() {
        transaction.commit().await.map_err(failure)?;
    } else {
        transaction.rollback().await.map_err(failure)?;
    }
    answer
}

/// A call that takes longer is slow.
const SLOW: Duration = Duration::from_secs(1);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
const PING: Duration = Duration::from_secs(1);
const TRUSTED_IDLE: Duration = Duration::from_secs(1);
const LONGEST_IDLE: Duration = Duration::from_secs(10 * 60);
const LONGEST_OPEN: Duration = Duration::from_secs(30 * 60);
