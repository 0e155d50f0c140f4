//! The store's connections: at most so many, kept ready from one call to the
//! next.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::future::BoxFuture;
use sqlx::{Connection as _, PgConnection, PgPool, SqlStr};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use super::{failure, schema::Statements, session::Session};
use crate::store::StoreError;

/// Connections that a pool opens, and does not get back: after each call it would
/// ask the server whether it is still there.
pub(super) struct Connections {
    pool: PgPool,
    places: Arc<Semaphore>,
    most: u32,
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
    /// A connection broke then: those that were used before may be broken too.
    suspected: Option<Instant>,
    is_closed: bool,
}

struct Idle {
    connection: PgConnection,
    opened: Instant,
    used: Instant,
}

/// A connection for one call.
struct Line {
    connection: PgConnection,
    opened: Instant,
    place: OwnedSemaphorePermit,
}

impl Connections {
    /// As many as `pool` may open.
    pub(super) fn of(
        pool: PgPool,
        deadline: Duration,
        begin: Option<SqlStr>,
        sql: Arc<Statements>,
    ) -> Self {
        let most = pool.options().get_max_connections();
        Self {
            pool,
            places: Arc::new(Semaphore::new(most as usize)),
            most,
            ready: Mutex::default(),
            deadline,
            begin,
            sql,
        }
    }

    /// Runs work on one of the connections. To be called from a task that is
    /// never dropped: half a conversation would be the next call's to hear.
    pub(super) async fn run<T, W>(self: &Arc<Self>, work: W) -> Result<T, StoreError>
    where
        T: Send,
        W: for<'c> FnOnce(Session<'c>) -> BoxFuture<'c, Result<T, StoreError>> + Send,
    {
        let line = timeout(self.patience(), self.line()).await;
        let mut line = line.map_err(|_| StoreError::timed_out())??;
        let call = async {
            match &self.begin {
                None => work(Session::lasting(&mut line.connection, &self.sql)).await,
                Some(begin) => in_transaction(&mut line.connection, &self.sql, begin, work).await,
            }
        };
        let Ok(answer) = timeout(self.deadline, call).await else {
            // The server keeps to its own timeouts, so the network does not
            // answer. What still comes is not for the next call to read.
            self.suspect();
            return Err(StoreError::timed_out());
        };
        match &answer {
            Ok(_) => self.keep(line),
            // What began a transaction may have left it open.
            Err(_) if self.begin.is_some() => drop(line),
            Err(_) => Arc::clone(self).examine(line),
        }
        answer
    }

    /// How long a call waits for a connection.
    pub(super) fn patience(&self) -> Duration {
        self.pool.options().get_acquire_timeout()
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
        self.pool.close().await;
        // Each call that is under way has a place, and closes its connection.
        let _all = self.places.acquire_many(self.most).await;
    }

    async fn line(&self) -> Result<Line, StoreError> {
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(|_| failure(sqlx::Error::PoolClosed))?;
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
                break;
            };
            // A question before every call would double the time of each; one
            // after a pause finds the connections that a firewall forgot.
            let is_doubtful = suspected.is_some_and(|then| used <= then);
            if (is_doubtful || used.elapsed() > TRUSTED_IDLE) && !answers(&mut connection).await {
                self.forget_used_before(used);
                continue;
            }
            return Ok(Line {
                connection,
                opened,
                place,
            });
        }
        Ok(Line {
            connection: self.pool.acquire().await.map_err(failure)?.detach(),
            opened: Instant::now(),
            place,
        })
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
async fn in_transaction<T, W>(
    connection: &mut PgConnection,
    sql: &Statements,
    begin: &SqlStr,
    work: W,
) -> Result<T, StoreError>
where
    W: for<'c> FnOnce(Session<'c>) -> BoxFuture<'c, Result<T, StoreError>>,
{
    let begun = connection.begin_with(begin.clone()).await;
    let mut transaction = begun.map_err(failure)?;
    let answer = work(Session::passing(&mut transaction, sql)).await;
    if answer.is_ok() {
        transaction.commit().await.map_err(failure)?;
    } else {
        transaction.rollback().await.map_err(failure)?;
    }
    answer
}

const PING: Duration = Duration::from_secs(1);
const TRUSTED_IDLE: Duration = Duration::from_secs(1);
const LONGEST_IDLE: Duration = Duration::from_secs(10 * 60);
const LONGEST_OPEN: Duration = Duration::from_secs(30 * 60);
