//! The coordinator's listening socket, and the connections that are not authenticated yet.
//!
//! Anybody who reaches the port may connect, so such connections are bounded: 5 s and 4 KiB each, and 128 at once. If
//! there are more, the oldest one of the address with the most of them is closed. So a host that floods the port, even
//! with many addresses of one IPv6 network, mostly gets in its own way. Every connection has 100 ms in any case, which
//! is ample for an agent: a thousand agents that connect at once wait in the kernel's queue, and none is closed.
//!
//! If no connection can be accepted, because too many files are open, it stays in the kernel's queue and the socket stays
//! readable: a poll loop would spin. The listener is not polled for a while then.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::address::list_ports;
use super::auth::Credentials;
use super::handshake::Fault;
use super::link::Link;
use super::opening::Opening;
use super::port_owner;
use super::preamble::RunTag;
use super::tcp;
use crate::rendezvous::rejections::{Rejection, Rejections};
use crate::{Error, Result};

/// Maximum number of connections that are not authenticated.
const MAX_OPENINGS: usize = 128;
/// How long a connection is not closed to make room for another one.
const PROTECTED_TIME: Duration = Duration::from_millis(100);
/// Connections accepted before those that were accepted earlier are served again.
const ACCEPTS_PER_TURN: usize = 16;
/// Turns per call, so that a flood does not keep the rest of the program waiting.
const TURNS_PER_CALL: usize = 8;
/// How long the listener is not polled if no connection can be accepted.
const PAUSE: Duration = Duration::from_millis(200);

/// Connections that were rejected, for a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RejectedConnections {
    /// Where they are from; `None` if that is not known, or for several addresses.
    pub address: Option<IpAddr>,
    /// Their number.
    pub connections: u64,
    /// Who made the first one, and why it was rejected.
    pub why: String,
}

/// Accepts the connections of agents.
///
/// Poll [`fds`](Self::fds). When one is ready or [`next_deadline`](Self::next_deadline) has passed, call
/// [`service`](Self::service) and [`take_rejections`](Self::take_rejections). No call blocks.
pub struct NodeListener {
    listener: TcpListener,
    port: u16,
    credentials: Credentials,
    run: RunTag,
    /// The oldest first.
    openings: Vec<Opening>,
    paused_until: Option<Instant>,
    rejections: Rejections<IpAddr>,
}

impl NodeListener {
    /// Listens at the first of `ports` that is free, of `address` or of all addresses of both families. Port 0 is any
    /// free one.
    ///
    /// # Errors
    /// If none is free, or the address does not belong to this host.
    pub fn bind(
        address: Option<IpAddr>,
        ports: &[u16],
        credentials: Credentials,
        run: RunTag,
    ) -> Result<Self> {
        let place = address.map_or("all addresses".into(), |address| address.to_string());
        let mut why = "no port was given".to_owned();
        for port in ports {
            let error = match tcp::listen_at(address, *port) {
                Ok(listener) => match listener.local_addr() {
                    Ok(bound) => return Ok(Self::new(listener, bound.port(), credentials, run)),
                    Err(error) => error,
                },
                Err(error) => error,
            };
            let remedy = match error.kind() {
                ErrorKind::AddrInUse => taken(*port),
                ErrorKind::AddrNotAvailable => "; the address does not belong to this host".into(),
                _ => String::new(),
            };
            why = format!("{}{remedy}", tcp::describe(&error));
        }
        let ports = list_ports(ports);
        Err(Error::system(format!("listen for other hosts at {ports} of {place}"), why))
    }

    fn new(listener: TcpListener, port: u16, credentials: Credentials, run: RunTag) -> Self {
        NodeListener {
            listener,
            port,
            credentials,
            run,
            openings: Vec::new(),
            paused_until: None,
            rejections: Rejections::default(),
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The descriptors with the events to poll them for.
    pub fn fds(&self) -> Vec<PollFd<'_>> {
        let listener = PollFd::new(self.listener.as_fd(), PollFlags::POLLIN);
        let listener = self.paused_until.is_none().then_some(listener);
        listener.into_iter().chain(self.openings.iter().flat_map(Opening::poll_fds)).collect()
    }

    /// When [`service`](Self::service) has to be called at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        let openings = self.openings.iter().map(Opening::deadline);
        openings.chain(self.paused_until).chain(self.rejections.next_deadline()).min()
    }

    /// Accepts connections and serves them. Returns those that are authenticated now.
    pub fn service(&mut self, now: Instant) -> Vec<Link> {
        let mut links = Vec::new();
        for _ in 0..TURNS_PER_CALL {
            let accepted = self.accept(now);
            self.serve(now, &mut links);
            if accepted < ACCEPTS_PER_TURN {
                break;
            }
        }
        links
    }

    /// Rejections that were collected for long enough. `everything`: all of them, for the end of a run.
    pub fn take_rejections(&mut self, now: Instant, everything: bool) -> Vec<RejectedConnections> {
        let rejections = if everything { self.rejections.take() } else { self.rejections.take_due(now) };
        let report =
            |Rejection { group, count, why }| RejectedConnections { address: group, connections: count, why };
        rejections.into_iter().map(report).collect()
    }

    /// Accepts connections; returns their number.
    fn accept(&mut self, now: Instant) -> usize {
        if self.paused_until.is_some_and(|until| now < until) {
            return 0;
        }
        self.paused_until = None;
        let mut accepted = 0;
        while accepted < ACCEPTS_PER_TURN {
            if self.openings.len() >= MAX_OPENINGS && !(self.has_pending_connection() && self.make_room(now))
            {
                break;
            }
            match self.listener.accept() {
                Ok((stream, peer)) => {
                    match Opening::accept(stream, peer, &self.credentials, self.run, now) {
                        Ok(opening) => self.openings.push(opening),
                        Err(fault) => self.reject(peer, &fault, now),
                    }
                    accepted += 1;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The kernel allocates a descriptor before it looks for a connection, so there may be none.
                Err(error) if is_lack(&error) && self.has_pending_connection() => {
                    let why = format!(
                        "no connection can be accepted: {}; raise `ulimit -n`",
                        tcp::describe(&error)
                    );
                    self.rejections.add(None, why, now);
                    self.paused_until = Some(now + PAUSE);
                    break;
                }
                Err(error) if is_lack(&error) => break,
                // This connection has failed before it was accepted.
                Err(_) => accepted += 1,
            }
        }
        accepted
    }

    fn has_pending_connection(&self) -> bool {
        let mut fds = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Closes the oldest connection of the network with the most of them. `false`: all of them are too young, and the
    /// listener is not polled until one is not.
    fn make_room(&mut self, now: Instant) -> bool {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.openings.iter().for_each(|opening| *counts.entry(network(opening)).or_default() += 1);
        let age = |opening: &Opening| now.saturating_duration_since(opening.started_at());
        let candidates =
            self.openings.iter().enumerate().filter(|(_, opening)| age(opening) >= PROTECTED_TIME);
        let oldest = candidates.max_by_key(|(index, opening)| (counts[&network(opening)], Reverse(*index)));
        let Some((index, _)) = oldest else {
            self.paused_until = self.openings.first().map(|opening| opening.started_at() + PROTECTED_TIME);
            return false;
        };
        let opening = self.openings.remove(index);
        let (own, all) = (counts[&network(&opening)], MAX_OPENINGS);
        let why = format!("has {own} of {all} unauthenticated connections, and no other address has more");
        self.reject(opening.peer(), &Fault::Connection(why), now);
        true
    }

    fn serve(&mut self, now: Instant, links: &mut Vec<Link>) {
        let mut index = 0;
        while index < self.openings.len() {
            let (peer, result) = match self.openings[index].service(now) {
                Ok(None) => {
                    index += 1;
                    continue;
                }
                Ok(Some(channel)) => {
                    let opening = self.openings.remove(index);
                    (opening.peer(), opening.into_link(channel))
                }
                Err(fault) => (self.openings.remove(index).peer(), Err(fault)),
            };
            // There is room for another one.
            self.paused_until = None;
            match result {
                Ok(link) => links.push(link),
                Err(fault) => self.reject(peer, &fault, now),
            }
        }
    }

    fn reject(&mut self, peer: SocketAddr, fault: &Fault, now: Instant) {
        let peer = tcp::canonical(peer);
        self.rejections.add(Some(peer.ip()), format!("{peer} {fault}"), now);
    }
}

/// Who has the port, and what to do.
fn taken(port: u16) -> String {
    let owner = port_owner::find(port);
    // An agent is called `mgpu-launcher`.
    let remedy = match owner.as_ref().is_some_and(|owner| owner.name.starts_with("mgpu")) {
        true => ": if that is node 0 of this job, give this node another --node-rank; otherwise name",
        false => "; name",
    };
    let who = port_owner::describe(owner.as_ref());
    format!("; {who}{remedy} another port with --rdzv-endpoint HOST:PORT")
}

/// True if this host, not the connection, is the reason.
fn is_lack(error: &io::Error) -> bool {
    use nix::libc::{EMFILE, ENFILE, ENOBUFS, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOBUFS | ENOMEM))
}

/// Whose connections count together: those of an IPv4 address, or of an IPv6 network of the size that one host gets.
fn network(opening: &Opening) -> IpAddr {
    match opening.peer().ip() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
        ip => ip,
    }
}
