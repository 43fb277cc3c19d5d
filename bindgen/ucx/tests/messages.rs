//! Two workers of one process, where a UCX is installed; and libraries that cannot be used.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use nvidia_libraries::SearchEnv;
use ucx_sys::{
    Context, EndpointId, LIBRARY_NAME, LIBRARY_VARIABLE, LIBRARY_WHEELS, Library, Request, Tested, UcxError,
    Worker,
};

/// More than any message that is sent before its receiver is known.
const LARGE: usize = 8 << 20;

fn context() -> Option<&'static Arc<Context>> {
    static CONTEXT: OnceLock<Option<Arc<Context>>> = OnceLock::new();
    let open = || match Library::open() {
        Ok(library) => Some(Context::new(&library, 4).unwrap()),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    };
    CONTEXT.get_or_init(open).as_ref()
}

/// Two workers, with an endpoint of each to the other.
fn pair() -> Option<[(Worker, EndpointId); 2]> {
    let context = context()?;
    let mut workers = [Worker::new(context).unwrap(), Worker::new(context).unwrap()];
    let addresses = workers.each_ref().map(|worker| worker.address().unwrap());
    // SAFETY: both are addresses of workers of this library.
    let [a, b] = [0, 1].map(|index| unsafe { workers[index].connect(&addresses[1 - index]) }.unwrap());
    let [first, second] = workers;
    Some([(first, a), (second, b)])
}

/// Progresses both workers until `done` returns a value.
fn drive<T>([a, b]: [&mut Worker; 2], mut done: impl FnMut(&mut Worker, &mut Worker) -> Option<T>) -> T {
    loop {
        let _ = (a.progress(), b.progress());
        if let Some(value) = done(a, b) {
            return value;
        }
    }
}

/// Tests a receive; keeps it if it is pending.
fn received(worker: &mut Worker, request: &mut Option<Request>) -> Option<Result<usize, UcxError>> {
    match worker.test_receive(request.take()?) {
        Tested::Done(result) => Some(result),
        Tested::Pending(pending) => {
            *request = Some(pending);
            None
        }
    }
}

/// The same for a send.
fn sent(worker: &mut Worker, request: &mut Option<Request>) -> Option<Result<(), UcxError>> {
    let Some(pending) = request.take() else { return Some(Ok(())) };
    match worker.test_send(pending) {
        Tested::Done(result) => Some(result),
        Tested::Pending(pending) => {
            *request = Some(pending);
            None
        }
    }
}

#[test]
fn messages_of_all_sizes_arrive() {
    let Some([(mut a, to_b), (mut b, _)]) = pair() else { return };
    for bytes in [0, 1, 64, 5000, 70_000, LARGE] {
        let message: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
        let mut memory = vec![0u8; bytes + 1];
        // SAFETY: the memory lives until the request is done.
        let mut receive = Some(unsafe { b.receive(7, memory.as_mut_ptr(), bytes + 1) }.unwrap());
        // SAFETY: as above.
        let mut send = unsafe { a.send(to_b, 7, message.as_ptr(), bytes) }.unwrap();
        let length = drive([&mut a, &mut b], |_, b| received(b, &mut receive)).unwrap();
        drive([&mut a, &mut b], |a, _| sent(a, &mut send)).unwrap();
        assert_eq!((length, &memory[..bytes]), (bytes, &message[..]));
    }
}

#[test]
fn a_message_is_found_by_the_bits_of_its_tag() {
    let Some([(mut a, to_b), (mut b, _)]) = pair() else { return };
    for tag in [0x15, 0x16] {
        // SAFETY: the memory is static.
        let mut send = unsafe { a.send(to_b, tag, b"hello".as_ptr(), 5) }.unwrap();
        drive([&mut a, &mut b], |a, _| sent(a, &mut send)).unwrap();
    }
    let message = drive([&mut a, &mut b], |_, b| b.probe(0x16, 0xff));
    assert_eq!((message.tag, message.bytes), (0x16, 5));
    let mut memory = [0u8; 3];
    // SAFETY: the memory lives until the request is done.
    let mut receive = Some(unsafe { b.receive_message(message, memory.as_mut_ptr(), 3) }.unwrap());
    let error = drive([&mut a, &mut b], |_, b| received(b, &mut receive)).unwrap_err();
    assert!(error.is_truncated(), "{error}");
    let message = drive([&mut a, &mut b], |_, b| b.probe(0x10, 0xf0));
    assert_eq!(message.tag, 0x15);
    let mut memory = [0u8; 5];
    // SAFETY: as above.
    let mut receive = Some(unsafe { b.receive_message(message, memory.as_mut_ptr(), 5) }.unwrap());
    drive([&mut a, &mut b], |_, b| received(b, &mut receive)).unwrap();
    assert_eq!(&memory, b"hello");
}

/// Neither operation has a counterpart, so both would last forever.
#[test]
fn operations_end_when_they_are_cancelled_or_closed() {
    let Some([(mut a, to_b), (mut b, _)]) = pair() else { return };
    let mut memory = vec![1u8; LARGE];
    // SAFETY: the memory lives until the request is done.
    let mut receive = Some(unsafe { a.receive(1, memory.as_mut_ptr(), 100) }.unwrap());
    a.cancel(receive.as_ref().unwrap());
    drive([&mut a, &mut b], |a, _| received(a, &mut receive)).unwrap_err();
    // SAFETY: as above.
    let mut send = unsafe { a.send(to_b, 2, memory.as_ptr(), LARGE) }.unwrap();
    assert!(send.is_some());
    for _ in 0..1000 {
        let _ = (a.progress(), b.progress());
    }
    a.close(to_b);
    drive([&mut a, &mut b], |a, _| sent(a, &mut send)).unwrap_err();
    // SAFETY: as above.
    let error = unsafe { a.send(to_b, 2, memory.as_ptr(), 1) }.unwrap_err();
    assert!(error.to_string().contains("ucp_tag_send_nbx failed"), "{error}");
}

#[test]
fn a_signal_ends_the_sleep_of_a_worker() {
    let Some([(mut a, _), _]) = pair() else { return };
    while !a.arm().unwrap() {
        a.progress();
    }
    a.signal();
    // There is something to progress again.
    assert!(!a.arm().unwrap());
}

fn only(library: impl Into<PathBuf>) -> SearchEnv {
    SearchEnv { explicit: Some(library.into()), ..SearchEnv::empty(LIBRARY_NAME, LIBRARY_WHEELS) }
}

#[test]
fn libraries_that_cannot_be_used_are_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join(LIBRARY_NAME);
    fs::write(&text, "not an ELF file").unwrap();
    for (library, reason) in [
        ("/nowhere/libucp.so.0".into(), "cannot open shared object file"),
        ("libc.so.6".into(), "not a UCX library"),
        (text, "libucp.so.0: "),
    ] {
        let error = Library::open_in(&only(library)).unwrap_err();
        assert_eq!(error.attempts.len(), 1);
        let text = error.to_string();
        assert!(text.contains(reason) && text.contains(&format!("correct {LIBRARY_VARIABLE}")), "{text}");
        assert_eq!(text.lines().count(), 1);
    }
    let nowhere = SearchEnv::empty("libucp-of-no-machine.so.0", LIBRARY_WHEELS);
    let text = Library::open_in(&nowhere).unwrap_err().to_string();
    for expected in ["libucp-of-no-machine.so.0", "apt install libucx0", "pip install libucx-cu12"] {
        assert!(text.contains(expected), "{text}");
    }
}
