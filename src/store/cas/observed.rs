use std::{
    collections::HashMap,
    mem,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Since when this process has seen the same version of each record in progress.
///
/// Bounded: the observation that was not used for longest is forgotten first. That
/// only makes a lease last longer.
pub(super) struct Observed<V>(Mutex<Generations<V>>);

struct Generations<V> {
    recent: HashMap<String, (V, Instant)>,
    former: HashMap<String, (V, Instant)>,
}

impl<V: PartialEq> Observed<V> {
    /// Returns the time until a lease of this length has lapsed for this process, or
    /// `None` if it has. Call it after the record was read.
    pub(super) fn lease_left(&self, key: &str, version: V, lease: Duration) -> Option<Duration> {
        let now = Instant::now();
        let unchanged_for = now - self.since(key, version, now);
        match lease.checked_sub(unchanged_for) {
            None if unchanged_for > lease.saturating_add(lease / MARGIN) => None,
            left => Some(left.unwrap_or_default()),
        }
    }

    fn since(&self, key: &str, version: V, now: Instant) -> Instant {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = generations.remove(key);
        let since = match seen {
            Some((seen, since)) if seen == version => since,
            _ => now,
        };
        if generations.recent.len() >= GENERATION {
            generations.former = mem::take(&mut generations.recent);
        }
        generations.recent.insert(key.to_owned(), (version, since));
        since
    }

    /// Forgets a record that is not in progress.
    pub(super) fn forget(&self, key: &str) {
        let mut generations = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        generations.remove(key);
    }
}

impl<V> Generations<V> {
    fn remove(&mut self, key: &str) -> Option<(V, Instant)> {
        self.recent.remove(key).or_else(|| self.former.remove(key))
    }
}

impl<V> Default for Observed<V> {
    fn default() -> Self {
        Self(Mutex::new(Generations {
            recent: HashMap::new(),
            former: HashMap::new(),
        }))
    }
}

/// A lease is given its hundredth more: for monotonic clocks that do not run alike.
const MARGIN: u32 = 100;
/// How many observations a generation has. There are two.
const GENERATION: usize = 50_000;

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(100);

    #[tokio::test(start_paused = true)]
    async fn unchanged_version_lapses_after_lease_and_margin() {
        let observed = Observed::default();
        assert_eq!(observed.lease_left("key", 1, LEASE), Some(LEASE));
        tokio::time::advance(LEASE).await;
        assert_eq!(observed.lease_left("key", 1, LEASE), Some(Duration::ZERO));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(observed.lease_left("key", 1, LEASE), Some(Duration::ZERO));
        tokio::time::advance(Duration::from_nanos(1)).await;
        assert_eq!(observed.lease_left("key", 1, LEASE), None);
        assert_eq!(observed.lease_left("key", 2, LEASE), Some(LEASE));
    }

    #[tokio::test(start_paused = true)]
    async fn forgotten_observation_starts_again() {
        let observed = Observed::default();
        observed.lease_left("key", 1, LEASE);
        tokio::time::advance(LEASE * 2).await;
        observed.forget("key");
        assert_eq!(observed.lease_left("key", 1, LEASE), Some(LEASE));
    }

    #[tokio::test(start_paused = true)]
    async fn full_generations_keep_what_is_used() {
        let observed = Observed::default();
        observed.lease_left("used", 1, LEASE);
        observed.lease_left("unused", 1, LEASE);
        tokio::time::advance(LEASE * 2).await;
        for other in 0..2 * GENERATION {
            observed.lease_left(&other.to_string(), 1, LEASE);
            observed.lease_left("used", 1, LEASE);
        }
        assert_eq!(observed.lease_left("used", 1, LEASE), None);
        assert_eq!(observed.lease_left("unused", 1, LEASE), Some(LEASE));
        let generations = observed.0.lock().unwrap();
        assert!(generations.recent.len() <= GENERATION);
        assert!(generations.former.len() <= GENERATION);
    }
}
