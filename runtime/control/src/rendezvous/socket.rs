//! One end of a connection: assembles received bytes and descriptors into messages, and sends frames with descriptors.
//!
//! The socket is non-blocking. The server reads the available bytes and continues with the next peer. A rank waits in
//! `poll` until its deadline; a signal only makes it check the clock again.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, recv, sendmsg};
use serde::de::DeserializeOwned;

use super::message::{Decoder, MAX_FDS};
use super::rights;

/// Maximum number of descriptors held for incomplete messages.
const MAX_PENDING_FDS: usize = 4 * MAX_FDS;

/// A connection that exchanges frames.
#[derive(Debug)]
pub(super) struct Connection {
    stream: UnixStream,
    decoder: Decoder,
    fds: VecDeque<OwnedFd>,
}

/// The result of one read.
#[derive(Debug, PartialEq)]
pub(super) enum Received {
    /// Some bytes.
    Bytes,
    /// Nothing for now.
    Nothing,
    /// The other side has closed the connection.
    End,
}

impl Connection {
    /// Takes a stream and makes it non-blocking. Returns the stream if that fails.
    pub(super) fn new(stream: UnixStream) -> Result<Self, (UnixStream, io::Error)> {
        if let Err(error) = stream.set_nonblocking(true) {
            return Err((stream, error));
        }
        Ok(Connection { stream, decoder: Decoder::default(), fds: VecDeque::new() })
    }

    pub(super) fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends a whole frame with its descriptors. A full buffer is an error: each side has at most one small frame in
    /// flight, so only a peer that does not read can fill it.
    pub(super) fn send(&self, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_when(frame, fds, || Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Sends a whole frame with its descriptors. Waits until `deadline` for a slow reader.
    pub(super) fn send_before(
        &self,
        frame: &[u8],
        fds: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        self.send_when(frame, fds, || match self.is_ready(PollFlags::POLLOUT, deadline)? {
            true => Ok(()),
            false => Err(io::ErrorKind::TimedOut.into()),
        })
    }

    /// Sends a whole frame; calls `full` whenever the buffer is full.
    fn send_when(
        &self,
        frame: &[u8],
        fds: &[BorrowedFd<'_>],
        full: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        let raw: Vec<i32> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let mut sent = 0;
        while sent < frame.len() {
            // Descriptors are sent with the first byte of the frame only.
            let control = if sent == 0 && !raw.is_empty() { &rights[..] } else { &[] };
            let bytes = [IoSlice::new(&frame[sent..])];
            match sendmsg::<()>(self.stream.as_raw_fd(), &bytes, control, MsgFlags::MSG_NOSIGNAL, None) {
                Ok(count) => sent += count,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => full()?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Reads once.
    pub(super) fn receive(&mut self) -> io::Result<Received> {
        let mut bytes = [0u8; 16 << 10];
        let arrival = match rights::receive(self.stream.as_fd(), &mut bytes) {
            Ok(arrival) => arrival,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Received::Nothing),
            Err(Errno::ECONNRESET) => return Ok(Received::End),
            Err(errno) => return Err(errno.into()),
        };
        if arrival.truncated {
            // Dropping `arrival` closes the installed ones.
            return Err(io::Error::other(match arrival.fds.len() {
                MAX_FDS.. => format!("sent more than {MAX_FDS} descriptors at once"),
                _ => "sent descriptors that could not be received: too many files are open here".into(),
            }));
        }
        if arrival.bytes == 0 {
            return Ok(Received::End);
        }
        self.fds.extend(arrival.fds);
        if self.fds.len() > MAX_PENDING_FDS {
            return Err(io::Error::other("sent more descriptors than any message has"));
        }
        self.decoder.push(&bytes[..arrival.bytes]);
        Ok(Received::Bytes)
    }

    /// Reads once. Waits for data until `deadline`.
    pub(super) fn receive_before(&mut self, deadline: Instant) -> io::Result<Received> {
        while self.is_ready(PollFlags::POLLIN, deadline)? {
            match self.receive()? {
                Received::Nothing => {}
                received => return Ok(received),
            }
        }
        Ok(Received::Nothing)
    }

    /// Waits until the socket is ready for `what`. `false`: the deadline has passed.
    fn is_ready(&self, what: PollFlags, deadline: Instant) -> io::Result<bool> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            // Rounded up: waking before the deadline would only cost another iteration.
            let timeout = PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.as_fd(), what)], timeout) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(true),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// True if the other side has closed the connection and nothing is left to read. Consumes no data.
    pub(super) fn is_at_end(&self) -> bool {
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.stream.as_raw_fd(), &mut [0], flags) {
            Ok(count) => count == 0,
            Err(errno) => errno == Errno::ECONNRESET,
        }
    }

    /// The next complete message, if there is one.
    pub(super) fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, String> {
        self.decoder.next_message()
    }

    /// The `count` descriptors that came with the message just returned.
    pub(super) fn take_fds(&mut self, count: u32) -> Result<Vec<OwnedFd>, String> {
        let count = count as usize;
        if count > self.fds.len().min(MAX_FDS) {
            return Err(format!("announced {count} descriptors and sent {}", self.fds.len()));
        }
        Ok(self.fds.drain(..count).collect())
    }

    /// Checks that no descriptor is left once all messages have been handled. It would be mistaken for a descriptor of a
    /// later message, and enough of them would exhaust this process's descriptors.
    pub(super) fn check_no_surplus_fds(&mut self) -> Result<(), String> {
        if self.fds.is_empty() || !self.decoder.is_empty() {
            return Ok(());
        }
        let surplus = self.fds.drain(..).count();
        Err(format!("sent {surplus} descriptors that no message announced"))
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::thread::JoinHandleExt;
    use std::sync::mpsc;
    use std::time::Duration;

    use nix::libc;
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
    use nix::unistd::pipe;

    use super::*;
    use crate::rendezvous::message::{Reply, encode};

    fn pair() -> (Connection, Connection) {
        let (one, other) = UnixStream::pair().unwrap();
        (Connection::new(one).unwrap(), Connection::new(other).unwrap())
    }

    /// Sends a frame with `count` descriptors of a pipe's write end. Returns the read end, which is at end of file once
    /// all of them are closed.
    fn send_pipe(sender: &Connection, count: usize) -> OwnedFd {
        let (reader, writer) = pipe().unwrap();
        sender.send(&encode(&Reply::Done), &vec![writer.as_fd(); count]).unwrap();
        reader
    }

    #[track_caller]
    fn assert_all_closed(reader: &OwnedFd) {
        let mut end = [PollFd::new(reader.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut end, PollTimeout::ZERO), Ok(1), "the pipe is still open somewhere");
    }

    #[test]
    fn surplus_descriptors_in_one_message_are_closed_and_rejected() {
        let (mut receiver, sender) = pair();
        let reader = send_pipe(&sender, MAX_FDS + 3);
        let error = receiver.receive().unwrap_err().to_string();
        assert!(error.contains("more than 4 descriptors at once"), "{error}");
        assert_all_closed(&reader);
    }

    #[test]
    fn unannounced_descriptors_are_closed_and_rejected() {
        let (mut receiver, sender) = pair();
        let reader = send_pipe(&sender, 2);
        assert_eq!(receiver.receive().unwrap(), Received::Bytes);
        assert_eq!(receiver.check_no_surplus_fds(), Ok(()), "its message may announce them");
        assert_eq!(receiver.next_message(), Ok(Some(Reply::Done)));
        assert_eq!(receiver.take_fds(1).unwrap().len(), 1);
        assert_eq!(
            receiver.check_no_surplus_fds(),
            Err("sent 1 descriptors that no message announced".into())
        );
        assert_all_closed(&reader);
    }

    #[test]
    fn sending_to_a_peer_that_does_not_read_times_out() {
        let (_deaf, sender) = pair();
        let frame = vec![0; 64 << 20];
        let deadline = Instant::now() + Duration::from_millis(20);
        assert_eq!(sender.send_before(&frame, &[], deadline).unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(sender.send(&frame, &[]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    extern "C" fn ignore(_: i32) {}

    /// If a signal restarted the read with its full timeout, the wait would last as long as signals arrive.
    #[test]
    fn signals_do_not_extend_a_wait() {
        let action = SigAction::new(SigHandler::Handler(ignore), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, and nothing else in this program uses the signal.
        unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();
        let (mut receiver, _silent) = pair();
        let (sender, done) = mpsc::channel();
        let waiter = std::thread::spawn(move || {
            let received = receiver.receive_before(Instant::now() + Duration::from_millis(50));
            sender.send(received.unwrap()).unwrap();
        });
        for _ in 0..20_000 {
            match done.recv_timeout(Duration::from_millis(1)) {
                Ok(received) => {
                    assert_eq!(received, Received::Nothing);
                    return waiter.join().unwrap();
                }
                // SAFETY: the thread has not been joined, so its handle is valid.
                Err(_) => _ = unsafe { libc::pthread_kill(waiter.as_pthread_t(), libc::SIGUSR2) },
            }
        }
        panic!("it still waits after 20,000 signals");
    }
}
