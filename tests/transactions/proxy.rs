//! A network that fails while COMMIT is under way.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
};
use tower_idempotency::sqlx::postgres::PgConnectOptions;

use crate::shop::options;

/// The fate of a COMMIT and of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Sound,
    /// Each message of the client is held back until the network changes.
    Silent,
    /// The connection breaks before COMMIT arrives.
    CutBefore,
    /// It breaks after the server has answered, before the answer arrives.
    CutAfter,
    /// COMMIT is held back until the network changes.
    HoldBefore,
    /// The beginning of a transaction is held back until the network changes.
    HoldBegin,
    /// The answer is held back until the network changes.
    HoldAfter,
    /// As [`CutBefore`](Self::CutBefore), and the server is gone from then on.
    GoneBefore,
    /// As [`CutAfter`](Self::CutAfter), and the server is gone from then on.
    GoneAfter,
    Gone,
}

/// Stands between a store and its server, and parses the store's messages.
pub(crate) struct Proxy {
    port: u16,
    network: Arc<watch::Sender<Network>>,
}

impl Proxy {
    pub(crate) async fn to(url: &str) -> Self {
        let server = (options(url).get_host().to_owned(), options(url).get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = Arc::new(watch::Sender::new(Network::Sound));
        let seen = Arc::clone(&network);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                if *seen.borrow() != Network::Gone {
                    let server = TcpStream::connect(&server).await.unwrap();
                    tokio::spawn(carry(client, server, Arc::clone(&seen)));
                }
            }
        });
        Self { port, network }
    }

    pub(crate) fn options(&self, url: &str) -> PgConnectOptions {
        options(url).host("127.0.0.1").port(self.port)
    }

    pub(crate) fn set(&self, network: Network) {
        self.network.send_replace(network);
    }
}

/// Carries one connection, until it ends or is cut.
async fn carry(client: TcpStream, server: TcpStream, network: Arc<watch::Sender<Network>>) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut gone = network.subscribe();
    tokio::select! {
        () = carry_requests(from_client, to_server, &network) => {}
        () = carry_answers(from_server, to_client, &network) => {}
        _ = gone.wait_for(|network| *network == Network::Gone) => {}
    }
}

async fn carry_requests(
    mut from_client: tcp::OwnedReadHalf,
    mut to_server: tcp::OwnedWriteHalf,
    network: &watch::Sender<Network>,
) {
    // The first message has no letter before its length.
    let mut letter = 0;
    loop {
        let mut message = Vec::new();
        if letter > 0 {
            message.push(from_client.read_u8().await.unwrap_or_default());
        }
        let Ok(length) = from_client.read_u32().await else {
            return;
        };
        letter = 1;
        message.extend_from_slice(&length.to_be_bytes());
        let mut rest = vec![0; length as usize - 4];
        if from_client.read_exact(&mut rest).await.is_err() {
            return;
        }
        message.extend_from_slice(&rest);
        if rest == b"COMMIT\0" {
            let now = *network.borrow();
            match now {
                Network::CutBefore => return,
                Network::GoneBefore => {
                    network.send_replace(Network::Gone);
                    return;
                }
                Network::HoldBefore => held(network, Network::HoldBefore).await,
                _ => {}
            }
        }
        if rest.starts_with(b"BEGIN") && *network.borrow() == Network::HoldBegin {
            held(network, Network::HoldBegin).await;
        }
        held(network, Network::Silent).await;
        if to_server.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// Recognises the answer to a COMMIT by its tag.
async fn carry_answers(
    mut from_server: tcp::OwnedReadHalf,
    mut to_client: tcp::OwnedWriteHalf,
    network: &watch::Sender<Network>,
) {
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_server.read(&mut said).await {
        if said[..length].starts_with(b"C\0\0\0\x0bCOMMIT\0") {
            let now = *network.borrow();
            match now {
                Network::CutAfter => return,
                Network::GoneAfter => {
                    network.send_replace(Network::Gone);
                    return;
                }
                Network::HoldAfter => held(network, Network::HoldAfter).await,
                _ => {}
            }
        }
        if to_client.write_all(&said[..length]).await.is_err() {
            return;
        }
    }
}

async fn held(network: &watch::Sender<Network>, while_so: Network) {
    let _ = network.subscribe().wait_for(|now| *now != while_so).await;
}
