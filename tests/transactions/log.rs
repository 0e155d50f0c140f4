//! The log of the requests of a test.

use std::{
    io,
    sync::{Arc, Mutex},
};

use tracing::{Level, subscriber::DefaultGuard};
use tracing_subscriber::{
    filter::Targets,
    fmt::{self, MakeWriter},
    prelude::*,
};

use crate::scan;

/// The events of this thread's requests.
pub(crate) struct Log {
    lines: Lines,
    _subscriber: DefaultGuard,
}

impl Log {
    pub(crate) fn start() -> Self {
        let lines = Lines::default();
        let written = fmt::layer().with_ansi(false).with_writer(lines.clone());
        let own = Targets::new().with_target("tower_idempotency", Level::DEBUG);
        let subscriber = tracing_subscriber::registry()
            .with(written)
            .with(scan::layer())
            .with(own);
        Self {
            lines,
            _subscriber: subscriber.set_default(),
        }
    }

    /// The warnings, one on a line.
    pub(crate) fn warnings(&self) -> String {
        let text = self.text();
        let warnings = text.lines().filter(|line| line.contains(" WARN "));
        warnings.map(|line| format!("{line}\n")).collect()
    }

    /// How often a notice was logged, as a warning or not.
    pub(crate) fn notices(&self, name: &str) -> usize {
        self.text().matches(&format!("notice=\"{name}\"")).count()
    }

    /// Whether one warning has all of these.
    pub(crate) fn has(&self, parts: &[&str]) -> bool {
        let warnings = self.warnings();
        let mut lines = warnings.lines();
        lines.any(|line| parts.iter().all(|part| line.contains(part)))
    }

    fn text(&self) -> String {
        String::from_utf8(self.lines.0.lock().unwrap().clone()).unwrap()
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
