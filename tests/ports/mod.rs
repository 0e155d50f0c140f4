//! Ports for servers that a test starts, and may start again.

use std::net::TcpListener;

use rand::RngExt as _;

/// Returns a free port. The one 10,000 above is free too: the nodes of a Redis cluster talk
/// to each other on it.
///
/// Both are below the ports that Linux gives to connections, which could take the port
/// while its server is stopped.
pub(crate) fn free_port() -> u16 {
    loop {
        let port = rand::rng().random_range(10_000..22_000);
        let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
        if is_free(port) && is_free(port + 10_000) {
            return port;
        }
    }
}
