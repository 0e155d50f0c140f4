//! How many orders of the load may be placed: each trouble needs orders that meet it.

use std::sync::Arc;

use tokio::sync::watch;

/// The limit on the orders of the load. Those beyond it wait. None may be placed at first.
#[derive(Clone, Default)]
pub(crate) struct Pace {
    limit: Arc<watch::Sender<u32>>,
}

impl Pace {
    /// Lets the load place this many orders, the first ones.
    pub(crate) fn allow(&self, orders: u32) {
        self.limit.send_replace(orders);
    }

    /// Waits until the order of this cart may be placed. Only carts of the load wait.
    pub(crate) async fn allowed(&self, cart: &str) {
        if let Some(number) = number_of(cart) {
            let mut limit = self.limit.subscribe();
            // Never an error: the sender lives as long as `self`.
            let _ = limit.wait_for(|limit| number < *limit).await;
        }
    }
}

fn number_of(cart: &str) -> Option<u32> {
    let (_, number) = cart.strip_prefix(CARTS)?.rsplit_once('-')?;
    number.parse().ok()
}

/// What the names of the load's carts begin with. They end with a number, from zero.
pub(crate) const CARTS: &str = "with-load-";
