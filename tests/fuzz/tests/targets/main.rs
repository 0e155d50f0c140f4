//! Each fuzz target on stable Rust: its seeds, and changes of them for a second.
//!
//! A failure prints the input. Put it into `seeds` with
//! `printf HEX | xxd -r -p > tests/fuzz/seeds/TARGET/NAME`. Set `FUZZ_SECONDS` for a longer
//! run, and `FUZZ_SEED` for other changes.

mod mutator;

use std::{
    env, fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rand::{SeedableRng as _, rngs::StdRng};

use self::mutator::mutated;

macro_rules! targets {
    ($($target:ident)*) => {
        $(
            #[test]
            fn $target() {
                run(stringify!($target), fuzz::$target);
            }
        )*

        const TESTED: &[&str] = &[$(stringify!($target)),*];
    };
}

targets! { json key media_type multipart problem record sealed sequence }

#[test]
fn every_target_has_a_test_and_seeds() {
    for path in files("libfuzzer/targets") {
        let target = path.file_stem().unwrap().to_str().unwrap();
        assert!(TESTED.contains(&target), "{target}");
        assert!(!seeds(target).is_empty(), "{target}");
    }
}

fn run(target: &str, check: fn(&[u8])) {
    let check = |input: &[u8]| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
            #[expect(clippy::print_stderr, reason = "a failure shows its input")]
            {
                eprintln!("input of {target}: {}", hex::encode(input));
            }
            resume_unwind(panic);
        }
    };
    let mut inputs = seeds(target);
    inputs.iter().for_each(|input| check(input));
    inputs.push(Vec::new());
    let time = Duration::from_secs(number("FUZZ_SECONDS").unwrap_or(1));
    let mut dice = StdRng::seed_from_u64(number("FUZZ_SEED").unwrap_or_default());
    let begun = Instant::now();
    while begun.elapsed() < time {
        for _ in 0..100 {
            check(&mutated(&inputs, &mut dice));
        }
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let paths = files(&format!("seeds/{target}")).into_iter();
    paths.map(|path| fs::read(path).unwrap()).collect()
}

/// The files of a directory of this package, in their order.
fn files(directory: &str) -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let files = fs::read_dir(directory).unwrap();
    let mut paths: Vec<_> = files.map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths
}

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok()?.parse().ok()
}
