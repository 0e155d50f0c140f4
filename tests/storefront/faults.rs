//! Each fault, on both sides of the page.

use serde_json::json;

use crate::browser::on_page;

#[tokio::test(flavor = "multi_thread")]
async fn lost_response_charges_twice_without_the_layer() {
    on_page(async |page| {
        page.click("input[name=drop-response]").await;
        page.wait_for_fault("drop-response", true).await;
        page.click("#without .pay").await;
        page.wait_for("#without .message", "Ordered").await;
        page.wait_for("#without .charges", "2").await;
        page.wait_for("#without .alarm", "charged 2 times").await;
        assert_eq!(page.text("#without .orders").await, "2");
        assert_eq!(page.text("#without .replays").await, "0");
        let color = "return getComputedStyle(document.querySelector(arguments[0])).color";
        let red = page.run(color, json!("#without .charges")).await;
        let usual = page.run(color, json!("#with .charges")).await;
        assert_ne!(red, usual);
        assert_eq!(red, "rgb(179, 38, 30)");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_response_is_replayed_with_the_layer() {
    on_page(async |page| {
        page.click("input[name=drop-response]").await;
        page.wait_for_fault("drop-response", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "replayed").await;
        page.wait_for("#with .replays", "1").await;
        page.wait_for("#with .charges", "1").await;
        page.has(&[
            ("requests", 2),
            ("runs", 1),
            ("orders", 1),
            ("events", 1),
            ("charges", 1),
        ])
        .await;
        page.wait_for("#with ol", "response lost").await;
        page.wait_for_fault("drop-response", false).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn double_click_reload_and_back_charge_once() {
    on_page(async |page| {
        let twice = "const pay = document.querySelector('#with .pay'); pay.click(); pay.click()";
        page.run(twice, json!(null)).await;
        page.wait_for("#with .replays", "1").await;

        page.client.refresh().await.unwrap();
        page.wait_for("#with .replays", "1").await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "replayed").await;
        page.wait_for("#with .replays", "2").await;

        page.client.goto("about:blank").await.unwrap();
        page.client.back().await.unwrap();
        page.wait_for("#with .replays", "2").await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "replayed").await;
        page.wait_for("#with .replays", "3").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[
            ("requests", 4),
            ("runs", 1),
            ("orders", 1),
            ("events", 1),
            ("charges", 1),
        ])
        .await;

        // A new cart is another operation.
        page.click("#with .new").await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with .charges", "1").await;
        assert_eq!(page.text("#with .replays").await, "0");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answer_of_the_provider_charges_once() {
    on_page(async |page| {
        page.switch("provider-unavailable", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with ol", "charge answered 503").await;
        page.wait_for("#with ol", "charge replayed").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_provider_charges_once() {
    on_page(async |page| {
        page.switch("slow-provider", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with ol", "charge delayed").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shop_killed_in_its_run_charges_once() {
    on_page(async |page| {
        page.switch("kill-shop", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with ol", "died").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
        page.wait_for_fault("kill-shop", false).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn database_that_does_not_answer_charges_nothing() {
    on_page(async |page| {
        page.switch("database-down", true).await;
        page.wait_for("#with ol", "stalled").await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "nothing ran").await;
        page.has(&[("runs", 0), ("orders", 0), ("events", 0), ("charges", 0)])
            .await;

        page.switch("database-down", false).await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_killed_after_an_event_repeats_it_after_its_lease() {
    on_page(async |page| {
        page.switch("kill-relay", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with ol", "repeat ignored").await;
        page.wait_for("#with ol", "published").await;
        page.has(&[("orders", 1), ("events", 1), ("charges", 1)])
            .await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_waits_for_a_relay() {
    on_page(async |page| {
        page.switch("relay-stopped", true).await;
        page.wait_for("#with ol", "died").await;
        page.click("#with .pay").await;
        page.wait_for("#with .message", "Ordered").await;
        page.wait_for("#with .orders", "1").await;
        page.has(&[("events", 0), ("charges", 0)]).await;

        page.switch("relay-stopped", false).await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn consumer_killed_after_its_charge_charges_once() {
    on_page(async |page| {
        page.switch("kill-consumer", true).await;
        page.click("#with .pay").await;
        page.wait_for("#with ol", "charge replayed").await;
        page.wait_for("#with .events", "1").await;
        page.has(&[("orders", 1), ("charges", 1)]).await;
    })
    .await;
}
