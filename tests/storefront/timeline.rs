//! The timeline as a browser reads it.

use std::{collections::HashSet, time::Duration};

use futures_util::future::join_all;
use reqwest::{Client, Response};
use serde_json::Value;
use tokio::time;

use crate::process::Storefront;

#[tokio::test(flavor = "multi_thread")]
async fn timeline_resumes_after_the_last_event() {
    let storefront = Storefront::open();
    for (last, next) in [(None, "1"), (Some("1"), "2"), (Some("3"), "4")] {
        let mut timeline = Timeline::open(&storefront, last).await;
        assert_eq!(timeline.next().await.0, next);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_operation_id_goes_from_the_request_to_the_charge() {
    let storefront = Storefront::open();
    let ids = join_all([order(&storefront, "one"), order(&storefront, "other")]).await;
    assert_ne!(ids[0], ids[1]);
    for (cart, id) in ["one", "other"].into_iter().zip(ids) {
        let mut missing = vec![
            ("shop", "run"),
            ("shop", "ordered"),
            ("network", "answered"),
            ("network", "replayed"),
            ("relay", "published"),
            ("consumer", "consumed"),
            ("provider", "charged"),
        ];
        let mut timeline = Timeline::open(&storefront, None).await;
        while !missing.is_empty() {
            let (_, event) = timeline.next().await;
            let is_it = |said: &(&str, &str)| event["process"] == said.0 && event["what"] == said.1;
            let said = missing.iter().position(is_it);
            if let Some(said) = said.filter(|_| event["cart"] == cart) {
                assert_eq!(event["operation"], id, "{event}");
                missing.remove(said);
            }
        }
    }
}

/// Places an order, twice. Returns the id of its operation.
async fn order(storefront: &Storefront, cart: &str) -> String {
    let mut ids = HashSet::new();
    for is_replay in [false, true] {
        let request = Client::new()
            .post(format!("{}/guarded/orders", storefront.address))
            .header("idempotency-key", format!("key-{cart}"))
            .header("content-type", "application/json")
            .body(format!(r#"{{"cart":"{cart}"}}"#));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 201);
        assert_eq!(
            response.headers().contains_key("idempotent-replayed"),
            is_replay
        );
        let location = response.headers()["location"].to_str().unwrap();
        ids.insert(location.strip_prefix("/orders/").unwrap().to_owned());
    }
    assert_eq!(ids.len(), 1);
    ids.into_iter().next().unwrap()
}

/// A stream of events with an id.
struct Timeline {
    response: Response,
    text: String,
}

impl Timeline {
    /// Opens it after the event with this id.
    async fn open(storefront: &Storefront, last: Option<&str>) -> Self {
        let mut request = Client::new().get(format!("{}/timeline", storefront.address));
        if let Some(id) = last {
            request = request.header("last-event-id", id);
        }
        Self {
            response: request.send().await.unwrap(),
            text: String::new(),
        }
    }

    async fn next(&mut self) -> (String, Value) {
        loop {
            while let Some((event, rest)) = self.text.split_once("\n\n") {
                let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
                let found = (field("id: ").map(str::to_owned), field("data: "));
                let found = found.0.zip(found.1.map(|data| data.parse().unwrap()));
                self.text = rest.to_owned();
                if let Some(found) = found {
                    return found;
                }
            }
            let chunk = time::timeout(Duration::from_secs(30), self.response.chunk()).await;
            let chunk = chunk.expect("an event comes").unwrap().unwrap();
            self.text += std::str::from_utf8(&chunk).unwrap();
        }
    }
}
