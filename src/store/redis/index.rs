//! The index of records whose outcome is open: in progress or unknown.
//!
//! Each of 1,024 groups of names is a sorted set in the slot of its records. An entry names
//! one claim, and its score is the time at which it was added, in microseconds. The scripts
//! keep it, except on a cluster: there, a script with two keys fails while their slot moves.
//! So an entry is added before the claim and removed after the outcome, by commands of their
//! own. Each open record has an entry, and an entry need not have an open record: readers
//! look. A replica receives both in the same order.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use futures_util::future::{join_all, try_join_all};
use redis::FromRedisValue as _;

use super::{
    Inner,
    error::unexpected,
    micros,
    place::{GROUPS, group, index, joined, now},
    scripts::Call,
};
use crate::{
    key::{Key, RecordName, Scope},
    store::{
        Purged, Record, StoreError, StoreErrorKind, Token,
        admin::{Filter, Page},
        transition::Swept,
    },
};

/// The entry of one claim.
struct Entry {
    name: RecordName,
    token: Token,
    added: Duration,
}

impl Inner {
    /// In the order of the groups, and of the names in each.
    pub(super) async fn list(
        &self,
        filter: &Filter,
        after: Option<&RecordName>,
        limit: u32,
    ) -> Result<Page, StoreError> {
        let first = after.map_or(0, |after| group(joined(after).as_bytes()));
        let (mut page, mut examined) = (Page::default(), 0);
        for start in (first..GROUPS).step_by(TOGETHER) {
            for (group, entries) in (start..).zip(self.entries(start).await?) {
                // A name may have entries of claims before its last one.
                let mut claims = BTreeMap::<_, Vec<_>>::new();
                // A sweep returns the error of one that is no entry.
                for entry in entries.into_iter().flatten() {
                    claims.entry(entry.name).or_default().push(entry.token);
                }
                if let Some(after) = after.filter(|_| group == first) {
                    claims.retain(|name, _| name > after);
                }
                let claims: Vec<_> = claims.into_iter().collect();
                for claims in claims.chunks(TOGETHER) {
                    let reads =
                        claims
                            .iter()
                            .map(async |(name, _)| match filter.includes_scope_of(name) {
                                true => self.read(name, false).await,
                                false => Ok(None),
                            });
                    for ((name, tokens), read) in claims.iter().zip(join_all(reads).await) {
                        let is_chosen = |record: &Record| {
                            tokens.contains(&record.token) && filter.matches(name, record)
                        };
                        if let Some(read) = read.map(|read| read.filter(is_chosen)).transpose() {
                            page.add(name.clone(), read)?;
                        }
                        examined += 1;
                        let is_full = page.records.len() == limit.max(1) as usize;
                        if is_full || examined == MOST_EXAMINED {
                            page.next = Some(name.clone());
                            return Ok(page);
                        }
                    }
                }
            }
        }
        Ok(page)
    }

    /// An unreadable record is left. It is the error if nothing else was due.
    pub(super) async fn purge_expired(
        &self,
        limit: u32,
        unknown_retention: Duration,
    ) -> Result<Purged, StoreError> {
        let (mut purged, mut unreadable) = (Purged::default(), None);
        for start in (0..GROUPS).step_by(TOGETHER) {
            let mut entries = self.entries(start).await?.into_iter().flatten();
            loop {
                let left = u64::from(limit) - purged.touched();
                let some: Vec<_> = entries.by_ref().take(TOGETHER.min(left as usize)).collect();
                if some.is_empty() {
                    break;
                }
                let swept = some.into_iter().map(async |entry| {
                    let entry = entry?;
                    self.sweep(&entry, unknown_retention).await
                });
                for swept in join_all(swept).await {
                    match swept {
                        Ok(swept) => purged.add(swept),
                        Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                            unreadable = Some(error);
                        }
                        Err(error) => return Err(error),
                    }
                }
            }
            if purged.touched() >= u64::from(limit) {
                break;
            }
        }
        purged.or_unreadable(unreadable)
    }

    /// Sweeps the record of an entry, and removes the entry if it has none.
    async fn sweep(&self, entry: &Entry, unknown_retention: Duration) -> Result<Swept, StoreError> {
        let place = self.place(&entry.name);
        let token = Bytes::copy_from_slice(entry.token.as_bytes());
        let call = Call {
            place: self.place(&entry.name),
            arguments: vec![token, micros(unknown_retention)],
        };
        let answer = Option::<String>::from_redis_value(self.sweeps.make(call).await?);
        let (swept, is_stale) = match answer.map_err(unexpected)?.as_deref().unwrap_or_default() {
            "kept" => (Swept::Kept, false),
            "marked" => (Swept::MarkedUnknown, false),
            "removed" => (Swept::Remove { unknown: true }, true),
            // A young entry may be that of a claim on its way.
            _ => (
                Swept::Kept,
                now().saturating_sub(entry.added) > CLAIM_ON_ITS_WAY,
            ),
        };
        if is_stale {
            let remove = place.remove_added(entry.token, entry.added);
            self.servers.send(remove, &place.key).await?;
        }
        Ok(swept)
    }

    /// Returns the entries of the groups from `start` on that are read together.
    async fn entries(&self, start: u16) -> Result<Vec<Vec<Result<Entry, StoreError>>>, StoreError> {
        let groups = start..GROUPS.min(start + TOGETHER as u16);
        try_join_all(groups.map(|group| async move {
            let index = index(&self.prefix, group);
            let mut range = redis::cmd("ZRANGE");
            range.arg(&index).arg(0).arg(-1).arg("WITHSCORES");
            let entries = self.servers.send(range, index.as_bytes()).await?;
            let entries = Vec::<(Vec<u8>, f64)>::from_redis_value(entries).map_err(unexpected)?;
            Ok(entries.into_iter().map(Entry::decode).collect())
        }))
        .await
    }
}

impl Entry {
    fn decode((bytes, added): (Vec<u8>, f64)) -> Result<Self, StoreError> {
        let corrupt = || StoreError::corrupt("index: entry");
        let (token, name) = bytes.split_first_chunk().ok_or_else(corrupt)?;
        let name = str::from_utf8(name)
            .ok()
            .and_then(|name| name.split_once('\0'));
        let (scope, key) = name.ok_or_else(corrupt)?;
        Ok(Self {
            name: RecordName::new(Scope::from_stored(scope), Key::new(key)),
            token: Token::from_bytes(*token),
            added: Duration::from_micros(added as u64),
        })
    }
}

/// How many commands are sent at once.
const TOGETHER: usize = 32;

/// How many records a page of a list looks at.
const MOST_EXAMINED: usize = 2_000;

/// Longer than any call takes, and than the clocks of hosts differ.
const CLAIM_ON_ITS_WAY: Duration = Duration::from_secs(3600);
