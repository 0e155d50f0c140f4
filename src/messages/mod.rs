//! Messages from and to other services, in the transactions of the application.
//!
//! An [`Inbox`] lets a consumer process each message once.
//! The [guide](crate::guide::messages) has the promises, and what a crash after each
//! step means.

mod error;
#[cfg(feature = "inbox")]
pub(crate) mod inbox;

pub use self::error::{MessageError, MessageErrorKind};
#[cfg(feature = "inbox")]
pub use self::inbox::{Delivery, Inbox, InboxStore, Received, SeenMessage};

/// Refuses a name that is empty, longer than `max` bytes, or has a NUL.
fn check_name(what: &str, name: &str, max: usize) -> Result<(), MessageError> {
    let bytes = name.len();
    if (1..=max).contains(&bytes) && !name.contains('\0') {
        return Ok(());
    }
    Err(MessageError::invalid(format!(
        "{what} must have 1 to {max} bytes and no NUL, got {bytes} bytes"
    )))
}
