//! Limits on what a layer holds at a time, and on what one scope does.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::sync::Notify;

use crate::{key::Scope, rejection::Numbers};

/// A limit on a number of requests, tasks or bytes. Nothing waits for a permit.
///
/// It may limit each scope too. To cost nothing as long as there is plenty, scopes count
/// only what they take while more than half of the limit is taken. So one scope can take
/// half and its own part, and the rest is for other scopes.
pub(crate) struct Limit(Arc<Counter>);

struct Counter {
    max: usize,
    max_per_scope: usize,
    /// The counted part of each scope that has one.
    of_scopes: Mutex<HashMap<Scope, usize>>,
    taken: AtomicUsize,
    /// Whether a task waits for the last permit to be given back.
    is_watched: AtomicBool,
    emptied: Notify,
}

impl Limit {
    pub(crate) fn new(max: usize) -> Self {
        Self::with_scopes(max, max)
    }

    pub(crate) fn with_scopes(max: usize, max_per_scope: usize) -> Self {
        Self(Arc::new(Counter {
            max,
            max_per_scope,
            of_scopes: Mutex::default(),
            taken: AtomicUsize::new(0),
            is_watched: AtomicBool::new(false),
            emptied: Notify::new(),
        }))
    }

    /// Returns a permit for `size`, or `None` if less is left.
    pub(crate) fn try_acquire(&self, size: usize) -> Option<Permit> {
        let mut permit = self.empty_permit();
        permit.try_grow(size).then_some(permit)
    }

    /// Returns a permit for a request of `scope`.
    pub(crate) fn acquire(&self, scope: &Scope) -> Result<Permit, Full> {
        let mut permit = self.empty_permit();
        permit.grow(scope, 1)?;
        Ok(permit)
    }

    /// Returns a permit for nothing yet.
    pub(crate) fn empty_permit(&self) -> Permit {
        Permit {
            counter: Arc::clone(&self.0),
            size: 0,
            counted: None,
        }
    }

    pub(crate) fn taken(&self) -> usize {
        self.0.taken.load(Ordering::SeqCst)
    }

    /// Resolves once no permit is held.
    pub(crate) async fn emptied(&self) {
        self.0.is_watched.store(true, Ordering::SeqCst);
        loop {
            let emptied = self.0.emptied.notified();
            if self.taken() == 0 {
                return;
            }
            emptied.await;
        }
    }
}

/// Why a permit is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// Less is left of the limit.
    Process(Exceeded),
    /// Less is left of what one scope may take.
    Scope(Exceeded),
}

/// A limit, and the sum that would exceed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exceeded {
    limit: usize,
    got: usize,
}

impl Exceeded {
    /// Returns the numbers for the log. `unit` is what the limit counts.
    pub(crate) fn numbers(self, unit: &'static str, refused: &'static str) -> Numbers {
        let [limit, got] = [self.limit, self.got].map(|number| number as u64);
        Numbers {
            limit,
            unit,
            got,
            refused,
        }
    }
}

/// A part of a [`Limit`], given back when it is dropped.
pub(crate) struct Permit {
    counter: Arc<Counter>,
    size: usize,
    counted: Option<Box<Counted>>,
}

/// The part of a permit that was counted for its scope.
struct Counted {
    scope: Scope,
    size: usize,
}

impl Permit {
    /// Adds `size` to the permit. Returns false if less is left.
    pub(crate) fn try_grow(&mut self, size: usize) -> bool {
        self.take(size).is_ok()
    }

    /// Adds `size` to the permit, which is that of a request of `scope`.
    pub(crate) fn grow(&mut self, scope: &Scope, size: usize) -> Result<(), Full> {
        // A permit for nothing has no part to give back, so that its scope would stay counted.
        if size == 0 {
            return Ok(());
        }
        let before = self.take(size).map_err(Full::Process)?;
        // A single tenant is alone, and may take everything.
        if before + size <= self.counter.max / 2 || *scope == Scope::single_tenant() {
            return Ok(());
        }
        let counter = Arc::clone(&self.counter);
        if let Err(exceeded) = counter.count(scope, size) {
            self.size -= size;
            counter.give_back(size);
            return Err(Full::Scope(exceeded));
        }
        let counted = self.counted.get_or_insert_with(|| {
            let scope = scope.clone();
            Box::new(Counted { scope, size: 0 })
        });
        counted.size += size;
        Ok(())
    }

    /// Makes the permit, which is that of a request of `scope`, one for `size`. Changes nothing
    /// if it fails.
    pub(crate) fn resize(&mut self, scope: &Scope, size: usize) -> Result<(), Full> {
        match size.checked_sub(self.size) {
            Some(more) => self.grow(scope, more),
            None => {
                self.shrink(self.size - size);
                Ok(())
            }
        }
    }

    fn shrink(&mut self, size: usize) {
        if let Some(counted) = &mut self.counted {
            let less = counted.size.min(size);
            self.counter.uncount(&counted.scope, less);
            counted.size -= less;
        }
        self.size -= size;
        self.counter.give_back(size);
    }

    /// Takes `size` of the limit. Returns the sum of all permits before.
    fn take(&mut self, size: usize) -> Result<usize, Exceeded> {
        let Counter { max, taken, .. } = &*self.counter;
        let before = taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |taken| {
            taken.checked_add(size).filter(|sum| sum <= max)
        });
        let before = before.map_err(|taken| Exceeded {
            limit: *max,
            got: taken.saturating_add(size),
        })?;
        self.size += size;
        Ok(before)
    }
}

impl Counter {
    /// Counts `size` for the scope, if it may take so much.
    fn count(&self, scope: &Scope, size: usize) -> Result<(), Exceeded> {
        let mut of_scopes = self.of_scopes();
        let taken = of_scopes.get(scope).copied().unwrap_or_default();
        let (limit, got) = (self.max_per_scope, taken.saturating_add(size));
        if got > limit {
            return Err(Exceeded { limit, got });
        }
        of_scopes.insert(scope.clone(), got);
        Ok(())
    }

    fn uncount(&self, scope: &Scope, size: usize) {
        let mut of_scopes = self.of_scopes();
        if let Some(taken) = of_scopes.get_mut(scope) {
            *taken -= size;
            if *taken == 0 {
                of_scopes.remove(scope);
            }
        }
    }

    fn give_back(&self, size: usize) {
        let before = self.taken.fetch_sub(size, Ordering::SeqCst);
        // Either this sees that the limit is watched, or the watcher sees that no
        // permit is held.
        if before == size && self.is_watched.load(Ordering::SeqCst) {
            self.emptied.notify_waiters();
        }
    }

    fn of_scopes(&self) -> MutexGuard<'_, HashMap<Scope, usize>> {
        self.of_scopes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.size > 0 {
            self.shrink(self.size);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_process(limit: usize, got: usize) -> Full {
        Full::Process(Exceeded { limit, got })
    }

    fn of_scope(limit: usize, got: usize) -> Full {
        Full::Scope(Exceeded { limit, got })
    }

    #[test]
    fn one_scope_leaves_a_quarter_to_others() {
        let (one, other) = (Scope::new("one").unwrap(), Scope::new("other").unwrap());
        let limit = Limit::with_scopes(8, 2);
        let mut held: Vec<_> = (0..6).map(|_| limit.acquire(&one).unwrap()).collect();
        assert_eq!(limit.acquire(&one).err(), Some(of_scope(2, 3)));
        assert_eq!(limit.taken(), 6);
        held.extend([&other, &other].map(|scope| limit.acquire(scope).unwrap()));
        assert_eq!(limit.acquire(&other).err(), Some(of_process(8, 9)));
        // All counted parts are given back, and the map is empty.
        held.clear();
        assert_eq!((limit.taken(), limit.0.of_scopes().len()), (0, 0));
        let alone = Scope::single_tenant();
        held.extend((0..8).map(|_| limit.acquire(&alone).unwrap()));
        assert_eq!(limit.acquire(&alone).err(), Some(of_process(8, 9)));
    }

    #[test]
    fn growing_permit_counts_from_half_of_the_limit() {
        let scope = Scope::new("one").unwrap();
        let limit = Limit::with_scopes(100, 10);
        let mut permit = limit.empty_permit();
        assert_eq!(permit.grow(&scope, 50), Ok(()));
        assert_eq!(permit.grow(&scope, 7), Ok(()));
        assert_eq!(permit.grow(&scope, 4), Err(of_scope(10, 11)));
        assert_eq!(permit.grow(&scope, 3), Ok(()));
        assert_eq!(limit.taken(), 60);
        assert_eq!(permit.resize(&scope, 45), Ok(()));
        assert_eq!(permit.resize(&scope, 58), Err(of_scope(10, 13)));
        assert_eq!(permit.resize(&scope, 54), Ok(()));
        drop(permit);
        assert_eq!((limit.taken(), limit.0.of_scopes().len()), (0, 0));
    }

    #[test]
    fn permit_for_nothing_counts_no_scope() {
        let (one, other) = (Scope::new("one").unwrap(), Scope::new("other").unwrap());
        let limit = Limit::with_scopes(8, 2);
        let held: Vec<_> = (0..5).map(|_| limit.acquire(&one).unwrap()).collect();
        let mut nothing = limit.empty_permit();
        assert_eq!(nothing.grow(&other, 0), Ok(()));
        assert_eq!(nothing.resize(&other, 0), Ok(()));
        assert_eq!(limit.0.of_scopes().len(), 1);
        drop((nothing, held));
        assert_eq!(limit.0.of_scopes().len(), 0);
    }
}
