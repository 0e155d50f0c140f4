//! A store written against nothing but the public contract, checked by the
//! conformance suite: the place to start a fourth store from.
//!
//! One mutex around one map makes every call atomic. A store on a server says
//! the same guards in its own language, a `WHERE` clause or a script.
//!
//! ```sh
//! cargo run --example custom_store --features conformance
//! ```

use std::{
    collections::BTreeMap,
    convert::Infallible,
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::Instant;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{
    Fence, Fingerprint, IdempotencyLayer, OperationId, RecordName, RequestBody, Scope, Store,
    StoreError, Token,
    conformance::{Subject, promises},
    store::{
        Claim, Claimed, Completion, Filter, Grant, MarkedBy, Page, Purged, ReclaimAs, Record,
        RecordState, Release, Resolution, Transitioned,
    },
};

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    check().await;
    use_it().await
}

/// The store below the layer, as any other: one run, and its replay.
#[expect(clippy::print_stdout, reason = "a report for whoever runs it")]
async fn use_it() -> Result<(), Box<dyn std::error::Error>> {
    let layer = IdempotencyLayer::required(MapStore::default(), |_| Some(Scope::single_tenant()))
        .build()?;
    let service = layer.layer(service_fn(|_: Request<RequestBody<Full<Bytes>>>| async {
        println!("the handler runs");
        Ok::<_, Infallible>(Response::new(Full::from("paid")))
    }));
    for _ in 0..2 {
        let request = Request::post("/payments")
            .header("idempotency-key", "8e03978e")
            .body(Full::<Bytes>::from("amount=100"))?;
        let response = service.clone().oneshot(request).await?;
        let replayed = response.headers().contains_key("idempotent-replayed");
        println!("{}, replayed: {replayed}", response.status());
    }
    Ok(())
}

/// Says each promise once it is kept; panics at the first that is not.
#[expect(clippy::print_stdout, reason = "a report for whoever runs it")]
async fn check() {
    let promises = promises();
    for promise in &promises {
        promise.check(Maps).await;
        println!("kept: {}", promise.name().replace('_', " "));
    }
    println!("all {} promises are kept", promises.len());
}

/// What the suite needs to know: how to get a fresh store, and how its time
/// passes. This one reads Tokio's clock, which `main` has paused.
struct Maps;

impl Subject for Maps {
    type Store = MapStore;
    const TICK: Option<Duration> = Some(Duration::from_nanos(1));

    async fn store(&self) -> MapStore {
        MapStore::default()
    }

    async fn pass(&self, time: Duration) {
        tokio::time::advance(time).await;
    }
}

/// Records in one ordered map.
#[derive(Clone, Default)]
struct MapStore(Arc<Mutex<Table>>);

#[derive(Default)]
struct Table {
    rows: BTreeMap<RecordName, Row>,
    /// Outlives every record, so that fences grow over removals too.
    last_fence: u64,
}

struct Row {
    operation: OperationId,
    fence: Fence,
    attempt: u32,
    takeovers: u32,
    fingerprint: Fingerprint,
    token: Token,
    claimed_at: Instant,
    expires_at: Instant,
    state: State,
}

enum State {
    InProgress { lease_until: Instant },
    Completed(Bytes),
    Unknown,
    Released(Release),
}

impl MapStore {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().expect("no call panics with the table locked")
    }

    /// One transition: `Superseded` unless there is a row and `apply` did it.
    fn settle(
        &self,
        name: &RecordName,
        apply: impl FnOnce(&mut Row, Instant) -> bool,
    ) -> Result<Transitioned, StoreError> {
        let mut table = self.table();
        // The clock is read under the lock: time spent waiting counts.
        let now = Instant::now();
        let applied = table.rows.get_mut(name).is_some_and(|row| apply(row, now));
        Ok(if applied {
            Transitioned::Applied
        } else {
            Transitioned::Superseded
        })
    }
}

impl Table {
    fn next_fence(&mut self) -> Fence {
        self.last_fence += 1;
        Fence::new(self.last_fence)
    }
}

impl Row {
    fn new(claim: &Claim, fence: Fence, now: Instant) -> Self {
        Self {
            operation: claim.operation,
            fence,
            attempt: 1,
            takeovers: 0,
            fingerprint: claim.fingerprint,
            token: claim.token,
            claimed_at: now,
            expires_at: now + claim.retention,
            state: State::InProgress {
                lease_until: now + claim.lease,
            },
        }
    }

    fn grant(&self) -> Grant {
        Grant::new(self.operation, self.fence, self.attempt)
    }

    fn has_lapsed(&self, now: Instant) -> bool {
        matches!(self.state, State::InProgress { lease_until } if lease_until < now)
    }

    fn has_expired(&self, now: Instant) -> bool {
        self.expires_at < now
    }

    fn allows(&self, reclaim_as: ReclaimAs, now: Instant) -> bool {
        match reclaim_as {
            ReclaimAs::Takeover => self.has_lapsed(now),
            ReclaimAs::Rerun | ReclaimAs::Reconcile => {
                matches!(self.state, State::Unknown) && !self.has_expired(now)
            }
            ReclaimAs::Retry => matches!(self.state, State::Released(_)) && !self.has_expired(now),
            ReclaimAs::Replace => {
                matches!(self.state, State::Released(Release::AnyRequest)) && !self.has_expired(now)
            }
            ReclaimAs::Expired => {
                let is_held = matches!(self.state, State::InProgress { .. });
                self.has_expired(now) && (!is_held || self.has_lapsed(now))
            }
        }
    }

    fn record(&self, now: Instant) -> Record {
        // At its last moment nothing is over: `None` is for the past alone.
        let left = |until: Instant| until.checked_duration_since(now);
        Record::new(
            self.operation,
            self.fence,
            self.attempt,
            self.takeovers,
            self.fingerprint,
            self.token,
            now - self.claimed_at,
            left(self.expires_at),
            match &self.state {
                State::InProgress { lease_until } => RecordState::InProgress {
                    lease_left: left(*lease_until),
                },
                State::Completed(response) => RecordState::Completed {
                    response: response.clone(),
                },
                State::Unknown => RecordState::Unknown,
                State::Released(release) => RecordState::Released(*release),
            },
        )
    }
}

impl Store for MapStore {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let mut table = self.table();
        let now = Instant::now();
        if let Some(row) = table.rows.get(name) {
            return Ok(Claimed::Occupied(row.record(now)));
        }
        let row = Row::new(claim, table.next_fence(), now);
        let grant = row.grant();
        table.rows.insert(name.clone(), row);
        Ok(Claimed::Acquired(grant))
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let mut table = self.table();
        let now = Instant::now();
        let fence = table.next_fence();
        let Some(row) = table.rows.get_mut(name) else {
            return Ok(None);
        };
        if row.fence != seen || !row.allows(reclaim_as, now) {
            return Ok(None);
        }
        let (operation, attempt, takeovers) = match reclaim_as {
            ReclaimAs::Takeover | ReclaimAs::Rerun => {
                (row.operation, row.attempt + 1, row.takeovers + 1)
            }
            ReclaimAs::Reconcile => (row.operation, row.attempt, row.takeovers),
            ReclaimAs::Retry => (row.operation, row.attempt + 1, row.takeovers.min(1)),
            ReclaimAs::Replace | ReclaimAs::Expired => (claim.operation, 1, 0),
        };
        *row = Row {
            operation,
            attempt,
            takeovers,
            ..Row::new(claim, fence, now)
        };
        Ok(Some(row.grant()))
    }

    async fn renew(
        &self,
        name: &RecordName,
        token: Token,
        lease: Duration,
    ) -> Result<Transitioned, StoreError> {
        self.settle(name, |row, now| match &mut row.state {
            State::InProgress { lease_until } if row.token == token => {
                *lease_until = now + lease;
                true
            }
            _ => false,
        })
    }

    async fn complete(
        &self,
        name: &RecordName,
        token: Token,
        completion: &Completion,
    ) -> Result<Transitioned, StoreError> {
        self.settle(name, |row, now| match row.state {
            _ if row.token != token => false,
            State::InProgress { .. } | State::Unknown => {
                row.state = State::Completed(completion.response.clone());
                row.expires_at =
                    (row.claimed_at + completion.retention).max(now + completion.at_least);
                true
            }
            State::Completed(_) => true,
            State::Released(_) => false,
        })
    }

    async fn release(
        &self,
        name: &RecordName,
        token: Token,
        release: Release,
    ) -> Result<Transitioned, StoreError> {
        self.settle(name, |row, _| match row.state {
            _ if row.token != token => false,
            State::InProgress { .. } => {
                // After a run whose outcome is unknown the key stays with its
                // request.
                row.state = State::Released(match row.takeovers {
                    0 => release,
                    _ => Release::SameRequest,
                });
                true
            }
            State::Released(_) => true,
            State::Completed(_) | State::Unknown => false,
        })
    }

    async fn mark_unknown(
        &self,
        name: &RecordName,
        marked_by: MarkedBy,
        retention: Duration,
    ) -> Result<Transitioned, StoreError> {
        self.settle(name, |row, now| {
            let (known, allowed) = match marked_by {
                MarkedBy::Owner(token) => (row.token == token, true),
                MarkedBy::Lapsed(seen) => (row.fence == seen, row.has_lapsed(now)),
            };
            match row.state {
                State::InProgress { .. } if known && allowed => {
                    row.state = State::Unknown;
                    row.expires_at = now + retention;
                    true
                }
                State::Unknown => known,
                _ => false,
            }
        })
    }

    async fn resolve(
        &self,
        name: &RecordName,
        seen: Fence,
        resolution: &Resolution,
    ) -> Result<Transitioned, StoreError> {
        self.settle(name, |row, now| match row.state {
            State::Unknown if row.fence == seen => {
                row.state = match resolution {
                    Resolution::Happened { response, at_least } => {
                        // The owner has lost it, should it ever come back.
                        row.token = Token::random();
                        row.expires_at = row.expires_at.max(now + *at_least);
                        State::Completed(response.clone())
                    }
                    Resolution::DidNotHappen => {
                        row.takeovers = 0;
                        State::Released(Release::SameRequest)
                    }
                };
                true
            }
            _ => false,
        })
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let table = self.table();
        let now = Instant::now();
        Ok(table.rows.get(name).map(|row| row.record(now)))
    }

    async fn list(
        &self,
        filter: Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let table = self.table();
        let now = Instant::now();
        let first = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut listed = Vec::new();
        let left = table.rows.range((first, Bound::Unbounded));
        for (examined, (name, row)) in left.enumerate() {
            let record = row.record(now);
            let chosen = match filter {
                Filter::Unknown => matches!(record.state, RecordState::Unknown),
                Filter::InProgressFor(least) => {
                    matches!(record.state, RecordState::InProgress { .. }) && record.age > least
                }
                // A later version of the contract may ask for more than this
                // store knows; it says so instead of showing too much.
                _ => return Err(StoreError::unavailable("this filter is not supported")),
            };
            if chosen {
                listed.push((name.clone(), record));
            }
            // However large the table is, the lock is not held for long.
            if listed.len() >= limit.max(1) as usize || examined == MOST_EXAMINED {
                let next = Some(name.clone());
                return Ok(Page::new(listed, next));
            }
        }
        Ok(Page::new(listed, None))
    }

    async fn forget(&self, name: &RecordName, seen: Fence) -> Result<Transitioned, StoreError> {
        let mut table = self.table();
        Ok(match table.rows.get(name) {
            Some(row) if row.fence == seen => {
                table.rows.remove(name);
                Transitioned::Applied
            }
            _ => Transitioned::Superseded,
        })
    }

    async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let mut table = self.table();
        let now = Instant::now();
        let mut purged = Purged::default();
        table.rows.retain(|_, row| {
            if purged.touched() >= u64::from(limit) || !row.has_expired(now) {
                return true;
            }
            match row.state {
                State::InProgress { .. } => {
                    if row.has_lapsed(now) {
                        row.state = State::Unknown;
                        row.expires_at = now + unknown_retention;
                        purged.marked_unknown += 1;
                    }
                    true
                }
                State::Unknown => {
                    purged.removed += 1;
                    purged.removed_unknown += 1;
                    false
                }
                State::Completed(_) | State::Released(_) => {
                    purged.removed += 1;
                    false
                }
            }
        });
        Ok(purged)
    }
}

/// How many records a page of a list looks at.
const MOST_EXAMINED: usize = 10_000;
