//! Where the processes keep their records and orders.

use std::{env, fs, path::PathBuf};

use crate::{proxy::Proxy, server::Server};

pub(crate) enum Place {
    Sqlite { directory: PathBuf },
    Postgres { proxy: Proxy, server: Server },
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
        Self::Postgres { proxy, server }
    }

    /// What the processes call it.
    pub(crate) fn address(&self) -> String {
        match self {
            Self::Sqlite { directory } => format!("sqlite:{}", directory.join("db").display()),
            Self::Postgres { proxy, server } => server.url(proxy.port()),
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
