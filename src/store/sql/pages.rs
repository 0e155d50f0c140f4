//! Pages of lists.

use super::columns::{StoreRow, found, name};
use crate::{
    key::{RecordName, Scope},
    store::{
        StoreError,
        admin::{Filter, Page},
    },
};

/// Returns the smallest name that a page may begin with, as its scope and its key.
///
/// `least` is the smallest character that a text of the database can have: appended
/// to a key, it makes the next key.
pub(crate) fn first_name(
    filter: &Filter,
    after: Option<&RecordName>,
    least: char,
) -> (String, String) {
    let scope = filter.scope.as_ref();
    match after {
        Some(after) if scope.is_none_or(|scope| scope == after.scope()) => {
            let mut key = after.key().as_str().to_owned();
            key.push(least);
            (after.scope().as_str().to_owned(), key)
        }
        _ => {
            let scope = scope.map_or("", Scope::as_str);
            (scope.to_owned(), String::new())
        }
    }
}

/// Makes a page of the records that were found. A full page has `limit` of them.
///
/// A row with `is_last` has the name of the last record examined, if the statement
/// examined as many as it may.
pub(crate) fn page(rows: &[impl StoreRow], limit: i64) -> Result<Page, StoreError> {
    let (mut records, mut last) = (Vec::new(), None);
    for row in rows {
        match row.flag("is_last")? {
            Some(true) => last = Some(name(row)?),
            _ => records.push((name(row)?, found(row)?.record)),
        }
    }
    records.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    let next = match records.last() {
        Some((name, _)) if records.len() as i64 >= limit => Some(name.clone()),
        _ => last,
    };
    Ok(Page { records, next })
}

/// Returns how many records a page has at most.
pub(crate) fn page_limit(limit: u32) -> i64 {
    limit.clamp(1, MAX_PAGE).into()
}

/// How many records a statement examines for a page.
pub(crate) const MAX_EXAMINED: i64 = 2_000;

const MAX_PAGE: u32 = 1_000;
