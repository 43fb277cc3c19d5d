//! Where the coordinator is: a host and a port as users write them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;

/// Longest name of a host in bytes.
const MAX_HOST: usize = 253;

/// A host, and a port if one was given: `HOST`, `HOST:PORT`, an IPv6 address, or `[IPV6]:PORT`.
///
/// ```
/// use mgpu_control::nodes::Endpoint;
/// let endpoint: Endpoint = "[fd00::1]:29400".parse()?;
/// assert_eq!((endpoint.host(), endpoint.port()), ("fd00::1", Some(29400)));
/// assert_eq!(endpoint.to_string(), "[fd00::1]:29400");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    host: String,
    port: Option<u16>,
}

impl Endpoint {
    /// A host without a port: a name, or an address without brackets.
    pub fn of_host(host: &str) -> Self {
        Endpoint { host: host.to_owned(), port: None }
    }

    /// The name or address, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, if one was given.
    pub fn port(&self) -> Option<u16> {
        self.port
    }

    /// The same host with this port.
    pub fn with_port(&self, port: u16) -> Self {
        Endpoint { host: self.host.clone(), port: Some(port) }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let failed = |why: &str| Err(format!("\"{}\" is no HOST or HOST:PORT: {why}", text.escape_debug()));
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, rest)) => match rest.strip_prefix(':') {
                    Some(port) => (host, Some(port)),
                    None => return failed("only a colon and a port can follow the bracket"),
                },
                None => return failed("the bracket is not closed"),
            },
            None => match text.split_once(':') {
                Some((_, rest)) if rest.contains(':') => (text, None),
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let is_v6 = |host: &str| host.split('%').next().is_some_and(|ip| ip.parse::<Ipv6Addr>().is_ok());
        if host.is_empty() {
            return failed("the host is missing");
        }
        if host.contains("//") || port.is_some_and(|port| port.starts_with("//")) {
            return failed("an endpoint has no scheme and no path");
        }
        if (host.contains(':') || text.starts_with('[')) && !is_v6(host) {
            return failed(
                "neither a name nor an IPv6 address; a port follows an IPv6 address as in [fd00::1]:29400",
            );
        }
        if host.len() > MAX_HOST
            || host
                .chars()
                .any(|char| char.is_whitespace() || char.is_control() || "/@,[]\"\\".contains(char))
        {
            return failed("that is no name of a host");
        }
        let port = match port.map(str::parse::<u16>) {
            None => None,
            Some(Ok(port)) if port > 0 => Some(port),
            Some(_) => return failed("a port is a number from 1 to 65535"),
        };
        Ok(Endpoint { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.port, self.host.contains(':')) {
            (Some(port), true) => write!(f, "[{}]:{port}", self.host),
            (Some(port), false) => write!(f, "{}:{port}", self.host),
            (None, _) => f.write_str(&self.host),
        }
    }
}

/// True if this host has the address. A loopback address belongs to every host.
///
/// The kernel sends from the same address to one of its own; no packet is sent to find out. (Binding a socket to the
/// address would not do: it succeeds for every address where `net.ipv4.ip_nonlocal_bind` is set.)
pub fn owns(address: IpAddr) -> bool {
    let address = address.to_canonical();
    if address.is_loopback() {
        return true;
    }
    let any: IpAddr =
        if address.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let source = || -> std::io::Result<IpAddr> {
        let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
        socket.connect(SocketAddr::new(address, 9))?;
        Ok(socket.local_addr()?.ip())
    };
    !address.is_unspecified() && !address.is_multicast() && source().is_ok_and(|source| source == address)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn endpoints_are_names_and_addresses_of_both_families() {
        for (text, host, port) in [
            ("a", "a", None),
            ("job-node-0-0.job:29500", "job-node-0-0.job", Some(29500)),
            ("10.0.0.1:1", "10.0.0.1", Some(1)),
            ("fd00::1", "fd00::1", None),
            ("::1", "::1", None),
            ("[fd00::1]", "fd00::1", None),
            ("[fd00::1]:65535", "fd00::1", Some(65535)),
            ("[fe80::1%eth0]:29400", "fe80::1%eth0", Some(29400)),
            ("fe80::1%eth0", "fe80::1%eth0", None),
        ] {
            let endpoint: Endpoint = text.parse().unwrap();
            assert_eq!((endpoint.host(), endpoint.port()), (host, port), "{text}");
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }
    }

    #[test]
    fn errors_name_the_text() {
        for (text, why) in [
            ("", "\"\" is no HOST or HOST:PORT: the host is missing"),
            (":29400", "the host is missing"),
            ("a:", "from 1 to 65535"),
            ("a:0", "from 1 to 65535"),
            ("a:65536", "from 1 to 65535"),
            ("a:+1x", "from 1 to 65535"),
            ("tcp://a:29400", "no scheme"),
            ("a:1:2", "as in [fd00::1]:29400"),
            ("[a]:1", "as in [fd00::1]:29400"),
            ("[fd00::1", "not closed"),
            ("[fd00::1]29400", "a colon and a port"),
            ("a b", "no name"),
            ("a\u{1b}", "\"a\\u{1b}\" is no HOST"),
        ] {
            let error =
                text.parse::<Endpoint>().map_or_else(|error| error, |endpoint| format!("{endpoint:?}"));
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_or_is_refused(text in ".{0,40}") {
            if let Ok(endpoint) = text.parse::<Endpoint>() {
                prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            }
        }
    }

    #[test]
    fn a_host_owns_its_addresses_only() {
        assert!(owns("127.0.0.1".parse().unwrap()));
        // Addresses for documentation, and none at all.
        for foreign in ["192.0.2.1", "2001:db8::1", "0.0.0.0", "::", "224.0.0.1"] {
            assert!(!owns(foreign.parse().unwrap()), "{foreign}");
        }
    }
}
