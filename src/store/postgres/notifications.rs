//! Notifications that wake the relays of other processes.
//!
//! PostgreSQL commits transactions that send a notification one after the other. So it is
//! sent after COMMIT, in a transaction of its own, and one stands for all commits of a few
//! milliseconds.

use std::time::{Duration, Instant};

use sqlx::{postgres::PgListener, raw_sql};
use tokio::{runtime::Handle, time::sleep};

use super::{PostgresStore, error::failure, session::Session};
use crate::{
    runtime::single_task::SingleTask,
    telemetry::log::{self, LogLimit},
};

/// The notifications that a store sends.
#[derive(Default)]
pub(super) struct Notifications {
    /// Sends the next one.
    sending: SingleTask,
    failures: LogLimit,
}

impl PostgresStore {
    fn may_notify(&self) -> bool {
        self.inner.wake_ups.are_possible()
    }

    /// Wakes relays after the commit of a transaction; see [`Wake::committed`](crate::store::sql::wake::Wake::committed).
    pub(crate) fn wake_relays(&self, begun: Option<Instant>) {
        if self.inner.wake.committed(begun) {
            self.notify_relays();
        }
    }

    /// Notifies the relays of other processes soon.
    pub(crate) fn notify_relays(&self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if !self.may_notify() {
            return;
        }
        let Some(permit) = self.inner.notifications.sending.try_begin() else {
            return;
        };
        let store = self.clone();
        runtime.spawn(async move {
            sleep(INTERVAL).await;
            // A commit after this needs another notification.
            drop(permit);
            let notify = async |session: &mut Session<'_>| {
                let notify = raw_sql(NOTIFY).execute(&mut *session.connection).await;
                notify.map(drop).map_err(failure)
            };
            if let Err(error) = store.inner.admin.run(notify).await {
                let failures = &store.inner.notifications.failures;
                log::warn(failures, NOT_SENT, Some(&error), None);
            }
        });
    }

    /// Wakes the relays of this process at each notification. Never returns.
    pub(crate) async fn listen_for_events(self) {
        let failures = LogLimit::new();
        while self.may_notify() {
            let listened = async {
                let mut listener = self.inner.connector.listen(CHANNEL).await?;
                // Notifications before this were lost.
                self.inner.wake.wake();
                self.wake_by(&mut listener).await
            };
            if let Err(error) = listened.await {
                log::warn(&failures, LOST, Some(&failure(error)), None);
            }
            sleep(PAUSE).await;
        }
        std::future::pending::<()>().await;
    }

    /// Returns when the connection is lost.
    async fn wake_by(&self, listener: &mut PgListener) -> Result<(), sqlx::Error> {
        while listener.try_recv().await?.is_some() {
            self.inner.wake.wake();
        }
        Ok(())
    }
}

/// Every role of the database may listen, so that the payload is empty.
const CHANNEL: &str = "idempotency_events";
const NOTIFY: &str = "NOTIFY idempotency_events";
const INTERVAL: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_secs(1);
const NOT_SENT: &str = "notification of staged events not sent, relays of other processes find them \
    by polling";
const LOST: &str = "connection for notifications of events lost, the relay polls";
