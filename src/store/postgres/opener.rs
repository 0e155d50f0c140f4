//! Opens connections, and fails calls at once while none can be opened.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use sqlx::{ConnectOptions as _, Connection as _, Error, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::{SetOnce, oneshot},
    time::{Instant, sleep, timeout},
};

use super::{
    failures::{address, connecting, not_answered},
    schema::Statements,
    session::{self, Patience},
};
use crate::{
    log::{self, LogLimit},
    store::StoreError,
};

/// Opens the store's connections, each with one attempt.
///
/// Calls that need a connection during an attempt wait for its end first. So a
/// server that does not answer costs one timeout, not one for each call. After a
/// failed attempt, calls fail at once with its error, and one attempt a second in
/// the background finds out when the server is back.
pub(super) struct Opener {
    options: PgConnectOptions,
    sql: Arc<Statements>,
    patience: Patience,
    pooler_safe: bool,
    /// How long one attempt may take.
    bound: Duration,
    state: Mutex<State>,
    /// The last attempt got no answer.
    is_unreachable: AtomicBool,
    failures: LogLimit,
}

#[derive(Default)]
struct State {
    /// The attempt that others wait for.
    first: Option<Arc<SetOnce<Result<(), OpenError>>>>,
    down: Option<Down>,
    is_probed: bool,
    is_closed: bool,
    /// How many attempts have reached the server.
    reached: u64,
    /// When a slow call last made the opener look for the server.
    doubted: Option<Instant>,
}

/// The answer to calls until an attempt succeeds.
struct Down {
    error: StoreError,
    /// Whether a call failed with it since the last attempt began.
    was_told: bool,
}

#[derive(Clone, Debug)]
pub(super) enum OpenError {
    /// The server has no room for another connection now.
    Busy(StoreError),
    Failed(StoreError),
}

impl Opener {
    pub(super) fn new(
        options: PgConnectOptions,
        sql: Arc<Statements>,
        patience: Patience,
        pooler_safe: bool,
        bound: Duration,
    ) -> Self {
        Self {
            options,
            sql,
            patience,
            pooler_safe,
            bound,
            state: Mutex::default(),
            is_unreachable: AtomicBool::new(false),
            failures: LogLimit::new(),
        }
    }

    pub(super) async fn open(self: &Arc<Self>) -> Result<PgConnection, OpenError> {
        let lead = {
            let mut state = self.state();
            if let Some(down) = &mut state.down {
                down.was_told = true;
                return Err(OpenError::Failed(down.error.clone()));
            }
            match &state.first {
                Some(first) => Err(Arc::clone(first)),
                None => Ok(self.lead(&mut state)),
            }
        };
        let lead = match lead {
            Ok(lead) => Some(lead),
            Err(first) => {
                first.wait().await.clone()?;
                None
            }
        };
        // In a task, since others wait for an attempt whose caller has no more time.
        let (opened, connection) = oneshot::channel();
        let opener = Arc::clone(self);
        tokio::spawn(async move {
            let _ = opened.send(opener.attempt(lead).await);
        });
        let connection = connection.await;
        connection.unwrap_or_else(|_| Err(OpenError::Failed(shut_down())))
    }

    /// Finds out in the background whether a server that answers slowly can be
    /// reached.
    pub(super) fn doubt(self: &Arc<Self>) {
        let lead = {
            let mut state = self.state();
            let is_known = state.doubted.is_some_and(|then| then.elapsed() < PAUSE);
            if is_known || state.down.is_some() || state.first.is_some() {
                return;
            }
            state.doubted = Some(Instant::now());
            self.lead(&mut state)
        };
        tokio::spawn(Arc::clone(self).look(Some(lead)));
    }

    /// The error of the last attempt if it did not reach the server.
    pub(super) fn unreachable(&self) -> Option<StoreError> {
        if !self.is_unreachable.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state();
        let down = state.down.as_mut()?;
        down.was_told = true;
        Some(down.error.clone())
    }

    pub(super) fn address(&self) -> String {
        address(&self.options)
    }

    pub(super) fn close(&self) {
        self.state().is_closed = true;
    }

    /// Makes an attempt that others wait for.
    fn lead(self: &Arc<Self>, state: &mut State) -> Lead {
        let end = Arc::new(SetOnce::new());
        state.first = Some(Arc::clone(&end));
        Lead {
            opener: Arc::clone(self),
            end,
        }
    }

    async fn attempt(self: &Arc<Self>, lead: Option<Lead>) -> Result<PgConnection, OpenError> {
        let reached_before = self.state().reached;
        let outcome = match timeout(self.bound, self.connect()).await {
            Ok(Ok(connection)) => {
                self.reached();
                Ok(connection)
            }
            Ok(Err(error)) => Err(self.failed(Some(error), reached_before)),
            Err(_) => Err(self.failed(None, reached_before)),
        };
        if let Some(lead) = lead {
            let _ = lead.end.set(match &outcome {
                Ok(_) => Ok(()),
                Err(error) => Err(error.clone()),
            });
        }
        outcome
    }

    async fn connect(&self) -> Result<PgConnection, Error> {
        let mut connection = self.options.connect().await?;
        session::prepare(&mut connection, &self.sql, self.patience, self.pooler_safe).await?;
        if !self.pooler_safe {
            session::prefer_names(&mut connection).await?;
        }
        Ok(connection)
    }

    fn reached(&self) {
        let mut state = self.state();
        state.reached += 1;
        state.down = None;
        self.is_unreachable.store(false, Ordering::Relaxed);
    }

    /// The error of an attempt; without one, it took too long.
    fn failed(self: &Arc<Self>, error: Option<Error>, reached_before: u64) -> OpenError {
        let answer = error.as_ref().and_then(Error::as_database_error);
        let is_busy = answer.is_some_and(|answer| answer.code().as_deref() == Some("53300"));
        let is_unreachable = answer.is_none() && !matches!(error, Some(Error::Configuration(_)));
        let error = match error {
            Some(error) => self.sql.explain(connecting(error, &self.options)),
            None => not_answered(&self.options, self.bound),
        };
        if is_busy {
            self.reached();
            return OpenError::Busy(error);
        }
        let mut state = self.state();
        // A later attempt may have ended before this one.
        if state.reached == reached_before && !state.is_closed {
            self.is_unreachable.store(is_unreachable, Ordering::Relaxed);
            let was_told = state.down.take().is_some_and(|down| down.was_told);
            state.down = Some(Down {
                error: error.clone(),
                was_told,
            });
            if !mem::replace(&mut state.is_probed, true) {
                tokio::spawn(Arc::clone(self).probe());
            }
        }
        drop(state);
        let message = "cannot open a connection: calls that need one fail until it succeeds";
        log::warn(&self.failures, message, Some(&error), None);
        OpenError::Failed(error)
    }

    /// Looks for the server until it is back or no call has needed it for long.
    async fn probe(self: Arc<Self>) {
        let _over = Probe(Arc::clone(&self));
        let mut unasked = 0;
        while unasked < LONGEST_UNASKED {
            sleep(PAUSE).await;
            {
                let mut state = self.state();
                let Some(down) = &mut state.down else { return };
                unasked = if mem::take(&mut down.was_told) {
                    0
                } else {
                    unasked + 1
                };
                if state.is_closed {
                    return;
                }
            }
            // Beside the one before: each may take longer than the pause.
            tokio::spawn(Arc::clone(&self).look(None));
        }
    }

    async fn look(self: Arc<Self>, lead: Option<Lead>) {
        if let Ok(connection) = self.attempt(lead).await {
            let _ = timeout(PAUSE, connection.close()).await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An attempt that others wait for.
struct Lead {
    opener: Arc<Opener>,
    end: Arc<SetOnce<Result<(), OpenError>>>,
}

impl Drop for Lead {
    fn drop(&mut self) {
        self.opener.state().first = None;
        // Only a runtime that shuts down leaves it unsaid.
        let _ = self.end.set(Err(OpenError::Failed(shut_down())));
    }
}

/// A task that looks for the server.
struct Probe(Arc<Opener>);

impl Drop for Probe {
    /// Without it, the next call makes an attempt of its own.
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.is_probed = false;
        state.down = None;
        self.0.is_unreachable.store(false, Ordering::Relaxed);
    }
}

fn shut_down() -> StoreError {
    StoreError::unavailable("the runtime is shutting down")
}

/// Between two attempts in the background.
const PAUSE: Duration = Duration::from_secs(1);

/// How many attempts are made in the background that no call has asked for.
const LONGEST_UNASKED: u32 = 10;
