//! Clients that send exactly the bytes of a test over HTTP/1.1, and its frames
//! over HTTP/2.

use std::net::SocketAddr;

use axum::body::Body;
use http::{Request, Response};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufStream},
    net::TcpStream,
};

use crate::{api::Answer, server::Server};

/// One HTTP/1.1 connection.
pub(crate) struct Wire(BufStream<TcpStream>);

/// A response as it came over the wire, line by line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WireAnswer {
    pub(crate) status: u16,
    pub(crate) lines: Vec<Line>,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Vec<Line>,
}

type Line = (String, Vec<u8>);

impl Wire {
    pub(crate) async fn open(server: &Server) -> Self {
        Self::connect(server.address).await
    }

    pub(crate) async fn connect(address: SocketAddr) -> Self {
        Self(BufStream::new(TcpStream::connect(address).await.unwrap()))
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).await.unwrap();
        self.0.flush().await.unwrap();
    }

    /// Sends a request and reads its answer.
    pub(crate) async fn ask(&mut self, bytes: impl AsRef<[u8]>) -> WireAnswer {
        self.write(bytes).await;
        self.answer().await
    }

    /// Closes the sending half of the connection.
    pub(crate) async fn half_close(&mut self) {
        self.0.shutdown().await.unwrap();
    }

    /// Reads one final answer; the bytes after it stay unread.
    pub(crate) async fn answer(&mut self) -> WireAnswer {
        let start = self.line().await;
        let status = String::from_utf8(start).unwrap()[9..12].parse().unwrap();
        let lines = self.lines().await;
        let mut answer = WireAnswer {
            status,
            lines,
            body: Vec::new(),
            trailers: Vec::new(),
        };
        if answer.text("transfer-encoding").as_deref() == Some("chunked") {
            loop {
                let size = String::from_utf8(self.line().await).unwrap();
                let size = usize::from_str_radix(&size, 16).unwrap();
                if size == 0 {
                    break;
                }
                let chunk = self.exactly(size).await;
                answer.body.extend(chunk);
                assert_eq!(self.line().await, b"");
            }
            answer.trailers = self.lines().await;
        } else if let Some(length) = answer.text("content-length") {
            answer.body = self.exactly(length.parse().unwrap()).await;
        } else {
            let bodiless = matches!(status, 100..=199 | 204 | 304);
            assert!(bodiless, "no framing: {answer:?}");
        }
        answer
    }

    /// All that the server sends before it closes.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).await.unwrap();
        rest
    }

    /// The next `length` bytes.
    pub(crate) async fn exactly(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).await.unwrap();
        bytes
    }

    async fn lines(&mut self) -> Vec<Line> {
        let mut lines = Vec::new();
        loop {
            let line = self.line().await;
            if line.is_empty() {
                return lines;
            }
            let colon = line.iter().position(|&byte| byte == b':').unwrap();
            let name = String::from_utf8(line[..colon].to_vec()).unwrap();
            lines.push((
                name.to_ascii_lowercase(),
                line[colon + 1..].trim_ascii().to_vec(),
            ));
        }
    }

    async fn line(&mut self) -> Vec<u8> {
        let mut line = Vec::new();
        self.0.read_until(b'\n', &mut line).await.unwrap();
        assert!(line.ends_with(b"\r\n"), "the connection broke: {line:?}");
        line.truncate(line.len() - 2);
        line
    }
}

impl WireAnswer {
    /// The values of this header's lines, in order.
    pub(crate) fn values(&self, name: &str) -> Vec<&[u8]> {
        self.lines
            .iter()
            .filter(|(other, _)| other == name)
            .map(|(_, value)| &**value)
            .collect()
    }

    /// The one value of this header.
    pub(crate) fn text(&self, name: &str) -> Option<String> {
        let values = self.values(name);
        assert!(values.len() <= 1, "{name} more than once: {values:?}");
        values
            .first()
            .map(|value| String::from_utf8(value.to_vec()).unwrap())
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.text("idempotent-replayed").as_deref() == Some("true")
    }

    /// The last part of a problem's type.
    pub(crate) fn problem(&self) -> String {
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        let of_type = problem["type"].as_str().unwrap();
        of_type
            .strip_prefix("urn:tower-idempotency:problem:")
            .unwrap()
            .to_owned()
    }
}

/// The bytes of a POST by the usual caller with these header lines and body.
pub(crate) fn post(path: &str, lines: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: test\r\nX-Account: acme-7\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{lines}\r\n{body}",
        body.len()
    )
}

/// The bytes of the request that most tests send, with this key.
pub(crate) fn keyed_post(key: &str) -> String {
    let lines = format!("Idempotency-Key: {key}\r\n");
    post("/count", &lines, "{\"amount\":1}")
}

/// One HTTP/2 connection.
#[derive(Clone)]
pub(crate) struct Http2(http2::SendRequest<Body>);

impl Http2 {
    pub(crate) async fn open(server: &Server) -> Self {
        let stream = TcpStream::connect(server.address).await.unwrap();
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    /// Dropped before its end, this resets the stream.
    pub(crate) async fn respond(&mut self, request: Request<Body>) -> Response<Incoming> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().unwrap().to_string();
        parts.uri = format!("http://test{path}").parse().unwrap();
        self.0
            .send_request(Request::from_parts(parts, body))
            .await
            .unwrap()
    }

    pub(crate) async fn ask(&mut self, request: Request<Body>) -> Answer {
        Answer::of(self.respond(request).await).await
    }
}
