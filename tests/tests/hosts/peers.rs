//! Whoever else connects to the coordinator, or answers in its place. They are Python programs on a host of their own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use mgpu_tests::hosts::Hosts;

use super::job::{Job, SLEEP, expect_all};

/// A program that prints a line when it is ready, and runs until its host does.
struct Peer {
    program: Child,
}

impl Peer {
    #[track_caller]
    fn start(hosts: &Hosts, host: usize, script: &str) -> Self {
        let mut python = hosts.command(host, "python3");
        let mut program = python.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(program.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "the program has failed");
        Peer { program }
    }

    /// Ends it.
    fn stop(mut self, hosts: &Hosts) {
        let _ = nix::sys::signal::kill(hosts.program(&self.program), nix::sys::signal::Signal::SIGKILL);
        self.program.wait().unwrap();
    }
}

/// Connects as soon as the coordinator listens.
const CONNECT: &str = "
import os, socket, struct, sys, threading, time
def connect(to=('a', 29400)):
    while True:
        try:
            return socket.create_connection(to)
        except ConnectionRefusedError:
            time.sleep(0.01)
def ready():
    print('ready', flush=True)
    time.sleep(1000)
";

#[test]
fn unauthenticated_peers_do_not_disturb_a_job() {
    let Some(hosts) = Hosts::start(3) else { return };
    let script = "
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
kept = [connect() for _ in range(1000)]
for text in [b'GET / HTTP/1.0\\r\\n\\r\\n', os.urandom(5000), b'\\0' * 3, b'mgpurun-nodes ' + b'1' * 500]:
    peer = connect()
    peer.sendall(text)
    kept.append(peer)
# Reset.
for _ in range(10):
    peer = connect()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    peer.sendall(b'mgpurun')
    peer.close()
# Another version is told which one this is.
peer = connect()
peer.sendall(b'mgpurun-nodes 7 9.9.9 anything\\n')
assert peer.makefile('rb').readline().startswith(b'mgpurun-nodes 1 ')
# Without a credential, or with a wrong packet.
for packet in [b'A\\0\\0', b'A\\xff\\xff', b'R\\0\\4what', b'A\\0\\x30' + os.urandom(48)]:
    peer = connect()
    hello = b'mgpurun-nodes 1 0.1.0 secret ' + b'0' * 32 + b' ' + b'1' * 32 + b'\\n'
    peer.sendall(hello)
    answer = peer.makefile('rb').readline().split()
    peer.close()
    peer = connect()
    peer.sendall(b' '.join(answer[:5]) + b' ' + b'2' * 32 + b'\\n' + packet)
    kept.append(peer)
# One byte at a time.
def crawl():
    peer = connect()
    for byte in b'mgpurun-nodes 1 0.1.0 secret ':
        try:
            peer.sendall(bytes([byte]))
        except OSError:
            break
        time.sleep(0.05)
threading.Thread(target=crawl, daemon=True).start()
ready()
";
    let mut job = Job::new(&hosts);
    job.add(0, &["-n", "1", "--nnodes", "2"], &["echo", "undisturbed"]);
    let peer = Peer::start(&hosts, 2, &format!("{CONNECT}{script}"));
    job.add(1, &["-n", "1", "--nnodes", "2"], &["echo", "undisturbed"]);
    for host in [0, 1] {
        job.finish_one(host).expect(0, &["undisturbed"]);
    }
    peer.stop(&hosts);
}

#[test]
fn nodes_without_the_secret_are_rejected_with_their_own_exit_code() {
    let Some(hosts) = Hosts::start(3) else { return };
    let options = ["-n", "1", "--nnodes", "2"];
    let mut job = Job::new(&hosts);
    job.add(0, &options, &["echo", "undisturbed"]);
    let mut wrong = job.command(2, &options, &["true"]);
    wrong.env("MGPU_SECRET", "another secret of the tests");
    job.spawn(2, wrong);
    job.finish_one(2).expect(72, &["the secrets differ", "MGPU_SECRET"]);
    let mut open = job.command(2, &[&options[..], &["--auth", "none"]].concat(), &["true"]);
    open.env_remove("MGPU_SECRET");
    job.spawn(2, open);
    job.finish_one(2).expect(72, &["authentication by `secret`, here it is `none`"]);
    let mut without = job.command(2, &options, &["true"]);
    without.env_remove("MGPU_SECRET");
    job.spawn(2, without);
    let finished = job.finish_one(2);
    assert!(finished.code != Some(0) && finished.stderr.contains("MGPU_SECRET"), "{finished:#?}");
    job.add(1, &options, &["echo", "undisturbed"]);
    let finished = job.finish();
    expect_all(&finished, 0, &["undisturbed"]);
    assert!(!finished[0].stderr.contains("another secret"), "{finished:#?}");
}

#[test]
fn a_recorded_connection_is_worthless() {
    let Some(hosts) = Hosts::start(3) else { return };
    // Passes bytes on between node 1 and the coordinator, and sends those of node 1 again.
    let script = "
listener = socket.create_server(('', 29400), family=socket.AF_INET6, dualstack_ipv6=True)
def serve():
    node, _ = listener.accept()
    coordinator = connect()
    recorded = []
    def pass_on(source, sink, record):
        while data := source.recv(65536):
            record.append(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    threading.Thread(target=pass_on, args=(coordinator, node, []), daemon=True).start()
    threading.Thread(target=pass_on, args=(node, coordinator, recorded), daemon=True).start()
    time.sleep(0.3)
    again = connect()
    again.sendall(b''.join(recorded))
    answer = again.makefile('rb')
    assert answer.readline().startswith(b'mgpurun-nodes 1 ')
    assert answer.read(1) == b'R', 'a recorded connection was accepted'
    open(os.environ['REPLAYED'], 'w').close()
threading.Thread(target=serve, daemon=True).start()
ready()
";
    let folder = tempfile::tempdir().unwrap();
    let replayed = folder.path().join("replayed");
    let script = format!("{CONNECT}os.environ['REPLAYED'] = {:?}\n{script}", replayed.to_str().unwrap());
    let peer = Peer::start(&hosts, 2, &script);
    let mut job = Job::new(&hosts);
    job.add(0, &["-n", "1", "--nnodes", "2"], &SLEEP);
    job.add(1, &["-n", "1", "--nnodes", "2", "--rdzv-endpoint", "c:29400"], &SLEEP);
    job.wait_for_ranks(2);
    job.wait_until(|_| replayed.exists());
    job.interrupt(0);
    for host in [0, 1] {
        job.finish_one(host).expect(130, &["stopped by SIGINT"]);
    }
    peer.stop(&hosts);
}

#[test]
fn whoever_else_listens_at_the_endpoint_is_described() {
    let Some(hosts) = Hosts::start(2) else { return };
    let listener = |answer: &str| {
        let script = format!(
            "
listener = socket.create_server(('', 29400), family=socket.AF_INET6, dualstack_ipv6=True)
def serve():
    while True:
        peer, _ = listener.accept()
        peer.recv(1)
        peer.sendall({answer})
threading.Thread(target=serve, daemon=True).start()
ready()
"
        );
        Peer::start(&hosts, 0, &format!("{CONNECT}{script}"))
    };
    for (answer, code, text) in [
        ("b'HTTP/1.1 400 Bad Request\\r\\n\\r\\n'", 64, "is not mgpurun, it is an HTTP server"),
        ("b'SSH-2.0-OpenSSH_9.2\\r\\n'", 64, "SSH"),
        ("b'mgpurun-nodes 7 9.9.9 anything\\n'", 73, "is mgpurun 9.9.9 with version 7"),
    ] {
        let peer = listener(answer);
        let mut job = Job::new(&hosts);
        job.add(1, &["-n", "1", "--node-rank", "1", "--timeout", "3"], &["true"]);
        job.finish_one(1).expect(code, &[text, "a"]);
        peer.stop(&hosts);
    }
}

#[test]
fn the_coordinator_of_another_job_is_not_joined() {
    let Some(hosts) = Hosts::start(2) else { return };
    let mut job = Job::new(&hosts);
    job.add(0, &["-n", "1", "--rdzv-id", "one"], &["echo", "joined"]);
    job.add(1, &["-n", "1", "--rdzv-id", "two", "--timeout", "3"], &["true"]);
    let finished = job.finish_one(1);
    finished.expect(64, &["belongs to another run", "--rdzv-id"]);
    job.add(1, &["-n", "1", "--rdzv-id", "one"], &["echo", "joined"]);
    expect_all(&job.finish(), 0, &["joined"]);
}
