//! Connections over loopback.

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

#[test]
fn messages_travel_both_ways_with_both_methods() {
    for credentials in [good(), Credentials::None] {
        let (mut one, mut other) = pair(&credentials);
        assert_eq!(one.peer_address(), other.local_address());
        assert_eq!(one.local_address(), other.peer_address());
        one.send(&"question");
        other.send(&vec![1, 2, 3]);
        let (mut question, mut answer) = (None, None);
        serve(&mut one, &mut other, |one, other| {
            question = question.take().or(other.next_message::<String>().unwrap());
            answer = answer.take().or(one.next_message::<Vec<u32>>().unwrap());
            question.is_some() && answer.is_some()
        });
        assert_eq!((question.as_deref(), answer), (Some("question"), Some(vec![1, 2, 3])));
    }
}

#[test]
fn large_messages_travel_in_both_directions_at_once() {
    let (mut one, mut other) = pair(&good());
    let text = "x".repeat(1_000_000);
    for _ in 0..8 {
        one.send(&text);
        other.send(&text);
    }
    assert!(one.wants_to_write(), "it does not fit into the kernel's buffers");
    let mut received = [0, 0];
    serve(&mut one, &mut other, |one, other| {
        for (count, link) in received.iter_mut().zip([one, other]) {
            while let Some(message) = link.next_message::<String>().unwrap() {
                assert!(message == text);
                *count += 1;
            }
        }
        received == [8, 8]
    });
}

#[test]
fn a_closed_link_delivers_what_was_sent_before() {
    let (mut one, mut other) = pair(&good());
    let text = "x".repeat(1_000_000);
    (0..8).for_each(|_| one.send(&text));
    one.close();
    one.send(&"too late");
    let mut received = 0;
    serve(&mut one, &mut other, |_, other| {
        let state = other.service(Instant::now());
        while let Some(message) = other.next_message::<String>().unwrap() {
            assert!(message == text);
            received += 1;
        }
        state == LinkState::Lost(Loss::Ended)
    });
    assert_eq!(received, 8);
    assert_eq!(one.service(Instant::now()), LinkState::Open, "the other side may still send");
    other.send(&"lost");
    let late = one.next_deadline().unwrap();
    assert_eq!(one.service(late), LinkState::Lost(Loss::Ended), "but not for ever");
}

#[test]
fn a_dropped_link_is_noticed_with_its_last_message() {
    let (mut one, mut other) = pair(&good());
    one.send(&"last words");
    drop(one);
    while other.service(Instant::now()) == LinkState::Open {
        wait(vec![other.poll_fd()], None);
    }
    assert_eq!(other.service(Instant::now()), LinkState::Lost(Loss::Ended));
    assert_eq!(other.next_message(), Ok(Some("last words".to_owned())));
}

#[test]
fn a_peer_that_never_reads_loses_the_link_and_not_the_memory() {
    let (mut one, _silent) = pair(&Credentials::None);
    let text = "x".repeat(1_000_000);
    let mut sent = 0;
    while one.service(Instant::now()) == LinkState::Open {
        one.send(&text);
        sent += 1;
        assert!(sent < 1000);
    }
    let LinkState::Lost(Loss::Protocol(why)) = one.service(Instant::now()) else { panic!() };
    assert!(why.starts_with("it does not read: 1") && why.ends_with(" bytes wait to be sent"), "{why}");
}

#[test]
fn an_oversized_message_loses_the_link() {
    let (mut one, _other) = pair(&good());
    one.send(&"x".repeat(2 << 20));
    let why = "cannot send a message of 2097154 bytes; the maximum is 1048576";
    assert_eq!(one.service(Instant::now()), LinkState::Lost(Loss::Protocol(why.into())));
}

#[test]
fn both_families_reach_a_listener_of_all_addresses() {
    let mut listener = NodeListener::bind(None, &[0], good(), run()).unwrap();
    for ip in [V4, V6] {
        let mut dialer = dial(good(), &endpoint(ip, listener.port()));
        let (ours, theirs) = connect(&mut dialer, &mut listener);
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        assert_eq!((ours.peer_address().ip(), theirs.peer_address().ip()), (ip, ip));
    }
    let mut dialer = dial(good(), &format!("localhost:{}", listener.port()).parse().unwrap());
    let (ours, _) = connect(&mut dialer, &mut listener);
    assert!(ours.unwrap().peer_address().ip().is_loopback());
}

#[test]
fn the_local_address_is_used() {
    let mut listener = listen(good());
    let local = "127.0.0.7".parse().unwrap();
    let endpoint = endpoint(V4, listener.port());
    let mut dialer = Dialer::new(&endpoint, &[], Some(local), good(), run(), Instant::now() + LONG);
    let (_, theirs) = connect(&mut dialer, &mut listener);
    assert_eq!(theirs.unwrap().peer_address().ip(), local);

    let mut dialer = Dialer::new(&endpoint, &[], Some(V6), good(), run(), Instant::now() + LONG);
    assert!(dialer.service(Instant::now()).is_none());
    let reasons = dialer.reasons();
    assert!(
        reasons.ends_with(": 127.0.0.1: it is of another family than the local address ::1"),
        "{reasons}"
    );
}

#[test]
fn a_wrong_secret_is_named_on_both_sides() {
    let mut listener = listen(secret("another secret of a job"));
    let port = listener.port();
    let (ours, _) = connect(&mut dial(good(), &endpoint(V4, port)), &mut listener);
    let remedy = "the secrets differ; check that MGPU_SECRET_FILE or MGPU_SECRET is the same on all hosts";
    assert_eq!(
        ours.unwrap_err(),
        DialError::Authentication(format!(
            "127.0.0.1:{port} (127.0.0.1) refused authentication by `secret`: {remedy}"
        ))
    );
    let rejected = rejections(&mut listener).remove(0);
    assert_eq!((rejected.address, rejected.connections), (Some(V4), 1));
    assert!(
        rejected.why.ends_with(&format!(" failed authentication by `secret`: {remedy}")),
        "{}",
        rejected.why
    );
}

#[test]
fn other_programs_are_turned_down_at_once() {
    let mut listener = listen(good());
    for (sent, said) in [
        (
            &b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"[..],
            "is not mgpurun, it is an HTTP client: it sent \"GET / HTTP",
        ),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "is not mgpurun, it is TLS: it sent"),
        (&[0xff; 5000], "is not mgpurun: it sent \"\\xff\\xff"),
        (b"mgpurun-nodes 1 0.1.0 secret\n", "sent an incomplete preamble"),
    ] {
        let mut stranger = TcpStream::connect((V4, listener.port())).unwrap();
        stranger.write_all(sent).unwrap();
        let why = &rejections(&mut listener)[0].why;
        assert!(why.starts_with("127.0.0.1:") && why.contains(said), "{why}");
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(answer.is_empty() || sent.starts_with(b"mgpurun"), "a stranger gets no answer");
    }
}

#[test]
fn silent_and_slow_peers_are_closed_after_five_seconds() {
    let mut listener = listen(good());
    let (start, mut slow) = (Instant::now(), TcpStream::connect((V4, listener.port())).unwrap());
    wait(listener.fds(), None);
    assert!(listener.service(start).is_empty());
    for second in 1..5 {
        slow.write_all(&b"mgpu"[second - 1..second]).unwrap();
        wait(listener.fds(), None);
        listener.service(start + Duration::from_secs(second as u64));
        assert_eq!(listener.next_deadline(), Some(start + Duration::from_secs(5)), "it is not extended");
    }
    assert!(listener.service(start + Duration::from_secs(5)).is_empty());
    let rejected = listener.take_rejections(start, true);
    assert!(
        rejected[0].why.contains("sent \"gpur\"") || rejected[0].why.ends_with("within 5 s"),
        "{rejected:?}"
    );
}

#[test]
fn a_thousand_silent_connections_do_not_keep_an_agent_out() {
    let mut listener = listen(good());
    let mut silent = std::collections::VecDeque::new();
    for _ in 0..1000 {
        silent.push_back(TcpStream::connect((V4, listener.port())).unwrap());
        assert!(listener.service(Instant::now()).is_empty());
        // The listener has closed the older ones.
        silent.truncate(100);
        silent.rotate_right(1);
    }
    let (ours, theirs) = connect(&mut dial(good(), &endpoint(V4, listener.port())), &mut listener);
    assert!(ours.is_ok() && theirs.is_some());
    assert!(listener.fds().len() <= 65);
    let rejected = listener.take_rejections(Instant::now(), true);
    assert!(rejected[0].connections >= 900, "{rejected:?}");
    assert!(
        rejected[0].why.ends_with("has 65 of 65 unauthenticated connections, and no other address has more")
    );
}

/// The bytes of a real agent, cut off after each of them.
#[test]
fn an_agent_that_disappears_during_the_handshake_leaves_nothing() {
    for credentials in [good(), Credentials::None] {
        let mut listener = listen(credentials.clone());
        for cut in 0.. {
            let mut stream = TcpStream::connect((V4, listener.port())).unwrap();
            let mut agent = handshake::Handshake::dialer(&credentials, run()).unwrap();
            let line = agent.take_output();
            stream.write_all(&line[..cut.min(line.len())]).unwrap();
            if cut > line.len() {
                let mut answer = [0; 256];
                stream.set_nonblocking(true).unwrap();
                let count = loop {
                    listener.service(Instant::now());
                    match stream.read(&mut answer) {
                        Ok(count) => break count,
                        Err(_) => wait(listener.fds(), Some(Instant::now() + Duration::from_millis(1))),
                    }
                };
                agent.advance(&answer[..count]).unwrap();
                let packet = agent.take_output();
                if cut - line.len() >= packet.len() {
                    break;
                }
                stream.write_all(&packet[..cut - line.len()]).unwrap();
            }
            drop(stream);
            assert_eq!(rejections(&mut listener)[0].connections, 1);
            assert_eq!(listener.fds().len(), 1);
        }
    }
}

/// The bytes of a real coordinator, cut off after each of them, and then a coordinator.
#[test]
fn a_dialer_survives_whatever_answers_before_the_coordinator_does() {
    let real = listen(good());
    let port = real.port();
    drop(real);
    let mut dialer = dial(good(), &endpoint(V4, port));
    let mut now = Instant::now();
    let mut step = |dialer: &mut Dialer| {
        now += Duration::from_millis(600);
        assert!(dialer.service(now).is_none());
        dialer.reasons()
    };
    assert_eq!(step(&mut dialer), format!("127.0.0.1:{port}: 127.0.0.1: connection refused"));
    let server = TcpListener::bind((V4, port)).unwrap();
    for cut in 0.. {
        step(&mut dialer);
        let (mut stream, _) = server.accept().unwrap();
        step(&mut dialer);
        let mut coordinator = handshake::Handshake::listener(&good(), run()).unwrap();
        let mut sent = 0;
        let mut bytes = [0; 256];
        let is_complete = loop {
            let count = stream.read(&mut bytes).unwrap();
            let is_complete = coordinator.advance(&bytes[..count]).unwrap().is_some();
            let answer = coordinator.take_output();
            stream.write_all(&answer[..answer.len().min(cut - sent)]).unwrap();
            sent += answer.len();
            if is_complete || sent > cut {
                break is_complete;
            }
            step(&mut dialer);
        };
        if is_complete && sent <= cut {
            break;
        }
        drop(stream);
        let reasons = step(&mut dialer);
        assert!(reasons.contains("closed the connection"), "{cut}: {reasons}");
    }
}
