//! Receiving descriptors: the one place where numbers from the kernel become owned.
//!
//! A message may bring more descriptors than there is room for, or than this process may open. The kernel then hands
//! over those that fit, closes the rest and marks the message as truncated. `nix` answers such a message with an error
//! and forgets what did arrive: a peer that sends enough of them leaves its receiver without descriptors. So the system
//! call is made here, and whatever arrived is owned before anything else is looked at.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::libc;

use super::message::MAX_FDS;

/// Room for the control message of [`MAX_FDS`] descriptors, and no more: the kernel must not install others.
// SAFETY: CMSG_SPACE is arithmetic on its argument.
const ROOM: usize = unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) } as usize;

/// What one read brought.
pub(super) struct Arrival {
    /// Number of bytes.
    pub(super) bytes: usize,
    /// Descriptors that came with them.
    pub(super) fds: Vec<OwnedFd>,
    /// The sender sent more descriptors than these.
    pub(super) truncated: bool,
}

/// Reads once from a socket into `bytes`.
pub(super) fn receive(socket: BorrowedFd<'_>, bytes: &mut [u8]) -> nix::Result<Arrival> {
    // Words, so that the headers in it are aligned.
    let mut control = [0usize; ROOM.div_ceil(size_of::<usize>())];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: a message header is numbers and pointers, for which zeros are valid.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    // The C libraries of Linux count in types of their own.
    header.msg_controllen = ROOM as _;
    // SAFETY: the header points to one part, `bytes`, and to `ROOM` bytes of `control`, which outlive the call.
    let count = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
    let bytes = Errno::result(count)? as usize;
    let truncated = header.msg_flags & libc::MSG_CTRUNC != 0;
    let mut fds = Vec::new();
    // SAFETY: the kernel has set the header's control length to what it has written into `control`.
    let mut item = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    // SAFETY: the item is null or a control message that the kernel wrote into `control`, aligned and whole.
    while let Some(message) = unsafe { item.as_ref() } {
        if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN is arithmetic on its argument.
            let header = unsafe { libc::CMSG_LEN(0) } as usize;
            #[allow(clippy::unnecessary_cast, reason = "the type differs between the C libraries of Linux")]
            let count = (message.cmsg_len as usize - header) / size_of::<RawFd>();
            // SAFETY: the data of a control message of this type are `count` descriptors.
            let numbers = unsafe { libc::CMSG_DATA(item) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: `index` is below `count`; the kernel has just installed this descriptor for us alone.
                fds.push(unsafe { OwnedFd::from_raw_fd(numbers.add(index).read_unaligned()) });
            }
        }
        // SAFETY: `item` is a control message of this header.
        item = unsafe { libc::CMSG_NXTHDR(&raw const header, item) };
    }
    Ok(Arrival { bytes, fds, truncated })
}
