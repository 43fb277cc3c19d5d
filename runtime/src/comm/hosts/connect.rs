//! How the ranks of a communicator connect: each with all others, from the higher world rank to the lower one.
//!
//! Every rank publishes the address of its [`Acceptor`] with a ticket at the rendezvous, for the higher ranks; reads
//! those of the lower ranks; and connects to all of them at once while it accepts the others. A connection counts only
//! after both sides have shown that they know the ticket ([`hello`](super::hello)). One that ends before that is tried
//! again: unauthenticated peers may have taken its place. While a rank waits here it watches the progress page as in any
//! wait.
//!
//! Two ranks have one connection, or as many as `MGPU_NET_STREAMS` says: one processor core drives them all, so several
//! are faster only in networks that limit each of them.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, socket};

use super::acceptor::{Acceptor, Invited};
use super::frame::Stamp;
use super::hello::{ANSWER_BYTES, HELLO_BYTES, Hello, TICKET_BYTES, Ticket};
use super::wire::spin::Spinner;
use super::wire::tcp::{Streams, configure, congestion};
use crate::comm::Members;
use crate::membership::Membership;
use crate::{Error, Result};

/// The environment variable with the number of connections between two ranks.
const MGPU_NET_STREAMS: &str = "MGPU_NET_STREAMS";
/// Their largest number.
const MAX_STREAMS: u32 = 16;
/// Longest wait between two looks at the progress page.
const SLICE: Duration = Duration::from_millis(20);
/// Shortest and longest pause before a connection is tried again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// How long a connection may take until it is given up. (The peer listens already.)
const CONNECT_TIME: Duration = Duration::from_secs(30);

/// What a rank publishes for the higher ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Invitation {
    address: SocketAddr,
    ticket: Ticket,
    answer: Ticket,
    /// Number of connections.
    streams: u32,
}

impl Invitation {
    fn new(address: SocketAddr, streams: u32) -> Result<Self> {
        Ok(Invitation { address, ticket: random()?, answer: random()?, streams })
    }

    fn encode(&self) -> Vec<u8> {
        let address = self.address.to_string();
        [&self.ticket[..], &self.answer, &self.streams.to_le_bytes(), address.as_bytes()].concat()
    }

    /// Reverses [`encode`](Self::encode).
    fn decode(bytes: &[u8]) -> Option<Self> {
        let (ticket, rest) = bytes.split_first_chunk::<TICKET_BYTES>()?;
        let (answer, rest) = rest.split_first_chunk::<TICKET_BYTES>()?;
        let (streams, address) = rest.split_first_chunk::<4>()?;
        let address = std::str::from_utf8(address).ok()?.parse().ok()?;
        let streams = u32::from_le_bytes(*streams);
        Some(Invitation { address, ticket: *ticket, answer: *answer, streams })
    }
}

/// 32 random hexadecimal digits.
fn random() -> Result<Ticket> {
    let digits = crate::protocol::new_run_id()?;
    Ok(digits.as_bytes().try_into().expect("an identifier of 32 digits"))
}

/// The number of connections between two ranks that the environment asks for.
fn streams_wanted(text: Option<&str>) -> Result<u32> {
    let Some(text) = text else { return Ok(1) };
    let number = text.parse().ok().filter(|number| (1..=MAX_STREAMS).contains(number));
    number.ok_or_else(|| Error::Environment {
        name: MGPU_NET_STREAMS,
        problem: format!("is `{text}` where a number of connections from 1 to {MAX_STREAMS} is expected"),
    })
}

/// Connects this rank with the other `members` of the communicator called `key`.
pub(super) fn connect(
    membership: &Membership,
    acceptor: &Acceptor,
    (members, stamp, run): (&Members, Stamp, u64),
    (key, title): (&str, &str),
    timeout: Duration,
) -> Result<Streams> {
    let own = membership.rank();
    let wanted = std::env::var_os(MGPU_NET_STREAMS).map(|value| value.to_string_lossy().into_owned());
    let streams = streams_wanted(wanted.as_deref())?;
    let (lower, higher): (Vec<u32>, Vec<u32>) = (0..members.size())
        .filter(|rank| *rank != members.rank())
        .partition(|rank| members.world_rank(*rank) < own);
    let entry = |rank: u32| format!("{key}/address-{rank}");
    if !higher.is_empty() {
        let invitation = Invitation::new(acceptor.address(), streams)?;
        let Invitation { ticket, answer, .. } = invitation;
        for peer in &higher {
            acceptor.expect(stamp, members.world_rank(*peer), Invited { ticket, answer, streams });
        }
        membership.store().set(&entry(own), &invitation.encode(), &[], higher.len() as u32)?;
    }
    let mut dials = Vec::new();
    for peer in lower {
        let to = members.world_rank(peer);
        let (value, _) = membership.store().get(&entry(to), to, timeout)?;
        let invitation = Invitation::decode(&value).ok_or_else(|| Error::Protocol {
            peer: format!("rank {to}"),
            problem: "its address is not that of a rank".into(),
        })?;
        if invitation.streams != streams {
            return Err(Error::SettingMismatch {
                rank: own,
                peer: to,
                setting: MGPU_NET_STREAMS.into(),
                ours: streams.to_string(),
                theirs: invitation.streams.to_string(),
            });
        }
        for stream in 0..streams {
            let hello = Hello { ticket: invitation.ticket, run, stamp, from: own, to, stream, streams };
            dials.push(Dial::new((peer, stream), invitation, hello.encode()));
        }
    }
    let awaited = higher.iter().flat_map(|peer| (0..streams).map(|stream| (*peer, stream))).collect();
    let mut connecting = Connecting { membership, acceptor, members, stamp, title, dials, awaited };
    let connected = connecting.run(timeout);
    acceptor.forget(stamp);
    let mut by_rank: Vec<Vec<TcpStream>> = (0..members.size()).map(|_| Vec::new()).collect();
    let mut connected = connected?;
    connected.sort_unstable_by_key(|(connection, _)| *connection);
    connected.into_iter().for_each(|((peer, _), stream)| by_rank[peer as usize].push(stream));
    let local_ranks = membership.store().layout().map_or(1, |layout| layout.local_ranks().len() as u32);
    Ok(Streams { by_rank, spinner: Spinner::new(own, local_ranks) })
}

/// A rank in the communicator, and the index of a connection to it.
type Connection = (u32, u32);

/// The connections of a communicator that is being connected.
struct Connecting<'a> {
    membership: &'a Membership,
    acceptor: &'a Acceptor,
    members: &'a Members,
    stamp: Stamp,
    title: &'a str,
    dials: Vec<Dial>,
    /// The connections that higher ranks have not made yet.
    awaited: Vec<Connection>,
}

impl Connecting<'_> {
    fn run(&mut self, timeout: Duration) -> Result<Vec<(Connection, TcpStream)>> {
        let mut streams = Vec::new();
        let (started, mut checked) = (Instant::now(), Instant::now());
        loop {
            self.dials.retain_mut(|dial| match dial.advance() {
                Some(stream) => {
                    streams.push((dial.connection, stream));
                    false
                }
                None => true,
            });
            let world_rank = |peer: u32| self.members.world_rank(peer);
            self.awaited.retain(|&(peer, index)| {
                let stream = self.acceptor.take(self.stamp, world_rank(peer), index);
                let is_missing = stream.is_none();
                streams.extend(stream.map(|stream| ((peer, index), stream)));
                is_missing
            });
            if self.dials.is_empty() && self.awaited.is_empty() {
                return Ok(streams);
            }
            let pauses = self.dials.iter().filter_map(Dial::pause);
            let patience = pauses.min().unwrap_or(SLICE).min(SLICE);
            let fds: Vec<PollFd<'_>> = self.dials.iter().filter_map(Dial::interest).collect();
            self.acceptor.serve(&fds, patience);
            if checked.elapsed() >= SLICE {
                checked = Instant::now();
                self.check(started.elapsed(), timeout)?;
            }
        }
    }

    /// Checks whether all missing peers can still come.
    fn check(&self, waited: Duration, timeout: Duration) -> Result<()> {
        let missing = self.dials.iter().map(|dial| dial.connection).chain(self.awaited.iter().copied());
        let mut missing: Vec<u32> = missing.map(|(peer, _)| self.members.world_rank(peer)).collect();
        missing.dedup();
        let (rank, membership) = (self.membership.rank(), self.membership);
        let operation = || format!("the connection of {}", self.title);
        if let Some(peer) = missing.first() {
            membership.page().wait(rank, *peer);
        }
        if let Some(error) = membership.lost_peer(&missing, operation) {
            return Err(error);
        }
        let unreachable = self.dials.iter().find(|dial| !dial.is_connected());
        if let Some(dial) = unreachable.filter(|_| waited >= timeout.min(CONNECT_TIME)) {
            let peer = self.members.world_rank(dial.connection.0);
            let why = dial.failure.as_deref().unwrap_or("nothing answers");
            let how = format!(
                "cannot be reached at {}: {why} (do the hosts' firewalls let ranks connect to each other?)",
                dial.invitation.address
            );
            return Err(Error::PeerLost { rank, peer, operation: operation(), how, silent: false });
        }
        if waited < timeout {
            return Ok(());
        }
        Err(Error::Timeout { rank, waited_for: missing, operation: operation(), after: waited })
    }
}

/// A connection to a lower rank.
struct Dial {
    connection: Connection,
    invitation: Invitation,
    hello: [u8; HELLO_BYTES],
    state: DialState,
    /// Pause before the next attempt.
    pause: Duration,
    /// Why the last attempt failed.
    failure: Option<String>,
}

enum DialState {
    /// Begins at this time.
    Waiting(Instant),
    Connecting(TcpStream),
    /// The hello was sent; this much of the answer has arrived.
    Greeted {
        stream: TcpStream,
        answer: [u8; ANSWER_BYTES],
        have: usize,
    },
}

impl Dial {
    fn new(connection: Connection, invitation: Invitation, hello: [u8; HELLO_BYTES]) -> Self {
        let state = DialState::Waiting(Instant::now());
        Dial { connection, invitation, hello, state, pause: PAUSES.0, failure: None }
    }

    /// How long nothing happens, if it waits for the next attempt.
    fn pause(&self) -> Option<Duration> {
        match self.state {
            DialState::Waiting(until) => Some(until.saturating_duration_since(Instant::now())),
            _ => None,
        }
    }

    /// Whether the peer's host has accepted the connection.
    fn is_connected(&self) -> bool {
        matches!(self.state, DialState::Greeted { .. })
    }

    /// What to poll for.
    fn interest(&self) -> Option<PollFd<'_>> {
        match &self.state {
            DialState::Waiting(_) => None,
            DialState::Connecting(stream) => Some(PollFd::new(stream.as_fd(), PollFlags::POLLOUT)),
            DialState::Greeted { stream, .. } => Some(PollFd::new(stream.as_fd(), PollFlags::POLLIN)),
        }
    }

    /// Goes on as far as possible. Returns the connection once the peer has proved who it is.
    fn advance(&mut self) -> Option<TcpStream> {
        match self.try_advance() {
            Ok(connected) => connected,
            Err(error) => {
                self.failure = Some(error.to_string());
                self.state = DialState::Waiting(Instant::now() + self.pause);
                self.pause = (2 * self.pause).min(PAUSES.1);
                None
            }
        }
    }

    fn try_advance(&mut self) -> io::Result<Option<TcpStream>> {
        loop {
            // An error leaves this state, which the caller replaces.
            let state = std::mem::replace(&mut self.state, DialState::Waiting(Instant::now()));
            match state {
                DialState::Waiting(until) if Instant::now() < until => {
                    self.state = state;
                    return Ok(None);
                }
                DialState::Waiting(_) => {
                    self.state = DialState::Connecting(begin_connect(self.invitation.address)?);
                }
                DialState::Connecting(mut stream) => {
                    if let Some(error) = stream.take_error()? {
                        return Err(error);
                    }
                    if stream.peer_addr().is_err() {
                        self.state = DialState::Connecting(stream);
                        return Ok(None);
                    }
                    // The send buffer of a new connection is empty: the hello fits.
                    stream.write_all(&self.hello)?;
                    self.state = DialState::Greeted { stream, answer: [0; ANSWER_BYTES], have: 0 };
                }
                DialState::Greeted { mut stream, mut answer, mut have } => {
                    let arrived = stream.read(&mut answer[have..]);
                    match &arrived {
                        Ok(0) => return Err(io::Error::other("it has closed the connection")),
                        Ok(bytes) => have += bytes,
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(_) => return arrived.map(|_| None),
                    }
                    if answer[..have] != self.invitation.answer[..have] {
                        return Err(io::Error::other("another program answers there"));
                    }
                    if have == ANSWER_BYTES {
                        return Ok(Some(stream));
                    }
                    self.state = DialState::Greeted { stream, answer, have };
                    if arrived.is_err() {
                        return Ok(None);
                    }
                }
            }
        }
    }
}

/// Begins to connect to `address` without waiting.
fn begin_connect(address: SocketAddr) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let stream = TcpStream::from(socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?);
    congestion::choose(&stream)?;
    configure(&stream)?;
    let address = match address {
        SocketAddr::V4(address) => SockaddrStorage::from(address),
        SocketAddr::V6(address) => SockaddrStorage::from(address),
    };
    match nix::sys::socket::connect(stream.as_raw_fd(), &address) {
        Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => Ok(stream),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { epoch: 0, communicator: 1 };

    /// Dials until it is connected, or an attempt has failed.
    fn dial(dial: &mut Dial, mut meanwhile: impl FnMut()) -> Option<TcpStream> {
        loop {
            meanwhile();
            let connected = dial.advance();
            if connected.is_some() || dial.failure.is_some() {
                return connected;
            }
        }
    }

    #[test]
    fn a_rank_is_reached_over_either_protocol() {
        for address in ["127.0.0.1", "::1"] {
            let acceptor = Acceptor::bind(address.parse().unwrap(), 5, 0).unwrap();
            let streams = 2;
            let invitation = Invitation::new(acceptor.address(), streams).unwrap();
            let Invitation { ticket, answer, .. } = invitation;
            acceptor.expect(STAMP, 1, Invited { ticket, answer, streams });
            for stream in 0..streams {
                let hello = Hello { ticket, run: 5, stamp: STAMP, from: 1, to: 0, stream, streams };
                let mut dialing = Dial::new((0, stream), invitation, hello.encode());
                let connected = dial(&mut dialing, || acceptor.serve(&[], Duration::ZERO));
                assert!(connected.is_some(), "{:?}", dialing.failure);
                assert!(acceptor.take(STAMP, 1, stream).is_some());
            }
        }
    }

    #[test]
    fn another_program_is_not_taken_for_a_rank() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let invitation = Invitation::new(listener.local_addr().unwrap(), 1).unwrap();
        let mut dialing = Dial::new((0, 0), invitation, [0; HELLO_BYTES]);
        let program = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"SSH-2.0-OpenSSH_9.6\r\n and more").unwrap();
            stream
        });
        assert!(dial(&mut dialing, || ()).is_none());
        assert_eq!(dialing.failure.as_deref(), Some("another program answers there"));
        let _ = program.join().unwrap();
        // Nobody listens any more.
        dialing.failure = None;
        assert!(dial(&mut dialing, || ()).is_none());
        assert!(dialing.failure.unwrap().contains("refused"));
    }

    #[test]
    fn the_number_of_connections_is_checked() {
        assert_eq!((streams_wanted(None).unwrap(), streams_wanted(Some("16")).unwrap()), (1, 16));
        for text in ["0", "17", "-1", "two", ""] {
            let error = streams_wanted(Some(text)).unwrap_err().to_string();
            let expected = "where a number of connections from 1 to 16 is expected";
            assert!(error.contains("MGPU_NET_STREAMS is `") && error.ends_with(expected), "{error}");
        }
    }

    #[test]
    fn invitations_survive_the_rendezvous() {
        for address in ["10.0.0.7:1234", "[fd00::7]:65535"] {
            let invitation = Invitation::new(address.parse().unwrap(), 3).unwrap();
            assert_ne!(invitation.ticket, invitation.answer);
            let bytes = invitation.encode();
            assert_eq!(Invitation::decode(&bytes), Some(invitation));
            for shorter in 0..bytes.len() - 5 {
                assert_eq!(Invitation::decode(&bytes[..shorter]), None);
            }
        }
    }
}
