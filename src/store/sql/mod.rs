//! What the SQL stores share: how a record is spelled in columns, and how work
//! on a connection survives a caller that leaves.

pub(crate) mod batcher;
pub(crate) mod calls;
pub(crate) mod commit;
pub(crate) mod commit_error;
pub(crate) mod reads;
pub(crate) mod single;
pub(crate) mod transaction;

use std::{borrow::Cow, time::Duration};

use bytes::Bytes;
use sqlx::{ColumnIndex, Decode, Error, FromRow, Row, Type, error::DatabaseError};

use self::{commit::ClaimStatus, reads::Found};
use super::{
    Grant, Page, ReclaimAs, Record, RecordState, Release, Resolution, StoreError, Transitioned,
};
use crate::{Fence, Fingerprint, Key, OperationId, RecordName, Scope, Token};

/// The columns of one record, not yet trusted.
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
    /// The length of the response, which may be too long to be here.
    bytes: Option<i64>,
}

/// The columns that make a grant.
pub(crate) struct GrantColumns {
    operation: Vec<u8>,
    fence: i64,
    attempt: i64,
}

/// One record with its name.
pub(crate) struct NamedColumns {
    name: RecordName,
    record: RecordColumns,
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
    pub(crate) fn decode(self) -> Result<Found, StoreError> {
        let grant = self.grant.decode()?;
        let mut large = None;
        let state = match (self.state, self.response) {
            (COMPLETED, None) if let Some(bytes) = self.bytes => {
                large = Some(number(bytes, "response")?);
                let response = Bytes::new();
                RecordState::Completed { response }
            }
            (IN_PROGRESS, None) => RecordState::InProgress {
                lease_left: left(self.lease_left),
            },
            (COMPLETED, Some(response)) => RecordState::Completed {
                response: response.into(),
            },
            (UNKNOWN, None) => RecordState::Unknown,
            (RELEASED_BOUND, None) => RecordState::Released(Release::SameRequest),
            (RELEASED_FREED, None) => RecordState::Released(Release::AnyRequest),
            (IN_PROGRESS..=RELEASED_FREED, _) => return Err(StoreError::corrupt("response")),
            _ => return Err(StoreError::corrupt("state")),
        };
        let record = Record {
            operation: grant.operation,
            fence: grant.fence,
            attempt: grant.attempt,
            takeovers: number(self.takeovers, "takeovers")?,
            fingerprint: Fingerprint::from_bytes(exact(&self.fingerprint, "fingerprint")?),
            token: Token::from_bytes(exact(&self.token, "token")?),
            // A clock that was set back makes an age negative, not a record corrupt.
            age: left(self.age).unwrap_or_default(),
            expires_in: left(self.expires_in),
            state,
        };
        Ok(match large {
            Some(bytes) => Found::Large { record, bytes },
            None => Found::Whole(record),
        })
    }
}

impl NamedColumns {
    fn decode(self) -> Result<(RecordName, Record), StoreError> {
        let name = self.name;
        match self.record.decode()? {
            Found::Whole(record) => Ok((name, record)),
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

/// The name in a row.
pub(crate) fn name<'r, R: Row>(row: &'r R) -> Result<RecordName, Error>
where
    &'static str: ColumnIndex<R>,
    String: Decode<'r, R::Database> + Type<R::Database>,
{
    let (scope, key): (String, String) = (row.try_get("scope")?, row.try_get("key")?);
    Ok(RecordName::new(Scope::from_stored(scope), Key::new(key)))
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

/// The smallest name that a page may begin with, as its scope and its key. `least`
/// is the least character that a text of the database may have: a name and that
/// character is the next one after the name.
pub(crate) fn first_name(after: Option<&RecordName>, least: char) -> (String, String) {
    let Some(after) = after else {
        return (String::new(), String::new());
    };
    let mut key = after.key().as_str().to_owned();
    key.push(least);
    (after.scope().as_str().to_owned(), key)
}

/// A page of the records that were found, of which a full page has `limit`. If the statement looked at as many records as it may,
/// `last` is the name of the last one.
pub(crate) fn page(
    found: Vec<NamedColumns>,
    limit: i64,
    last: Option<RecordName>,
) -> Result<Page, StoreError> {
    let records = found.into_iter().map(NamedColumns::decode);
    let mut records: Vec<_> = records.collect::<Result<_, _>>()?;
    records.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    let next = match records.last() {
        Some((name, _)) if records.len() as i64 >= limit => Some(name.clone()),
        _ => last,
    };
    Ok(Page { records, next })
}

/// As many records as a page may have.
pub(crate) fn page_limit(limit: u32) -> i64 {
    limit.clamp(1, LONGEST_PAGE).into()
}

/// Microseconds for a statement to add to its clock.
pub(crate) fn micros(duration: Duration) -> i64 {
    duration
        .min(LONGEST)
        .as_micros()
        .try_into()
        .unwrap_or(i64::MAX)
}

/// A fence as a column holds it; one too large for any column is no row's.
pub(crate) fn fence(seen: Fence) -> i64 {
    i64::try_from(seen.get()).unwrap_or(-1)
}

/// The number by which a statement knows a reclaim_as.
pub(crate) fn reclaim_as(reclaim_as: ReclaimAs) -> i64 {
    match reclaim_as {
        ReclaimAs::Takeover => 1,
        ReclaimAs::Retry => 2,
        ReclaimAs::Replace => 3,
        ReclaimAs::Expired => 4,
        ReclaimAs::Rerun => 5,
        ReclaimAs::Reconcile => 6,
    }
}

pub(crate) fn released(release: Release) -> i64 {
    match release {
        Release::SameRequest => RELEASED_BOUND,
        Release::AnyRequest => RELEASED_FREED,
    }
}

/// The state and the response that a resolution leaves, and for how long from
/// now at least.
pub(crate) fn resolved(resolution: &Resolution) -> (i64, Option<&[u8]>, i64) {
    match resolution {
        Resolution::Happened { response, at_least } => {
            (COMPLETED, Some(response), micros(*at_least))
        }
        Resolution::DidNotHappen => (RELEASED_BOUND, None, 0),
    }
}

/// The settlement of a transition that changed no row: applied if the same
/// claim's record is where an earlier call, whose answer got lost, has put it.
pub(crate) fn repeated(state: Option<i64>, goal: &[i64]) -> Result<Transitioned, StoreError> {
    match state {
        None => Ok(Transitioned::Superseded),
        Some(state) if goal.contains(&state) => Ok(Transitioned::Applied),
        Some(IN_PROGRESS..=RELEASED_FREED) => Ok(Transitioned::Superseded),
        Some(_) => Err(StoreError::corrupt("state")),
    }
}

/// What the state of the record with a claim's token says of the claim.
pub(crate) fn claim_status(state: Option<i64>) -> Result<ClaimStatus, StoreError> {
    match state {
        Some(COMPLETED) => Ok(ClaimStatus::Completed),
        Some(IN_PROGRESS | UNKNOWN) => Ok(ClaimStatus::Open),
        None | Some(RELEASED_BOUND | RELEASED_FREED) => Ok(ClaimStatus::Superseded),
        Some(_) => Err(StoreError::corrupt("state")),
    }
}

/// Runs work to its end even if the caller's future is dropped: half a
/// conversation with a database would be left to its connection's next user.
///
/// The work is boxed at once: it is seldom done, and the caller's future has no
/// room for it.
pub(crate) fn detached<T, E>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> impl Future<Output = Result<T, E>> + Send
where
    T: Send + 'static,
    E: From<StoreError> + Send + 'static,
{
    let work = Box::pin(work);
    async move {
        #[cfg(feature = "tracing")]
        let work = tracing::Instrument::in_current_span(work);
        match tokio::spawn(work).await {
            Ok(answer) => answer,
            // A panic's message may quote what it was about.
            Err(gone) if gone.is_panic() => Err(StoreError::unavailable("a call panicked").into()),
            Err(_) => Err(StoreError::unavailable("the runtime is shutting down").into()),
        }
    }
}

/// What an error of sqlx means to the layer, without a word of what was bound;
/// `answered` judges what the database itself said.
pub(crate) fn failure(
    error: Error,
    answered: impl FnOnce(&dyn DatabaseError) -> StoreError,
) -> StoreError {
    match error {
        Error::Database(error) => answered(&*error),
        Error::PoolTimedOut => StoreError::timed_out().because("no connection was free in time"),
        Error::PoolClosed => StoreError::unavailable("the store is closed"),
        Error::Io(error) => StoreError::unavailable(error),
        Error::Tls(error) | Error::Configuration(error) => StoreError::unavailable(error),
        Error::ColumnDecode { .. } | Error::Decode(_) => StoreError::corrupt("a column's type"),
        Error::ColumnNotFound(_) | Error::ColumnIndexOutOfBounds { .. } => {
            StoreError::corrupt("a missing column")
        }
        error => StoreError::unavailable(quoting_no_value(&error)),
    }
}

/// What an error of sqlx says, without a value that was bound or read.
pub(crate) fn quoting_no_value(error: &Error) -> Cow<'static, str> {
    Cow::Borrowed(match error {
        Error::Database(error) => return answered_quoting_no_value(&**error).into(),
        // What a type's own decoder says may quote the value.
        Error::ColumnDecode { index, .. } => {
            return format!("the value of column {index} cannot be decoded").into();
        }
        Error::Decode(_) => "a value cannot be decoded",
        Error::Encode(_) => "a value cannot be encoded",
        Error::Protocol(_) => "the database broke its protocol",
        Error::Configuration(_)
        | Error::Io(_)
        | Error::Tls(_)
        | Error::RowNotFound
        | Error::TypeNotFound { .. }
        | Error::ColumnIndexOutOfBounds { .. }
        | Error::ColumnNotFound(_)
        | Error::PoolTimedOut
        | Error::PoolClosed
        | Error::WorkerCrashed
        | Error::InvalidSavePointStatement
        | Error::BeginFailed => return error.to_string().into(),
        _ => "the database driver failed",
    })
}

fn answered_quoting_no_value(error: &dyn DatabaseError) -> String {
    #[cfg(feature = "postgres")]
    if error
        .try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
        .is_some()
    {
        return super::postgres::quoting_no_value(error);
    }
    #[cfg(feature = "sqlite")]
    if error
        .try_downcast_ref::<sqlx::sqlite::SqliteError>()
        .is_some()
    {
        return super::sqlite::quoting_no_value(error);
    }
    // Of another database, which the application uses beside the store.
    match error.code() {
        Some(code) => format!("the database answered with the error {code}"),
        None => "the database answered with an error".into(),
    }
}

fn left(micros: i64) -> Option<Duration> {
    u64::try_from(micros).ok().map(Duration::from_micros)
}

fn exact<const N: usize>(bytes: &[u8], what: &'static str) -> Result<[u8; N], StoreError> {
    bytes.try_into().map_err(|_| StoreError::corrupt(what))
}

fn number<T: TryFrom<i64>>(column: i64, what: &'static str) -> Result<T, StoreError> {
    column.try_into().map_err(|_| StoreError::corrupt(what))
}

/// How many records a statement looks at for one page.
pub(crate) const MOST_EXAMINED: i64 = 2_000;

const LONGEST_PAGE: u32 = 1_000;

pub(crate) const IN_PROGRESS: i64 = 1;
pub(crate) const COMPLETED: i64 = 2;
pub(crate) const UNKNOWN: i64 = 3;
pub(crate) const RELEASED_BOUND: i64 = 4;
pub(crate) const RELEASED_FREED: i64 = 5;

/// What a clock can be moved by without leaving the range of a timestamp.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
