//! Events and messages with canaries in their payloads.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::time::timeout;
use tower_idempotency::messages::{Event, MessageError, Publish, Received, Relay};

use crate::{
    canaries::{FAILURE, PAYLOAD},
    output::print,
    shop::{Connection, Shop},
};

/// Publishes one event after a failure, and gives another one up. Processes one message
/// twice, and fails in another one.
pub(crate) async fn publish_and_receive<S: Shop>(shop: S) {
    let (inbox, outbox) = (shop.inbox("billing"), shop.outbox("orders"));
    inbox.migrate().await.unwrap();
    outbox.migrate().await.unwrap();
    let mut transaction = shop.begin().await;
    for id in ["published", "dead"] {
        let event = Event::new(id, id, PAYLOAD);
        print(format_args!("{event:?}"));
        outbox.stage(&mut transaction, event).await.unwrap();
    }
    transaction.commit().await.unwrap();
    let tries = AtomicUsize::new(0);
    let relay = Relay::new(shop.outbox("orders"), move |event: Event| {
        let first = tries.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            match event.id() {
                "dead" => Publish::Reject,
                _ if first => Publish::Retry,
                _ => Publish::Done,
            }
        }
    });
    let relay = relay.poll(Duration::from_millis(5)).spawn();
    let one_is_dead = async {
        while outbox.lag().await.unwrap().events > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(20), one_is_dead).await.unwrap();
    print(format_args!("{:?}", outbox.dead(10).await.unwrap()));
    print(format_args!(
        "{:?}",
        relay.stop(Duration::from_secs(5)).await
    ));

    for _ in 0..2 {
        let work = async |_: &mut Connection<S>| Ok::<_, Failed>(PAYLOAD);
        let received = inbox.receive("message", work).await.unwrap();
        assert!(matches!(
            received,
            Received::First(PAYLOAD) | Received::Repeat
        ));
    }
    let failed = async |_: &mut Connection<S>| Err::<(), _>(Failed(FAILURE));
    assert!(inbox.receive("failing", failed).await.is_err());
}

/// The error of work, which is its caller's.
#[derive(Debug)]
struct Failed(#[expect(dead_code, reason = "it is shown")] &'static str);

impl From<MessageError> for Failed {
    fn from(_: MessageError) -> Self {
        Self("the inbox failed")
    }
}
