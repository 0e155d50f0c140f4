//! What each process does.

use crate::{Error, billing, consumer, load, provider, relay, server, shop};

/// One of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Provider,
    Shop,
    Relay,
    Consumer,
    Billing,
    Load,
}

impl Role {
    pub(crate) const ALL: [Self; 6] = [
        Self::Provider,
        Self::Shop,
        Self::Relay,
        Self::Consumer,
        Self::Billing,
        Self::Load,
    ];

    /// Those that run until they are stopped.
    pub(crate) const SERVICES: [Self; 5] = [
        Self::Provider,
        Self::Shop,
        Self::Relay,
        Self::Consumer,
        Self::Billing,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Provider => "provider",
            Self::Shop => "shop",
            Self::Relay => "relay",
            Self::Consumer => "consumer",
            Self::Billing => "billing",
            Self::Load => "load",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }

    /// Runs the process until its input is closed.
    pub(crate) async fn run(self) -> Result<(), Error> {
        server::start_logs(true)?;
        match self {
            Self::Provider => provider::run().await,
            Self::Shop => shop::run().await,
            Self::Relay => relay::run().await,
            Self::Consumer => consumer::run().await,
            Self::Billing => billing::run().await,
            Self::Load => load::run().await,
        }
    }
}
