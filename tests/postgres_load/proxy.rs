//! A network that can be stalled, and that counts the bytes it carries.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
};
use tower_idempotency::sqlx::postgres::PgConnectOptions;

use crate::options;

/// Stands between a store and its server.
pub(crate) struct Proxy {
    port: u16,
    network: Arc<Network>,
}

#[derive(Default)]
struct Network {
    /// Whether answers are held back.
    is_stalled: watch::Sender<bool>,
    /// The bytes that were sent to the server.
    sent: AtomicU64,
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
                tokio::spawn(carry_calls(from_client, to_server, Arc::clone(&between)));
                tokio::spawn(carry_answers(from_server, to_client, Arc::clone(&between)));
            }
        });
        Self { port, network }
    }

    pub(crate) fn options(&self, url: &str) -> PgConnectOptions {
        options(url).host("127.0.0.1").port(self.port)
    }

    /// Holds all answers back, or lets them go on.
    pub(crate) fn stall(&self, is_stalled: bool) {
        self.network.is_stalled.send_replace(is_stalled);
    }

    /// How many bytes were sent to the server.
    pub(crate) fn sent(&self) -> u64 {
        self.network.sent.load(Ordering::Relaxed)
    }
}

async fn carry_calls(
    mut from_client: tcp::OwnedReadHalf,
    mut to_server: tcp::OwnedWriteHalf,
    network: Arc<Network>,
) {
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_client.read(&mut said).await {
        network.sent.fetch_add(length as u64, Ordering::Relaxed);
        if to_server.write_all(&said[..length]).await.is_err() {
            return;
        }
    }
}

async fn carry_answers(
    mut from_server: tcp::OwnedReadHalf,
    mut to_client: tcp::OwnedWriteHalf,
    network: Arc<Network>,
) {
    let mut stalled = network.is_stalled.subscribe();
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_server.read(&mut said).await {
        if stalled.wait_for(|is_stalled| !is_stalled).await.is_err()
            || to_client.write_all(&said[..length]).await.is_err()
        {
            return;
        }
    }
}
