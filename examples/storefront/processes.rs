//! The other processes, each of which is started again when it dies.

use std::{
    collections::HashMap, env, future::pending, net::SocketAddr, path::PathBuf,
    process::ExitStatus, process::Stdio, sync::Arc, time::Duration,
};

use futures_util::future::join_all;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    sync::{Notify, watch},
    time,
};

use crate::{
    Error,
    faults::{Fault, Faults},
    load,
    pace::Pace,
    role::Role,
    server,
    timeline::{Event, Timeline},
};

/// The processes, by what they do.
#[derive(Clone)]
pub(crate) struct Processes {
    seats: Arc<HashMap<Role, Seat>>,
    pub(crate) timeline: Timeline,
    pub(crate) faults: Faults,
    pub(crate) pace: Pace,
}

/// Holds one process at a time.
#[derive(Default)]
struct Seat {
    /// Where its process listens.
    address: watch::Sender<Option<SocketAddr>>,
    kill: Notify,
    stop: watch::Sender<bool>,
}

impl Seat {
    async fn stopped(&self) {
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }
}

/// The settings that each process gets in its environment.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) directory: PathBuf,
    /// The address of the network.
    pub(crate) network: SocketAddr,
    /// How many orders the load places.
    pub(crate) orders: u32,
    /// What the names of its carts begin with.
    pub(crate) prefix: String,
}

impl Processes {
    pub(crate) fn new() -> Self {
        let seats = Role::ALL.map(|role| (role, Seat::default()));
        Self {
            seats: Arc::new(seats.into()),
            timeline: Timeline::default(),
            faults: Faults::default(),
            pace: Pace::default(),
        }
    }

    /// Waits for the address of a process.
    pub(crate) async fn address(&self, role: Role) -> SocketAddr {
        let mut address = self.seats[&role].address.subscribe();
        let known = address.wait_for(Option::is_some).await;
        known
            .ok()
            .and_then(|known| *known)
            .expect("its sender lives")
    }

    /// Kills a process, if it runs.
    pub(crate) fn kill(&self, role: Role) {
        self.seats[&role].kill.notify_waiters();
    }

    /// Closes the input of each process, which tells it to stop. Kills it if it does not.
    pub(crate) fn stop(&self) {
        for seat in self.seats.values() {
            seat.stop.send_replace(true);
        }
    }

    /// Runs these processes until they are stopped.
    pub(crate) async fn keep_all(&self, roles: &[Role], settings: &Settings) -> Result<(), Error> {
        let kept = roles.iter().map(|role| self.keep(*role, settings));
        join_all(kept)
            .await
            .into_iter()
            .try_for_each(|kept| kept.map(drop))
    }

    /// Runs a process until it is stopped. The load ends by itself.
    pub(crate) async fn keep(
        &self,
        role: Role,
        settings: &Settings,
    ) -> Result<Option<ExitStatus>, Error> {
        let seat = &self.seats[&role];
        loop {
            tokio::select! {
                () = self.allowed(role, true) => {}
                () = seat.stopped() => return Ok(None),
            }
            let mut child = start(role, settings)?;
            self.timeline.add(Event::of(role.name(), "started"));
            let killed = seat.kill.notified();
            let has_ended = tokio::select! {
                has_ended = self.listen(role, &mut child) => has_ended,
                () = killed => false,
                () = self.allowed(role, false) => false,
                () = seat.stopped() => {
                    end(child).await?;
                    return Ok(None);
                }
            };
            seat.address.send_replace(None);
            match has_ended {
                true => {
                    let status = child.wait().await?;
                    if role == Role::Load {
                        return Ok(Some(status));
                    }
                }
                false => child.kill().await?,
            }
            self.timeline.add(Event::of(role.name(), "died"));
            time::sleep(RESTART).await;
        }
    }

    /// Resolves when a process may run, or may not.
    async fn allowed(&self, role: Role, is_allowed: bool) {
        match role {
            Role::Relay => self.faults.wait(Fault::RelayStopped, !is_allowed).await,
            _ if is_allowed => {}
            _ => pending().await,
        }
    }

    /// Adds what a process says to the timeline. Returns true when its output ends, and
    /// false if it has to be killed now.
    async fn listen(&self, role: Role, child: &mut Child) -> bool {
        let Some(output) = child.stdout.take() else {
            return true;
        };
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let Ok(mut event) = serde_json::from_str::<Event>(&line) else {
                continue;
            };
            event.process = role.name();
            let is_run = role == Role::Shop && event.what == "run";
            if let Some(address) = event.address {
                self.seats[&role].address.send_replace(Some(address));
            } else {
                self.timeline.add(event);
            }
            if is_run && self.faults.take(Fault::KillShop) {
                return false;
            }
        }
        true
    }
}

fn start(role: Role, settings: &Settings) -> Result<Child, Error> {
    let child = Command::new(env::current_exe()?)
        .args(["process", role.name()])
        .env(server::DIRECTORY, &settings.directory)
        .env(server::NETWORK, format!("http://{}", settings.network))
        .env(load::ORDERS, settings.orders.to_string())
        .env(load::PREFIX, &settings.prefix)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    Ok(child)
}

async fn end(mut child: Child) -> Result<(), Error> {
    drop(child.stdin.take());
    if time::timeout(GRACE, child.wait()).await.is_err() {
        child.kill().await?;
    }
    Ok(())
}

/// The pause before a process is started again.
const RESTART: Duration = Duration::from_millis(100);

/// Longer than a process takes to stop.
const GRACE: Duration = Duration::from_secs(8);
