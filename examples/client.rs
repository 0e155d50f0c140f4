//! A client that pays once over a connection that is cut.
//!
//! ```text
//! cargo run --example quickstart
//! cargo run --example client
//! ```
//!
//! It pays at `http://localhost:3000/payments`, or at its first argument, through a proxy
//! of its own that cuts the connection when the first response arrives. The payment is
//! made, but the client does not know. It retries under the same key, and gets the response
//! replayed.

#![allow(clippy::print_stdout, reason = "it tells what happens")]

use std::{env, error::Error, net::Ipv4Addr, net::SocketAddr, time::Duration};

use bytes::Bytes;
use http::{Request, Uri, header::CONTENT_TYPE};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use tokio::{
    io::{self, AsyncReadExt as _},
    net::{TcpListener, TcpStream},
};
use tower::{ServiceBuilder, ServiceExt as _, retry::RetryLayer, timeout::TimeoutLayer};
use tower_idempotency::client::{KeyLayer, KeyedRetry};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let address = env::args().nth(1);
    let address = address
        .as_deref()
        .unwrap_or("http://localhost:3000/payments");
    let uri: Uri = address.parse()?;
    let host = uri
        .host()
        .ok_or("an address with a host, as http://localhost:3000/")?;
    let service = format!("{host}:{}", uri.port_u16().unwrap_or(80));
    let proxy = cut_the_first_connection(service).await?;

    let client = ServiceBuilder::new()
        // Outermost: all attempts of a call have one key.
        .layer(KeyLayer::uuid_v7())
        .layer(RetryLayer::new(KeyedRetry::new().attempts(5)))
        // For one attempt.
        .layer(TimeoutLayer::new(Duration::from_secs(30)))
        .service(Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>());

    let request = Request::post(format!("http://{proxy}{}", uri.path()))
        .header(CONTENT_TYPE, "application/json")
        .body(Full::from(r#"{"amount":500}"#))?;
    let response = client.oneshot(request).await?;
    let replayed = response.headers().contains_key("idempotent-replayed");
    println!("{}, replayed: {replayed}", response.status());
    let body = response.into_body().collect().await?.to_bytes();
    println!("{}", String::from_utf8_lossy(&body));
    Ok(())
}

/// Forwards connections to `service`. Cuts the first one when its response arrives.
async fn cut_the_first_connection(service: String) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        let mut is_first = true;
        while let Ok((mut client, _)) = listener.accept().await {
            let Ok(mut server) = TcpStream::connect(&service).await else {
                println!("nothing listens at {service}");
                continue;
            };
            if std::mem::take(&mut is_first) {
                let (mut requests, _) = client.split();
                let (mut responses, mut to_server) = server.split();
                tokio::select! {
                    _ = io::copy(&mut requests, &mut to_server) => {}
                    _ = responses.read_u8() => println!("connection cut before the response"),
                }
                continue;
            }
            tokio::spawn(async move { io::copy_bidirectional(&mut client, &mut server).await });
        }
    });
    Ok(address)
}
