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
    let (mut page, mut last_found) = (Page::default(), None);
    let mut rows_found = 0;
    for row in rows {
        let name = name(row)?;
        if row.flag("is_last")? == Some(true) {
            page.next = Some(name);
            continue;
        }
        rows_found += 1;
        last_found = last_found.max(Some(name.clone()));
        page.add(name, found(row).map(|found| found.record))?;
    }
    page.records
        .sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    page.unreadable.sort_unstable();
    if rows_found >= limit {
        page.next = last_found;
    }
    Ok(page)
}

/// Returns how many records a page has at most.
pub(crate) fn page_limit(limit: u32) -> i64 {
    limit.clamp(1, MAX_PAGE).into()
}

/// How many records a statement examines for a page.
pub(crate) const MAX_EXAMINED: i64 = 2_000;

const MAX_PAGE: u32 = 1_000;
