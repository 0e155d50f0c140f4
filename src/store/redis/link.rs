//! A connection that comes back after the server did.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use redis::{Cmd, ErrorKind, Pipeline, RedisError, RedisResult, ServerErrorKind, Value};

use super::connection::{Connection, Connector};
use crate::{
    runtime::single_task::SingleTask,
    store::{StoreError, StoreErrorKind},
};

/// Clones share the connection.
#[derive(Clone)]
pub(super) struct Link(Arc<Inner>);

struct Inner {
    connector: Connector,
    /// Held briefly.
    live: Mutex<Option<Live>>,
    /// Held while connecting. Has the last failure, which the calls that waited share.
    connecting: tokio::sync::Mutex<Option<(Instant, StoreError)>>,
    /// Looks after the connection.
    tending: SingleTask,
}

#[derive(Clone)]
struct Live {
    connection: Connection,
    /// Tells connections apart.
    connected: Instant,
    inspected: Instant,
    timed_out: Option<Instant>,
}

impl Link {
    pub(super) async fn connect(connector: Connector) -> Result<Self, StoreError> {
        let link = Self(Arc::new(Inner {
            connector,
            live: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            tending: SingleTask::default(),
        }));
        link.live().await?;
        Ok(link)
    }

    /// Sends commands about `key` together, and returns their answers or the first error.
    ///
    /// If the connection was found closed, they may have been made or not. Sends them once
    /// more if a second time does no harm.
    pub(super) async fn send(
        &self,
        commands: impl IntoIterator<Item = Cmd>,
        key: &[u8],
        is_repeatable: bool,
    ) -> Result<RedisResult<Vec<Value>>, StoreError> {
        let mut pipeline = Pipeline::new();
        for command in commands {
            pipeline.add_command(command);
        }
        let live = self.live().await.map_err(StoreError::unsent)?;
        let answer = self.send_on(live, &pipeline, key).await;
        match &answer {
            Err(error) if is_repeatable && is_closed(error) => {
                let live = self.live().await?;
                Ok(self.send_on(live, &pipeline, key).await)
            }
            _ => Ok(answer),
        }
    }

    async fn send_on(
        &self,
        live: Live,
        commands: &Pipeline,
        key: &[u8],
    ) -> RedisResult<Vec<Value>> {
        let connected = live.connected;
        let answer = live.connection.send(commands, key).await;
        match &answer {
            Err(error) if is_closed(error) => self.forget(connected),
            Err(error) if error.is_timeout() => self.timed_out(connected),
            _ => {}
        }
        answer
    }

    /// Returns the connection, and makes one if there is none.
    async fn live(&self) -> Result<Live, StoreError> {
        if let Some(live) = self.current() {
            return Ok(live);
        }
        let asked = Instant::now();
        // In a task: other calls wait for its end, and this one may not be polled any more.
        let connecting = tokio::spawn(self.clone().connect_once(asked));
        connecting.await.unwrap_or_else(|_| {
            let error = "the attempt to connect panicked, or its runtime has ended";
            Err(StoreError::unavailable(error))
        })
    }

    /// Connects, unless another call has done so, or has failed, since `asked`.
    async fn connect_once(self, asked: Instant) -> Result<Live, StoreError> {
        let mut last_failure = self.0.connecting.lock().await;
        if let Some(live) = self.current() {
            return Ok(live);
        }
        match &*last_failure {
            Some((failed, error)) if *failed > asked => return Err(error.clone()),
            _ => {}
        }
        match self.0.connector.connect().await {
            Ok(connection) => Ok(self.replace(connection)),
            Err(error) => {
                *last_failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    fn current(&self) -> Option<Live> {
        let live = self.lock().clone()?;
        if live.inspected.elapsed() > INSPECT_EVERY {
            let (link, connection) = (self.clone(), live.connection.clone());
            let connected = live.connected;
            self.tend(async move {
                match connection.inspect().await {
                    Ok(()) => link.update(connected, |live| live.inspected = Instant::now()),
                    Err(error) if error.kind() == StoreErrorKind::TimedOut => {
                        link.timed_out(connected);
                    }
                    // The next call connects, and tells why that is refused.
                    Err(_) => link.forget(connected),
                }
            });
        }
        Some(live)
    }

    /// One timeout may be a slow call. After the second, the connection is replaced: that to
    /// a frozen primary stays open after another one was promoted.
    fn timed_out(&self, connected: Instant) {
        let timeout = self.0.connector.response_timeout;
        let mut is_second = false;
        self.update(connected, |live| {
            let now = Instant::now();
            let since = live.timed_out.map(|first| now - first);
            is_second = since.is_some_and(|since| timeout / 2 < since && since < timeout * 5);
            if since.is_none_or(|since| since >= timeout * 5) {
                live.timed_out = Some(now);
            }
        });
        if is_second {
            // Calls to other primaries go on meanwhile.
            let link = self.clone();
            self.tend(async move {
                match link.0.connector.connect().await {
                    Ok(connection) => drop(link.replace(connection)),
                    Err(_) => link.forget(connected),
                }
            });
        }
    }

    /// Looks after the connection in a task, unless one does so already.
    fn tend(&self, tending: impl Future<Output = ()> + Send + 'static) {
        if let Some(permit) = self.0.tending.try_begin() {
            tokio::spawn(async move {
                let _permit = permit;
                tending.await;
            });
        }
    }

    fn replace(&self, connection: Connection) -> Live {
        let now = Instant::now();
        let live = Live {
            connection,
            connected: now,
            inspected: now,
            timed_out: None,
        };
        *self.lock() = Some(live.clone());
        live
    }

    fn update(&self, connected: Instant, update: impl FnOnce(&mut Live)) {
        let mut live = self.lock();
        if let Some(live) = live.as_mut().filter(|live| live.connected == connected) {
            update(live);
        }
    }

    fn forget(&self, connected: Instant) {
        let mut live = self.lock();
        live.take_if(|live| live.connected == connected);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Live>> {
        self.0.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether another connection is needed: this one is closed, or leads to a server that is
/// no longer the primary.
fn is_closed(error: &RedisError) -> bool {
    let kind = error.kind();
    error.is_connection_dropped() || kind == ErrorKind::Server(ServerErrorKind::ReadOnly)
}

/// How long a change of the eviction policy may go unseen.
const INSPECT_EVERY: Duration = Duration::from_secs(2);
