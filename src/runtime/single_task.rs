//! Background work of which one task is enough.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

/// Permits one task at a time.
#[derive(Debug, Default)]
pub(crate) struct SingleTask(Arc<AtomicBool>);

/// The task's permit. Dropped, it permits the next task: at the latest with the runtime in
/// which its task ran.
#[derive(Debug)]
pub(crate) struct Permit(Arc<AtomicBool>);

impl SingleTask {
    /// Returns `None` while another task has the permit.
    pub(crate) fn try_begin(&self) -> Option<Permit> {
        // Most calls only read, so that threads share the cache line.
        let is_running = self.0.load(Ordering::Acquire) || self.0.swap(true, Ordering::AcqRel);
        (!is_running).then(|| Permit(Arc::clone(&self.0)))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    #[test]
    fn runtime_that_ends_permits_the_next_task() {
        let single = SingleTask::default();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let permit = single.try_begin().unwrap();
        assert!(single.try_begin().is_none());
        runtime.spawn(async move {
            let _permit = permit;
            pending::<()>().await;
        });
        assert!(single.try_begin().is_none());
        drop(runtime);
        assert!(single.try_begin().is_some());
    }
}
