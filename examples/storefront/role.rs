//! What each process does.

use crate::{Error, load, provider, server, shop};

/// One of the processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Provider,
    Shop,
    Load,
}

impl Role {
    pub(crate) const ALL: [Self; 3] = [Self::Provider, Self::Shop, Self::Load];

    /// Those that run until they are stopped.
    pub(crate) const SERVICES: [Self; 2] = [Self::Provider, Self::Shop];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Provider => "provider",
            Self::Shop => "shop",
            Self::Load => "load",
        }
    }

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }

    /// Runs the process until it is told to stop.
    pub(crate) async fn run(self) -> Result<(), Error> {
        server::start_logs()?;
        match self {
            Self::Provider => provider::run().await,
            Self::Shop => shop::run().await,
            Self::Load => load::run().await,
        }
    }
}
