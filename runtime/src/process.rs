//! What a launcher needs of the operating system to own a child process, and the standard library lacks.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getpid, getppid};

/// Makes the child of `command` die with this process, and start with no signal blocked.
///
/// The kernel sends SIGKILL to the child when the *thread* that spawned it ends, so spawn from a thread that
/// outlives the child. If this process is already gone when the child gets to ask for that, the child does not
/// start.
pub fn tie_to_parent(command: &mut Command) {
    let parent = getpid();
    let in_child = move || {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died between fork and the line above, when there was nobody to send the signal.
        if getppid() != parent {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // The launcher reads its signals from a descriptor and blocks them; the mask survives exec.
        SigSet::empty().thread_set_mask()?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes three system calls, all async-signal-safe, and does not
    // allocate: the error values it can return are plain numbers.
    unsafe { command.pre_exec(in_child) };
}

/// Gives the child of `command` a session of its own: no signal to this process's group or terminal reaches it.
pub(crate) fn detach(command: &mut Command) {
    let in_child = || nix::unistd::setsid().map(drop).map_err(io::Error::from);
    // SAFETY: between fork and exec the closure makes one system call, async-signal-safe, and does not allocate.
    unsafe { command.pre_exec(in_child) };
}

/// A descriptor that becomes readable when process `pid` ends.
///
/// # Errors
/// If there is no such process or the kernel is older than Linux 5.3.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
