//! A network that can be cut, stalled and slowed down, and that recognises a
//! COMMIT.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
    sync::watch,
    task::JoinHandle,
    time,
};

/// Stands between the processes and their server.
pub(crate) struct Proxy {
    port: u16,
    network: Arc<Network>,
    acceptor: JoinHandle<()>,
}

struct Network {
    weather: watch::Sender<Weather>,
    /// The number of COMMITs to cut off before they arrive.
    cut_before: AtomicUsize,
    /// The number of COMMITs whose answers to cut off.
    cut_after: AtomicUsize,
    /// The number of bytes of slowed answers.
    slowed: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
struct Weather {
    cuts: usize,
    is_stalled: bool,
    is_slow: bool,
}

impl Proxy {
    pub(crate) async fn to(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let network = Arc::new(Network {
            weather: watch::Sender::default(),
            cut_before: AtomicUsize::default(),
            cut_after: AtomicUsize::default(),
            slowed: AtomicUsize::default(),
        });
        let between = Arc::clone(&network);
        let acceptor = tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let between = Arc::clone(&between);
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(("127.0.0.1", server)).await {
                        carry(client, server, &between).await;
                    }
                });
            }
        });
        Self {
            port,
            network,
            acceptor,
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Breaks every connection.
    pub(crate) fn cut(&self) {
        self.network
            .weather
            .send_modify(|weather| weather.cuts += 1);
    }

    /// Holds every byte back, or releases all.
    pub(crate) fn stall(&self, is_stalled: bool) {
        self.network
            .weather
            .send_modify(|weather| weather.is_stalled = is_stalled);
    }

    /// Lets the server's answers through in small pieces, or all at once. Each
    /// connection then carries about 400 kB a second.
    pub(crate) fn slow_down(&self, is_slow: bool) {
        self.network
            .weather
            .send_modify(|weather| weather.is_slow = is_slow);
    }

    /// Returns the number of bytes of slowed answers.
    pub(crate) fn slowed(&self) -> usize {
        self.network.slowed.load(Ordering::Relaxed)
    }

    /// Cuts the next COMMITs off before they arrive.
    pub(crate) fn cut_before_commits(&self, number: usize) {
        self.network.cut_before.store(number, Ordering::SeqCst);
    }

    /// Lets the next COMMITs arrive, and cuts their answers off.
    pub(crate) fn cut_after_commits(&self, number: usize) {
        self.network.cut_after.store(number, Ordering::SeqCst);
    }

    /// Returns whether no COMMIT is left to cut off.
    pub(crate) fn is_done(&self) -> bool {
        let left = |number: &AtomicUsize| number.load(Ordering::SeqCst);
        left(&self.network.cut_before) == 0 && left(&self.network.cut_after) == 0
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.cut();
    }
}

/// Carries one connection, until it ends or is cut.
async fn carry(client: TcpStream, server: TcpStream, network: &Network) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let mut weather = network.weather.subscribe();
    let cuts = weather.borrow().cuts;
    let is_swallowed = AtomicBool::new(false);
    tokio::select! {
        () = carry_requests(from_client, to_server, network, &is_swallowed) => {}
        () = carry_answers(from_server, to_client, network, &is_swallowed) => {}
        _ = weather.wait_for(|now| now.cuts != cuts) => {}
    }
}

async fn carry_requests(
    mut from_client: tcp::OwnedReadHalf,
    mut to_server: tcp::OwnedWriteHalf,
    network: &Network,
    is_swallowed: &AtomicBool,
) {
    let mut is_first = true;
    // Behind a pooler every call of the store ends with a COMMIT, but on other
    // connections than the orders.
    let mut has_orders = false;
    while let Ok(message) = read_message(&mut from_client, is_first).await {
        is_first = false;
        has_orders |= message.windows(ORDER.len()).any(|text| text == ORDER);
        if has_orders && message.get(5..) == Some(b"COMMIT\0") {
            if take(&network.cut_before) {
                return;
            }
            if take(&network.cut_after) {
                is_swallowed.store(true, Ordering::SeqCst);
            }
        }
        network.calm().await;
        if to_server.write_all(&message).await.is_err() {
            return;
        }
    }
}

/// The first message has no letter before its length.
async fn read_message(
    from_client: &mut tcp::OwnedReadHalf,
    is_first: bool,
) -> std::io::Result<Vec<u8>> {
    let mut message = Vec::new();
    if !is_first {
        message.push(from_client.read_u8().await?);
    }
    let length = from_client.read_u32().await?;
    message.extend_from_slice(&length.to_be_bytes());
    let begun = message.len();
    message.resize(begun + length as usize - 4, 0);
    from_client.read_exact(&mut message[begun..]).await?;
    Ok(message)
}

async fn carry_answers(
    mut from_server: tcp::OwnedReadHalf,
    mut to_client: tcp::OwnedWriteHalf,
    network: &Network,
    is_swallowed: &AtomicBool,
) {
    let mut said = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_server.read(&mut said).await {
        // No statement comes between the last answer and the COMMIT, so this is
        // the COMMIT's answer.
        if is_swallowed.load(Ordering::SeqCst) {
            return;
        }
        for piece in said[..length].chunks(PIECE) {
            network.calm().await;
            if to_client.write_all(piece).await.is_err() {
                return;
            }
            network.delay(piece.len()).await;
        }
    }
}

impl Network {
    async fn calm(&self) {
        let mut weather = self.weather.subscribe();
        let _ = weather.wait_for(|now| !now.is_stalled).await;
    }

    /// Waits after a piece of an answer while the network is slow. A piece that
    /// is not full is the last one of its answer.
    async fn delay(&self, length: usize) {
        if length == PIECE && self.weather.borrow().is_slow {
            self.slowed.fetch_add(length, Ordering::Relaxed);
            time::sleep(PAUSE).await;
        }
    }
}

fn take(number: &AtomicUsize) -> bool {
    number
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
            left.checked_sub(1)
        })
        .is_ok()
}

/// The size of a piece of an answer in a slow network.
const PIECE: usize = 4 << 10;
/// The time between two pieces.
const PAUSE: Duration = Duration::from_millis(10);

/// A statement that a connection sends before it commits an order.
const ORDER: &[u8] = b"INSERT INTO playground_orders";
