//! How far an upload has come.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::{ErasedStream, UploadFault};

/// How far an upload has come, for the layer.
#[derive(Default)]
pub(crate) struct UploadState {
    progress: Mutex<Progress>,
    changed: Notify,
}

#[derive(Default)]
struct Progress {
    /// How it ended.
    ended: Option<Result<(), UploadFault>>,
    /// What the handler has left of it.
    left: Option<Box<ErasedStream>>,
}

impl UploadState {
    /// Returns how it ended; `None` if it has not.
    pub(crate) fn ended(&self) -> Option<Result<(), UploadFault>> {
        self.progress().ended
    }

    /// Whether its handler has dropped it.
    pub(crate) fn is_left(&self) -> bool {
        self.progress().left.is_some()
    }

    /// Takes what the handler has left of it.
    pub(crate) fn take_left(&self) -> Option<Box<ErasedStream>> {
        self.progress().left.take()
    }

    /// Resolves when it has ended, or its handler has dropped it.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    pub(super) fn end(&self, ended: Result<(), UploadFault>) {
        self.progress().ended.get_or_insert(ended);
        self.changed.notify_one();
    }

    pub(super) fn leave(&self, left: ErasedStream) {
        self.progress().left = Some(Box::new(left));
        self.changed.notify_one();
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for UploadState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UploadState")
            .field("ended", &self.ended())
            .finish_non_exhaustive()
    }
}
