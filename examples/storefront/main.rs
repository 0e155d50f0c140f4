//! A shop, its payment provider and a page that shows what happens between them.
//!
//! ```text
//! cargo run --example storefront               # prints the address of the page
//! cargo run --example storefront -- load 1000  # orders under faults, and a table of them
//! ```
//!
//! The data is in files that are removed at the end. With `DATABASE_URL` and
//! `--features postgres`, that of the shop is in PostgreSQL. `PORT` chooses the port,
//! and `RUST_LOG=warn` shows what the processes log.
//!
//! | process | file | what it shows |
//! |---|---|---|
//! | shop | `shop.rs` | an order, its stock, its event and its response in one transaction |
//! | relay | `relay.rs` | events that are published after their transaction |
//! | consumer | `consumer.rs` | a message that is processed once |
//! | billing | `billing.rs` | a job that runs once for each hour |
//! | provider | `provider.rs` | a guarded service with a database of its own |
//! | load | `load.rs` | a client that goes on under the same keys after a crash |
//!
//! The process that starts the others is the network between them (`network.rs`). It has
//! the page, the timeline and the faults, so that no other process knows of a fault.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "it tells its address and its table, or why it has none"
)]

mod billing;
mod client;
mod consumer;
mod database;
mod faults;
mod load;
mod network;
mod ordered;
mod outcome;
mod pace;
mod page;
mod processes;
mod provider;
mod relay;
mod role;
mod scene;
mod server;
mod shop;
mod timeline;
mod trial;

use std::{env, process::ExitCode};

use tokio::signal;

use self::{role::Role, scene::Scene};

/// Why a process ends.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let ended = match *arguments {
        [] => show().await,
        ["load", orders] => trial::run(orders).await,
        ["process", name] => match Role::named(name) {
            Some(role) => role.run().await,
            None => Err(format!("no process is named {name:?}").into()),
        },
        _ => Err("usage: storefront [load ORDERS]".into()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("storefront: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Shows the page until Ctrl-C or SIGTERM.
async fn show() -> Result<(), Error> {
    server::start_logs(false)?;
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse())?;
    let scene = Scene::open(port, 0).await?;
    println!("listening on http://{}", scene.address());
    stop_signal().await;
    scene.close().await
}

async fn stop_signal() {
    let interrupt = async {
        signal::ctrl_c().await.expect("Ctrl-C can be caught");
    };
    #[cfg(unix)]
    let terminate = async {
        signal::unix::signal(signal::unix::SignalKind::terminate())
            .expect("SIGTERM can be caught")
            .recv()
            .await;
    };
    #[cfg(not(unix))]
    let terminate = std::future::pending();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}
