//! The listener of a rank: which connections are from its peers.
//!
//! A rank has one listener for all its communicators. Whoever connects a communicator serves it, also for connections
//! of another communicator that another thread is connecting. Who connects is unknown until the whole hello has
//! arrived: until then a connection costs a few bytes, one of a bounded number of places, and at most five seconds.

use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Backlog, listen};

use super::frame::Stamp;
use super::hello::{HELLO_BYTES, Hello, Ticket, may_be_hello};
use super::wire::tcp::{configure, congestion};
use crate::{Error, Result};

/// How long a connection has for its hello.
const HELLO_TIME: Duration = Duration::from_secs(5);
/// Number of connections that may be without a hello at the same time.
const MAX_UNKNOWN: usize = 64;
/// Connections accepted in one go.
const ACCEPTED_AT_ONCE: usize = 64;
/// Connections that the kernel keeps for us: as many as a world has ranks, within the system's limit.
const BACKLOG: i32 = 4096;
/// Pause after the process has run out of descriptors.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(10);

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Acceptor {
    address: SocketAddr,
    run: u64,
    /// World rank of this rank.
    rank: u32,
    io: Mutex<Unknown>,
    expected: Mutex<HashMap<Seat, Guest>>,
}

/// The listener, and the connections whose hello has not arrived.
#[derive(Debug)]
struct Unknown {
    listener: TcpListener,
    connections: Vec<Connection>,
}

#[derive(Debug)]
struct Connection {
    stream: TcpStream,
    hello: [u8; HELLO_BYTES],
    have: usize,
    since: Instant,
}

/// Communicator, world rank, and index of the connection.
type Seat = (Stamp, u32, u32);

/// A connection that a peer may make.
#[derive(Debug)]
enum Guest {
    Expected(Invited),
    Connected(TcpStream),
}

/// What a peer was told.
#[derive(Debug, Clone, Copy)]
pub(super) struct Invited {
    /// What it must show.
    pub(super) ticket: Ticket,
    /// What it gets then.
    pub(super) answer: Ticket,
    /// How many connections it must make.
    pub(super) streams: u32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Listens on a free port of `address`. An address that other hosts know is not always one of this host's own: then
/// it listens on all of them.
fn bind(address: IpAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind((address, 0)).or_else(|error| {
        let any = match address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        if error.kind() == ErrorKind::AddrNotAvailable { TcpListener::bind((any, 0)) } else { Err(error) }
    })?;
    // Once more, for a longer queue than the standard library's.
    listen(&listener, Backlog::new(BACKLOG)?)?;
    congestion::choose(&listener)?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    Ok((listener, SocketAddr::new(address, port)))
}

impl Acceptor {
    /// Listens on `address`, for world rank `rank` of the run with this hash.
    pub(super) fn bind(address: IpAddr, run: u64, rank: u32) -> Result<Self> {
        let hint = match address {
            IpAddr::V6(address) if address.is_unicast_link_local() => {
                "; it is a link-local address, and ranks do not know of which interface: give node 0 another one"
            }
            _ => "",
        };
        let (listener, address) = bind(address).map_err(|error| {
            Error::system(format!("listen for other ranks on {address}"), format!("{error}{hint}"))
        })?;
        let io = Mutex::new(Unknown { listener, connections: Vec::new() });
        Ok(Acceptor { address, run, rank, io, expected: Mutex::default() })
    }

    /// The same, for peers that reach it through a proxy.
    #[cfg(test)]
    pub(super) fn behind(self, proxy: SocketAddr) -> Self {
        Acceptor { address: proxy, ..self }
    }

    /// Where peers connect to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets world rank `from` connect for the communicator of this stamp.
    pub(super) fn expect(&self, stamp: Stamp, from: u32, invited: Invited) {
        let seats = (0..invited.streams).map(|stream| ((stamp, from, stream), Guest::Expected(invited)));
        lock(&self.expected).extend(seats);
    }

    /// A connection of a peer, once it is there.
    pub(super) fn take(&self, stamp: Stamp, from: u32, stream: u32) -> Option<TcpStream> {
        let mut expected = lock(&self.expected);
        match expected.remove(&(stamp, from, stream))? {
            Guest::Connected(stream) => Some(stream),
            guest => {
                expected.insert((stamp, from, stream), guest);
                None
            }
        }
    }

    /// Expects nobody of this communicator any more.
    pub(super) fn forget(&self, stamp: Stamp) {
        lock(&self.expected).retain(|(of, ..), _| *of != stamp);
    }

    /// Waits for at most `patience` until something arrives here or at `others`, and handles what has arrived here.
    /// If another thread does that already, only waits.
    pub(super) fn serve(&self, others: &[PollFd<'_>], patience: Duration) {
        let milliseconds = |time: Duration| PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
        let Ok(mut io) = self.io.try_lock() else {
            let _ = poll(&mut others.to_vec(), milliseconds(patience.min(Duration::from_millis(2))));
            return;
        };
        let mut fds = others.to_vec();
        fds.push(PollFd::new(io.listener.as_fd(), PollFlags::POLLIN));
        let unknown = io.connections.iter();
        fds.extend(unknown.map(|connection| PollFd::new(connection.stream.as_fd(), PollFlags::POLLIN)));
        let _ = poll(&mut fds, milliseconds(patience));
        drop(fds);
        let now = Instant::now();
        let is_short = io.accept(now);
        for mut connection in std::mem::take(&mut io.connections) {
            match connection.read() {
                Progress::More if now.duration_since(connection.since) < HELLO_TIME => {
                    io.connections.push(connection);
                }
                // Says nothing: an unauthenticated peer learns as little as possible.
                Progress::More | Progress::Unknown => {}
                Progress::Hello(hello) => self.admit(&hello, connection.stream),
            }
        }
        if is_short {
            std::thread::sleep(SHORTAGE_PAUSE);
        }
    }

    /// Answers a hello, if it is that of an expected peer; otherwise the connection is closed.
    fn admit(&self, hello: &Hello, stream: TcpStream) {
        let mut expected = lock(&self.expected);
        let Some(guest) = expected.get_mut(&(hello.stamp, hello.from, hello.stream)) else { return };
        let Guest::Expected(Invited { ticket, answer, streams }) = guest else { return };
        let invited = (self.run, self.rank, *ticket, *streams);
        let is_valid = (hello.run, hello.to, hello.ticket, hello.streams) == invited;
        // The send buffer of a new connection is empty: the answer fits.
        if is_valid && configure(&stream).is_ok() && (&stream).write(answer).is_ok_and(|n| n == answer.len())
        {
            *guest = Guest::Connected(stream);
        }
    }
}

impl Unknown {
    /// Accepts connections. Returns whether there are no descriptors for more.
    fn accept(&mut self, now: Instant) -> bool {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_err() {
                        continue;
                    }
                    if self.connections.len() == MAX_UNKNOWN {
                        // The oldest. A peer whose connection is closed connects again.
                        self.connections.remove(0);
                    }
                    self.connections.push(Connection {
                        stream,
                        hello: [0; HELLO_BYTES],
                        have: 0,
                        since: now,
                    });
                }
                Err(error) => {
                    let shortage = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
                    return error
                        .raw_os_error()
                        .is_some_and(|code| shortage.contains(&Errno::from_raw(code)));
                }
            }
        }
        false
    }
}

/// What is known of a connection after reading.
enum Progress {
    More,
    Unknown,
    Hello(Hello),
}

impl Connection {
    fn read(&mut self) -> Progress {
        loop {
            match self.stream.read(&mut self.hello[self.have..]) {
                Ok(0) => return Progress::Unknown,
                Ok(bytes) => self.have += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::More,
                Err(_) => return Progress::Unknown,
            }
            if !may_be_hello(&self.hello[..self.have]) {
                return Progress::Unknown;
            }
            if self.have == HELLO_BYTES {
                return Hello::decode(&self.hello).map_or(Progress::Unknown, Progress::Hello);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { epoch: 1, communicator: 2 };
    const TICKET: Ticket = *b"0123456789abcdef0123456789abcdef";
    const ANSWER: Ticket = *b"fedcba9876543210fedcba9876543210";
    const HELLO: Hello =
        Hello { ticket: TICKET, run: 7, stamp: STAMP, from: 3, to: 0, stream: 1, streams: 2 };

    #[test]
    fn a_link_local_address_is_explained() {
        let refused = Acceptor::bind("fe80::1".parse().unwrap(), 7, 0).err().unwrap().to_string();
        assert!(refused.starts_with("cannot listen for other ranks on fe80::1: "), "{refused}");
        assert!(refused.contains("link-local"), "{refused}");
    }

    /// The acceptor of rank 0, which expects rank 3.
    fn acceptor(address: &str) -> Acceptor {
        let acceptor = Acceptor::bind(address.parse().unwrap(), 7, 0).unwrap();
        acceptor.expect(STAMP, 3, Invited { ticket: TICKET, answer: ANSWER, streams: 2 });
        acceptor
    }

    fn connect(acceptor: &Acceptor, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(acceptor.address()).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    }

    /// Serves until `stream` has got an answer, or has been closed.
    fn outcome(acceptor: &Acceptor, stream: &mut TcpStream) -> Vec<u8> {
        let mut bytes = Vec::new();
        loop {
            acceptor.serve(&[], Duration::from_millis(1));
            let mut some = [0; 100];
            match stream.read(&mut some) {
                Ok(0) => return bytes,
                Ok(count) => bytes.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => return bytes,
            }
            if bytes.len() == ANSWER.len() {
                return bytes;
            }
        }
    }

    #[test]
    fn unauthenticated_peers_get_no_answer_and_a_rank_gets_one() {
        for address in ["127.0.0.1", "::1"] {
            let acceptor = acceptor(address);
            let hello = HELLO.encode();
            let wrong = [
                Hello { ticket: ANSWER, ..HELLO },
                Hello { run: 8, ..HELLO },
                Hello { stamp: Stamp { epoch: 0, ..STAMP }, ..HELLO },
                Hello { stamp: Stamp { communicator: 1, ..STAMP }, ..HELLO },
                Hello { from: 2, ..HELLO },
                Hello { to: 1, ..HELLO },
                Hello { stream: 2, ..HELLO },
                Hello { streams: 3, ..HELLO },
            ];
            let mut unknown: Vec<Vec<u8>> = wrong.iter().map(|hello| hello.encode().to_vec()).collect();
            unknown.push(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec());
            unknown.push(vec![0; 1000]);
            for hello in unknown {
                assert_eq!(outcome(&acceptor, &mut connect(&acceptor, &hello)), b"", "{hello:?}");
            }
            let _silent: Vec<_> = (0..100).map(|_| connect(&acceptor, b"")).collect();
            let _slow = connect(&acceptor, &hello[..HELLO_BYTES - 1]);
            assert!(acceptor.take(STAMP, 3, 1).is_none());
            assert_eq!(outcome(&acceptor, &mut connect(&acceptor, &hello)), ANSWER);
            assert!(acceptor.take(STAMP, 3, 0).is_none());
            // The ticket is used up, before the connection is taken and after.
            assert_eq!(outcome(&acceptor, &mut connect(&acceptor, &hello)), b"");
            assert!(acceptor.take(STAMP, 3, 1).is_some());
            assert_eq!(outcome(&acceptor, &mut connect(&acceptor, &hello)), b"");
            assert!(acceptor.io.lock().unwrap().connections.len() <= MAX_UNKNOWN);
        }
    }

    #[test]
    fn a_slow_hello_is_understood() {
        let acceptor = acceptor("127.0.0.1");
        let mut stream = connect(&acceptor, b"");
        for byte in HELLO.encode() {
            stream.write_all(&[byte]).unwrap();
            acceptor.serve(&[], Duration::ZERO);
        }
        assert_eq!(outcome(&acceptor, &mut stream), ANSWER);
    }

    #[test]
    fn a_communicator_that_failed_expects_nobody() {
        let acceptor = acceptor("127.0.0.1");
        acceptor.forget(STAMP);
        assert_eq!(outcome(&acceptor, &mut connect(&acceptor, &HELLO.encode())), b"");
    }

    #[test]
    fn silent_connections_are_closed_after_a_while() {
        let acceptor = acceptor("127.0.0.1");
        let mut stream = connect(&acceptor, b"mgpu");
        while acceptor.io.lock().unwrap().connections.is_empty() {
            acceptor.serve(&[], Duration::from_millis(1));
        }
        acceptor.io.lock().unwrap().connections[0].since -= HELLO_TIME;
        assert_eq!(outcome(&acceptor, &mut stream), b"");
    }
}
