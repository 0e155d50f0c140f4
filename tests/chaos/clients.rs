//! Clients that ask with one key until they know.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    net::SocketAddr,
    time::Duration,
};

use rand::{RngExt as _, rngs::StdRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{self, Instant},
};

use crate::{World, processes::Seat};

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// An order, which is committed with its response.
    Order,
    /// As `Order`; the first process dies right before the commit.
    CrashBefore,
    /// As `Order`; the first process dies right after the commit.
    CrashAfter,
    /// An order that its handler rolls back.
    Rollback,
    /// An order whose handler ignores that it was rolled back.
    Swallow,
    /// A handler without a transaction, which must not run twice.
    Plain,
}

/// One key, and the answers of its client.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    /// Also the account, so that orders and runs are counted by key.
    pub(crate) key: String,
    pub(crate) target: String,
    /// Whether its response has hundreds of kilobytes.
    pub(crate) is_large: bool,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
    /// The distinct answers of success.
    pub(crate) done: Vec<String>,
    pub(crate) replays: usize,
    /// Whether the last pursuit got a final answer.
    pub(crate) is_final: bool,
    /// Whether it settled only without other requests.
    pub(crate) is_slow: bool,
    pub(crate) last: String,
}

impl Case {
    pub(crate) fn new(client: u64, number: usize, rng: &mut StdRng) -> Self {
        let kind = match rng.random_range(0..100) {
            0..60 => Kind::Order,
            60..62 => Kind::CrashBefore,
            62..64 => Kind::CrashAfter,
            64..67 => Kind::Rollback,
            67..70 => Kind::Swallow,
            _ => Kind::Plain,
        };
        // Most pauses are short; a long one leaves time for a fault.
        let mut pause = || match rng.random_range(0..3) {
            0 => rng.random_range(100..700),
            _ => rng.random_range(0..30),
        };
        let (pause, hold) = (pause(), pause());
        let mode = match kind {
            Kind::Order => "commit",
            Kind::CrashBefore => "crash-before",
            Kind::CrashAfter => "crash-after",
            Kind::Rollback => "rollback",
            Kind::Swallow => "swallow",
            Kind::Plain => "",
        };
        let is_large = matches!(kind, Kind::Order | Kind::Plain) && rng.random_range(0..10) == 0;
        let length = match is_large {
            true => rng.random_range(256 << 10..1_000_000),
            false => 0,
        };
        let target = match kind {
            Kind::Plain if is_large => format!("/big?len={length}"),
            Kind::Plain => format!("/slow?ms={pause}"),
            _ => format!("/order?mode={mode}&ms={pause}&hold_ms={hold}&len={length}"),
        };
        let now = Instant::now();
        Self {
            kind,
            key: format!("c{client}n{number}"),
            target,
            is_large,
            begun: now,
            ended: now,
            done: Vec::new(),
            replays: 0,
            is_final: false,
            is_slow: false,
            last: String::new(),
        }
    }

    /// Returns whether it may have an order in the end.
    pub(crate) fn orders(&self) -> bool {
        matches!(
            self.kind,
            Kind::Order | Kind::CrashBefore | Kind::CrashAfter
        )
    }

    /// Asks for a large response again, for its replays.
    pub(crate) async fn insist(&mut self, world: &World, rng: &mut StdRng) {
        for _ in 0..MORE_REPLAYS {
            time::sleep(Duration::from_millis(rng.random_range(0..400))).await;
            let seats = self.seats(world);
            let seat = &seats[rng.random_range(0..seats.len())];
            if let Some(answer) = self.ask(seat, LONGEST_PATIENCE).await {
                self.hear(&answer);
            }
        }
    }

    /// Asks one process after another, until an answer is final.
    pub(crate) async fn pursue(&mut self, world: &World, until: Instant, rng: &mut StdRng) {
        self.is_final = false;
        while !self.is_final && Instant::now() < until {
            let seats = self.seats(world);
            // Some clients leave early, and some send two requests at once.
            let asks_twice = rng.random_range(0..4) == 0;
            let mut request = || {
                let patience = match rng.random_range(0..2) {
                    0 => rng.random_range(1..1_200),
                    _ => LONGEST_PATIENCE,
                };
                self.ask(&seats[rng.random_range(0..seats.len())], patience)
            };
            let first = request();
            let answers = if asks_twice {
                let second = request();
                tokio::join!(first, second).into()
            } else {
                [first.await, None]
            };
            for answer in answers.into_iter().flatten() {
                self.hear(&answer);
            }
            if !self.is_final {
                time::sleep(Duration::from_millis(rng.random_range(10..150))).await;
            }
        }
    }

    fn seats<'w>(&self, world: &'w World) -> &'w [Seat] {
        match self.kind {
            Kind::Plain => &world.refusing,
            _ => &world.rerunning,
        }
    }

    async fn ask(&self, seat: &Seat, patience: u64) -> Option<Answer> {
        let asked = ask(seat.address()?, "POST", &self.target, &self.key);
        time::timeout(Duration::from_millis(patience), asked)
            .await
            .ok()?
    }

    fn hear(&mut self, answer: &Answer) {
        let body = answer.short_body();
        self.last = format!("{} {body}", answer.status);
        let is_done = (200..300).contains(&answer.status);
        if is_done {
            let header = |name| answer.header(name).unwrap_or_default();
            let (location, run) = (header("location"), header("x-run"));
            let done = format!("{} {location} {run} {body}", answer.status);
            if !self.done.contains(&done) {
                self.done.push(done);
            }
            self.replays += usize::from(answer.header("idempotent-replayed").is_some());
        }
        self.is_final |= is_done
            || match self.kind {
                Kind::Rollback => answer.body == "the order was rolled back",
                Kind::Swallow => answer.body.contains("problem:rolled-back"),
                Kind::Plain => answer.body.contains("problem:outcome-unknown"),
                Kind::Order | Kind::CrashBefore | Kind::CrashAfter => false,
            };
    }
}

/// A whole answer.
pub(crate) struct Answer {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Answer {
    /// The body, or its hash if it is long.
    fn short_body(&self) -> String {
        if self.body.len() < 1_000 {
            return self.body.clone();
        }
        let mut hasher = DefaultHasher::new();
        self.body.hash(&mut hasher);
        format!("{} bytes, {:016x}", self.body.len(), hasher.finish())
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then_some(value.trim())
        })
    }
}

/// `None` if the connection breaks before the answer is whole.
pub(crate) async fn ask(
    address: SocketAddr,
    method: &str,
    target: &str,
    key: &str,
) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!(
        "{method} {target} HTTP/1.1\r\nHost: playground\r\nConnection: close\r\n\
         Authorization: Bearer {key}.1\r\nIdempotency-Key: {key}\r\nContent-Length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut said = Vec::new();
    stream.read_to_end(&mut said).await.ok()?;
    let said = String::from_utf8(said).ok()?;
    let (head, body) = said.split_once("\r\n\r\n")?;
    let answer = Answer {
        status: head.split(' ').nth(1)?.parse().ok()?,
        head: head.to_owned(),
        body: body.to_owned(),
    };
    let length: usize = answer.header("content-length")?.parse().ok()?;
    (body.len() == length).then_some(answer)
}

const MORE_REPLAYS: usize = 4;

/// In milliseconds.
const LONGEST_PATIENCE: u64 = 2_500;
