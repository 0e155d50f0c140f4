//! Chromium without a window, told what to do by its driver.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    panic::{AssertUnwindSafe, resume_unwind},
    process::{Child, Command, Stdio},
    time::Duration,
};

use fantoccini::{Client, ClientBuilder, Locator};
use futures_util::FutureExt as _;
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::json;
use tokio::time::{self, Instant};

use crate::process::{Directory, Storefront};

/// A page of the storefront.
pub(crate) struct Page {
    pub(crate) client: Client,
}

/// Runs a test with the page of a new storefront in a new browser.
pub(crate) async fn on_page(test: impl AsyncFnOnce(&Page)) {
    let storefront = Storefront::open();
    let driver = Driver::start();
    let page = Page {
        client: driver.connect().await,
    };
    page.client.goto(&storefront.address).await.unwrap();
    let outcome = AssertUnwindSafe(test(&page)).catch_unwind().await;
    let closed = page.client.close().await;
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
    closed.unwrap();
}

impl Page {
    pub(crate) async fn click(&self, selector: &str) {
        let found = self.client.find(Locator::Css(selector)).await.unwrap();
        found.click().await.unwrap();
    }

    /// Switches a fault, and waits until the page has seen the change.
    pub(crate) async fn switch(&self, fault: &str, on: bool) {
        let script = "await fetch('/faults', { method: 'PUT', body: JSON.stringify(arguments[0]),
            headers: { 'Content-Type': 'application/json' } })";
        self.run(script, json!({ "fault": fault, "on": on })).await;
        self.wait_for_fault(fault, on).await;
    }

    pub(crate) async fn wait_for_fault(&self, fault: &str, on: bool) {
        let script = format!(
            "return document.querySelector('input[name={fault}]').checked === arguments[0]"
        );
        self.wait(&script, json!(on)).await;
    }

    pub(crate) async fn text(&self, selector: &str) -> String {
        let found = self.client.find(Locator::Css(selector)).await.unwrap();
        found.text().await.unwrap()
    }

    /// Fails unless the counters of the guarded side show these numbers.
    pub(crate) async fn has(&self, counters: &[(&str, u32)]) {
        for (counter, number) in counters {
            let shown = self.text(&format!("#with .{counter}")).await;
            assert_eq!(shown, number.to_string(), "{counter}");
        }
    }

    /// Waits until the text of an element contains this.
    pub(crate) async fn wait_for(&self, selector: &str, text: &str) {
        let script = format!(
            "return document.querySelector('{selector}').textContent.includes(arguments[0])"
        );
        self.wait(&script, json!(text)).await;
    }

    async fn wait(&self, script: &str, argument: serde_json::Value) {
        let end = Instant::now() + Duration::from_secs(30);
        while self.run(script, argument.clone()).await != json!(true) {
            assert!(
                Instant::now() < end,
                "{script} {argument}: {}",
                self.text("main").await
            );
            time::sleep(Duration::from_millis(50)).await;
        }
    }

    pub(crate) async fn run(&self, script: &str, argument: serde_json::Value) -> serde_json::Value {
        self.client.execute(script, vec![argument]).await.unwrap()
    }
}

/// The driver, its browser, and the processes of both, which are one group.
struct Driver {
    process: Child,
    port: u16,
    profile: Directory,
}

impl Driver {
    fn start() -> Self {
        // The port is free on IPv4, and may be in use on IPv6: the driver then ends.
        let mut started = (0..10).filter_map(|_| Self::start_once());
        started.next().expect("chromedriver tells its port")
    }

    fn start_once() -> Option<Self> {
        let profile = Directory::new();
        let mut process = Command::new("chromedriver")
            .arg("--port=0")
            .env("TMPDIR", &profile.0)
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("chromedriver is not installed; ./tests/run installs it");
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let port = lines.by_ref().map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            port.trim_end_matches('.').parse().ok()
        });
        let Some(port) = port else {
            let _ = process.wait();
            return None;
        };
        Some(Self {
            port,
            process,
            profile,
        })
    }

    async fn connect(&self) -> Client {
        let profile = format!("--user-data-dir={}/profile", self.profile.0.display());
        // Without its sandbox, Chromium runs as root.
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            &profile,
        ];
        let capabilities = json!({ "goog:chromeOptions": { "args": arguments } });
        ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{}", self.port))
            .await
            .unwrap()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let group = format!("-{}", self.process.id());
        let _ = Command::new("kill")
            .args(["-s", "KILL", "--", &group])
            .status();
        let _ = self.process.wait();
    }
}
