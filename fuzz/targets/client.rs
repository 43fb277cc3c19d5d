//! Tests the client against an arbitrary server: the replies may be anything. Every call returns an error or a value,
//! and no descriptor is leaked.
#![no_main]

use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;
use mgpu_control::rendezvous::message::{Reply, encode};
use mgpu_control::rendezvous::{Server, Store};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// A message of the server.
#[derive(Debug, Arbitrary)]
enum Answer<'a> {
    Welcome { fds: u8 },
    Done,
    Value { bytes: u8, announced: u8, sent: u8 },
    TimedOut { missing: Vec<u32> },
    PeerGone { peer: u32, how: &'a str },
    Refused { why: &'a str },
    Denied { why: &'a str },
    Frame { text: &'a str, fds: u8 },
    Bytes { bytes: &'a [u8], fds: u8 },
}

/// A real progress page, which a correct server sends with its welcome.
fn page() -> &'static std::os::fd::OwnedFd {
    static PAGE: OnceLock<std::os::fd::OwnedFd> = OnceLock::new();
    PAGE.get_or_init(|| {
        use nix::sys::socket::{ControlMessageOwned, recvmsg};
        use std::io::Write;
        use std::os::fd::{FromRawFd, OwnedFd};
        let (mut server, streams) = Server::in_process(1, "run").expect("sockets and a page");
        let hello = mgpu_control::rendezvous::message::Request::Hello {
            version: mgpu_control::rendezvous::message::VERSION,
            run_id: "run".into(),
            rank: 0,
            world_size: 1,
            pid: 1,
            manifest: Default::default(),
        };
        (&streams[0]).write_all(&encode(&hello)).expect("room for a hello");
        server.service();
        let mut bytes = [0; 4096];
        let mut parts = [std::io::IoSliceMut::new(&mut bytes)];
        let mut control = nix::cmsg_space!([i32; 1]);
        let message =
            recvmsg::<()>(streams[0].as_raw_fd(), &mut parts, Some(&mut control), MsgFlags::empty());
        let message = message.expect("a welcome");
        let Some(ControlMessageOwned::ScmRights(fds)) = message.cmsgs().expect("a page").next() else {
            panic!("no page")
        };
        // SAFETY: the kernel has just installed this descriptor, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(fds[0]) }
    })
}

fn send(stream: &UnixStream, bytes: &[u8], fds: u8) {
    let raw = vec![page().as_fd().as_raw_fd(); usize::from(fds % 8)];
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights };
    if !bytes.is_empty() {
        let parts = [std::io::IoSlice::new(bytes)];
        let _ = sendmsg::<()>(stream.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None);
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc can be read").count()
}

fn run(answers: &[Answer<'_>]) {
    let (ours, theirs) = UnixStream::pair().expect("sockets");
    theirs.set_nonblocking(true).expect("a socket");
    for answer in answers {
        // No server sends longer texts: `encode` panics if a message does not fit into a frame.
        let cut = |text: &str| -> String { text.chars().take(1000).collect() };
        let (reply, fds) = match answer {
            Answer::Welcome { fds } => (Reply::WELCOME, if *fds < 200 { 1 } else { *fds }),
            Answer::Done => (Reply::Done, 0),
            Answer::Value { bytes, announced, sent } => {
                let fds = if *sent < 200 { *announced } else { *sent };
                (Reply::Value { value: vec![7; usize::from(*bytes)], fds: u32::from(announced % 8) }, fds)
            }
            Answer::TimedOut { missing } => {
                (Reply::TimedOut { missing: missing.iter().take(4000).copied().collect() }, 0)
            }
            Answer::PeerGone { peer, how } => (Reply::PeerGone { peer: *peer, how: cut(how) }, 0),
            Answer::Refused { why } => (Reply::Refused { why: cut(why) }, 0),
            Answer::Denied { why } => (Reply::Denied { why: cut(why) }, 0),
            Answer::Frame { text, fds } => {
                send(&theirs, &[&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat(), *fds);
                continue;
            }
            Answer::Bytes { bytes, fds } => {
                send(&theirs, bytes, *fds);
                continue;
            }
        };
        send(&theirs, &encode(&reply), fds);
    }
    // The server sends no more: a client that waits for more gets end of file.
    theirs.shutdown(std::net::Shutdown::Write).expect("a socket");
    let Ok((store, _page)) = Store::join_through(ours, "run", 0, 1) else { return };
    for number in 0.. {
        let timeout = Duration::from_millis(1);
        let result = match number % 4 {
            0 => store.set("key", b"value", &[], 1),
            1 => store.get("key", 0, timeout).map(drop),
            2 => store.barrier("barrier", timeout),
            _ => store.set("key", b"value", &[page().as_fd()], 1),
        };
        if number > answers.len() {
            assert!(result.is_err(), "a reply that was never sent: call {number} after {answers:?}");
            return;
        }
    }
}

fuzz_target!(|answers: Vec<Answer<'_>>| {
    page();
    let before = open_descriptors();
    run(&answers);
    assert_eq!(open_descriptors(), before, "descriptors were left open");
});
