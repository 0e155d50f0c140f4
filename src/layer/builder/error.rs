//! The error of a setting.

use thiserror::Error;

/// A setting that is not possible. Its text names the setting, the limit and the value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{setting}` {reason}")]
pub struct BuildError {
    pub(super) setting: &'static str,
    pub(super) reason: String,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self {
            setting,
            reason: reason.into(),
        }
    }

    /// Returns the name of the builder's method.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}
