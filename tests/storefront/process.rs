//! The example as a process, with files of its own.

use std::{
    env, fs,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, ExitStatus, Output, Stdio},
};

/// The storefront, and all that it starts.
pub(crate) struct Storefront {
    process: Child,
    pub(crate) address: String,
    pub(crate) files: Directory,
}

impl Storefront {
    pub(crate) fn open() -> Self {
        let files = Directory::new();
        let mut process = program(&files)
            .env("PORT", "0")
            .stdout(Stdio::piped())
            .spawn()
            .expect("the storefront is not built: cargo build --workspace --examples");
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on ");
        Self {
            address: address.expect(&line).to_owned(),
            process,
            files,
        }
    }

    /// Sends it a signal, and waits for its end.
    pub(crate) fn end(&mut self, signal: &str) -> ExitStatus {
        if let Some(status) = self.process.try_wait().unwrap() {
            return status;
        }
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-s", signal, &id]).status();
        assert!(sent.unwrap().success());
        self.process.wait().unwrap()
    }
}

impl Drop for Storefront {
    fn drop(&mut self) {
        self.end("TERM");
    }
}

/// Places this many orders under all faults, on the database of this URL or in a file.
pub(crate) fn load(orders: u32, database: Option<&str>) -> Output {
    let files = Directory::new();
    let mut program = program(&files);
    if let Some(url) = database {
        program.env("DATABASE_URL", url);
    }
    let output = program
        .args(["load", &orders.to_string()])
        .output()
        .unwrap();
    assert!(fs::read_dir(&files.0).unwrap().next().is_none());
    output
}

/// Cargo builds the examples beside the directory of the tests.
fn program(files: &Directory) -> Command {
    let test = env::current_exe().unwrap();
    let built = test.ancestors().nth(2).unwrap().join("examples/storefront");
    let mut program = Command::new(built);
    program.env_remove("DATABASE_URL").env("TMPDIR", &files.0);
    program
}

/// A directory that is removed with its files.
pub(crate) struct Directory(pub(crate) PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        let name = format!("storefront-test-{:016x}", rand::random::<u64>());
        let directory = env::temp_dir().join(name);
        fs::create_dir(&directory).unwrap();
        Self(directory)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
