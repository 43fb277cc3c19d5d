//! Receives descriptors (SCM_RIGHTS): the only place where descriptor numbers from the kernel become owned.
//!
//! A message may carry more descriptors than its buffer holds, or than this process may open. The kernel then installs
//! those that fit, closes the others and marks the message as truncated. `nix` returns an error for such a message and
//! leaks the installed descriptors: a peer could send enough of them to exhaust the receiver's descriptors. So the
//! system call is made here, and every installed descriptor is owned before anything else is checked.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;

use super::message::MAX_FDS;

/// Size of the control message of [`MAX_FDS`] descriptors. Not larger, so that the kernel installs no more than these.
// SAFETY: CMSG_SPACE is arithmetic on its argument.
const ROOM: usize = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) } as usize;

/// The result of one read.
pub(super) struct Arrival {
    /// Number of bytes.
    pub(super) bytes: usize,
    /// Descriptors that came with them.
    pub(super) fds: Vec<OwnedFd>,
    /// Some of the sent descriptors were not installed.
    pub(super) truncated: bool,
}

/// Reads once from a socket into `bytes`.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> nix::Result<Arrival> {
    // An array of words, so that the headers in it are aligned.
    let mut control = [0usize; ROOM.div_ceil(size_of::<usize>())];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a message header is numbers and pointers, for which zeros are valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    // The type of this field differs between the C libraries of Linux.
    header.msg_controllen = ROOM as _;
    // SAFETY: the header points to one part, `bytes`, and to `ROOM` bytes of `control`, which outlive the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let bytes = Errno::result(count)? as usize;
    let truncated = header.msg_flags & libc::MSG_CTRUNC != 0;
    let mut fds = Vec::new();
    // SAFETY: the kernel has set the header's control length to the number of bytes that it wrote into `control`.
    let mut item = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: the item is null or a complete, aligned control message that the kernel wrote into `control`.
    while let Some(message) = unsafe { item.as_ref() } {
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN is arithmetic on its argument.
            let header = unsafe { libc::CMSG_LEN(0) } as usize;
            #[allow(clippy::unnecessary_cast, reason = "the type differs between the C libraries of Linux")]
            let count = (message.cmsg_len as usize - header) / size_of::<RawFd>();
            // SAFETY: the data of a control message of this type are `count` descriptors.
            let numbers = unsafe { libc::CMSG_DATA(item) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: `index` is below `count`; the kernel has just installed this descriptor, and nothing else owns it.
                fds.push(unsafe { OwnedFd::from_raw_fd(numbers.add(index).read_unaligned()) });
            }
        }
        // SAFETY: `item` is a control message of this header.
        item = unsafe { libc::CMSG_NXTHDR(&raw const header, item) };
    }
    Ok(Arrival { bytes, fds, truncated })
}
