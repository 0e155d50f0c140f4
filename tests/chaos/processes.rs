//! Processes of the playground, each started again whenever it dies.

use std::{
    env,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::PathBuf,
    process::{Child, ChildStderr, Command, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Counts of messages in the logs of the processes.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    pub(crate) superseded: AtomicUsize,
    pub(crate) commit_found: AtomicUsize,
    pub(crate) abort_found: AtomicUsize,
    /// Warnings of a full store or database, which are limited in number.
    pub(crate) disk_full: AtomicUsize,
    panics: Mutex<Vec<String>>,
}

impl Notices {
    fn listen(&self, logs: ChildStderr) {
        for line in BufReader::new(logs).lines().map_while(Result::ok) {
            for (notice, count) in [
                ("notice=\"superseded\"", &self.superseded),
                ("notice=\"commit-found\"", &self.commit_found),
                ("notice=\"abort-found\"", &self.abort_found),
                (" is full", &self.disk_full),
            ] {
                if line.contains(notice) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
            if line.contains("panicked at") {
                lock(&self.panics).push(line);
            }
        }
    }

    pub(crate) fn panics(&self) -> Vec<String> {
        lock(&self.panics).clone()
    }
}

/// Holds one process at a time.
pub(crate) struct Seat {
    shared: Arc<Shared>,
    keeper: Option<JoinHandle<()>>,
}

struct Shared {
    environment: Vec<(&'static str, String)>,
    notices: Arc<Notices>,
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    child: Option<Child>,
    /// An additional setting, until it is changed.
    besides: Option<(&'static str, &'static str)>,
    address: Option<SocketAddr>,
    is_closed: bool,
}

impl Seat {
    pub(crate) fn open(environment: Vec<(&'static str, String)>, notices: Arc<Notices>) -> Self {
        let shared = Arc::new(Shared {
            environment,
            notices,
            now: Mutex::default(),
        });
        let kept = Arc::clone(&shared);
        let keeper = Some(thread::spawn(move || kept.keep()));
        Self { shared, keeper }
    }

    /// The address of its process; `None` without one.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        lock(&self.shared.now).address
    }

    /// Kills its process. The next ones get this additional setting.
    pub(crate) fn restart_with(&self, besides: Option<(&'static str, &'static str)>) {
        lock(&self.shared.now).besides = besides;
        self.signal("KILL");
    }

    /// Sends a signal to its process. While the lock is held the process is not
    /// reaped, so that its id is not reused.
    pub(crate) fn signal(&self, name: &str) {
        let mut now = lock(&self.shared.now);
        if let Some(child) = &mut now.child
            && matches!(child.try_wait(), Ok(None))
        {
            let id = child.id().to_string();
            let told = Command::new("kill").args(["-s", name, &id]).status();
            assert!(told.unwrap().success(), "kill -s {name} {id}");
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        {
            let mut now = lock(&self.shared.now);
            now.is_closed = true;
            if let Some(child) = &mut now.child {
                let _ = child.kill();
            }
        }
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
    }
}

impl Shared {
    fn keep(&self) {
        loop {
            let (out, logs) = {
                let mut now = lock(&self.now);
                if now.is_closed {
                    return;
                }
                let mut child = Command::new(program())
                    .env_clear()
                    // Warnings are limited; each notice is an event at DEBUG at least.
                    .env("RUST_LOG", "warn,tower_idempotency=debug")
                    .envs(self.environment.iter().map(|(name, value)| (name, value)))
                    .envs(now.besides)
                    .stdin(Stdio::null())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .expect("the playground is not built: cargo build --examples --all-features");
                let (out, logs) = (child.stdout.take(), child.stderr.take());
                now.child = Some(child);
                (out, logs)
            };
            let notices = Arc::clone(&self.notices);
            let listener = logs.map(|logs| thread::spawn(move || notices.listen(logs)));
            // Kept open until the process ends, which it would if its output were
            // closed.
            let mut out = out.map(BufReader::new);
            let mut line = String::new();
            if let Some(out) = &mut out {
                let _ = out.read_line(&mut line);
            }
            let said = line.trim().strip_prefix("listening on ");
            lock(&self.now).address = said.and_then(|address| address.parse().ok());
            while self.is_running() {
                thread::sleep(Duration::from_millis(20));
            }
            if let Some(listener) = listener {
                let _ = listener.join();
            }
            // A process does not start without its store. Wait before the next
            // try.
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn is_running(&self) -> bool {
        let mut now = lock(&self.now);
        let is_running = now
            .child
            .as_mut()
            .is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        if !is_running {
            now.child = None;
            now.address = None;
        }
        is_running
    }
}

/// Cargo builds the examples beside the directory of the tests.
fn program() -> PathBuf {
    let test = env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("examples/playground")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
