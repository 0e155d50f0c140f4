//! How the processes end.

use std::{
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use crate::process::Storefront;

#[test]
fn stop_ends_the_processes_and_removes_their_files() {
    let mut storefront = Storefront::open();
    wait_for_processes(&storefront.files.0, 6);
    assert!(storefront.end("TERM").success());
    assert_eq!(processes_of(&storefront.files.0), 0);
    let left = fs::read_dir(&storefront.files.0).unwrap().count();
    assert_eq!(left, 0);
}

#[test]
fn processes_end_when_the_first_one_is_killed() {
    let mut storefront = Storefront::open();
    wait_for_processes(&storefront.files.0, 6);
    storefront.end("KILL");
    wait_for_processes(&storefront.files.0, 0);
}

fn wait_for_processes(directory: &Path, number: usize) {
    let end = Instant::now() + Duration::from_secs(30);
    while processes_of(directory) != number {
        assert!(
            Instant::now() < end,
            "{} processes",
            processes_of(directory)
        );
        thread::sleep(Duration::from_millis(20));
    }
}

/// The processes whose files are in `directory`. An example is started with that in its
/// environment, and passes it on.
fn processes_of(directory: &Path) -> usize {
    let variable = format!("TMPDIR={}", directory.display()).into_bytes();
    let is_of = |process: &fs::DirEntry| {
        let environment = fs::read(process.path().join("environ")).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|found| found == variable)
    };
    let processes = fs::read_dir("/proc").unwrap().map_while(Result::ok);
    processes.filter(is_of).count()
}
