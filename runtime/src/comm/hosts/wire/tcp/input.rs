//! What has arrived over one stream from a peer, and was not used yet.
//!
//! Small frames go through a buffer. The payload of a piece is read directly to where it belongs, together with the
//! header of the next frame. It counts as received when all of the piece is there and its checksum fits.

use std::io::{ErrorKind, IoSliceMut, Read};
use std::net::TcpStream;

use super::dead_link::Link;
use crate::comm::hosts::frame::{FrameKind, HEADER_BYTES, Header, SMALL_BYTES, Stamp};
use crate::comm::hosts::transfer::Transfer;
use crate::comm::hosts::wire::{Ended, Frame};

/// Size of the memory for bytes that have no other place. It grows when a longer frame arrives.
const INPUT_BYTES: usize = 2 * SMALL_BYTES;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Input {
    /// Bytes `begin..end` were read and not used.
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// The piece that is being received, and how many of its bytes are there.
    piece: Option<(Header, usize)>,
    /// The next frame is a piece for which nothing is posted, or whose turn has not come.
    pub(super) stalled: bool,
    pub(super) ended: Option<Ended>,
    pub(super) link: Link,
}

/// Which payload comes next from a peer: pieces are distributed over the streams in turn.
#[derive(Default)]
pub(super) struct Turn {
    /// The stream that carries the next piece.
    pub(super) stream: usize,
    /// Bytes of payload before it.
    pub(super) position: u64,
}

impl Turn {
    /// After a piece of `bytes` bytes.
    pub(super) fn advance(&mut self, bytes: usize, streams: usize) {
        self.position += bytes as u64;
        self.stream = (self.stream + 1) % streams;
    }
}

/// Where a stream belongs, and how its bytes are to be understood.
pub(super) struct Place {
    pub(super) peer: u32,
    /// Index of the stream, and the number of streams.
    pub(super) stream: usize,
    pub(super) streams: usize,
    pub(super) stamp: Stamp,
}

impl Input {
    pub(super) fn available(&self) -> usize {
        self.end - self.begin
    }

    /// Notes how the connection has ended, unless that is known.
    fn end(&mut self, how: impl FnOnce() -> String) {
        self.ended.get_or_insert_with(|| Ended::now(how()));
    }

    /// Reads more bytes, if there is room: into the target of the current piece, if it has one, and into the buffer.
    /// Returns how many.
    pub(super) fn read(&mut self, peer: u32, mut stream: &TcpStream, transfer: &mut Transfer<'_>) -> usize {
        if self.buffer.is_empty() {
            self.buffer.resize(INPUT_BYTES, 0);
        }
        self.buffer.copy_within(self.begin..self.end, 0);
        (self.begin, self.end) = (0, self.available());
        let target: &mut [u8] = match (&self.piece, transfer.target(peer)) {
            (Some((header, have)), Some(target)) if self.end == 0 => {
                target.get_mut(*have..header.length as usize).unwrap_or_default()
            }
            _ => &mut [],
        };
        let wanted = target.len();
        // Behind a piece only the header of the next one is read, since its payload has a place of its own.
        let room = if wanted > 0 { HEADER_BYTES } else { self.buffer.len() };
        let room = &mut self.buffer[self.end..room];
        if wanted + room.len() == 0 {
            return 0;
        }
        match stream.read_vectored(&mut [IoSliceMut::new(target), IoSliceMut::new(room)]) {
            Ok(0) if wanted > 0 => self.end(|| "closed its connection in the middle of a transfer".into()),
            Ok(0) => self.end(|| "closed its connection".into()),
            Ok(bytes) => {
                self.end += bytes.saturating_sub(wanted);
                if let Some((_, have)) = &mut self.piece {
                    *have += bytes.min(wanted);
                }
                return bytes;
            }
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(error) => self.end(|| format!("has lost its connection ({error})")),
        }
        0
    }

    /// Uses what was read as far as possible. Adds small frames to `received`.
    ///
    /// # Errors
    /// If something is invalid.
    pub(super) fn parse(
        &mut self,
        place: &Place,
        turn: &mut Turn,
        transfer: &mut Transfer<'_>,
        received: &mut impl Extend<Frame>,
    ) -> Result<(), String> {
        self.stalled = false;
        loop {
            let goes_on = match self.piece {
                Some(piece) => self.continue_piece(piece, place, turn, transfer)?,
                None => self.take_frame(place, turn, transfer, received)?,
            };
            if !goes_on {
                return Ok(());
            }
        }
    }

    /// Copies bytes of the current piece to where they belong, and checks it at its end. Returns whether it is complete.
    fn continue_piece(
        &mut self,
        (header, mut have): (Header, usize),
        place: &Place,
        turn: &mut Turn,
        transfer: &mut Transfer<'_>,
    ) -> Result<bool, String> {
        let length = header.length as usize;
        let target = transfer.target(place.peer).and_then(|target| target.get_mut(..length));
        let target = target.ok_or("a piece for which there is no memory any more")?;
        let count = self.available().min(length - have);
        target[have..have + count].copy_from_slice(&self.buffer[self.begin..self.begin + count]);
        self.begin += count;
        have += count;
        self.piece = Some((header, have));
        if have < length {
            return Ok(false);
        }
        header.check_payload(target)?;
        transfer.fill(place.peer, length);
        turn.advance(length, place.streams);
        self.piece = None;
        Ok(true)
    }

    /// Takes the next frame, or begins the next piece. Returns whether there was one.
    fn take_frame(
        &mut self,
        place: &Place,
        turn: &Turn,
        transfer: &mut Transfer<'_>,
        received: &mut impl Extend<Frame>,
    ) -> Result<bool, String> {
        let bytes = &self.buffer[self.begin..self.end];
        let Some((header, behind)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(false) };
        let header = Header::decode(header, place.stamp)?;
        let length = header.length as usize;
        if header.kind == FrameKind::Data {
            self.stalled = place.stream != turn.stream || !transfer.expects_from(place.peer);
            if self.stalled {
                return Ok(false);
            }
            transfer.check(&header)?;
            check_place(&header, turn, transfer.target(place.peer).map_or(0, |target| target.len()))?;
            self.piece = Some((header, 0));
            self.begin += HEADER_BYTES;
            return Ok(true);
        }
        if place.stream > 0 {
            return Err(format!("a frame of kind {:?} on stream {}", header.kind, place.stream));
        }
        let Some(payload) = behind.get(..length) else {
            if self.buffer.len() < HEADER_BYTES + length {
                self.buffer.resize(HEADER_BYTES + length, 0);
            }
            return Ok(false);
        };
        header.check_payload(payload)?;
        received.extend([Frame { from: place.peer, header, payload: payload.to_vec() }]);
        self.begin += HEADER_BYTES + length;
        Ok(true)
    }
}

/// Checks that a piece is the next one, and that the next `room` bytes of memory are for it.
fn check_place(header: &Header, turn: &Turn, room: usize) -> Result<(), String> {
    let length = header.length as usize;
    if header.argument != turn.position {
        return Err(format!(
            "payload from byte {} on, where byte {} is next",
            header.argument, turn.position
        ));
    }
    if length == 0 || length > room {
        return Err(format!("a piece of {length} bytes, where {room} are expected"));
    }
    Ok(())
}
