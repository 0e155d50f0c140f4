//! A network that can be stalled, holds large calls and answers back, and counts
//! its bytes.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
};
use tower_idempotency::sqlx::postgres::PgConnectOptions;

use crate::databases::options;

/// Stands between a store and its server.
pub(crate) struct Proxy {
    port: u16,
    network: Arc<Network>,
}

#[derive(Default)]
struct Network {
    weather: watch::Sender<Weather>,
    /// The bytes that were sent to the server.
    sent: AtomicU64,
    /// The size of the largest answer to one call.
    largest_answer: AtomicUsize,
    /// The number of connections with a stuck call or answer.
    stuck: AtomicUsize,
}

#[derive(Clone, Copy)]
struct Weather {
    /// The bytes of an answer that pass before it gets stuck.
    stuck_after: usize,
    /// The bytes of a call that pass before it gets stuck.
    calls_stuck_after: usize,
}

impl Default for Weather {
    fn default() -> Self {
        Self {
            stuck_after: usize::MAX,
            calls_stuck_after: usize::MAX,
        }
    }
}

impl Proxy {
    pub(crate) async fn to(url: &str) -> Self {
        let server = (options(url).get_host().to_owned(), options(url).get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = Arc::<Network>::default();
        let between = Arc::clone(&network);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let server = TcpStream::connect(&server).await.unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let line = Arc::<Line>::default();
                let call = (Arc::clone(&between), Arc::clone(&line));
                tokio::spawn(carry_calls(from_client, to_server, call));
                let answer = (Arc::clone(&between), line);
                tokio::spawn(carry_answers(from_server, to_client, answer));
            }
        });
        Self { port, network }
    }

    pub(crate) fn options(&self, url: &str) -> PgConnectOptions {
        options(url).host("127.0.0.1").port(self.port)
    }

    /// Holds all answers back, or releases them.
    pub(crate) fn stall(&self, is_stalled: bool) {
        self.stick_after(if is_stalled { 0 } else { usize::MAX });
    }

    /// Holds back each answer longer than this, and all after it on its
    /// connection.
    pub(crate) fn stick_after(&self, bytes: usize) {
        self.network
            .weather
            .send_modify(|weather| weather.stuck_after = bytes);
    }

    /// Holds back each call longer than this, and all after it on its connection.
    pub(crate) fn stick_calls_after(&self, bytes: usize) {
        self.network
            .weather
            .send_modify(|weather| weather.calls_stuck_after = bytes);
    }

    /// Returns the number of connections with a stuck call or answer.
    pub(crate) fn stuck(&self) -> usize {
        self.network.stuck.load(Ordering::Relaxed)
    }

    /// Returns the size of the largest answer to one call.
    pub(crate) fn largest_answer(&self) -> usize {
        self.network.largest_answer.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes sent to the server.
    pub(crate) fn sent(&self) -> u64 {
        self.network.sent.load(Ordering::Relaxed)
    }
}

/// A connection: the bytes of its last call so far, and of its answer.
#[derive(Default)]
struct Line {
    called: AtomicUsize,
    answered: AtomicUsize,
}

type Between = (Arc<Network>, Arc<Line>);

async fn carry_calls(
    mut from_client: tcp::OwnedReadHalf,
    mut to_server: tcp::OwnedWriteHalf,
    (network, line): Between,
) {
    let mut weather = network.weather.subscribe();
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_client.read(&mut said).await {
        network.sent.fetch_add(length as u64, Ordering::Relaxed);
        line.answered.store(0, Ordering::Relaxed);
        let bytes = line.called.fetch_add(length, Ordering::Relaxed) + length;
        network.stuck.fetch_add(1, Ordering::Relaxed);
        let passes = weather.wait_for(|weather| bytes <= weather.calls_stuck_after);
        let is_over = passes.await.is_err();
        network.stuck.fetch_sub(1, Ordering::Relaxed);
        if is_over || to_server.write_all(&said[..length]).await.is_err() {
            return;
        }
    }
}

async fn carry_answers(
    mut from_server: tcp::OwnedReadHalf,
    mut to_client: tcp::OwnedWriteHalf,
    (network, line): Between,
) {
    let mut weather = network.weather.subscribe();
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_server.read(&mut said).await {
        line.called.store(0, Ordering::Relaxed);
        let bytes = line.answered.fetch_add(length, Ordering::Relaxed) + length;
        network.largest_answer.fetch_max(bytes, Ordering::Relaxed);
        network.stuck.fetch_add(1, Ordering::Relaxed);
        let passes = weather.wait_for(|weather| bytes <= weather.stuck_after);
        let is_over = passes.await.is_err();
        network.stuck.fetch_sub(1, Ordering::Relaxed);
        if is_over || to_client.write_all(&said[..length]).await.is_err() {
            return;
        }
    }
}
