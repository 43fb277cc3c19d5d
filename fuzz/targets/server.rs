//! Tests the server against arbitrary peers: several connections that send anything in any order, with announced or
//! unannounced descriptors, that close, and whose ranks end. The server answers or refuses, leaks no descriptor and
//! never stops serving.
#![no_main]

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use mgpu_control::rendezvous::message::{Decoder, Manifest, Reply, Request, VERSION, encode};
use mgpu_control::rendezvous::{ProcessEnd, Server};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

const RANKS: u32 = 3;
const RUN: &str = "run";

/// An action of connection `peer`, or an event of the run.
#[derive(Debug, Arbitrary)]
enum Step<'a> {
    /// It says a valid hello.
    Hello {
        peer: u8,
    },
    /// It says hello with arbitrary contents.
    Claim {
        peer: u8,
        version: u32,
        run_id: &'a str,
        rank: u32,
        world_size: u32,
    },
    Set {
        peer: u8,
        key: u8,
        bytes: u16,
        announced: u8,
        sent: u8,
        readers: u8,
    },
    Get {
        peer: u8,
        key: u8,
        from: u8,
        timeout: u8,
    },
    Barrier {
        peer: u8,
        name: u8,
        /// A bit for each participant; 0 for all ranks.
        ranks: u8,
        timeout: u8,
    },
    Leave {
        peer: u8,
    },
    /// It sends arbitrary bytes with arbitrary descriptors.
    Bytes {
        peer: u8,
        bytes: &'a [u8],
        fds: u8,
    },
    /// It sends a frame with an arbitrary text.
    Frame {
        peer: u8,
        text: &'a str,
    },
    /// It reads the replies.
    Read {
        peer: u8,
    },
    /// It sends no more.
    Close {
        peer: u8,
    },
    /// The process of a rank ends.
    Gone {
        rank: u8,
        how: Option<&'a str>,
    },
    /// The server is called.
    Serve,
}

/// A timeout in milliseconds: zero, or longer than anything here takes.
fn timeout(choice: u8) -> u64 {
    if choice % 2 == 0 { 0 } else { u64::MAX - u64::from(choice) }
}

/// Sends bytes with `fds` descriptors; they are lost if the peer's buffer is full.
fn send(stream: &UnixStream, bytes: &[u8], fds: u8) {
    let raw = vec![stream.as_raw_fd(); usize::from(fds % 8)];
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights };
    let parts = [std::io::IoSlice::new(bytes)];
    if !bytes.is_empty() {
        let sent =
            sendmsg::<()>(stream.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None).unwrap_or(0);
        let _ = (&*stream).write(&bytes[sent..]);
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc can be read").count()
}

fn request(stream: &UnixStream, request: &Request, fds: u8) {
    send(stream, &encode(request), fds);
}

fn run(steps: &[Step<'_>]) {
    let (mut server, streams) = Server::in_process(RANKS, RUN).expect("sockets and a page");
    let mut decoders: Vec<Decoder> = streams.iter().map(|_| Decoder::default()).collect();
    for stream in &streams {
        stream.set_nonblocking(true).expect("a socket");
    }
    let stream = |peer: u8| &streams[usize::from(peer) % streams.len()];
    for step in steps {
        match *step {
            Step::Hello { peer } => {
                let rank = u32::from(peer) % RANKS;
                let hello =
                    Request::Hello { version: VERSION, run_id: RUN.into(), rank, world_size: RANKS, pid: 1, manifest: Manifest::default() };
                request(stream(peer), &hello, 0);
            }
            Step::Claim { peer, version, run_id, rank, world_size } => {
                let run_id = run_id.chars().take(64).collect();
                request(stream(peer), &Request::Hello { version, run_id, rank, world_size, pid: rank, manifest: Manifest::default() }, 0);
            }
            Step::Set { peer, key, bytes, announced, sent, readers } => {
                let value = vec![key; usize::from(bytes) % (13 << 10)];
                let (fds, readers) = (u32::from(announced % 8), u32::from(readers % 5));
                let (key, sent) = ((key % 4).to_string(), if sent < 200 { announced } else { sent });
                request(stream(peer), &Request::Set { key, value, fds, readers }, sent);
            }
            Step::Get { peer, key, from, timeout: choice } => {
                let (key, from) = ((key % 4).to_string(), u32::from(from % 4));
                request(stream(peer), &Request::Get { key, from, timeout_ms: timeout(choice) }, 0);
            }
            Step::Barrier { peer, name, ranks, timeout: choice } => {
                let (name, timeout_ms) = ((name % 3).to_string(), timeout(choice));
                let ranks = (ranks != 0).then(|| (0..8).filter(|rank| ranks >> rank & 1 == 1).collect());
                request(stream(peer), &Request::Barrier { name, ranks, timeout_ms }, 0);
            }
            Step::Leave { peer } => request(stream(peer), &Request::Leave, 0),
            Step::Bytes { peer, bytes, fds } => send(stream(peer), bytes, fds),
            Step::Frame { peer, text } => {
                send(stream(peer), &[&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat(), 0);
            }
            Step::Read { peer } => {
                let (mut bytes, index) = ([0; 4096], usize::from(peer) % streams.len());
                while let Ok(count @ 1..) = (&streams[index]).read(&mut bytes) {
                    decoders[index].push(&bytes[..count]);
                    while decoders[index]
                        .next_message::<Reply>()
                        .expect("the server speaks the protocol")
                        .is_some()
                    {}
                }
            }
            Step::Close { peer } => _ = stream(peer).shutdown(Shutdown::Write),
            Step::Gone { rank, how } => {
                let how = how.map_or(ProcessEnd::Finished, |how| ProcessEnd::Failed(how.to_owned()));
                server.rank_ended(u32::from(rank) % RANKS, how);
            }
            Step::Serve => _ = server.service(),
        }
    }
    let fds: Vec<BorrowedFd<'_>> = server.fds();
    assert!(fds.len() <= streams.len());
    // After another call no deadline has passed.
    let now = Instant::now();
    server.service();
    assert!(server.next_deadline().is_none_or(|deadline| deadline > now));
    for stream in &streams {
        stream.shutdown(Shutdown::Both).expect("a socket");
    }
    // The server makes at most 16 reads per call and peer.
    for _ in 0..1000 {
        if server.fds().is_empty() {
            return;
        }
        server.service();
    }
    panic!("the server keeps peers that have disconnected");
}

fuzz_target!(|steps: Vec<Step<'_>>| {
    let before = open_descriptors();
    run(&steps);
    assert_eq!(open_descriptors(), before, "descriptors were left open");
});
