//! The files, the network and the processes of one run.

use std::{
    env, fs, io,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use tokio::{net::TcpListener, task::JoinHandle, time};
use tower_idempotency::OperationId;

use crate::{
    Error,
    database::Database,
    faults::Fault,
    network::Network,
    pace::CARTS,
    page,
    processes::{Processes, Settings},
    provider::Bank,
    role::Role,
    timeline::Event,
};

pub(crate) struct Scene {
    pub(crate) processes: Processes,
    pub(crate) settings: Settings,
    pub(crate) database: Database,
    pub(crate) bank: Bank,
    kept: JoinHandle<Result<(), Error>>,
    _directory: Directory,
}

impl Scene {
    /// Serves the page at this port, and starts the processes, but for the load, which is
    /// to place this many orders.
    pub(crate) async fn open(port: u16, orders: u32) -> Result<Self, Error> {
        let directory = Directory::create()?;
        let database = Database::open(&directory.0).await?;
        database.migrate().await?;
        let bank = Bank::open(&directory.0).await?;

        let processes = Processes::new();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await;
        let listener = listener
            .map_err(|error| format!("cannot listen on 127.0.0.1:{port}, set `PORT`: {error}"))?;
        let settings = Settings {
            directory: directory.0.clone(),
            network: listener.local_addr()?,
            orders,
            // On the guarded side of the page. New for each run, since a database of
            // PostgreSQL has the orders of all.
            prefix: format!("{CARTS}{}-", OperationId::random()),
        };
        let page = page::router(processes.timeline.clone(), processes.faults.clone());
        let app = page.merge(Network::router(processes.clone()));
        tokio::spawn(async { axum::serve(listener, app).await });
        tokio::spawn(stall(database.clone(), processes.clone()));
        let kept = tokio::spawn({
            let (processes, settings) = (processes.clone(), settings.clone());
            async move { processes.keep_all(&Role::SERVICES, &settings).await }
        });
        Ok(Self {
            processes,
            settings,
            database,
            bank,
            kept,
            _directory: directory,
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.settings.network
    }

    /// Stops the processes and removes the files.
    pub(crate) async fn close(self) -> Result<(), Error> {
        self.processes.stop();
        self.kept.await?
    }
}

/// Keeps the database from answering while that fault is on.
async fn stall(database: Database, processes: Processes) {
    let Processes {
        faults, timeline, ..
    } = processes;
    loop {
        faults.wait(Fault::DatabaseDown, true).await;
        timeline.add(Event::of("database", "stalled"));
        tokio::select! {
            Err(error) = database.stall() => {
                tracing::warn!(%error, "cannot stall the database");
                time::sleep(Duration::from_secs(1)).await;
            }
            () = faults.wait(Fault::DatabaseDown, false) => {}
        }
    }
}

/// A directory that is removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn create() -> io::Result<Self> {
        let directory = env::temp_dir().join(format!("storefront-{}", OperationId::random()));
        fs::create_dir(&directory)?;
        Ok(Self(directory))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
