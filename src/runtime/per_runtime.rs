//! State that each Tokio runtime keeps for itself.

use std::sync::{Mutex, PoisonError};

use tokio::runtime;

/// A value for each runtime.
///
/// Tasks end with their runtime. State that a task keeps up to date is therefore
/// not shared with other runtimes.
pub(crate) struct PerRuntime<T>(Mutex<Vec<(runtime::Id, T)>>);

/// A value of [`PerRuntime`].
pub(crate) trait RuntimeState: Default {
    /// Returns whether the value can be dropped and created again.
    fn is_idle(&self) -> bool;
}

impl<T> Default for PerRuntime<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: RuntimeState> PerRuntime<T> {
    /// Calls `f` with the value of `runtime`, under a lock.
    ///
    /// A panic in `f` must leave the value consistent.
    pub(crate) fn with<R>(&self, runtime: runtime::Id, f: impl FnOnce(&mut T) -> R) -> R {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let index = values.iter().position(|(id, _)| *id == runtime);
        let index = index.unwrap_or_else(|| {
            // The runtimes of idle values may have ended.
            values.retain(|(_, value)| !value.is_idle());
            values.push((runtime, T::default()));
            values.len() - 1
        });
        f(&mut values[index].1)
    }

    /// Returns the number of values.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).len()
    }
}
