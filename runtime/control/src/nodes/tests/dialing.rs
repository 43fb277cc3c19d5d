//! What the dialer meets on its way to the coordinator.

use super::*;

#[test]
fn both_families_reach_a_listener_of_all_addresses() {
    let mut listener = NodeListener::bind(None, &[0], good(), run()).unwrap();
    let has_v6 = TcpListener::bind((V6, 0)).is_ok();
    for ip in [V4, V6].into_iter().filter(|ip| ip.is_ipv4() || has_v6) {
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
    assert!(reasons.ends_with(": it is of another family than the local address ::1"), "{reasons}");
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
    assert_eq!(step(&mut dialer), format!("127.0.0.1:{port}: connection refused"));
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

/// Serves the dialer, whose time passes quickly, until its reasons contain `text`.
fn dial_until(dialer: &mut Dialer, text: &str) -> String {
    for step in 0..200 {
        // Real time passes too: what other threads and the kernel do takes some.
        let result = dialer.service(Instant::now() + step * Duration::from_millis(600));
        assert!(result.is_none(), "{result:?}");
        let reasons = dialer.reasons();
        if reasons.contains(text) {
            return reasons;
        }
        let mut fds = dialer.fds();
        poll(&mut fds, PollTimeout::from(20u16)).unwrap();
    }
    panic!("{}", dialer.reasons());
}

/// A server that answers every connection with these bytes and closes it.
fn other_program(answer: &'static [u8]) -> u16 {
    let server = TcpListener::bind((V4, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in server.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 256]).and_then(|_| stream.write_all(answer));
        }
    });
    port
}

#[test]
fn programs_at_the_port_are_named() {
    for (answer, said) in [
        (
            &b"HTTP/1.1 400 Bad Request\r\n\r\n"[..],
            "is not mgpurun, it is an HTTP server: it sent \"HTTP/1.1 400 Bad",
        ),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "is not mgpurun, it is SSH: it sent \"SSH-2.0-"),
        (b"", "closed the connection without a word of mgpurun"),
    ] {
        let port = other_program(answer);
        let reasons = dial_until(&mut dial(good(), &endpoint(V4, port)), said);
        assert!(reasons.starts_with(&format!("127.0.0.1:{port}: {said}")), "{reasons}");
    }
}

#[test]
fn a_silent_program_is_left_after_five_seconds() {
    let silent = TcpListener::bind((V4, 0)).unwrap();
    let mut dialer = dial(good(), &endpoint(V4, silent.local_addr().unwrap().port()));
    dial_until(&mut dialer, "did not identify itself within 5 s");
}

#[test]
fn another_version_at_the_only_port_is_final() {
    let port = other_program(b"mgpurun-nodes 7 9.0.0 something else\n");
    let mut dialer = dial(good(), &endpoint(V4, port));
    let error = loop {
        match dialer.service(Instant::now()) {
            Some(result) => break result.unwrap_err(),
            None => wait(dialer.fds(), [dialer.next_deadline()]),
        }
    };
    let DialError::Incompatible(text) = error else { panic!("{error}") };
    assert!(text.contains(" is mgpurun 9.0.0 with version 7 of the protocol"), "{text}");
}

#[test]
fn ports_are_tried_in_turn() {
    let mut other = NodeListener::bind(Some(V4), &[0], good(), RunTag::of("another run")).unwrap();
    let newer = other_program(b"mgpurun-nodes 7 9.0.0 something else\n");
    let silent = TcpListener::bind((V4, 0)).unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let taken = [silent_port, other_program(b"SSH-2.0-x\r\n"), newer, other.port()];
    // The coordinator takes the first port that is free.
    let mut listener = NodeListener::bind(Some(V4), &[&taken[..], &[0]].concat(), good(), run()).unwrap();
    let ports = [&taken[..], &[listener.port()]].concat();
    let host = "127.0.0.1".parse().unwrap();
    let mut dialer = Dialer::new(&host, &ports, None, good(), run(), Instant::now() + LONG);
    let other = std::thread::spawn(move || {
        while other.take_rejections(Instant::now(), true).is_empty() {
            assert!(other.service(Instant::now()).is_empty());
            wait(other.fds(), other.next_deadline());
        }
    });
    let (ours, theirs) = connect(&mut dialer, &mut listener);
    assert_eq!(ours.unwrap().peer_address().port(), listener.port());
    assert!(theirs.is_some());
    other.join().unwrap();
}

#[test]
fn the_final_error_names_each_address_with_its_last_reason() {
    let taken = listen(good());
    let error = NodeListener::bind(Some(V4), &[taken.port()], good(), run()).err().unwrap().to_string();
    let start = format!(
        "cannot listen for other hosts at port {} of 127.0.0.1: address already in use; ",
        taken.port()
    );
    assert!(error.starts_with(&start), "{error}");
    let port = taken.port();
    drop(taken);

    let endpoint: Endpoint = format!("localhost:{port}").parse().unwrap();
    let mut dialer = dial(good(), &endpoint);
    dial_until(&mut dialer, "127.0.0.1: connection refused");
    let text = dialer.service(Instant::now() + LONG).unwrap().unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("localhost:{port}: ")) && text.contains("127.0.0.1: connection refused"),
        "{text}"
    );

    let mut dialer = Dialer::new(&endpoint, &[], None, good(), run(), Instant::now());
    let error = dialer.service(Instant::now()).unwrap().unwrap_err();
    assert_eq!(error, DialError::Unreachable(format!("localhost:{port}: the name is still being looked up")));
}

#[test]
fn a_name_is_looked_up_again_until_it_exists() {
    let mut dialer = dial(good(), &Endpoint::for_test("no such host", 29400));
    let reasons = dial_until(&mut dialer, "cannot be looked up");
    assert!(reasons.starts_with("no such host:29400: the name cannot be looked up: "), "{reasons}");
    assert!(dialer.fds().is_empty(), "the lookup has ended");
    assert!(dialer.service(dialer.next_deadline()).is_none());
    assert!(!dialer.fds().is_empty(), "another one runs");
}
