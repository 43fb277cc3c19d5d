//! Where `--metrics-listen` listens.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;

/// An address of the machine or a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MetricsAddress {
    /// An address and a port; port 0 is any free one.
    Tcp(SocketAddr),
    /// A Unix socket, which only this user can use.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: needs a path, such as unix:/run/user/1000/job.sock".into()),
                path => Ok(MetricsAddress::Unix(path.into())),
            };
        }
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port = port
            .parse::<u16>()
            .map_err(|_| "it should be a port, such as 9400, ADDRESS:PORT or unix:PATH".to_owned())?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let address = match host {
            "" | "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            host => host.parse().map_err(|_| {
                format!("`{host}` is not an IP address: write 127.0.0.1:{port}, or 0.0.0.0:{port} for all interfaces")
            })?,
        };
        Ok(MetricsAddress::Tcp(SocketAddr::new(address, port)))
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => write!(f, "http://{address}"),
            MetricsAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_loopback_interface_unless_another_is_named() {
        for (text, shown) in [
            ("9400", "http://127.0.0.1:9400"),
            (":0", "http://127.0.0.1:0"),
            ("localhost:9400", "http://127.0.0.1:9400"),
            ("0.0.0.0:9400", "http://0.0.0.0:9400"),
            ("[::1]:9400", "http://[::1]:9400"),
            ("unix:/tmp/a b", "unix:/tmp/a b"),
        ] {
            assert_eq!(text.parse::<MetricsAddress>().unwrap().to_string(), shown);
        }
        for text in ["", "unix:", "70000", "a.example:9400", "127.0.0.1", "1.2.3.4:", "[::1:9400x"] {
            assert!(text.parse::<MetricsAddress>().is_err(), "{text}");
        }
    }
}
