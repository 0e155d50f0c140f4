//! The error of a setting.

use thiserror::Error;

/// A setting that is not possible. Its text names the setting, the limit and the value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{setting}` {reason}")]
pub struct BuildError {
    setting: &'static str,
    reason: String,
}

impl BuildError {
    pub(crate) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        Self {
            setting,
            reason: reason.into(),
        }
    }

    /// Returns the same error under the name that another builder has for the setting.
    #[cfg(feature = "guard")]
    pub(crate) fn renamed(self, from: &str, to: &'static str) -> Self {
        match self.setting == from {
            true => Self::new(to, self.reason),
            false => self,
        }
    }

    /// Returns the name of the builder's method.
    #[must_use]
    pub fn setting(&self) -> &'static str {
        self.setting
    }
}
