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
use super::wire::configure;
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
    expected: Mutex<HashMap<(Stamp, u32), Guest>>,
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

/// A peer that may connect, by communicator and world rank.
#[derive(Debug)]
enum Guest {
    /// With this ticket, and gets this answer.
    Expected(Ticket, Ticket),
    Connected(TcpStream),
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
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    Ok((listener, SocketAddr::new(address, port)))
}

impl Acceptor {
    /// Listens on `address`, for world rank `rank` of the run with this hash.
    pub(super) fn bind(address: IpAddr, run: u64, rank: u32) -> Result<Self> {
        let (listener, address) = bind(address)
            .map_err(|error| Error::system(format!("listen for other ranks on {address}"), error))?;
        let io = Mutex::new(Unknown { listener, connections: Vec::new() });
        Ok(Acceptor { address, run, rank, io, expected: Mutex::default() })
    }

    /// Where peers connect to.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets world rank `from` connect for the communicator of this stamp.
    pub(super) fn expect(&self, stamp: Stamp, from: u32, ticket: Ticket, answer: Ticket) {
        lock(&self.expected).insert((stamp, from), Guest::Expected(ticket, answer));
    }

    /// The connection of a peer, once it is there.
    pub(super) fn take(&self, stamp: Stamp, from: u32) -> Option<TcpStream> {
        let mut expected = lock(&self.expected);
        match expected.remove(&(stamp, from))? {
            Guest::Connected(stream) => Some(stream),
            guest => {
                expected.insert((stamp, from), guest);
                None
            }
        }
    }

    /// Expects nobody of this communicator any more.
    pub(super) fn forget(&self, stamp: Stamp) {
        lock(&self.expected).retain(|(of, _), _| *of != stamp);
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
                // Says nothing: a stranger learns as little as possible.
                Progress::More | Progress::Stranger => {}
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
        let Some(guest) = expected.get_mut(&(hello.stamp, hello.from)) else { return };
        let Guest::Expected(ticket, answer) = guest else { return };
        let is_valid = (hello.run, hello.to, hello.ticket) == (self.run, self.rank, *ticket);
        // The send buffer of a new connection is empty: the answer fits.
        if is_valid && configure(&stream).is_ok() && (&stream).write(answer).is_ok_and(|n| n == answer.len()) {
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
    Stranger,
    Hello(Hello),
}

impl Connection {
    fn read(&mut self) -> Progress {
        loop {
            match self.stream.read(&mut self.hello[self.have..]) {
                Ok(0) => return Progress::Stranger,
                Ok(bytes) => self.have += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Progress::More,
                Err(_) => return Progress::Stranger,
            }
            if !may_be_hello(&self.hello[..self.have]) {
                return Progress::Stranger;
            }
            if self.have == HELLO_BYTES {
                return Hello::decode(&self.hello).map_or(Progress::Stranger, Progress::Hello);
            }
        }
    }
}
