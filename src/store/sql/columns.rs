//! The columns of a record.

use std::time::Duration;

use bytes::Bytes;
use sqlx::Row as _;

use super::error::failure;
use crate::{
    fingerprint::Fingerprint,
    key::{Key, OperationId, RecordName, Scope},
    store::{
        Fence, Grant, Record, Release, StoreError, Token,
        transition::{State, StoredRecord},
    },
};

/// A row of a statement. Its columns may be missing or have another type.
pub(crate) trait StoreRow {
    fn int(&self, column: &'static str) -> Result<Option<i64>, StoreError>;
    fn bytes(&self, column: &'static str) -> Result<Option<&[u8]>, StoreError>;
    fn text(&self, column: &'static str) -> Result<Option<&str>, StoreError>;
    fn flag(&self, column: &'static str) -> Result<Option<bool>, StoreError>;
}

macro_rules! store_row {
    ($row:ty) => {
        impl StoreRow for $row {
            store_row! { int -> i64, bytes -> &[u8], text -> &str, flag -> bool }
        }
    };
    ($($method:ident -> $value:ty),*) => {
        $(fn $method(&self, column: &'static str) -> Result<Option<$value>, StoreError> {
            let value = self.try_get(column);
            value.map_err(|error| failure(error, |_| StoreError::corrupt(column)))
        })*
    };
}

#[cfg(feature = "postgres")]
store_row!(sqlx::postgres::PgRow);
#[cfg(feature = "sqlite")]
store_row!(sqlx::sqlite::SqliteRow);

/// A record of the table.
#[derive(Clone)]
pub(crate) struct LoadedRecord {
    /// Its response is empty if it was left out.
    pub(crate) record: StoredRecord,
    /// The length of a response that was left out.
    omitted: Option<usize>,
}

/// A record that a statement found.
#[derive(Clone)]
pub(crate) struct Found {
    /// Its response is empty if it was left out.
    pub(crate) record: Record,
    /// The length of a response that was left out, because it is longer than asked for.
    pub(crate) omitted: Option<usize>,
}

impl LoadedRecord {
    /// Returns the record at `now`.
    pub(crate) fn read(&self, now: Duration) -> Found {
        Found {
            record: self.record.read(now),
            omitted: self.omitted,
        }
    }
}

/// Returns the record of a statement whose moments are relative to now.
pub(crate) fn found(row: &impl StoreRow) -> Result<Found, StoreError> {
    // Any moment that leaves room for earlier ones.
    let now = i64::MAX / 2;
    let loaded = load(row, now)?;
    Ok(loaded.read(Duration::from_micros(now.unsigned_abs())))
}

/// Returns the record of a statement whose moments are relative to `origin`, in
/// microseconds on the store's clock.
pub(crate) fn load(row: &impl StoreRow, origin: i64) -> Result<LoadedRecord, StoreError> {
    let Grant {
        operation,
        fence,
        attempt,
    } = grant(row)?;
    let relative = |column| number::<i64>(row, column);
    let lease_until = duration(origin.saturating_add(relative("lease_left")?));
    let (response, bytes) = (row.bytes("response")?, row.int("bytes")?);
    let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok());
    let omitted = bytes.filter(|_| response.is_none());
    let state = match (number(row, "state")?, response) {
        (COMPLETED, None) if omitted.is_some() => State::Completed {
            response: Bytes::new(),
        },
        (COMPLETED, Some(response)) => State::Completed {
            response: Bytes::copy_from_slice(response),
        },
        (IN_PROGRESS, None) => State::InProgress { lease_until },
        (UNKNOWN, None) => State::Unknown,
        (RELEASED_SAME_REQUEST, None) => State::Released(Release::SameRequest),
        (RELEASED_ANY_REQUEST, None) => State::Released(Release::AnyRequest),
        (IN_PROGRESS..=RELEASED_ANY_REQUEST, _) => return Err(StoreError::corrupt("response")),
        _ => return Err(StoreError::corrupt("state")),
    };
    let record = StoredRecord {
        operation,
        fence,
        attempt,
        takeovers: number(row, "takeovers")?,
        fingerprint: Fingerprint::from_bytes(exact(row, "fingerprint")?),
        token: Token::from_bytes(exact(row, "token")?),
        claimed_at: duration(origin.saturating_sub(relative("age")?)),
        expires_at: duration(origin.saturating_add(relative("expires_in")?)),
        state,
    };
    Ok(LoadedRecord { record, omitted })
}

/// Returns the grant in a row.
pub(crate) fn grant(row: &impl StoreRow) -> Result<Grant, StoreError> {
    Ok(Grant {
        operation: OperationId::from_bytes(exact(row, "operation")?),
        fence: Fence::from(number::<u64>(row, "fence")?),
        attempt: number(row, "attempt")?,
    })
}

/// Returns the name in a row.
pub(crate) fn name(row: &impl StoreRow) -> Result<RecordName, StoreError> {
    let text = |column| row.text(column)?.ok_or(StoreError::corrupt(column));
    let scope = Scope::from_stored(text("scope")?);
    Ok(RecordName::new(scope, Key::new(text("key")?)))
}

/// Returns the number of a state.
#[cfg(feature = "sqlite")]
pub(crate) fn state_number(state: &State) -> i64 {
    match state {
        State::InProgress { .. } => IN_PROGRESS,
        State::Completed { .. } => COMPLETED,
        State::Unknown => UNKNOWN,
        State::Released(release) => released(*release),
    }
}

/// Returns the number of the state of a released record.
pub(crate) fn released(release: Release) -> i64 {
    match release {
        Release::SameRequest => RELEASED_SAME_REQUEST,
        Release::AnyRequest => RELEASED_ANY_REQUEST,
    }
}

/// Returns the fence as a column has it. A fence that is too large for the column becomes
/// one that no record has.
pub(crate) fn fence_number(fence: Fence) -> i64 {
    fence.get().try_into().unwrap_or(-1)
}

/// Returns the duration, or the moment, of a column. A clock that was set back makes it
/// negative, which is no corruption and counts as zero.
pub(crate) fn duration(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or_default())
}

fn number<T: TryFrom<i64>>(row: &impl StoreRow, column: &'static str) -> Result<T, StoreError> {
    let number = row.int(column)?.and_then(|number| number.try_into().ok());
    number.ok_or(StoreError::corrupt(column))
}

fn exact<const N: usize>(row: &impl StoreRow, column: &'static str) -> Result<[u8; N], StoreError> {
    let bytes = row.bytes(column)?.and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or(StoreError::corrupt(column))
}

// The states, as the column `state` and the statements have them.
pub(crate) const IN_PROGRESS: i64 = 1;
pub(crate) const COMPLETED: i64 = 2;
pub(crate) const UNKNOWN: i64 = 3;
pub(crate) const RELEASED_SAME_REQUEST: i64 = 4;
pub(crate) const RELEASED_ANY_REQUEST: i64 = 5;
