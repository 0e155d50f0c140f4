//! A PostgreSQL server for one test, which may kill it.

use std::{
    env, fs,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use tokio::time::{self, Instant};
use tower_idempotency::{
    PostgresStore,
    sqlx::{self, Connection as _, PgConnection, Row as _, raw_sql},
};

use crate::ports::free_port;

pub(crate) struct Server {
    programs: PathBuf,
    directory: PathBuf,
    port: u16,
    /// The user that runs the server if the test is root, which PostgreSQL
    /// refuses.
    user: Option<(u32, u32)>,
    postmaster: Child,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let programs = programs();
        let directory = env::temp_dir().join(format!("chaos-{:016x}", rand::random::<u64>()));
        fs::create_dir(&directory).unwrap();
        let user = (id(&["-u"]) == 0).then(|| (id(&["-u", "postgres"]), id(&["-g", "postgres"])));
        if user.is_some() {
            let owned = Command::new("chown")
                .arg("postgres")
                .arg(&directory)
                .status();
            assert!(owned.unwrap().success());
        }
        let made = as_user(user, &programs.join("initdb"))
            .arg("--pgdata")
            .arg(directory.join("data"))
            .args(["--username", "postgres", "--auth", "trust"])
            .args(["--encoding", "UTF8", "--no-locale"])
            .stdout(Stdio::null())
            .status();
        assert!(made.unwrap().success(), "initdb");
        let port = free_port();
        let postmaster = postmaster(&programs, &directory, port, user);
        let server = Self {
            programs,
            directory,
            port,
            user,
            postmaster,
        };
        answers(&server.url(port)).await;
        server
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) async fn migrate(&self) {
        let store = PostgresStore::connect(&self.url(self.port)).await.unwrap();
        store.migrate().await.unwrap();
        store.close().await;
    }

    /// Returns its address through this port.
    pub(crate) fn url(&self, port: u16) -> String {
        format!("postgres://postgres@127.0.0.1:{port}/postgres?sslmode=disable")
    }

    /// Crashes it, and starts it again.
    pub(crate) async fn restart(&mut self) {
        self.stop();
        self.start_again().await;
    }

    pub(crate) async fn start_again(&mut self) {
        self.postmaster = postmaster(&self.programs, &self.directory, self.port, self.user);
        answers(&self.url(self.port)).await;
    }

    /// Makes every write wait in its COMMIT for a standby that does not exist.
    /// Returns once one write waits.
    pub(crate) async fn lose_standby(&self) -> Result<(), sqlx::Error> {
        self.set_standby("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            .await?;
        let mut writer = PgConnection::connect(&self.url(self.port)).await?;
        let writes = async {
            loop {
                let write = raw_sql("SELECT pg_logical_emit_message(true, 'chaos', '')");
                write.execute(&mut writer).await?;
            }
        };
        let waits = async {
            while self.stalled_commits().await? == 0 {
                time::sleep(Duration::from_millis(10)).await;
            }
            Ok(())
        };
        tokio::select! {
            broken = writes => broken,
            waiting = waits => waiting,
        }
    }

    /// Ends the wait for the standby. Returns once no write waits.
    pub(crate) async fn regain_standby(&self) -> Result<(), sqlx::Error> {
        self.set_standby("ALTER SYSTEM RESET synchronous_standby_names")
            .await?;
        while self.stalled_commits().await? > 0 {
            time::sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }

    /// Returns the number of writes that wait for the standby.
    pub(crate) async fn stalled_commits(&self) -> Result<i64, sqlx::Error> {
        let mut connection = PgConnection::connect(&self.url(self.port)).await?;
        let row = raw_sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
            .fetch_one(&mut connection)
            .await?;
        connection.close().await?;
        row.try_get(0)
    }

    async fn set_standby(&self, statement: &'static str) -> Result<(), sqlx::Error> {
        let mut connection = PgConnection::connect(&self.url(self.port)).await?;
        raw_sql(statement).execute(&mut connection).await?;
        raw_sql("SELECT pg_reload_conf()")
            .execute(&mut connection)
            .await?;
        connection.close().await
    }

    /// Ends every connection but the one that gives the order.
    pub(crate) async fn terminate_backends(&self) -> Result<(), sqlx::Error> {
        let mut connection = PgConnection::connect(&self.url(self.port)).await?;
        raw_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
        )
        .execute(&mut connection)
        .await?;
        connection.close().await
    }

    pub(crate) fn stop(&mut self) {
        let postmaster = self.postmaster.id().to_string();
        let _ = Command::new("kill")
            .args(["-s", "QUIT", &postmaster])
            .status();
        let _ = self.postmaster.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn postmaster(programs: &Path, directory: &Path, port: u16, user: Option<(u32, u32)>) -> Child {
    as_user(user, &programs.join("postgres"))
        .arg("-D")
        .arg(directory.join("data"))
        .args(["-p", &port.to_string()])
        .args(["-c", "listen_addresses=127.0.0.1"])
        .args(["-c", "unix_socket_directories="])
        .args(["-c", "max_connections=300"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// A pooler in front of a [`Server`]. It gives each transaction another
/// connection.
pub(crate) struct Pooler {
    port: u16,
    process: Child,
}

impl Pooler {
    pub(crate) async fn before(server: &Server) -> Self {
        Self::with_mode(server, "transaction").await
    }

    pub(crate) async fn with_mode(server: &Server, mode: &str) -> Self {
        let port = free_port();
        let settings = server.directory.join("pgbouncer.ini");
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = {mode}\ndefault_pool_size = 8\n\
             server_login_retry = 1\nignore_startup_parameters = extra_float_digits\n",
            server.port
        );
        fs::write(&settings, text).unwrap();
        let paths = env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .chain([PathBuf::from("/usr/sbin")])
            .collect::<Vec<_>>();
        let program = paths
            .iter()
            .map(|directory| directory.join("pgbouncer"))
            .find(|program| program.exists())
            .expect("pgbouncer is not installed");
        let process = as_user(server.user, &program)
            .arg(&settings)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pooler = Self { port, process };
        answers(&server.url(port)).await;
        pooler
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits until the server at `url` answers.
async fn answers(url: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let answer = async {
            let mut connection = PgConnection::connect(url).await?;
            raw_sql("SELECT 1").execute(&mut connection).await
        };
        if answer.await.is_ok() {
            return;
        }
        assert!(Instant::now() < end, "{url} does not answer");
        time::sleep(Duration::from_millis(50)).await;
    }
}

fn as_user(user: Option<(u32, u32)>, program: &Path) -> Command {
    let mut command = Command::new(program);
    // A directory that every user may enter.
    command.current_dir("/").stdin(Stdio::null());
    if let Some((user, group)) = user {
        command.uid(user).gid(group);
    }
    command
}

fn id(of: &[&str]) -> u32 {
    let said = Command::new("id").args(of).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    said.trim().parse().expect("there is no user postgres")
}

/// The directory of the newest installed server.
fn programs() -> PathBuf {
    let installed = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut versions: Vec<_> = installed
        .filter_map(|version| Some(version.ok()?.path().join("bin")))
        .collect();
    versions.sort_by_key(|bin| {
        let version = bin.parent().and_then(Path::file_name)?.to_str()?;
        version.parse::<u32>().ok()
    });
    versions
        .into_iter()
        .rev()
        .chain(env::split_paths(&env::var_os("PATH").unwrap_or_default()))
        .find(|bin| bin.join("initdb").exists() && bin.join("postgres").exists())
        .expect("no programs of a PostgreSQL server (initdb, postgres) are installed")
}
