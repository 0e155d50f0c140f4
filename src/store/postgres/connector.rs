//! Opens connections. While the server cannot be reached, calls fail at once.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sqlx::{
    ConnectOptions as _, Connection as _, Error, PgConnection,
    postgres::{PgConnectOptions, PgListener, PgPoolOptions},
};
use tokio::{
    sync::{Mutex as Turn, OwnedMutexGuard},
    time::{Instant, sleep, timeout},
};

use super::{
    error::{address, connect_failure, connect_timeout, sqlstate},
    schema::Schema,
    session::SessionSettings,
};
use crate::{
    store::StoreError,
    telemetry::log::{self, LogLimit},
};

/// Opens the store's connections.
///
/// During an attempt to connect, other calls wait for its end before they make
/// their own. So a server that does not answer costs one timeout, not one for each
/// call. After a failed attempt, calls fail with its error, and one attempt a second
/// in the background finds out when the server is back.
pub(crate) struct Connector {
    pub(super) options: PgConnectOptions,
    pub(crate) schema: Arc<Schema>,
    pub(super) settings: SessionSettings,
    /// The limit of an attempt.
    pub(crate) acquire_timeout: Duration,
    /// Held during an attempt that others wait for.
    first: Arc<Turn<()>>,
    state: Mutex<State>,
    /// The last attempt got no answer.
    is_unreachable: AtomicBool,
    failures: LogLimit,
}

#[derive(Default)]
struct State {
    down: Option<Down>,
    /// When an attempt last reached the server.
    reached: Option<Instant>,
    /// When a slow call last caused an attempt.
    checked: Option<Instant>,
    is_probed: bool,
    is_closed: bool,
}

/// The answer to calls until an attempt succeeds.
struct Down {
    error: StoreError,
    /// When a call last received it.
    asked: Instant,
}

pub(super) enum ConnectError {
    /// The server has too many connections.
    Busy(StoreError),
    Failed(StoreError),
}

type FirstAttempt = OwnedMutexGuard<()>;

impl Connector {
    pub(super) fn new(
        options: PgConnectOptions,
        schema: Arc<Schema>,
        settings: SessionSettings,
        acquire_timeout: Duration,
    ) -> Self {
        Self {
            options,
            schema,
            settings,
            acquire_timeout,
            first: Arc::default(),
            state: Mutex::default(),
            is_unreachable: AtomicBool::new(false),
            failures: LogLimit::new(),
        }
    }

    pub(super) async fn connect(self: &Arc<Self>) -> Result<PgConnection, ConnectError> {
        self.fail_if_down()?;
        let asked = Instant::now();
        let first = Arc::clone(&self.first).lock_owned().await;
        self.fail_if_down()?;
        // After an attempt that has reached the server, others need not wait for this one.
        let was_reached = self.state().reached.is_some_and(|reached| reached >= asked);
        let first = (!was_reached).then_some(first);
        // In a task, so that the attempt completes even if this caller leaves.
        let attempt = tokio::spawn(Arc::clone(self).attempt(first));
        attempt.await.unwrap_or_else(|_| {
            let error = StoreError::unavailable("the attempt to connect was broken off");
            Err(ConnectError::Failed(error))
        })
    }

    /// Checks in the background whether the server can be reached.
    pub(super) fn check_server(self: &Arc<Self>) {
        let Ok(first) = Arc::clone(&self.first).try_lock_owned() else {
            return;
        };
        let mut state = self.state();
        let was_checked = state.checked.is_some_and(|then| then.elapsed() < PAUSE);
        if state.down.is_none() && !was_checked {
            state.checked = Some(Instant::now());
            tokio::spawn(Arc::clone(self).try_server(Some(first)));
        }
    }

    /// Returns the error of the last attempt if it did not reach the server.
    pub(super) fn unreachable(&self) -> Option<StoreError> {
        match self.is_unreachable.load(Ordering::Relaxed) {
            true => self.down(),
            false => None,
        }
    }

    /// Listens to a channel on a connection of its own.
    pub(crate) async fn listen(&self, channel: &str) -> Result<PgListener, Error> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect_lazy_with(self.options.clone());
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.listen(channel).await?;
        Ok(listener)
    }

    pub(super) fn address(&self) -> String {
        address(&self.options)
    }

    pub(super) fn close(&self) {
        self.state().is_closed = true;
    }

    fn down(&self) -> Option<StoreError> {
        let mut state = self.state();
        let down = state.down.as_mut()?;
        down.asked = Instant::now();
        Some(down.error.clone())
    }

    fn fail_if_down(&self) -> Result<(), ConnectError> {
        match self.down() {
            Some(error) => Err(ConnectError::Failed(error)),
            None => Ok(()),
        }
    }

    async fn attempt(
        self: Arc<Self>,
        _first: Option<FirstAttempt>,
    ) -> Result<PgConnection, ConnectError> {
        let begun = Instant::now();
        let attempt = async {
            let mut connection = self.options.connect().await?;
            self.settings.apply(&mut connection).await?;
            Ok(connection)
        };
        match timeout(self.acquire_timeout, attempt).await {
            Ok(Ok(connection)) => {
                self.reached();
                Ok(connection)
            }
            Ok(Err(error)) => Err(self.failed(Some(error), begun)),
            Err(_) => Err(self.failed(None, begun)),
        }
    }

    fn reached(&self) {
        let mut state = self.state();
        state.reached = Some(Instant::now());
        state.down = None;
        self.is_unreachable.store(false, Ordering::Relaxed);
    }

    /// Returns the error of an attempt, which timed out if there is none.
    fn failed(self: &Arc<Self>, error: Option<Error>, begun: Instant) -> ConnectError {
        let is_busy = error.as_ref().and_then(sqlstate).as_deref() == Some(TOO_MANY_CONNECTIONS);
        let is_unreachable = !matches!(error, Some(Error::Database(_) | Error::Configuration(_)));
        let error = match error {
            Some(error) => self.schema.explain(connect_failure(error, &self.options)),
            None => connect_timeout(&self.options, self.acquire_timeout),
        };
        if is_busy {
            self.reached();
            return ConnectError::Busy(error);
        }
        let mut is_first = false;
        let mut state = self.state();
        // Another attempt may have reached the server meanwhile.
        if state.reached.is_none_or(|reached| reached < begun) && !state.is_closed {
            let asked = state
                .down
                .take()
                .map_or_else(Instant::now, |down| down.asked);
            state.down = Some(Down {
                error: error.clone(),
                asked,
            });
            self.is_unreachable.store(is_unreachable, Ordering::Relaxed);
            is_first = !mem::replace(&mut state.is_probed, true);
        }
        drop(state);
        if is_first {
            // Made here, since a runtime that ends may drop the task before its first step.
            let end = ProbeEnd(Arc::clone(self));
            tokio::spawn(async move { end.0.probe().await });
        }
        let message = "cannot open a connection: calls that need one fail until it succeeds";
        log::warn(&self.failures, message, Some(&error), None);
        ConnectError::Failed(error)
    }

    /// Tries to connect once a second, until an attempt succeeds or calls stop.
    async fn probe(self: &Arc<Self>) {
        loop {
            sleep(PAUSE).await;
            {
                let state = self.state();
                let was_asked = |down: &Down| down.asked.elapsed() < LONGEST_UNASKED;
                if state.is_closed || !state.down.as_ref().is_some_and(was_asked) {
                    return;
                }
            }
            // Without waiting for its end, since an attempt may take longer than the
            // pause.
            tokio::spawn(Arc::clone(self).try_server(None));
        }
    }

    async fn try_server(self: Arc<Self>, first: Option<FirstAttempt>) {
        if let Ok(connection) = self.attempt(first).await {
            let _ = timeout(PAUSE, connection.close()).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ProbeEnd(Arc<Connector>);

impl Drop for ProbeEnd {
    /// The next call makes an attempt.
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_probed = false;
        state.down = None;
        self.0.is_unreachable.store(false, Ordering::Relaxed);
    }
}

const TOO_MANY_CONNECTIONS: &str = "53300";

/// The pause between two attempts in the background.
const PAUSE: Duration = Duration::from_secs(1);

/// Attempts in the background end this long after the last call.
const LONGEST_UNASKED: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;

    use super::*;
    use crate::store::{PostgresEngine, postgres::session::Timeouts};

    #[test]
    fn runtime_that_ends_leaves_the_server_to_the_next_call() {
        let schema = Schema::new(
            "app".to_owned(),
            "role".to_owned(),
            PostgresEngine::Postgres,
        );
        let schema = Arc::new(schema.unwrap());
        let timeouts = Timeouts {
            statement: PAUSE,
            lock: PAUSE,
            idle_in_transaction: PAUSE,
        };
        let settings = SessionSettings::for_calls(&schema, timeouts, false);
        let options = PgConnectOptions::new();
        let connector = Arc::new(Connector::new(options, schema, settings, PAUSE));
        let runtime = Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async { connector.failed(None, Instant::now()) });
        assert!(connector.down().is_some());
        // It ends before the task that tries again was polled.
        drop(runtime);
        assert!(connector.down().is_none() && !connector.state().is_probed);
    }
}
