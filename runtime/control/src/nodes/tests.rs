//! Connections over loopback.

mod dialing;
mod links;
mod unauthenticated;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollTimeout, poll};

use super::auth::{Credentials, Secret};
use super::*;

const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);
/// Longer than any test waits.
const LONG: Duration = Duration::from_secs(3600);

fn secret(text: &str) -> Credentials {
    Credentials::Secret(Secret::new(text.as_bytes(), "test").unwrap())
}

fn good() -> Credentials {
    secret("a secret of this job")
}

fn run() -> RunTag {
    RunTag::of("run")
}

fn listen(credentials: Credentials) -> NodeListener {
    NodeListener::bind(Some(V4), &[0], credentials, run()).unwrap()
}

fn endpoint(ip: IpAddr, port: u16) -> Endpoint {
    SocketAddr::new(ip, port).to_string().parse().unwrap()
}

fn dial(credentials: Credentials, endpoint: &Endpoint) -> Dialer {
    Dialer::new(endpoint, &[], None, credentials, run(), Instant::now() + LONG)
}

/// Waits until something is ready, or until the earliest of the deadlines.
fn wait(mut fds: Vec<PollFd<'_>>, deadlines: impl IntoIterator<Item = Instant>) {
    let longest = Instant::now() + Duration::from_secs(10);
    let until = deadlines.into_iter().fold(longest, Instant::min).saturating_duration_since(Instant::now());
    let timeout = PollTimeout::try_from(until.as_millis() + 1).unwrap();
    assert!(poll(&mut fds, timeout).unwrap() > 0 || until < Duration::from_secs(10), "nothing happens");
}

/// Serves both sides until the dialer has a result, and the listener a link if the dialer has one.
fn connect(dialer: &mut Dialer, listener: &mut NodeListener) -> (Result<Link, DialError>, Option<Link>) {
    let (mut result, mut accepted) = (None, None);
    loop {
        if result.is_none() {
            result = dialer.service(Instant::now());
        }
        accepted = accepted.or(listener.service(Instant::now()).pop());
        match result {
            Some(Ok(link)) if accepted.is_some() => return (Ok(link), accepted),
            Some(Err(error)) => return (Err(error), accepted),
            _ => {}
        }
        let fds = if result.is_none() { dialer.fds() } else { Vec::new() };
        let dial_by = result.is_none().then(|| dialer.next_deadline());
        wait(
            listener.fds().into_iter().chain(fds).collect(),
            listener.next_deadline().into_iter().chain(dial_by),
        );
    }
}

fn pair(credentials: &Credentials) -> (Link, Link) {
    let mut listener = listen(credentials.clone());
    let mut dialer = dial(credentials.clone(), &endpoint(V4, listener.port()));
    let (ours, theirs) = connect(&mut dialer, &mut listener);
    (ours.unwrap(), theirs.unwrap())
}

/// Serves both links until `is_done`.
fn serve(one: &mut Link, other: &mut Link, mut is_done: impl FnMut(&mut Link, &mut Link) -> bool) {
    loop {
        one.service(Instant::now());
        other.service(Instant::now());
        if is_done(one, other) {
            return;
        }
        wait(
            vec![one.poll_fd(), other.poll_fd()],
            one.next_deadline().into_iter().chain(other.next_deadline()),
        );
    }
}

/// Serves the listener until it has rejected a connection; returns the texts.
fn rejections(listener: &mut NodeListener) -> Vec<RejectedConnections> {
    loop {
        assert!(listener.service(Instant::now()).is_empty(), "it is authenticated");
        let rejections = listener.take_rejections(Instant::now(), true);
        if !rejections.is_empty() {
            return rejections;
        }
        wait(listener.fds(), listener.next_deadline());
    }
}
