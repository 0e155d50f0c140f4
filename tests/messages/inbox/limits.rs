//! Names and ids that are refused before any SQL.

use tower_idempotency::{
    messages::{Delivery, MessageError, MessageErrorKind},
    sqlx::Connection as _,
};

use crate::shop::{Shop, with_each_database};

with_each_database! {
    unfit_id_is_refused_and_the_transaction_usable;
    unfit_consumer_is_refused;
}

fn assert_invalid(error: &MessageError, says: &str) {
    assert_eq!(error.kind(), MessageErrorKind::Invalid);
    let text = error.to_string();
    assert!(text.contains(says) && !text.contains("secret"), "{text}");
}

async fn unfit_id_is_refused_and_the_transaction_usable<S: Shop>(shop: S) {
    let inbox = shop.inbox("billing");
    let mut transaction = shop.begin().await;
    for id in ["", "secret\0", &"secret".repeat(200)] {
        let error = inbox.first_time(&mut transaction, id).await.unwrap_err();
        assert_invalid(&error, "1 to 1024 bytes");
        let ids = ["fit", id];
        let error = inbox.first_times(&mut transaction, &ids).await.unwrap_err();
        assert_invalid(&error, "1 to 1024 bytes");
        let received: Result<_, MessageError> = inbox.receive(id, async |_| Ok(())).await;
        assert_invalid(&received.unwrap_err(), "1 to 1024 bytes");
    }
    let longest = "i".repeat(1024);
    let delivery = inbox.first_time(&mut transaction, &longest).await.unwrap();
    assert_eq!(delivery, Delivery::First);
    transaction.ping().await.unwrap();
    transaction.commit().await.unwrap();
    assert_eq!(inbox.list(None, 10).await.unwrap().len(), 1);
}

async fn unfit_consumer_is_refused<S: Shop>(shop: S) {
    for consumer in ["", "secret\0", &"secret".repeat(50)] {
        let error = shop.try_inbox(consumer).unwrap_err();
        assert_invalid(&error, "1 to 255 bytes");
    }
    assert!(shop.try_inbox(&"c".repeat(255)).is_ok());
}
