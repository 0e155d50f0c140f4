//! The switches of the faults.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{Stream, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// Cuts the connection when the next response of the shop arrives.
    DropResponse,
    /// Loses the next answer of the provider, and answers 503 in its place.
    ProviderUnavailable,
    /// Kills the shop in its next run.
    KillShop,
    /// Kills the relay after its next event has arrived.
    KillRelay,
    /// Kills the consumer after its next charge.
    KillConsumer,
    /// Lets no relay run.
    RelayStopped,
    /// Delays each request to the provider.
    SlowProvider,
    /// Lets no transaction of the shop's database begin.
    DatabaseDown,
}

/// The faults that are switched on.
#[derive(Clone, Default)]
pub(crate) struct Faults {
    on: Arc<watch::Sender<BTreeSet<Fault>>>,
}

impl Faults {
    pub(crate) fn switch(&self, fault: Fault, on: bool) {
        self.on.send_if_modified(|faults| match on {
            true => faults.insert(fault),
            false => faults.remove(&fault),
        });
    }

    /// Switches all faults off.
    pub(crate) fn clear(&self) {
        self.on.send_modify(BTreeSet::clear);
    }

    pub(crate) fn is_on(&self, fault: Fault) -> bool {
        self.on.borrow().contains(&fault)
    }

    /// Switches a fault off that happens once. Returns whether it was on.
    pub(crate) fn take(&self, fault: Fault) -> bool {
        self.on.send_if_modified(|faults| faults.remove(&fault))
    }

    /// Resolves when `fault` is on, or is off.
    pub(crate) async fn wait(&self, fault: Fault, on: bool) {
        let mut faults = self.on.subscribe();
        let is_so = faults.wait_for(|faults| faults.contains(&fault) == on);
        // Never an error: the sender lives as long as `self`.
        let _ = is_so.await;
    }

    /// The faults that are on, now and after each change.
    pub(crate) fn changes(&self) -> impl Stream<Item = BTreeSet<Fault>> + use<> {
        let mut faults = self.on.subscribe();
        faults.mark_changed();
        stream::unfold(faults, async |mut faults| {
            faults.changed().await.ok()?;
            let on = faults.borrow_and_update().clone();
            Some((on, faults))
        })
    }
}
