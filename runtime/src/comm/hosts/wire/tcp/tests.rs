//! Wires of one process, and peers that send half of something.

use std::io::Write;
use std::net::TcpListener;

use super::*;
use crate::comm::hosts::frame::{FrameKind, HEADER_BYTES, Header};

const STAMP: Stamp = Stamp { epoch: 1, communicator: 2 };
const CALL: [u64; 4] = [3; 4];

fn connected() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    [near, far].map(|stream| {
        configure(&stream).unwrap();
        stream
    })
}

/// The wire of rank 0 of two, and the other ends of its streams to rank 1.
fn wire(streams: usize) -> (TcpWire, Vec<TcpStream>) {
    let (near, far) = (0..streams).map(|_| connected()).map(|[near, far]| (near, far)).unzip();
    let streams = Streams { by_rank: vec![Vec::new(), near], spinner: Spinner::new(0, 1) };
    (TcpWire::new(STAMP, streams), far)
}

fn transfer() -> Transfer<'static> {
    Transfer::new(2, 7, CALL, CALL)
}

/// Drives the wire until `done`, for at most 10 s.
fn drive<'a>(
    wire: &mut TcpWire,
    transfer: &mut Transfer<'a>,
    done: impl Fn(&TcpWire, &Transfer<'a>) -> bool,
) -> Result<(), BadFrame> {
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while !done(wire, transfer) {
        assert!(std::time::Instant::now() < deadline, "nothing happens");
        wire.advance(transfer)?;
        wire.poll(transfer, Duration::from_millis(1), &Watch::default())?;
    }
    Ok(())
}

fn data(position: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header::new(FrameKind::Data, 7, CALL).with_argument(position).with_payload(payload);
    [&header.encode(STAMP)[..], payload].concat()
}

fn bytes(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + seed) as u8).collect()
}

/// Posts of many lengths in both directions, with small frames between them.
#[test]
fn payloads_arrive_over_any_number_of_streams() {
    const LENS: [usize; 6] = [1, 300_000, 4096, 1 << 20, 262_144, 262_145];
    for streams in [1, 2, 3] {
        let (near, far) = wire(streams);
        let spinner = Spinner::new(1, u32::MAX);
        // The other end believes to be rank 1 as well: its peer is called 1, too.
        let far = TcpWire::new(STAMP, Streams { by_rank: vec![Vec::new(), far], spinner });
        std::thread::scope(|scope| {
            for (own, mut wire) in [near, far].into_iter().enumerate() {
                scope.spawn(move || {
                    let sent: Vec<Vec<u8>> = LENS.iter().map(|len| bytes(*len, own)).collect();
                    let mut received: Vec<Vec<u8>> = LENS.iter().map(|len| vec![0; *len]).collect();
                    for round in 0..3 {
                        let mut transfer = transfer();
                        sent.iter().for_each(|bytes| transfer.send(1, bytes));
                        received.iter_mut().for_each(|bytes| transfer.receive(1, bytes));
                        let header = Header::new(FrameKind::Arrival, round, CALL);
                        wire.sender().queue(1, header, &sent[2]);
                        drive(&mut wire, &mut transfer, |_, transfer| transfer.is_done_with(1)).unwrap();
                        drive(&mut wire, &mut transfer, |wire, _| !wire.received.is_empty()).unwrap();
                        let frame = wire.next_frame().unwrap();
                        assert_eq!((frame.header.sequence, frame.payload.len()), (round, LENS[2]));
                        assert_eq!(transfer.received_posts(1), LENS.len());
                        drop(transfer);
                        for (received, len) in received.iter_mut().zip(LENS) {
                            assert!(*received == bytes(len, 1 - own), "{len} bytes over {streams} streams");
                            received.fill(0);
                        }
                    }
                });
            }
        });
    }
}

/// What has arrived before the damage counts, and nothing of the damaged piece.
#[test]
fn a_damaged_piece_is_not_received() {
    for at in [5, HEADER_BYTES, HEADER_BYTES + 99_999] {
        let (mut wire, mut far) = wire(1);
        let (first, mut second) = (data(0, &bytes(100_000, 1)), data(100_000, &bytes(100_000, 2)));
        second[at] ^= 4;
        let mut memory = vec![0; 200_000];
        let mut transfer = transfer();
        transfer.receive(1, &mut memory);
        let sender = std::thread::spawn(move || {
            far[0].set_nonblocking(false).unwrap();
            far[0].write_all(&first).unwrap();
            far[0].write_all(&second).unwrap();
            far
        });
        let bad = drive(&mut wire, &mut transfer, |_, _| false).unwrap_err();
        assert_eq!((bad.from, transfer.received(), transfer.received_posts(1)), (1, 100_000, 0));
        assert!(bad.problem.contains("damaged on the way: "), "{}", bad.problem);
        sender.join().unwrap();
    }
}

#[test]
fn a_damaged_small_frame_is_rejected() {
    let (mut wire, mut far) = wire(1);
    let payload = bytes(1000, 0);
    let header = Header::new(FrameKind::Arrival, 1, CALL).with_payload(&payload);
    let mut frame = [&header.encode(STAMP)[..], &payload].concat();
    *frame.last_mut().unwrap() ^= 1;
    far[0].write_all(&frame).unwrap();
    let bad = drive(&mut wire, &mut transfer(), |_, _| false).unwrap_err();
    assert!(bad.problem.starts_with("1000 bytes of payload that were damaged on the way"), "{}", bad.problem);
    assert!(wire.next_frame().is_none());
}

#[test]
fn pieces_must_be_those_that_are_expected() {
    for (position, len, problem) in
        [(5, 10, "payload from byte 5 on, where byte 0 is next"), (0, 101, "a piece of 101 bytes, where 100")]
    {
        let (mut wire, mut far) = wire(1);
        far[0].write_all(&data(position, &bytes(len, 0))).unwrap();
        let mut memory = vec![0; 100];
        let mut transfer = transfer();
        transfer.receive(1, &mut memory);
        let bad = drive(&mut wire, &mut transfer, |_, _| false).unwrap_err();
        assert!(bad.problem.contains(problem), "{}", bad.problem);
    }
}

/// Frames may arrive in parts of any size.
#[test]
fn single_bytes_become_a_piece_and_a_frame() {
    let (mut wire, mut far) = wire(1);
    let payload = bytes(300, 0);
    let header = Header::new(FrameKind::Arrival, 1, CALL).with_payload(&payload);
    let frame = [&data(0, &payload)[..], &header.encode(STAMP), &payload].concat();
    let mut memory = vec![0; 300];
    let mut transfer = transfer();
    transfer.receive(1, &mut memory);
    for byte in frame {
        far[0].write_all(&[byte]).unwrap();
        wire.poll(&mut transfer, Duration::ZERO, &Watch::default()).unwrap();
    }
    drive(&mut wire, &mut transfer, |wire, _| !wire.received.is_empty()).unwrap();
    assert_eq!(wire.next_frame().unwrap().payload, payload);
    assert!(transfer.is_done_with(1));
    drop(transfer);
    assert_eq!(memory, payload);
}

/// A stream ends in the middle of a piece, of a header, and of nothing; or another one than that of the next piece does.
#[test]
fn a_stream_that_ends_is_the_end_of_its_peer() {
    let piece = data(0, &bytes(1000, 0));
    for (streams, ends, sent, how) in [
        (1, 0, &piece[..500], "closed its connection in the middle of a transfer"),
        (1, 0, &piece[..20], "closed its connection"),
        (2, 0, &[][..], "closed its connection"),
    ] {
        let (mut wire, mut far) = wire(streams);
        let mut memory = vec![0; 1000];
        let mut transfer = transfer();
        transfer.receive(1, &mut memory);
        far[ends].write_all(sent).unwrap();
        drop(far.remove(ends));
        drive(&mut wire, &mut transfer, |wire, _| wire.ended(1).is_some()).unwrap();
        assert_eq!(wire.ended(1).unwrap().how, how);
        assert_eq!(transfer.received(), 0);
    }
}

/// A peer that does not read keeps this rank neither from reading nor from an abort.
#[test]
fn an_abort_does_not_wait_for_a_peer_that_does_not_read() {
    let (mut wire, mut far) = wire(1);
    let payload = bytes(64 << 20, 0);
    let mut transfer = transfer();
    transfer.send(1, &payload);
    drive(&mut wire, &mut transfer, |wire, _| !wire.peers[1].full.is_empty()).unwrap();
    let header = Header::new(FrameKind::Arrival, 1, CALL).with_payload(b"hello");
    far[0].write_all(&[&header.encode(STAMP)[..], b"hello"].concat()).unwrap();
    drive(&mut wire, &mut transfer, |wire, _| !wire.received.is_empty()).unwrap();
    wire.sender().abort(Header::new(FrameKind::Abort, 0, CALL), b"");
    wire.sender().close(Duration::ZERO);
}
