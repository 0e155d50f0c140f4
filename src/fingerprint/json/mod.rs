//! JSON by structure: members sorted, numbers with their spelling.
//!
//! One pass writes the canonical form of the document into a buffer: strings
//! unescaped, numbers untouched, no white space. An object with several members
//! is replaced by the digest of its sorted members when it ends, so that no byte
//! is moved twice, however deep the document is. Numbers never become floats:
//! 9007199254740993 is not 9007199254740992.
//!
//! serde_json does not serve here: it recurses for each level of a document, and
//! refuses half a surrogate pair in a string.

mod pointers;
mod scan;
mod selection;
mod tokens;

pub(super) use self::selection::Selection;
use self::{scan::Scan, tokens::NOT_JSON};
use super::digest::{BodyFault, Framed};

/// The hash of the chosen values of the document `body`. Two documents have
/// the same one if and only if these values are the same.
pub(super) fn hash(body: &[u8], selection: &Selection) -> Result<Framed, BodyFault> {
    let text = std::str::from_utf8(body).map_err(|_| NOT_JSON)?;
    Scan::new(text, selection).document()
}

#[cfg(test)]
mod tests;
