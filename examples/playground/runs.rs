//! Counts the runs of handlers, over processes and crashes.

use std::{
    fs::{self, OpenOptions},
    io::{self, Seek as _, Write as _},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    extract::{OriginalUri, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::StatusCode;

use crate::caller::Account;

/// One line, `path account`, for each run of a handler: in a file that several
/// processes share, or in memory.
#[derive(Clone)]
pub(crate) enum Runs {
    Shared(Arc<PathBuf>),
    Own(Arc<Mutex<Vec<u8>>>),
}

/// The number of this run among those of its path, as an extension of its
/// request.
#[derive(Clone, Copy)]
pub(crate) struct Run(pub(crate) usize);

impl Runs {
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        match file {
            Some(file) => Self::Shared(Arc::new(file)),
            None => Self::Own(Arc::default()),
        }
    }

    /// Notes a run before it does anything, so that a crash cannot hide it.
    pub(crate) fn add(&self, path: &str, account: &str) -> io::Result<Run> {
        let line = format!("{path} {account}\n");
        let runs = match self {
            Self::Shared(file) => {
                let mut out = OpenOptions::new().create(true).append(true).open(&**file)?;
                out.write_all(line.as_bytes())?;
                // The end of this line. Later runs may have appended more.
                let end = out.stream_position()?;
                let mut runs = fs::read(&**file)?;
                runs.truncate(usize::try_from(end).unwrap_or(usize::MAX));
                count(&runs, Some(path))
            }
            Self::Own(lines) => {
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.extend_from_slice(line.as_bytes());
                count(&lines, Some(path))
            }
        };
        Ok(Run(runs))
    }

    /// The runs of one path, or all.
    pub(crate) fn count(&self, path: Option<&str>) -> io::Result<usize> {
        match self {
            Self::Shared(file) => match fs::read(&**file) {
                Ok(lines) => Ok(count(&lines, path)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
                Err(error) => Err(error),
            },
            Self::Own(lines) => {
                let lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(count(&lines, path))
            }
        }
    }
}

/// Counts a run right before the handlers, inside of every other layer.
pub(crate) async fn note(
    State(runs): State<Runs>,
    OriginalUri(uri): OriginalUri,
    mut request: Request,
    next: Next,
) -> Response {
    match runs.add(uri.path(), Account::name(request.extensions())) {
        Ok(run) => {
            request.extensions_mut().insert(run);
            next.run(request).await
        }
        Err(error) => unwritable(&error).into_response(),
    }
}

pub(crate) fn unwritable(error: &io::Error) -> (StatusCode, String) {
    let message = format!("the list of runs: {error}");
    (StatusCode::INTERNAL_SERVER_ERROR, message)
}

fn count(lines: &[u8], path: Option<&str>) -> usize {
    lines
        .split_inclusive(|&byte| byte == b'\n')
        .filter(|line| {
            let of_line = line.split(|&byte| byte == b' ').next();
            path.is_none_or(|path| of_line == Some(path.as_bytes()))
        })
        .count()
}
