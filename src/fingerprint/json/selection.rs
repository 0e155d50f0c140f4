//! The choice of the values that count.

use std::{fmt, sync::Arc};

use super::pointers::Pointers;

/// Which values of a document count.
#[derive(Clone)]
pub(crate) enum Selection {
    All,
    Only(Arc<Pointers>),
    Without(Arc<Pointers>),
}

impl Selection {
    pub(crate) fn only<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Only(Arc::new(Pointers::new(pointers)))
    }

    pub(crate) fn without<P: Into<String>>(pointers: impl IntoIterator<Item = P>) -> Self {
        Self::Without(Arc::new(Pointers::new(pointers)))
    }

    pub(crate) fn fault(&self) -> Option<&'static str> {
        self.pointers().and_then(Pointers::fault)
    }

    /// What kind of selection it is, and its pointers in order.
    pub(crate) fn spelled(&self) -> (&'static str, &[String]) {
        match self {
            Self::All => ("all", &[]),
            Self::Only(pointers) => ("only", pointers.spelled()),
            Self::Without(pointers) => ("without", pointers.spelled()),
        }
    }

    pub(super) fn pointers(&self) -> Option<&Pointers> {
        match self {
            Self::All => None,
            Self::Only(pointers) | Self::Without(pointers) => Some(pointers),
        }
    }
}

impl fmt::Debug for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, pointers) = self.spelled();
        write!(f, "{kind} {pointers:?}")
    }
}
