//! The example of a client, against the quick start, as two processes.

use std::{
    env,
    io::{BufRead as _, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
};

/// A process that is killed with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An example that has been built.
fn example(name: &str) -> Command {
    let test = env::current_exe().unwrap();
    let built: PathBuf = test.ancestors().nth(2).unwrap().join("examples");
    Command::new(built.join(name))
}

#[test]
fn the_client_pays_the_quick_start_once() {
    let file = env::temp_dir().join(format!("client-example-{}.db", std::process::id()));
    let server = example("quickstart")
        .env("PORT", "0")
        .env("DB", &file)
        .stdout(Stdio::piped())
        .spawn();
    let mut server = Process(server.unwrap());
    let mut printed = BufReader::new(server.0.stdout.take().unwrap()).lines();
    let mut next = |contains: &str| {
        let line = printed.by_ref().map(Result::unwrap);
        line.into_iter().find(|line| line.contains(contains))
    };
    let line = next("curl -i").unwrap();
    let address = line.split_whitespace().nth(2).unwrap();

    let paid = example("client").arg(address).output().unwrap();
    let paid = String::from_utf8(paid.stdout).unwrap();
    assert!(paid.contains("connection cut"), "{paid}");
    assert!(paid.contains("201 Created, replayed: true"), "{paid}");
    assert!(paid.contains("\"amount\":500"), "{paid}");

    server.0.kill().unwrap();
    assert!(next("charged 500").is_some());
    assert_eq!(next("charged"), None);
    drop(server);
    let _ = std::fs::remove_file(file);
}
