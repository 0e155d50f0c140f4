//! The timeline as a browser reads it.

use crate::process::Storefront;

#[tokio::test(flavor = "multi_thread")]
async fn timeline_resumes_after_the_last_event() {
    let storefront = Storefront::open();
    assert_eq!(first_id(&storefront, None).await, "1");
    assert_eq!(first_id(&storefront, Some("1")).await, "2");
}

/// The id of the first event that comes after this one.
async fn first_id(storefront: &Storefront, last: Option<&str>) -> String {
    let request = reqwest::Client::new().get(format!("{}/timeline", storefront.address));
    let request = match last {
        Some(id) => request.header("last-event-id", id),
        None => request,
    };
    let mut response = request.send().await.unwrap();
    let mut text = String::new();
    loop {
        let id = text.lines().find_map(|line| line.strip_prefix("id: "));
        if let Some(id) = id {
            return id.to_owned();
        }
        text += std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap();
    }
}
