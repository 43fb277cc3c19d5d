//! The connections of the metrics server.
//!
//! Clients may be slow, many or hostile. So there is a limit on connections, beyond which the oldest one is dropped, on the
//! time of each, on the bytes of a request, and on the connections that are accepted in a second; the rest waits in the
//! kernel's queue, which is short.
//!
//! If a connection is closed while input of it is unread, TCP resets it, and the client may lose the answer. So after the
//! answer the input is read to its end.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mgpu_control::nodes::who_listens;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::content::Content;
use super::http::{MAX_REQUEST, Request, head, parse};
use super::{MetricsAddress, SocketFile};

/// Most connections at one time.
const MAX_CONNECTIONS: usize = 32;

/// A request has to arrive in this time. While the answer is sent, some of it has to be accepted in each such time.
const PATIENCE: Duration = Duration::from_secs(3);

/// Longest time for an answer.
const MAX_ANSWER_TIME: Duration = Duration::from_secs(15);

/// Most bytes that are read after the request.
const MAX_DISCARDED: usize = 1 << 20;

/// Connections accepted in a second.
const RATE: f64 = 50.0;

/// What is served on.
#[derive(Debug)]
pub(super) enum Listener {
    /// The flag: on the loopback interface.
    Tcp(TcpListener, bool),
    Unix(UnixListener),
}

/// A connection.
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Listener {
    /// Listens. Also returns the address with the port that was chosen, and the file of a Unix socket.
    ///
    /// # Errors
    /// Why not, for people.
    pub(super) fn bind(
        address: &MetricsAddress,
    ) -> Result<(Self, MetricsAddress, Option<SocketFile>), String> {
        match address {
            MetricsAddress::Tcp(address) => {
                let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
                    ErrorKind::AddrInUse => {
                        let who = who_listens(address.port());
                        format!("{error}; {who}; choose another port, or 0 for any free one")
                    }
                    _ => error.to_string(),
                })?;
                let bound = prepare(listener.set_nonblocking(true).and_then(|()| listener.local_addr()))?;
                let is_local = bound.ip().is_loopback();
                Ok((Listener::Tcp(listener, is_local), MetricsAddress::Tcp(bound), None))
            }
            MetricsAddress::Unix(path) => {
                let listener = UnixListener::bind(path).map_err(|error| match error.kind() {
                    ErrorKind::AddrInUse => {
                        "the file exists; remove it if no other mgpurun serves on it".to_owned()
                    }
                    _ => error.to_string(),
                })?;
                let file = SocketFile::of(path);
                prepare(fs::set_permissions(path, fs::Permissions::from_mode(0o600)))?;
                prepare(listener.set_nonblocking(true))?;
                Ok((Listener::Unix(listener), address.clone(), file))
            }
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        let stream = match self {
            Listener::Tcp(listener, _) => Stream::Tcp(listener.accept()?.0),
            Listener::Unix(listener) => Stream::Unix(listener.accept()?.0),
        };
        match &stream {
            Stream::Tcp(stream) => stream.set_nonblocking(true)?,
            Stream::Unix(stream) => stream.set_nonblocking(true)?,
        }
        Ok(stream)
    }

    /// Whether browsers reach it under names of this machine only.
    fn is_local(&self) -> bool {
        matches!(self, Listener::Tcp(_, true))
    }
}

fn prepare<T>(done: io::Result<T>) -> Result<T, String> {
    done.map_err(|error: io::Error| error.to_string())
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener, _) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Tcp(stream) => stream.as_fd(),
            Stream::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.read(bytes),
            Stream::Unix(stream) => stream.read(bytes),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => stream.write(bytes),
            Stream::Unix(stream) => stream.write(bytes),
        }
    }

    /// Tells the client that nothing more is sent.
    fn end_output(&self) -> io::Result<()> {
        match self {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }
}

/// A connection and how far its request has come.
struct Connection {
    stream: Stream,
    deadline: Instant,
    request: Vec<u8>,
    answer: Option<Answer>,
}

/// An answer that is being sent, or has been sent.
struct Answer {
    head: Vec<u8>,
    body: Arc<[u8]>,
    sent: usize,
    /// When the connection is closed in any case.
    limit: Instant,
    /// Bytes that were read after the request.
    discarded: usize,
}

impl Answer {
    fn is_sent(&self) -> bool {
        self.sent == self.head.len() + self.body.len()
    }

    /// What has not been sent of the head, or else of the body.
    fn rest(&self) -> &[u8] {
        match self.head.get(self.sent..).filter(|rest| !rest.is_empty()) {
            Some(rest) => rest,
            None => &self.body[self.sent - self.head.len()..],
        }
    }
}

impl Connection {
    fn new(stream: Stream, now: Instant) -> Self {
        Connection { stream, deadline: now + PATIENCE, request: Vec::new(), answer: None }
    }

    fn events(&self) -> PollFlags {
        match &self.answer {
            Some(answer) if !answer.is_sent() => PollFlags::POLLOUT,
            _ => PollFlags::POLLIN,
        }
    }

    /// Reads and writes what is possible. False once the connection is over.
    fn advance(&mut self, content: &mut Content, is_local: bool) -> bool {
        self.try_advance(content, is_local)
            .unwrap_or_else(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted))
    }

    fn try_advance(&mut self, content: &mut Content, is_local: bool) -> io::Result<bool> {
        let mut bytes = [0; 4096];
        while self.answer.is_none() {
            let room = MAX_REQUEST.saturating_sub(self.request.len()).clamp(1, bytes.len());
            match self.stream.read(&mut bytes[..room])? {
                0 => return Ok(false),
                count => self.request.extend_from_slice(&bytes[..count]),
            }
            self.answer = answer(parse(&self.request, is_local), content);
            if self.answer.is_some() {
                self.deadline = Instant::now() + PATIENCE;
            }
        }
        let Some(answer) = &mut self.answer else { return Ok(true) };
        while !answer.is_sent() {
            match self.stream.write(answer.rest())? {
                0 => return Ok(false),
                count => answer.sent += count,
            }
            self.deadline = answer.limit.min(Instant::now() + PATIENCE);
            if answer.is_sent() {
                self.stream.end_output()?;
            }
        }
        while answer.discarded < MAX_DISCARDED {
            match self.stream.read(&mut bytes)? {
                0 => return Ok(false),
                count => answer.discarded += count,
            }
        }
        Ok(false)
    }
}

/// The answer to a request; `None` while it is incomplete.
fn answer(request: Request, content: &mut Content) -> Option<Answer> {
    let (head, body) = match request {
        Request::Incomplete => return None,
        Request::Refused(status, reason) => {
            let body: Arc<[u8]> = format!("{reason}\n").into_bytes().into();
            (head(status, reason, "text/plain", body.len()), body)
        }
        Request::Get(resource, with_body) => {
            let (content_type, body) = content.answer(resource, Instant::now());
            let head = head(200, "OK", content_type, body.len());
            (head, if with_body { body } else { Arc::default() })
        }
    };
    // Making the answer may have taken long.
    Some(Answer { head, body, sent: 0, limit: Instant::now() + MAX_ANSWER_TIME, discarded: 0 })
}

/// How many connections may be accepted now.
struct Allowance {
    left: f64,
    counted: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Allowance { left: RATE, counted: now }
    }

    /// Whether there is one left.
    fn refill(&mut self, now: Instant) -> bool {
        let passed = now.duration_since(std::mem::replace(&mut self.counted, now));
        self.left = (self.left + passed.as_secs_f64() * RATE).min(RATE);
        self.left >= 1.0
    }
}

/// Serves until the other end of `alive` is closed.
pub(super) fn serve(listener: &Listener, alive: &UnixStream, mut content: Content) {
    let is_local = listener.is_local();
    let mut connections: Vec<Connection> = Vec::new();
    let mut allowance = Allowance::new(Instant::now());
    loop {
        content.sample(Instant::now());
        let accepts = allowance.refill(Instant::now());
        let listened = if accepts { PollFlags::POLLIN } else { PollFlags::empty() };
        let mut fds =
            vec![PollFd::new(alive.as_fd(), PollFlags::POLLIN), PollFd::new(listener.as_fd(), listened)];
        fds.extend(
            connections.iter().map(|connection| PollFd::new(connection.stream.as_fd(), connection.events())),
        );
        // The pages are read so often that no other deadline matters.
        let left = content.next_sample().saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        let is_ready = |fd: &PollFd<'_>| fd.revents().is_some_and(|events| !events.is_empty());
        let ready: Vec<bool> = match poll(&mut fds, timeout) {
            Ok(_) => fds.iter().map(is_ready).collect(),
            Err(_) => vec![false; fds.len()],
        };
        drop(fds);
        if ready[0] {
            return;
        }
        let now = Instant::now();
        let mut of_connection = ready[2..].iter();
        connections.retain_mut(|connection| {
            let is_ready = of_connection.next().copied().unwrap_or_default();
            let is_open = !is_ready || connection.advance(&mut content, is_local);
            is_open && now < connection.deadline
        });
        if accepts && ready[1] {
            allowance.left -= 1.0;
            // A connection that cannot be accepted, for want of descriptors for instance, counts too.
            if let Ok(stream) = listener.accept() {
                if connections.len() >= MAX_CONNECTIONS {
                    // The oldest one has had more than half a second, since not more than RATE come in a second.
                    connections.remove(0);
                }
                connections.push(Connection::new(stream, now));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use mgpu_control::progress::ProgressPage;

    use super::super::{Board, MetricsServer};
    use super::*;

    fn server(address: &MetricsAddress) -> (MetricsServer, SocketAddr) {
        let board = Board::default();
        let (page, _fd) = ProgressPage::create(2).unwrap();
        page.join(0, std::process::id());
        board.put(None, Arc::new(page));
        let server = MetricsServer::start(address, board).unwrap();
        let bound = match &server.address {
            MetricsAddress::Tcp(bound) => *bound,
            MetricsAddress::Unix(_) => SocketAddr::from(([127, 0, 0, 1], 0)),
        };
        (server, bound)
    }

    fn ask(mut stream: impl Read + Write, path: &str) -> String {
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn the_runs_are_served_while_other_clients_are_silent() {
        let (server, address) = server(&"0".parse().unwrap());
        // They say nothing, or a part of a request, or do not read.
        let silent: Vec<TcpStream> = (0..12).map(|_| TcpStream::connect(address).unwrap()).collect();
        (&silent[0]).write_all(b"GET /met").unwrap();
        (&silent[1]).write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let metrics = ask(TcpStream::connect(address).unwrap(), "/metrics");
        assert!(
            metrics.starts_with("HTTP/1.1 200 OK\r\nContent-Type: application/openmetrics-text"),
            "{metrics}"
        );
        assert!(metrics.contains("\nmgpurun_rank_joined{mgpurun_job=\"0\",rank=\"0\"} 1\n"), "{metrics}");
        assert!(metrics.ends_with("# EOF\n"));
        let status = ask(TcpStream::connect(address).unwrap(), "/status.json");
        let (_, body) = status.split_once("\r\n\r\n").unwrap();
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(body["runs"][0]["ranks"].as_array().unwrap().len(), 2);
        assert!(ask(TcpStream::connect(address).unwrap(), "/").contains("<!doctype html>"));
        assert!(ask(TcpStream::connect(address).unwrap(), "/other").starts_with("HTTP/1.1 404"));
        // Silent ones are dropped.
        let mut end = Vec::new();
        (&silent[0]).read_to_end(&mut end).unwrap();
        drop(server);
        // The thread ends, and with it the listener.
        while TcpStream::connect(address).is_ok() {
            std::thread::yield_now();
        }
    }

    /// The client sends a request of many parts before it reads; each part but the last would be lost by a reset.
    #[test]
    fn answers_to_long_requests_arrive() {
        let (_server, address) = server(&"0".parse().unwrap());
        let long_head = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(300_000));
        let with_body = format!("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n{}", "x".repeat(300_000));
        for (request, expected) in [(long_head, "HTTP/1.1 431 "), (with_body, "HTTP/1.1 405 ")] {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with(expected), "{answer}");
        }
        // One that sends for ever is dropped.
        let mut stream = TcpStream::connect(address).unwrap();
        while stream.write_all(&[b'x'; 65_536]).is_ok() {}
    }

    /// An answer that does not fit the buffers of the kernel, to a client that reads it slowly.
    #[test]
    fn a_client_that_makes_progress_keeps_its_connection() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut content = Content::new(Board::default());
        let mut connection = Connection::new(Stream::Unix(ours), Instant::now());
        let limit = Instant::now() + MAX_ANSWER_TIME;
        let body: Arc<[u8]> = vec![b'x'; 4 << 20].into();
        connection.answer = Some(Answer { head: b"head".to_vec(), body, sent: 0, limit, discarded: 0 });
        let mut received = Vec::new();
        while !connection.answer.as_ref().unwrap().is_sent() {
            let before = Instant::now();
            connection.deadline = before;
            assert!(connection.advance(&mut content, true));
            assert!(connection.deadline >= limit.min(before + PATIENCE) && connection.deadline <= limit);
            let mut part = vec![0; 1 << 20];
            let count = (&theirs).read(&mut part).unwrap();
            received.extend_from_slice(&part[..count]);
        }
        (&theirs).read_to_end(&mut received).unwrap();
        assert_eq!(received.len(), (4 << 20) + 4);
        // Without progress the deadline stays; the connection ends with the client.
        let deadline = connection.deadline;
        assert!(connection.advance(&mut content, true) && connection.deadline == deadline);
        drop(theirs);
        assert!(!connection.advance(&mut content, true));
    }

    #[test]
    fn a_unix_socket_is_private_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("job.sock");
        let (server, _) = server(&MetricsAddress::Unix(path.clone()));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(ask(UnixStream::connect(&path).unwrap(), "/metrics").ends_with("# EOF\n"));
        let again = MetricsServer::start(&MetricsAddress::Unix(path.clone()), Board::default()).unwrap_err();
        assert!(again.to_string().contains("the file exists"), "{again}");
        drop(server);
        assert!(!path.exists());
        // What others have put there stays.
        let (server, _) = self::server(&MetricsAddress::Unix(path.clone()));
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        drop(server);
        assert!(path.exists());
    }
}
