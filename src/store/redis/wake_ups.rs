//! Wakes waiters when a claim ends in another process.
//!
//! The script that ends a claim publishes a message on the sharded channel of its record.
//! A waiter subscribes to that channel first, and then looks whether the claim has ended.

use std::sync::Arc;

use redis::{FromRedisValue as _, PushInfo, PushKind, RedisResult, aio::SendError};
use tokio::{runtime::Handle, sync::Mutex};

use super::{
    connection::{Connection, Connector},
    error::failure,
    place::Place,
};
use crate::store::{StoreError, waiters::Waiters};

pub(super) struct WakeUps {
    connector: Connector,
    /// By the key of the record that they wait for.
    waiters: Arc<Waiters<Vec<u8>>>,
    /// Subscribes, on a connection of its own. Made for the first waiter.
    subscriber: Mutex<Option<Connection>>,
}

impl WakeUps {
    pub(super) fn new(connector: Connector) -> Self {
        Self {
            connector,
            waiters: Arc::new(Waiters::new(usize::MAX)),
            subscriber: Mutex::default(),
        }
    }

    /// Returns once a message about the record has arrived, or at once if `is_at_work`
    /// finds that the claim has ended.
    pub(super) async fn wait(
        &self,
        place: &Place,
        is_at_work: impl Future<Output = Result<bool, StoreError>>,
    ) -> Result<(), StoreError> {
        // Declared first, and so dropped after the waiter: it ends with the last one.
        let _subscription;
        // There is no limit: the layer has one.
        let Some(waiter) = self.waiters.enter(&place.key) else {
            return Ok(());
        };
        let woken = waiter.listen();
        _subscription = self.subscribe(&place.key).await?;
        if is_at_work.await? {
            woken.await;
        }
        Ok(())
    }

    /// Subscribes to the channel of a record. Connects anew if the connection is lost.
    async fn subscribe(&self, key: &[u8]) -> Result<Subscription, StoreError> {
        let mut subscriber = self.subscriber.lock().await;
        let mut subscribed = match &*subscriber {
            Some(connection) => connection.clone().subscribe(key).await,
            None => Err((redis::ErrorKind::Io, "not connected").into()),
        };
        if subscribed.is_err() {
            let opened = self.connector.subscriber(wake(&self.waiters)).await?;
            subscribed = opened.clone().subscribe(key).await;
            *subscriber = Some(opened);
        }
        subscribed.map_err(failure)?;
        Ok(Subscription {
            connection: subscriber.clone(),
            waiters: Arc::clone(&self.waiters),
            key: key.to_owned(),
            runtime: Handle::current(),
        })
    }
}

/// Wakes the waiters of the record whose channel has a message.
fn wake(
    waiters: &Arc<Waiters<Vec<u8>>>,
) -> impl Fn(PushInfo) -> Result<(), SendError> + Send + Sync + use<> {
    let waiters = Arc::clone(waiters);
    move |push| {
        let channel = push.data.into_iter().next();
        if push.kind == PushKind::SMessage
            && let Some(channel) = channel
            && let Ok(key) = Vec::from_redis_value(channel)
        {
            waiters.wake(&key);
        }
        Ok(())
    }
}

/// A subscription of a waiter. Dropped, it ends, unless the record has other waiters.
struct Subscription {
    connection: Option<Connection>,
    waiters: Arc<Waiters<Vec<u8>>>,
    key: Vec<u8>,
    /// A waiter may be dropped outside of it.
    runtime: Handle,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take()
            && !self.waiters.has(&self.key)
        {
            let key = std::mem::take(&mut self.key);
            // A subscription that stays costs the server a few bytes, until the connection
            // is closed.
            self.runtime.spawn(async move {
                let _: RedisResult<()> = connection.unsubscribe(&key).await;
            });
        }
    }
}
