//! The event that an order was placed.

use serde::{Deserialize, Serialize};

/// The payload of the event.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Ordered {
    pub(crate) cart: String,
    /// The operation that placed it.
    pub(crate) operation: String,
}

/// The topic of the outbox.
pub(crate) const ORDERS: &str = "orders";
