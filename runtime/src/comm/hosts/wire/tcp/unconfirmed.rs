//! How many bytes of a connection the peer's host has not confirmed.

use std::net::TcpStream;
use std::os::fd::AsRawFd;

use nix::libc;

/// Bytes that were written and not confirmed; 0 if the kernel does not say.
pub(super) fn bytes(stream: &TcpStream) -> usize {
    let mut count: libc::c_int = 0;
    // SAFETY: the descriptor is open, and SIOCOUTQ (the same number as TIOCOUTQ) writes one int to a live variable.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut count) };
    if result == 0 { usize::try_from(count).unwrap_or(0) } else { 0 }
}
