//! Looks up the addresses of a host without blocking: each lookup has its own thread.
//!
//! `getaddrinfo` has no other form: it may take many seconds if a name server does not answer, and nothing can interrupt
//! it. A thread whose lookup is no longer wanted ends when the resolver gives up.

use std::io::{self, PipeReader};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;

/// Maximum number of addresses of one name that are tried.
const MAX_ADDRESSES: usize = 16;

/// A lookup that runs.
pub struct Lookup {
    result: Receiver<io::Result<Vec<SocketAddr>>>,
    /// At its end when the thread has ended.
    end: PipeReader,
}

impl Lookup {
    /// Starts to look up the addresses of `host`.
    ///
    /// # Errors
    /// If the system refuses a thread or a pipe.
    pub fn start(host: &str) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot look up {host}: {error}");
        let (end, held_by_thread) = io::pipe().map_err(failed)?;
        let (sender, result) = channel();
        let name = host.to_owned();
        let lookup = move || {
            // Port 0: callers set the port.
            let addresses = (name.as_str(), 0).to_socket_addrs().map(Vec::from_iter);
            let _ = sender.send(addresses);
            drop(held_by_thread);
        };
        thread::Builder::new().name("lookup".into()).spawn(lookup).map_err(failed)?;
        Ok(Lookup { result, end })
    }

    /// Becomes readable when the lookup has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }

    /// The addresses in the order in which to try them, or why there are none; `None` while the lookup runs.
    pub fn result(&self) -> Option<Result<Vec<SocketAddr>, String>> {
        let addresses = match self.result.try_recv() {
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => return Some(Err("the lookup was interrupted".into())),
            Ok(Err(error)) => return Some(Err(describe(&error))),
            Ok(Ok(addresses)) => interleave(addresses),
        };
        Some(if addresses.is_empty() { Err("the name has no address".into()) } else { Ok(addresses) })
    }
}

/// The addresses that need no lookup: those that are written as numbers.
pub(super) fn literal(host: &str) -> Option<SocketAddr> {
    host.parse::<IpAddr>().ok().map(|ip| SocketAddr::new(ip, 0))
}

/// The resolver's reason without the name of the function that failed.
fn describe(error: &io::Error) -> String {
    let text = error.to_string();
    let reason = text.strip_prefix("failed to lookup address information: ").unwrap_or(&text);
    format!("the name cannot be looked up: {}", reason.to_lowercase())
}

/// Each address once, families in turn: the one that the resolver prefers first.
fn interleave(addresses: Vec<SocketAddr>) -> Vec<SocketAddr> {
    let prefers_v6 = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) = addresses.into_iter().partition(|ip| ip.is_ipv6() == prefers_v6);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut ordered = Vec::new();
    loop {
        let next = [first.next(), second.next()];
        if next == [None, None] {
            return ordered;
        }
        for address in next.into_iter().flatten() {
            if ordered.len() < MAX_ADDRESSES && !ordered.contains(&address) {
                ordered.push(address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    fn result_of(host: &str) -> Result<Vec<SocketAddr>, String> {
        let lookup = Lookup::start(host).unwrap();
        poll(&mut [PollFd::new(lookup.fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        lookup.result().expect("the descriptor is readable, so the lookup has ended")
    }

    #[test]
    fn a_lookup_ends_with_addresses_or_a_reason() {
        assert!(result_of("localhost").unwrap().iter().all(|address| address.ip().is_loopback()));
        // No resolver accepts it, so no name server is asked.
        let error = result_of("no such host").unwrap_err();
        assert!(error.starts_with("the name cannot be looked up: "), "{error}");
    }

    #[test]
    fn families_are_tried_in_turn() {
        let parse =
            |list: &[&str]| -> Vec<SocketAddr> { list.iter().map(|ip| ip.parse().unwrap()).collect() };
        let [a, b, c, d] = ["[fd00::1]:0", "[fd00::2]:0", "10.0.0.1:0", "[fd00::3]:0"];
        assert_eq!(interleave(parse(&[a, b, a, c, d])), parse(&[a, c, b, d]));
        assert_eq!(interleave(parse(&[c])), parse(&[c]));
        assert_eq!(interleave(Vec::new()), Vec::new());
    }
}
