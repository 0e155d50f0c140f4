//! Futures that are dropped at each of their awaits.

use std::{
    pin::{Pin, pin},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::response::{IntoResponse as _, Response};
use tokio::sync::Notify;
use tower_idempotency::{Disconnect, Outcome, Recovery, store::RecordState};

use crate::{
    commit::{order, respond},
    service::{Run, Service, status},
    shop::{Shop, with_each_database},
};

/// Polls a future up to `left` times. `None` keeps the unfinished future alive.
struct Polls<F> {
    future: Pin<Box<F>>,
    left: usize,
}

impl<F: Future> Future for Polls<F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        match self.future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if self.left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    }
}

fn polls<F: Future>(left: usize, future: F) -> Polls<F> {
    Polls {
        future: Box::pin(future),
        left,
    }
}

/// Orders with at most `left` polls. Without a result it drops the order and
/// answers as if it had succeeded.
async fn order_in_time<S: Shop>(run: Run<S>, left: usize) -> Response {
    let ordered = polls(left, order(&run)).await;
    match ordered {
        Some(committed) => committed.into_response(),
        None => status(202),
    }
}

with_each_database! {
    i15_an_order_dropped_at_any_await_matches_its_record;
    i15_an_order_whose_client_leaves_matches_its_record;
}

async fn i15_an_order_dropped_at_any_await_matches_its_record<S: Shop>(shop: S) {
    let whole = Arc::new(Mutex::new(false));
    let mut left = 0;
    while !*whole.lock().unwrap() {
        let told = Arc::clone(&whole);
        let service = Service::new(&shop, move |run| {
            let told = Arc::clone(&told);
            async move {
                let response = order_in_time(run, left).await;
                *told.lock().unwrap() = response.status() == 201;
                response
            }
        });
        let key = format!("{left}-polls");
        let orders = shop.orders().await.len();
        let answer = service.post(&key).await;
        let record = shop.record(&key).await.unwrap();
        let grown = shop.orders().await.len() - orders;
        match answer.status.as_u16() {
            201 => {
                answer.assert_is(201, "ordered by run 1");
                assert!(matches!(record.state, RecordState::Completed { .. }));
                assert_eq!(grown, 1);
            }
            500 => {
                answer.assert_problem(500, "rolled-back");
                match record.state {
                    // Dropped during `commit`.
                    RecordState::Released(_) => {}
                    // Dropped before `commit`: the response reports an order that
                    // does not exist.
                    RecordState::Unknown => assert_eq!(answer.outcome, Outcome::Unknown),
                    other => panic!("{other:?}"),
                }
                assert_eq!(grown, 0);
            }
            // Dropped before a transaction had begun: the handler's response
            // stands.
            202 => assert_eq!(grown, 0),
            other => panic!("{other}: {}", answer.body),
        }
        left += 1;
    }
    assert!(left > 1, "an order has more awaits than {left}");
}

async fn i15_an_order_whose_client_leaves_matches_its_record<S: Shop>(shop: S) {
    let mut left = 0;
    loop {
        let key = format!("{left}-polls");
        let (reached, whole) = (Arc::new(Notify::new()), Arc::new(Mutex::new(false)));
        let service = Service::new(&shop, {
            let (reached, whole) = (Arc::clone(&reached), Arc::clone(&whole));
            move |run| {
                let (reached, whole) = (Arc::clone(&reached), Arc::clone(&whole));
                async move {
                    let mut ordering = pin!(polls(left, order(&run)));
                    *whole.lock().unwrap() = ordering.as_mut().await.is_some();
                    reached.notify_one();
                    // Keeps the future until the layer stops the handler.
                    std::future::pending().await
                }
            }
        })
        .set(|layer| layer.disconnect(Disconnect::Cancel));
        let orders = shop.orders().await.len();
        {
            let mut client = pin!(service.post(&key));
            tokio::select! {
                _ = &mut client => unreachable!("the handler does not answer"),
                () = reached.notified() => {}
            }
        }
        assert_eq!(service.layer.drain(Duration::from_secs(60)).await.left(), 0);
        let record = shop.record(&key).await.unwrap();
        let grown = shop.orders().await.len() - orders;
        match record.state {
            RecordState::Completed { .. } => assert_eq!(grown, 1),
            RecordState::Unknown => assert_eq!(grown, 0),
            other => panic!("{other:?}"),
        }
        let retry = Service::new(&shop, respond).set(|layer| layer.recovery(Recovery::Rerun));
        retry.post(&key).await.assert_is(201, "ordered by run 1");
        assert_eq!(shop.orders().await.len(), orders + 1);
        assert_eq!(retry.runs(), 1 - grown);
        if *whole.lock().unwrap() {
            assert_eq!(grown, 1);
            break;
        }
        left += 1;
    }
    assert!(left > 1, "an order has more awaits than {left}");
}
