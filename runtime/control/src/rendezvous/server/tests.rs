//! Tests of the server against misbehaving peers. None of them waits for time to pass.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::super::entries::MAX_KEYS_PER_RANK;
use super::super::message::{Decoder, MAX_NAME, Manifest, VERSION};
use super::*;
use crate::rendezvous::in_process;

const RUN: &str = "a-test";

fn hello(rank: u32, world_size: u32) -> Request {
    Request::Hello {
        version: VERSION,
        run_id: RUN.into(),
        rank,
        world_size,
        pid: 1,
        manifest: Manifest::default(),
    }
}

fn set(key: &str) -> Request {
    Request::Set { key: key.into(), value: vec![1], fds: 0, readers: 1 }
}

/// The replies to `requests`, sent one at a time.
fn ask(server: &mut Server, stream: &UnixStream, requests: &[Request]) -> Vec<Reply> {
    let reply = |request| {
        (&*stream).write_all(&encode(request)).unwrap();
        server.service();
        read_reply(stream)
    };
    requests.iter().map(reply).collect()
}

/// The next reply, which the server has already sent.
fn read_reply(mut stream: &UnixStream) -> Reply {
    let (mut decoder, mut bytes) = (Decoder::default(), [0]);
    stream.set_nonblocking(true).unwrap();
    loop {
        if let Some(reply) = decoder.next_message().unwrap() {
            return reply;
        }
        assert_eq!(stream.read(&mut bytes).unwrap(), 1, "the server closed the connection");
        decoder.push(&bytes);
    }
}

/// The reported reasons of rejected connections in one call, with their number.
fn rejections(server: &mut Server) -> Vec<(u64, String)> {
    let mut events = server.service();
    events.extend(server.drain_rejections());
    let why = |event| match event {
        ServerEvent::Rejected { connections, why, .. } => Some((connections, why)),
        _ => None,
    };
    events.into_iter().filter_map(why).collect()
}

fn refused(reply: Reply) -> String {
    let Reply::Refused { why } = reply else { panic!("{reply:?} is not a refusal") };
    why
}

/// A server with a socket, and how to connect to it.
fn listening(world_size: u32) -> (Server, impl Fn() -> UnixStream) {
    let server = Server::bind(world_size, &crate::protocol::new_run_id().unwrap()).unwrap();
    let path = server.address().strip_prefix("unix:").unwrap().to_owned();
    (server, move || UnixStream::connect(&path).unwrap())
}

#[test]
fn a_key_that_is_set_already_fails_that_request_only() {
    let (mut server, streams) = Server::in_process(1, RUN).unwrap();
    let requests = [hello(0, 1), set("a"), set("a"), set("b")];
    let replies = ask(&mut server, &streams[0], &requests);
    let Reply::Denied { why } = &replies[2] else { panic!("{replies:?}") };
    assert!(why.contains("key `a` is already set by rank 0"), "{why}");
    assert_eq!((&replies[1], &replies[3]), (&Reply::Done, &Reply::Done));
    let elsewhere = [Request::Get { key: "c".into(), from: 1, timeout_ms: 0 }];
    let Reply::Denied { why } = &ask(&mut server, &streams[0], &elsewhere)[0] else { panic!("no denial") };
    assert!(why.contains("rank 0 waits for rank 1 in a world of 1"), "{why}");
}

#[test]
fn keys_that_nobody_reads_are_bounded() {
    let (mut server, streams) = Server::in_process(1, RUN).unwrap();
    let keys = (0..=MAX_KEYS_PER_RANK).map(|key| set(&key.to_string()));
    let requests: Vec<Request> = [hello(0, 1)].into_iter().chain(keys).collect();
    let replies = ask(&mut server, &streams[0], &requests);
    assert!(replies[1..=MAX_KEYS_PER_RANK].iter().all(|reply| *reply == Reply::Done));
    let Reply::Denied { why } = &replies[MAX_KEYS_PER_RANK + 1] else { panic!("{:?}", replies.last()) };
    assert!(why.contains("rank 0 would have 1025 unread keys"), "{why}");
}

#[test]
fn long_names_are_rejected() {
    let name = "n".repeat(MAX_NAME + 1);
    for request in [
        set(&name),
        Request::Get { key: name.clone(), from: 0, timeout_ms: 1 },
        Request::Barrier { name: name.clone(), ranks: None, timeout_ms: 1 },
    ] {
        let (mut server, streams) = Server::in_process(1, RUN).unwrap();
        let reply = ask(&mut server, &streams[0], &[hello(0, 1), request]).remove(1);
        assert!(refused(reply).contains("a name of 257 bytes"));
    }
}

/// A reason that quotes more than fits a frame is truncated.
#[test]
fn long_requests_have_short_denials() {
    let (mut server, streams) = Server::in_process(2, RUN).unwrap();
    let with_driver = |rank, driver: char| {
        let Request::Hello { version, run_id, world_size, pid, .. } = hello(rank, 2) else { unreachable!() };
        let manifest = Manifest { driver: Some(driver.to_string().repeat(40_000)), ..Manifest::default() };
        Request::Hello { version, run_id, rank, world_size, pid, manifest }
    };
    (&streams[0]).write_all(&encode(&with_driver(0, 'a'))).unwrap();
    server.service();
    let reply = ask(&mut server, &streams[1], &[with_driver(1, 'b')]).remove(0);
    assert!(refused(reply).contains("aaa"));

    let (mut server, streams) = Server::in_process(1, RUN).unwrap();
    let everyone = Request::Barrier { name: "b".into(), ranks: Some((0..65536).collect()), timeout_ms: 1 };
    let reply = ask(&mut server, &streams[0], &[hello(0, 1), everyone]).remove(1);
    assert!(
        matches!(&reply, Reply::Denied { why } if why.contains("rank 0 in a barrier of ranks [0, 1,")),
        "{reply:?}"
    );
}

/// Ranks 0 and 2 of three meet, while rank 1 leaves.
#[test]
fn a_barrier_of_some_ranks_does_not_wait_for_the_others() {
    let (mut server, streams) = Server::in_process(3, RUN).unwrap();
    let enter =
        |ranks: &[u32]| Request::Barrier { name: "b".into(), ranks: Some(ranks.into()), timeout_ms: 1 << 20 };
    for (rank, stream) in (0..).zip(&streams) {
        (&*stream).write_all(&encode(&hello(rank, 3))).unwrap();
        server.service();
    }
    streams.iter().for_each(|stream| assert_eq!(read_reply(stream), Reply::WELCOME));
    for ranks in [&[1, 2][..], &[0, 3]] {
        let Reply::Denied { why } = &ask(&mut server, &streams[0], &[enter(ranks)])[0] else {
            panic!("no denial")
        };
        assert!(why.contains(&format!("rank 0 in a barrier of ranks {ranks:?} of 3")), "{why}");
    }
    (&streams[2]).write_all(&encode(&enter(&[2, 0]))).unwrap();
    server.service();
    assert_eq!(ask(&mut server, &streams[1], &[Request::Leave]), [Reply::Done]);
    assert_eq!(ask(&mut server, &streams[0], &[enter(&[0, 2])]), [Reply::Done]);
    assert_eq!(read_reply(&streams[2]), Reply::Done);
    let reply = &ask(&mut server, &streams[0], &[enter(&[0, 1])])[0];
    assert!(matches!(reply, Reply::PeerGone { peer: 1, .. }), "{reply:?}");
}

#[test]
fn unannounced_descriptors_are_rejected() {
    let (mut server, streams) = Server::in_process(1, RUN).unwrap();
    ask(&mut server, &streams[0], &[hello(0, 1)]);
    let sender = super::super::socket::Connection::new(streams[0].try_clone().unwrap()).unwrap();
    sender.send(&encode(&set("a")), &[streams[0].as_fd(); 3]).unwrap();
    let told = rejections(&mut server);
    assert_eq!(told, [(1, "rank 0: sent 3 descriptors that no message announced".into())]);
    sender.stream().shutdown(Shutdown::Both).unwrap();
}

/// A hello with the token of `server`.
fn hello_to(server: &Server, rank: u32) -> Request {
    Request::Hello {
        version: VERSION,
        run_id: server.run_id.clone(),
        rank,
        world_size: server.world_size(),
        pid: std::process::id(),
        manifest: Manifest::default(),
    }
}

#[test]
fn a_flood_of_connections_is_reported_in_one_line_and_blocks_no_rank() {
    let (mut server, connect) = listening(2);
    let first = connect();
    server.service();
    // Its connection is the oldest one of the process with the most connections: it is closed.
    let silent: Vec<UnixStream> = (0..400).map(|_| connect()).collect();
    for _ in 0..400 / MAX_ACCEPTS_PER_CALL {
        server.service();
    }
    let told = rejections(&mut server);
    assert_eq!((told.len(), told[0].0), (1, 401 - 18), "{told:?}");
    let own =
        format!("process {}, which has not said hello: has 19 of 19 silent connections", std::process::id());
    assert!(told[0].1.starts_with(&own), "{}", told[0].1);
    assert!(refused(read_reply(&first)).starts_with("has 19 of 19 silent connections"));
    assert_eq!(server.peers.len(), 18);
    // Ranks can join in spite of the silent connections.
    let ranks = [0, 1].map(|rank| {
        let stream = connect();
        (&stream).write_all(&encode(&hello_to(&server, rank))).unwrap();
        server.service();
        stream
    });
    assert_eq!(ranks.each_ref().map(read_reply), [Reply::WELCOME, Reply::WELCOME]);
    drop(silent);
    server.service();
    assert_eq!(server.peers.len(), 2);
}

#[test]
fn a_process_that_floods_the_rendezvous_only_blocks_itself() {
    let (mut server, connect) = listening(1);
    let _of_another = connect();
    server.service();
    server.peers[0].pid = 1;
    let _silent: Vec<UnixStream> = (0..40).map(|_| connect()).collect();
    let told = rejections(&mut server);
    assert_eq!(told.len(), 1);
    assert!(told[0].1.contains("has 17 of 18 silent connections"), "{told:?}");
    let of_another = server.peers.iter().filter(|peer| peer.pid == 1);
    assert_eq!((of_another.count(), server.peers.len()), (1, 17));
}

#[test]
fn a_connection_without_a_hello_is_closed_after_a_timeout() {
    let (mut server, connect) = listening(2);
    let (first, silent) = (connect(), connect());
    server.service();
    assert!(server.next_deadline().is_some());
    (&first).write_all(&encode(&hello_to(&server, 0))).unwrap();
    server.service();
    for peer in &mut server.peers {
        peer.hello_by = Some(Instant::now());
    }
    let told = rejections(&mut server);
    assert_eq!(told.len(), 1);
    assert!(told[0].1.ends_with("was silent for 10s after it had connected"), "{}", told[0].1);
    assert!(refused(read_reply(&silent)).contains("silent for 10s"));
    assert_eq!(server.peers.len(), 1);
    // A rank that has said hello waits for the others without a limit.
    let second = connect();
    let hello = hello_to(&server, 1);
    assert_eq!(ask(&mut server, &second, &[hello]), [Reply::WELCOME]);
    assert_eq!(read_reply(&first), Reply::WELCOME);
    assert_eq!((server.peers.len(), server.next_deadline()), (2, None));
}

/// True if polling the server would return at once.
fn is_readable(server: &Server) -> bool {
    let mut fds: Vec<PollFd<'_>> =
        server.fds().into_iter().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
    poll(&mut fds, PollTimeout::ZERO).unwrap() > 0
}

/// Limits on descriptors belong to the process: this test runs itself in a separate process.
#[test]
fn without_descriptors_the_listener_does_not_spin() {
    const ALONE: &str = "MGPU_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        alone.args(["--exact", "rendezvous::server::tests::without_descriptors_the_listener_does_not_spin"]);
        let output = alone.env(ALONE, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let (mut server, connect) = listening(2);
    let streams = [connect(), connect(), connect()];
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let limit = |most| setrlimit(Resource::RLIMIT_NOFILE, most, hard).unwrap();

    // Only the reserved descriptor is free: every connection gets the reason, and it is reported once.
    let free = std::fs::File::open("/dev/null").unwrap();
    let first_free = std::os::fd::AsRawFd::as_raw_fd(&free) as u64;
    drop(free);
    limit(first_free);
    let told = rejections(&mut server);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].1.contains("os error 24") && told[0].1.contains("ulimit -n"), "{}", told[0].1);
    for stream in &streams {
        assert!(refused(read_reply(stream)).contains("ulimit -n"));
    }
    assert!(!is_readable(&server));

    // Not even that one is free: the listener is paused, and has a deadline to resume.
    limit(hard);
    let late = connect();
    limit(3);
    assert!(is_readable(&server));
    assert_eq!(server.service(), []);
    assert!(!is_readable(&server) && server.next_deadline().is_some());

    // Once descriptors are available, waiting connections are accepted.
    limit(hard);
    server.listener.as_mut().unwrap().end_pause();
    assert_eq!(server.service(), []);
    assert_eq!((server.peers.len(), server.fds().len()), (1, 2));
    drop(late);
}

/// A server without a launcher, and how to connect to it.
fn unattended(
    name: &str,
    world_size: u32,
    join_timeout: Duration,
) -> (Server, impl Fn() -> io::Result<UnixStream>) {
    let name = format!("mgpu-test-{name}-{}", std::process::id());
    let listener = Listener::bind_abstract(&name).unwrap();
    let server = Server::unattended(world_size, RUN, listener, Instant::now() + join_timeout).unwrap();
    (server, move || UnixStream::connect_addr(&SocketAddr::from_abstract_name(&name)?))
}

/// Says hello and expects no answer yet.
fn apply(server: &mut Server, mut stream: &UnixStream, rank: u32, world_size: u32) {
    stream.write_all(&encode(&hello(rank, world_size))).unwrap();
    server.service();
}

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn without_a_launcher_the_end_of_a_connection_is_the_end_of_its_rank() {
    let (mut server, connect) = unattended("ends", 3, LONG);
    let [first, second] = [0, 1].map(|rank| {
        let stream = connect().unwrap();
        apply(&mut server, &stream, rank, 3);
        stream
    });
    drop(second);
    server.service();
    let gone = Reply::PeerGone { peer: 1, how: "ended without a goodbye".into() };
    assert_eq!(read_reply(&first), gone);
    // A rank that joins later is told, too.
    let third = connect().unwrap();
    assert_eq!(ask(&mut server, &third, &[hello(2, 3)]), [gone]);
}

#[test]
fn without_a_launcher_a_goodbye_is_no_failure_and_the_name_is_free_once_all_have_joined() {
    let (mut server, connect) = unattended("leaves", 2, LONG);
    let [first, second] = [0, 1].map(|rank| {
        let stream = connect().unwrap();
        apply(&mut server, &stream, rank, 2);
        stream
    });
    assert_eq!([read_reply(&first), read_reply(&second)], [Reply::WELCOME, Reply::WELCOME]);
    assert_eq!(connect().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(ask(&mut server, &second, &[Request::Leave]), [Reply::Done]);
    drop(second);
    server.service();
    assert_eq!((server.page.state(1), server.is_needed()), (RankState::Left, true));
    drop(first);
    server.service();
    assert_eq!((server.page.state(0), server.is_needed()), (RankState::Failed, false));
}

#[test]
fn without_a_launcher_the_server_names_the_missing_ranks() {
    let (mut server, connect) = unattended("missing", 3, Duration::ZERO);
    let stream = connect().unwrap();
    assert_eq!(ask(&mut server, &stream, &[hello(1, 3)]), [Reply::TimedOut { missing: vec![0, 2] }]);
    assert_eq!(connect().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(server.next_deadline(), None);
}

/// The peer's next request may arrive while its last one is being answered, within one call of the server.
#[test]
fn back_to_back_requests_are_always_answered() {
    let ranks = in_process(2, RUN).unwrap();
    std::thread::scope(|scope| {
        for ((store, _), rank) in ranks.iter().zip(0..) {
            scope.spawn(move || {
                for number in 0..3000 {
                    let key = format!("{number} of {rank}");
                    store.set(&key, b"value", &[], 1).unwrap();
                    let (value, _) = store.get(&key, rank, LONG).unwrap();
                    assert_eq!(value, b"value");
                }
            });
        }
    });
}

#[test]
fn a_world_of_too_many_ranks_is_an_error() {
    let error = Server::bind(20_000, RUN).map(drop).unwrap_err().to_string();
    assert!(error.contains("20000 ranks; the maximum is 4096"), "{error}");
}
