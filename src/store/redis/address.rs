//! Where the servers are.

use std::time::Duration;

use redis::{ConnectionInfo, IntoConnectionInfo as _, io::tcp::TcpSettings};

use super::error::failure;
use crate::store::StoreError;

#[derive(Clone)]
pub(super) enum Address {
    Single(ConnectionInfo),
    Sentinels {
        sentinels: Vec<ConnectionInfo>,
        service: String,
        /// The password and database of the servers, which Sentinel names.
        server: ConnectionInfo,
    },
    Cluster(Vec<ConnectionInfo>),
}

impl Address {
    pub(super) fn parse(url: &str, unacknowledged: Duration) -> Result<Self, StoreError> {
        let (scheme, rest) = url.split_once("://").ok_or_else(unknown)?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (format!("{login}@"), hosts),
            None => (String::new(), authority),
        };
        let info = |url: String| -> Result<ConnectionInfo, StoreError> {
            let info = parse(&url)?;
            let tcp = TcpSettings::default().set_nodelay(true);
            #[cfg(target_os = "linux")]
            let tcp = tcp.set_user_timeout(unacknowledged);
            Ok(info.set_tcp_settings(tcp))
        };
        let each = |scheme: &str, login: &str| {
            hosts
                .split(',')
                .map(|host| info(format!("{scheme}://{login}{host}")))
                .collect::<Result<Vec<_>, _>>()
        };
        match scheme {
            "redis" | "rediss" => Ok(Self::Single(info(url.to_owned())?)),
            "redis+cluster" => Ok(Self::Cluster(each("redis", &login)?)),
            "rediss+cluster" => Ok(Self::Cluster(each("rediss", &login)?)),
            "redis+sentinel" | "rediss+sentinel" => {
                let scheme = scheme.trim_end_matches("+sentinel");
                let (service, database) = path.split_once('/').unwrap_or((path, "0"));
                if service.is_empty() {
                    return Err(unknown());
                }
                Ok(Self::Sentinels {
                    sentinels: each(scheme, "")?,
                    service: service.to_owned(),
                    server: info(format!("{scheme}://{login}server/{database}"))?,
                })
            }
            _ => Err(unknown()),
        }
    }
}

fn parse(url: &str) -> Result<ConnectionInfo, StoreError> {
    url.into_connection_info().map_err(|error| {
        // The client has one kind of error for all faults of an address.
        let without_tls = url.replacen("rediss://", "redis://", 1);
        match url != without_tls && without_tls.into_connection_info().is_ok() {
            true => StoreError::unavailable(NO_TLS),
            false => failure(error),
        }
    })
}

fn unknown() -> StoreError {
    StoreError::unavailable(
        "the address is none of redis://HOST:PORT, redis+sentinel://HOST:PORT,…/SERVICE and \
         redis+cluster://HOST:PORT,…, or one of them with `rediss` for TLS",
    )
}

const NO_TLS: &str = "the address asks for TLS: turn on `tokio-rustls-comp` or \
    `tokio-native-tls-comp` of the crate `redis`";
