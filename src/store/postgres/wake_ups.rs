//! Wakes waiters when a claim ends in another process.
//!
//! A waiter marks the record as awaited. The statement that ends the claim of such a
//! record also notifies all processes, with the claim's fence. Other statements send no
//! notification: PostgreSQL commits transactions that send one after the other.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use sqlx::postgres::PgListener;
use tokio::{
    sync::Mutex,
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{connector::Connector, error::failure, schema::CHANNEL};
use crate::{
    store::{Fence, StoreError, waiters::Waiters},
    telemetry::log::Warnings,
};

/// The waiters of this process, by the fence of the claim that they wait for.
pub(super) struct WakeUps {
    waiters: Waiters<Fence>,
    connector: Arc<Connector>,
    /// Listens while there are waiters, on a connection of its own.
    listener: Mutex<Option<JoinHandle<()>>>,
    warnings: Warnings,
}

impl WakeUps {
    pub(super) fn new(connector: Arc<Connector>) -> Self {
        Self {
            waiters: Waiters::new(usize::MAX),
            connector,
            listener: Mutex::default(),
            warnings: Warnings::default(),
        }
    }

    /// Whether notifications are sent and arrive. Behind a pooler in transaction mode they
    /// do not arrive.
    pub(super) fn are_possible(&self) -> bool {
        self.connector.settings.begin.is_none() && self.connector.schema.notifies()
    }

    /// Returns once a notification about this claim has arrived, or at once if `mark`
    /// finds that it has ended.
    pub(super) async fn wait(
        self: &Arc<Self>,
        seen: Fence,
        mark: impl Future<Output = Result<bool, StoreError>>,
    ) -> Result<(), StoreError> {
        // There is no limit: the layer has one.
        let Some(waiter) = self.waiters.enter(&seen) else {
            return Ok(());
        };
        let woken = waiter.listen();
        // In a task: other waiters wait for its end, and this one may not be polled meanwhile.
        let listening = tokio::spawn(Arc::clone(self).listen());
        let ended = |_| StoreError::unavailable("the attempt to listen was broken off");
        listening.await.map_err(ended)??;
        if mark.await? {
            woken.await;
        }
        Ok(())
    }

    /// Starts to listen, unless this process listens already.
    async fn listen(self: Arc<Self>) -> Result<(), StoreError> {
        let mut listener = self.listener.lock().await;
        if listener.as_ref().is_none_or(JoinHandle::is_finished) {
            let opened = self.connector.listen(CHANNEL);
            let opened = timeout(self.connector.acquire_timeout, opened).await;
            let opened = opened.map_err(|_| StoreError::timed_out())?;
            let receive = receive(Arc::downgrade(&self), opened.map_err(failure)?);
            *listener = Some(tokio::spawn(receive));
        }
        Ok(())
    }

    /// Stops to listen. Its waiters read their records after pauses.
    pub(super) async fn close(&self) {
        if let Some(listener) = self.listener.lock().await.take() {
            listener.abort();
        }
    }
}

impl Drop for WakeUps {
    fn drop(&mut self) {
        if let Some(listener) = self.listener.get_mut() {
            listener.abort();
        }
    }
}

/// Wakes waiters until there have been none for a while, or until the connection is lost.
/// The next waiter connects anew.
async fn receive(wake_ups: Weak<WakeUps>, mut listener: PgListener) {
    loop {
        let received = timeout(IDLE, listener.try_recv()).await;
        let Some(wake_ups) = wake_ups.upgrade() else {
            return;
        };
        match received {
            Ok(Ok(Some(notification))) => {
                if let Ok(fence) = notification.payload().parse::<u64>() {
                    wake_ups.waiters.wake(&Fence::from(fence));
                }
            }
            Ok(Ok(None)) => return,
            Ok(Err(error)) => {
                wake_ups.warnings.warn(LOST, Some(&failure(error)), None);
                sleep(PAUSE).await;
                return;
            }
            Err(_) if wake_ups.waiters.is_empty() => return,
            Err(_) => {}
        }
    }
}

const LOST: &str = "connection for notifications lost, waiters read their records after pauses";
/// How long a process without waiters keeps its connection.
const IDLE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);
