//! What reaches the listener and is no agent.

use std::process::Command;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;

#[test]
fn a_wrong_secret_is_named_on_both_sides() {
    let mut listener = listen(secret("another secret of a job"));
    let port = listener.port();
    let (ours, _) = connect(&mut dial(good(), &endpoint(V4, port)), &mut listener);
    let remedy = "the secrets differ; check that MGPU_SECRET_FILE or MGPU_SECRET is the same on all hosts";
    assert_eq!(
        ours.unwrap_err(),
        DialError::Authentication(format!("127.0.0.1:{port} refused authentication by `secret`: {remedy}"))
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
        let mut peer = TcpStream::connect((V4, listener.port())).unwrap();
        peer.write_all(sent).unwrap();
        let why = &rejections(&mut listener)[0].why;
        assert!(why.starts_with("127.0.0.1:") && why.contains(said), "{why}");
        let mut answer = Vec::new();
        let _ = peer.read_to_end(&mut answer);
        assert!(answer.is_empty() || sent.starts_with(b"mgpurun"), "an unauthenticated peer gets no answer");
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
    assert!(rejected[0].why.ends_with(" did not identify itself within 5 s"), "{rejected:?}");
}

/// More descriptors than the usual 1024.
fn allow_many_descriptors() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

#[test]
fn a_thousand_silent_connections_do_not_keep_an_agent_out() {
    allow_many_descriptors();
    let mut listener = listen(good());
    let connect_silently = || TcpStream::connect((V4, listener.port())).unwrap();
    let _silent: Vec<TcpStream> = (0..1000).map(|_| connect_silently()).collect();
    let (ours, theirs) = connect(&mut dial(good(), &endpoint(V4, listener.port())), &mut listener);
    assert!(ours.is_ok() && theirs.is_some());
    assert!(listener.fds().len() <= 129);
    let rejected = listener.take_rejections(Instant::now(), true);
    assert!(rejected[0].connections >= 800, "{rejected:?}");
    let why = "has 128 of 128 unauthenticated connections, and no other address has more";
    assert!(rejected[0].why.ends_with(why), "{rejected:?}");
}

#[test]
fn agents_that_connect_at_once_are_all_accepted() {
    allow_many_descriptors();
    let mut listener = listen(good());
    let mut dialers: Vec<_> = (0..300).map(|_| Some(dial(good(), &endpoint(V4, listener.port())))).collect();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // Time stands still, so that nothing expires on a busy machine.
    let now = Instant::now();
    while ours.len() < dialers.len() {
        for dialer in &mut dialers {
            if let Some(result) = dialer.as_mut().and_then(|dialer| dialer.service(now)) {
                ours.push(result.unwrap());
                *dialer = None;
            }
        }
        theirs.extend(listener.service(now));
    }
    assert_eq!(theirs.len(), ours.len());
    assert_eq!(listener.take_rejections(now, true), []);
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

/// Limits on descriptors belong to the process: this test runs itself in a separate process.
#[test]
fn without_descriptors_the_listener_does_not_spin() {
    const ALONE: &str = "MGPU_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args([
            "--exact",
            "nodes::tests::unauthenticated::without_descriptors_the_listener_does_not_spin",
        ]);
        let output = alone.env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let mut listener = listen(good());
    let mut dialer = dial(good(), &endpoint(V4, listener.port()));
    assert!(dialer.service(Instant::now()).is_none());
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let limit = |most| setrlimit(Resource::RLIMIT_NOFILE, most, hard).unwrap();
    let is_ready = |listener: &NodeListener| poll(&mut listener.fds(), PollTimeout::ZERO).unwrap() > 0;

    limit(3);
    wait(listener.fds(), None);
    let now = Instant::now();
    assert!(listener.service(now).is_empty());
    let rejected = listener.take_rejections(now, true);
    assert_eq!(rejected[0].why, "no connection can be accepted: too many open files; raise `ulimit -n`");
    assert!(!is_ready(&listener) && listener.next_deadline().is_some(), "it is paused");
    assert!(listener.service(now).is_empty() && listener.take_rejections(now, true).is_empty());

    limit(hard);
    listener.service(listener.next_deadline().unwrap());
    let (ours, theirs) = connect(&mut dialer, &mut listener);
    assert!(ours.is_ok() && theirs.is_some(), "the waiting connection is accepted");
}
