//! The little of HTTP/1.1 that a scraper and a browser need: one GET for each connection. Pure.

use std::net::IpAddr;

/// A longer request is refused.
pub(super) const MAX_REQUEST: usize = 8 << 10;

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resource {
    /// The page that draws the run.
    Page,
    /// The numbers for the page.
    Status,
    /// The numbers for Prometheus.
    Metrics,
}

/// The answer to the first bytes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// The head of the request has not ended.
    Incomplete,
    /// Send this; only its head, if the second is false.
    Get(Resource, bool),
    /// Refuse it with this status and reason.
    Refused(u16, &'static str),
}

/// Reads a request. A server on the loopback interface (`is_local`) refuses names of hosts other than localhost: a page
/// of another site could otherwise let a browser read the answers, under a name that it makes resolve to this machine.
pub(super) fn parse(bytes: &[u8], is_local: bool) -> Request {
    let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
        return match bytes.len() {
            0..MAX_REQUEST => Request::Incomplete,
            _ => Request::Refused(431, "Request Header Fields Too Large"),
        };
    };
    let bad = Request::Refused(400, "Bad Request");
    let Ok(head) = str::from_utf8(&bytes[..end]) else { return bad };
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return bad;
    };
    if !matches!(version, "HTTP/1.1" | "HTTP/1.0") {
        return bad;
    }
    let hosts = lines.filter_map(|line| line.split_once(':'));
    let mut hosts = hosts.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
    if is_local && !hosts.all(|(_, host)| is_local_name(host.trim())) {
        return Request::Refused(403, "Forbidden");
    }
    let is_get = match method {
        "GET" => true,
        "HEAD" => false,
        _ => return Request::Refused(405, "Method Not Allowed"),
    };
    let path = target.split(['?', '#']).next().unwrap_or_default();
    match path {
        "/" => Request::Get(Resource::Page, is_get),
        "/status.json" => Request::Get(Resource::Status, is_get),
        "/metrics" => Request::Get(Resource::Metrics, is_get),
        _ => Request::Refused(404, "Not Found"),
    }
}

/// "localhost" or an IP address, with or without a port.
fn is_local_name(host: &str) -> bool {
    let is_known = |name: &str| name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok();
    let name = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((name, _)) => name,
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    is_known(name)
}

/// The head of a response.
pub(super) fn head(status: u16, reason: &str, content_type: &str, length: usize) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nConnection: close\r\n\
         Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nContent-Security-Policy: default-src 'none'; \
         script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'\r\n\r\n"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_understood_or_refused() {
        let local = |text: &str| parse(text.as_bytes(), true);
        assert_eq!(local("GET / HTTP/1.1\r\nHost: localhost:9400\r\n"), Request::Incomplete);
        for (text, expected) in [
            ("GET / HTTP/1.1\r\nHost: localhost:9400\r\n\r\n", Request::Get(Resource::Page, true)),
            ("GET /metrics?x=1 HTTP/1.0\r\n\r\n", Request::Get(Resource::Metrics, true)),
            ("HEAD /status.json HTTP/1.1\r\nhost: [::1]:1\r\n\r\n", Request::Get(Resource::Status, false)),
            ("GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nmore", Request::Get(Resource::Page, true)),
            ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", Request::Refused(403, "Forbidden")),
            ("GET / HTTP/1.1\r\nHost: localhost\r\nHost: a.b\r\n\r\n", Request::Refused(403, "Forbidden")),
            ("POST /metrics HTTP/1.1\r\n\r\n", Request::Refused(405, "Method Not Allowed")),
            ("GET /../etc/passwd HTTP/1.1\r\n\r\n", Request::Refused(404, "Not Found")),
            ("GET  / HTTP/1.1\r\n\r\n", Request::Refused(400, "Bad Request")),
            ("GET / HTTP/2\r\n\r\n", Request::Refused(400, "Bad Request")),
            ("\r\n\r\n", Request::Refused(400, "Bad Request")),
        ] {
            assert_eq!(local(text), expected, "{text}");
        }
        let named = b"GET / HTTP/1.1\r\nHost: node7.example:9400\r\n\r\n";
        assert_eq!(parse(named, false), Request::Get(Resource::Page, true));
        assert!(matches!(parse(&[b'a'; MAX_REQUEST], true), Request::Refused(431, _)));
        assert_eq!(parse(&[b'a'; MAX_REQUEST - 1], true), Request::Incomplete);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), local: bool) {
            parse(&bytes, local);
            bytes.extend(b"\r\n\r\n");
            prop_assert_ne!(parse(&bytes, local), Request::Incomplete);
        }
    }
}
