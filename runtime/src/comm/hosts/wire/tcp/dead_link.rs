//! Whether the other host of a connection still answers.
//!
//! The kernel gives up an idle connection after four probes without an answer, but one with data on their way only after
//! a quarter of an hour (`tcp_retries2`), and its TCP_USER_TIMEOUT also ends connections whose receiver is alive and
//! reads nothing. What it knows of a connection (`TCP_INFO`) tells the two apart: a host that is there acknowledges data
//! that are sent again, and answers when it is asked whether it has room.

use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use nix::libc;

/// Longest time without an answer: as for the connections of the control plane.
const TIMEOUT: Duration = Duration::from_millis(4750);
/// Number of times that data were sent again without an answer. The kernel doubles the time between them.
const RETRANSMITS: u8 = 3;
/// Number of questions without an answer, whether there is room. The last one may have been asked just now.
const PROBES: u8 = 2;

/// What the kernel knows of a connection.
#[derive(Debug, Clone, Copy)]
struct State {
    /// Number of times that the oldest data were sent again.
    retransmits: u8,
    /// Number of probes that were not answered.
    probes: u8,
    /// Time since anything was acknowledged.
    since_answer: Duration,
}

impl State {
    /// `None` if the kernel does not say.
    fn of(stream: &TcpStream) -> Option<Self> {
        // SAFETY: the structure consists of integers, for which zeros are valid.
        let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
        let mut length = size_of_val(&info) as libc::socklen_t;
        // SAFETY: the descriptor is open; the kernel writes at most `length` bytes to a live structure of that size.
        let result = unsafe {
            let value = (&raw mut info).cast();
            libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, value, &raw mut length)
        };
        (result == 0).then(|| State {
            retransmits: info.tcpi_retransmits,
            probes: info.tcpi_probes,
            since_answer: Duration::from_millis(info.tcpi_last_ack_recv.into()),
        })
    }

    fn is_dead(self) -> bool {
        self.since_answer >= TIMEOUT && (self.retransmits >= RETRANSMITS || self.probes >= PROBES)
    }
}

/// How long the other host has not answered, if that is too long.
pub(super) fn silence(stream: &TcpStream) -> Option<Duration> {
    State::of(stream).filter(|state| state.is_dead()).map(|state| state.since_answer)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn only_hosts_that_do_not_answer_are_dead() {
        let is_dead = |retransmits, probes, milliseconds| {
            State { retransmits, probes, since_answer: Duration::from_millis(milliseconds) }.is_dead()
        };
        assert!(is_dead(3, 0, 4750) && is_dead(0, 2, 60_000));
        // An outage that may end; data that were lost after a long pause; a receiver without room that was just asked.
        assert!(!is_dead(4, 0, 4000) && !is_dead(1, 0, 60_000) && !is_dead(0, 1, 60_000));
    }

    #[test]
    fn a_receiver_that_reads_nothing_is_alive() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _far = listener.accept().unwrap();
        near.set_nonblocking(true).unwrap();
        while near.write(&[0; 1 << 16]).is_ok() {}
        let state = State::of(&near).expect("the kernel knows its connections");
        assert!(!state.is_dead(), "{state:?}");
    }
}
