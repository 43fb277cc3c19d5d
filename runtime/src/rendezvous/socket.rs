//! One end of a connection: bytes and descriptors in, frames and descriptors out.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;

use super::message::{Decoder, MAX_FDS};

/// Most descriptors held for messages that have not arrived whole.
const MAX_PENDING_FDS: usize = 4 * MAX_FDS;

/// A connection that speaks frames.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    decoder: Decoder,
    fds: VecDeque<OwnedFd>,
}

/// What one read brought.
pub(super) enum Received {
    /// Some bytes.
    Bytes,
    /// Nothing for now (non-blocking socket, or the read timeout passed).
    Nothing,
    /// The other side is gone.
    End,
}

impl Connection {
    pub(super) fn new(stream: UnixStream) -> Self {
        Connection { stream, decoder: Decoder::default(), fds: VecDeque::new() }
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a whole frame with its descriptors. On a non-blocking socket a full buffer is an error: each side
    /// has at most one small frame under way, so only a peer that does not read fills it.
    pub(super) fn send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let raw: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let mut sent = 0;
        while sent < frame.len() {
            // Descriptors go with the first byte of the frame and only with that.
            let control = if sent == 0 && !raw.is_empty() { &rights[..] } else { &[] };
            let bytes = [IoSlice::new(&frame[sent..])];
            match sendmsg::<()>(self.stream.as_raw_fd(), &bytes, control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Reads once.
    pub(super) fn receive(&mut self) -> io::Result<Received> {
        let mut bytes = [0u8; 16 << 10];
        let mut control = nix::cmsg_space!([i32; MAX_FDS]);
        let count = loop {
            let mut buffers = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            match recvmsg::<()>(self.stream.as_raw_fd(), &mut buffers, Some(&mut control), flags) {
                Ok(message) => {
                    for item in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(received) = item {
                            // SAFETY: the kernel has just installed these descriptors for us alone.
                            let owned = received.iter().map(|fd| unsafe { OwnedFd::from_raw_fd(*fd) });
                            self.fds.extend(owned);
                        }
                    }
                    break message.bytes;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(Received::Nothing),
                Err(Errno::ECONNRESET) => return Ok(Received::End),
                Err(errno) => return Err(errno.into()),
            }
        };
        if count == 0 {
            return Ok(Received::End);
        }
        if self.fds.len() > MAX_PENDING_FDS {
            return Err(io::Error::other("more descriptors than any message has"));
        }
        self.decoder.push(&bytes[..count]);
        Ok(Received::Bytes)
    }

    /// The next whole message, if there is one.
    pub(super) fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        self.decoder.next_message()
    }

    /// The `count` descriptors that came with the message just taken.
    pub(super) fn take_fds(&mut self, count: u32) -> Result<Vec<OwnedFd>, String> {
        let count = count as usize;
        if count > self.fds.len() {
            return Err(format!("announced {count} descriptors and sent {}", self.fds.len()));
        }
        Ok(self.fds.drain(..count).collect())
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
