//! Where the processes keep their records and orders.

use std::{env, fs, path::PathBuf};

use crate::{
    proxy::Proxy,
    server::{Pooler, Server},
};

pub(crate) enum Place {
    Sqlite {
        directory: PathBuf,
    },
    Postgres {
        proxy: Proxy,
        pooler: Option<Pooler>,
        server: Server,
    },
}

impl Place {
    pub(crate) fn sqlite() -> Self {
        let name = format!("chaos-{:016x}", rand::random::<u64>());
        let directory = env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        Self::Sqlite { directory }
    }

    pub(crate) async fn postgres() -> Self {
        let server = Server::start().await;
        let proxy = Proxy::to(server.port()).await;
        Self::Postgres {
            proxy,
            pooler: None,
            server,
        }
    }

    pub(crate) async fn pgbouncer() -> Self {
        let server = Server::start().await;
        server.migrate().await;
        let pooler = Pooler::before(&server).await;
        let proxy = Proxy::to(pooler.port()).await;
        Self::Postgres {
            proxy,
            pooler: Some(pooler),
            server,
        }
    }

    pub(crate) fn is_pooled(&self) -> bool {
        matches!(
            self,
            Self::Postgres {
                pooler: Some(_),
                ..
            }
        )
    }

    /// The address for the processes.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Sqlite { directory } => format!("sqlite:{}", directory.join("db").display()),
            Self::Postgres { proxy, server, .. } => server.url(proxy.port()),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Self::Sqlite { directory } = self {
            let _ = fs::remove_dir_all(directory);
        }
    }
}
