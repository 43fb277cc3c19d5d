//! One pair of nodes over TCP: connects to a fresh port, asks for the time there, and sends a short stream.
//!
//! A test is one connection. The client sends the token of the check, then bytes [`PING`], each of which the server
//! answers with its clock, then [`STREAM`] and data until it closes its side; the server answers with the number of bytes
//! and the time that they took. Whoever does not send the token within two seconds is not answered.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::facts::Facts;

const PING: u8 = 1;
const STREAM: u8 = 2;
/// Number of round trips; the fastest counts.
const PINGS: usize = 20;
/// How long a stream is sent.
const STREAM_TIME: Duration = Duration::from_millis(100);
/// Time to connect, and for each answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time for the token.
const TOKEN_TIME: Duration = Duration::from_secs(2);
/// Most connections at a time.
const MAX_CONNECTIONS: usize = 16;

/// What the client found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Test {
    /// All went well.
    Measured(Measured),
    /// There is no connection.
    Unreachable(String),
    /// Small packets arrive, and a stream does not.
    Stalled(String),
}

/// The figures of a pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Round trip in seconds.
    pub(super) round_trip: f64,
    /// Bytes in a second.
    pub(super) bandwidth: f64,
    /// How far the other clock is ahead, in seconds; known to half a round trip.
    pub(super) clock: f64,
}

/// Answers the tests of other nodes on threads, until the process ends.
pub(super) struct Server {
    port: u16,
}

impl Server {
    pub(super) fn start(token: &str) -> io::Result<Server> {
        let any = |address| TcpListener::bind(SocketAddr::new(address, 0));
        // An IPv6 socket takes IPv4 connections, too, unless IPv6 is switched off.
        let listener = any(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| any(Ipv4Addr::UNSPECIFIED.into()))?;
        let port = listener.local_addr()?.port();
        let token: Arc<[u8]> = token.as_bytes().into();
        let connections = Arc::new(AtomicUsize::new(0));
        let serve = move || {
            for stream in listener.incoming().flatten() {
                let (token, open) = (Arc::clone(&token), Arc::clone(&connections));
                if open.fetch_add(1, Ordering::Relaxed) >= MAX_CONNECTIONS {
                    open.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                let of_this = Arc::clone(&open);
                let answer = move || {
                    // The client reports what went wrong.
                    let _ = answer(stream, &token);
                    of_this.fetch_sub(1, Ordering::Relaxed);
                };
                if std::thread::Builder::new().name("answer".into()).spawn(answer).is_err() {
                    open.fetch_sub(1, Ordering::Relaxed);
                }
            }
        };
        std::thread::Builder::new().name("listen".into()).spawn(serve)?;
        Ok(Server { port })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }
}

/// Answers one client.
fn answer(mut stream: TcpStream, token: &[u8]) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    check_token(&mut stream, token)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut command = [0];
    loop {
        stream.read_exact(&mut command)?;
        match command[0] {
            PING => stream.write_all(&clock().to_le_bytes())?,
            STREAM => break,
            _ => return Err(ErrorKind::InvalidData.into()),
        }
    }
    let (started, mut bytes) = (Instant::now(), 0u64);
    let mut buffer = vec![0; 256 << 10];
    loop {
        match stream.read(&mut buffer)? {
            0 => break,
            read => bytes += read as u64,
        }
    }
    let nanoseconds = started.elapsed().as_nanos() as u64;
    stream.write_all(&bytes.to_le_bytes())?;
    stream.write_all(&nanoseconds.to_le_bytes())
}

/// Reads the token, however slowly it comes, within its time.
fn check_token(stream: &mut TcpStream, token: &[u8]) -> io::Result<()> {
    let deadline = Instant::now() + TOKEN_TIME;
    let mut given = Vec::new();
    let mut buffer = [0; 64];
    while given.len() < token.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let wanted = (token.len() - given.len()).min(buffer.len());
        match stream.read(&mut buffer[..wanted])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => given.extend_from_slice(&buffer[..read]),
        }
    }
    if given == token { Ok(()) } else { Err(ErrorKind::PermissionDenied.into()) }
}

/// Tests the connection to `other`.
pub(super) fn test(other: &Facts, token: &str) -> Test {
    let Some(address) = other.address else {
        return Test::Unreachable("its address is unknown".into());
    };
    let address = SocketAddr::new(address, other.port);
    let mut stream = match TcpStream::connect_timeout(&address, TIMEOUT) {
        Ok(stream) => stream,
        Err(error) => return Test::Unreachable(describe(&error)),
    };
    let (round_trip, clock) = match ping(&mut stream, token) {
        Ok(measured) => measured,
        Err(error) => return Test::Unreachable(describe(&error)),
    };
    match send_stream(&mut stream) {
        Ok(bandwidth) => Test::Measured(Measured { round_trip, bandwidth, clock }),
        Err(error) => Test::Stalled(describe(&error)),
    }
}

/// The shortest round trip in seconds, and how far the other clock was ahead then.
fn ping(stream: &mut TcpStream, token: &str) -> io::Result<(f64, f64)> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all(token.as_bytes())?;
    let mut best: Option<(f64, f64)> = None;
    for _ in 0..PINGS {
        let (before, started) = (clock(), Instant::now());
        let mut there = [0; 8];
        stream.write_all(&[PING])?;
        stream.read_exact(&mut there)?;
        let round_trip = started.elapsed().as_secs_f64();
        let ahead = i128::from(u64::from_le_bytes(there)) - i128::from(before);
        if best.is_none_or(|(shortest, _)| round_trip < shortest) {
            best = Some((round_trip, ahead as f64 / 1e9 - round_trip / 2.0));
        }
    }
    best.ok_or_else(|| ErrorKind::UnexpectedEof.into())
}

/// Sends a stream for a moment. Returns bytes in a second, as the other side has received them.
fn send_stream(stream: &mut TcpStream) -> io::Result<f64> {
    let data = vec![0; 256 << 10];
    stream.write_all(&[STREAM])?;
    let started = Instant::now();
    while started.elapsed() < STREAM_TIME {
        stream.write_all(&data)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut number = || -> io::Result<u64> {
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let (bytes, nanoseconds) = (number()?, number()?);
    Ok(bytes as f64 / (nanoseconds.max(1) as f64 / 1e9))
}

/// Nanoseconds since 1970.
fn clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => format!("no answer within {} s", TIMEOUT.as_secs()),
        ErrorKind::UnexpectedEof => "the connection was closed at once".into(),
        _ => error.to_string().to_lowercase(),
    }
}
