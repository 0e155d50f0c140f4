//! The columns of a record.

use std::time::Duration;

use bytes::Bytes;
use sqlx::{ColumnIndex, Decode, Error, FromRow, Row, Type};

use crate::{
    Fence, Fingerprint, Key, OperationId, RecordName, Scope, Token,
    store::{
        Grant, Record, Release, StoreError,
        transition::{State, StoredRecord},
    },
};

/// The columns of a record, which may be corrupt.
///
/// The moments are relative to one that the statement chooses, in microseconds.
pub(crate) struct RecordColumns {
    grant: GrantColumns,
    state: i64,
    takeovers: i64,
    fingerprint: Vec<u8>,
    token: Vec<u8>,
    age: i64,
    expires_in: i64,
    lease_left: i64,
    response: Option<Vec<u8>>,
    /// The length of the response, which a statement may leave out.
    bytes: Option<i64>,
}

/// The columns of a grant.
pub(crate) struct GrantColumns {
    operation: Vec<u8>,
    fence: i64,
    attempt: i64,
}

/// The columns of a record and its name. Their moments are relative to now.
pub(crate) struct NamedColumns {
    name: RecordName,
    record: RecordColumns,
}

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
pub(crate) enum Found {
    Whole(Record),
    /// A completed record without its response, which is longer than asked for.
    Large {
        record: Record,
        bytes: usize,
    },
}

impl GrantColumns {
    pub(crate) fn decode(self) -> Result<Grant, StoreError> {
        Ok(Grant {
            operation: OperationId::from_bytes(exact(&self.operation, "operation")?),
            fence: Fence::from(number::<u64>(self.fence, "fence")?),
            attempt: number(self.attempt, "attempt")?,
        })
    }
}

impl RecordColumns {
    /// Decodes the record of a statement whose moments are relative to now.
    pub(crate) fn decode(self) -> Result<Found, StoreError> {
        // Any moment does that leaves room for what lies before it.
        let now = i64::MAX / 2;
        let loaded = self.load(now)?;
        Ok(loaded.read(Duration::from_micros(now.unsigned_abs())))
    }

    /// Decodes the record of a statement whose moments are relative to `origin`, in
    /// microseconds on the store's clock.
    pub(crate) fn load(self, origin: i64) -> Result<LoadedRecord, StoreError> {
        let Grant {
            operation,
            fence,
            attempt,
        } = self.grant.decode()?;
        let mut omitted = None;
        let state = match (self.state, self.response) {
            (COMPLETED, None) if let Some(bytes) = self.bytes => {
                omitted = Some(number(bytes, "response")?);
                let response = Bytes::new();
                State::Completed { response }
            }
            (IN_PROGRESS, None) => State::InProgress {
                lease_until: moment(origin.saturating_add(self.lease_left)),
            },
            (COMPLETED, Some(response)) => State::Completed {
                response: response.into(),
            },
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
            takeovers: number(self.takeovers, "takeovers")?,
            fingerprint: Fingerprint::from_bytes(exact(&self.fingerprint, "fingerprint")?),
            token: Token::from_bytes(exact(&self.token, "token")?),
            claimed_at: moment(origin.saturating_sub(self.age)),
            expires_at: moment(origin.saturating_add(self.expires_in)),
            state,
        };
        Ok(LoadedRecord { record, omitted })
    }
}

impl LoadedRecord {
    /// Returns the record at `now`.
    pub(crate) fn read(&self, now: Duration) -> Found {
        let record = self.record.read(now);
        match self.omitted {
            Some(bytes) => Found::Large { record, bytes },
            None => Found::Whole(record),
        }
    }
}

impl NamedColumns {
    pub(super) fn decode(self) -> Result<(RecordName, Record), StoreError> {
        match self.record.decode()? {
            Found::Whole(record) => Ok((self.name, record)),
            Found::Large { .. } => Err(StoreError::corrupt("state")),
        }
    }
}

impl<'r, R: Row> FromRow<'r, R> for GrantColumns
where
    &'static str: ColumnIndex<R>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
{
    fn from_row(row: &'r R) -> Result<Self, Error> {
        Ok(Self {
            operation: row.try_get("operation")?,
            fence: row.try_get("fence")?,
            attempt: row.try_get("attempt")?,
        })
    }
}

impl<'r, R: Row> FromRow<'r, R> for RecordColumns
where
    &'static str: ColumnIndex<R>,
    i64: Decode<'r, R::Database> + Type<R::Database>,
    Vec<u8>: Decode<'r, R::Database> + Type<R::Database>,
    Option<i64>: Decode<'r, R::Database> + Type<R::Database>,
    Option<Vec<u8>>: Decode<'r, R::Database> + Type<R::Database>,
{
    fn from_row(row: &'r R) -> Result<Self, Error> {
        Ok(Self {
            grant: GrantColumns::from_row(row)?,
            state: row.try_get("state")?,
            takeovers: row.try_get("takeovers")?,
            fingerprint: row.try_get("fingerprint")?,
            token: row.try_get("token")?,
            age: row.try_get("age")?,
            expires_in: row.try_get("expires_in")?,
            lease_left: row.try_get("lease_left")?,
            response: row.try_get("response")?,
            bytes: row.try_get("bytes")?,
        })
    }
}

impl<'r, R: Row> FromRow<'r, R> for NamedColumns
where
    RecordColumns: FromRow<'r, R>,
    &'static str: ColumnIndex<R>,
    String: Decode<'r, R::Database> + Type<R::Database>,
{
    fn from_row(row: &'r R) -> Result<Self, Error> {
        Ok(Self {
            name: name(row)?,
            record: RecordColumns::from_row(row)?,
        })
    }
}

/// Returns the name in a row.
pub(crate) fn name<'r, R: Row>(row: &'r R) -> Result<RecordName, Error>
where
    &'static str: ColumnIndex<R>,
    String: Decode<'r, R::Database> + Type<R::Database>,
{
    let (scope, key): (String, String) = (row.try_get("scope")?, row.try_get("key")?);
    Ok(RecordName::new(Scope::from_stored(scope), Key::new(key)))
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

/// A clock that was set back far makes a moment negative, not a record corrupt.
fn moment(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or_default())
}

fn exact<const N: usize>(bytes: &[u8], column: &'static str) -> Result<[u8; N], StoreError> {
    bytes.try_into().map_err(|_| StoreError::corrupt(column))
}

fn number<T: TryFrom<i64>>(value: i64, column: &'static str) -> Result<T, StoreError> {
    value.try_into().map_err(|_| StoreError::corrupt(column))
}

// The states, as the column `state` and the statements have them.
pub(crate) const IN_PROGRESS: i64 = 1;
pub(crate) const COMPLETED: i64 = 2;
pub(crate) const UNKNOWN: i64 = 3;
pub(crate) const RELEASED_SAME_REQUEST: i64 = 4;
pub(crate) const RELEASED_ANY_REQUEST: i64 = 5;
