//! What a launcher needs of the operating system to own a child process, and the standard library lacks.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getpid, getppid};

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

/// Which of the two processes this one is after a [`fork`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The one that called, and its child.
    Parent(Pid),
    /// The new one.
    Child,
}

/// Makes a second process that goes on from here.
///
/// # Errors
/// If this process has more than one thread (a fork takes only one along, and the others may hold locks), or the
/// limit of processes is reached.
pub fn fork() -> io::Result<Fork> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("a process with threads cannot be forked"));
    }
    // SAFETY: this is the only thread, so the child has all there is: no lock is held by a thread that is not there.
    match unsafe { nix::unistd::fork() }? {
        nix::unistd::ForkResult::Parent { child } => Ok(Fork::Parent(child)),
        nix::unistd::ForkResult::Child => Ok(Fork::Child),
    }
}

/// Sets SIGCHLD to its default, which an ignored signal that this process was started with is not.
///
/// # Errors
/// The kernel has none to give.
pub fn heed_children() -> io::Result<()> {
    // SAFETY: the default action runs no code of ours.
    unsafe { nix::sys::signal::signal(Signal::SIGCHLD, nix::sys::signal::SigHandler::SigDfl) }?;
    Ok(())
}

/// Gives the child of `command` a session of its own: no signal to this process's group or terminal reaches it.
pub(crate) fn detach(command: &mut Command) {
    let in_child = || nix::unistd::setsid().map(drop).map_err(io::Error::from);
    // SAFETY: between fork and exec the closure makes one system call, async-signal-safe, and does not allocate.
    unsafe { command.pre_exec(in_child) };
}

/// Makes the child of `command` run on `cores` only, and with it all its threads and children.
///
/// Starting the child fails with the kernel's error if it refuses, as it does when none of the cores is there any more.
pub fn bind_to_cores(command: &mut Command, cores: CpuSet) {
    let in_child = move || {
        sched_setaffinity(Pid::from_raw(0), &cores)?;
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes one system call, which is async-signal-safe, and does not
    // allocate: the set lies in the closure, and the error value is a plain number.
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

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;

    use super::*;

    #[test]
    fn a_child_runs_where_it_is_bound() {
        let own = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let core = (0..CpuSet::count()).find(|core| own.is_set(*core).unwrap()).unwrap();
        let mut one = CpuSet::new();
        one.set(core).unwrap();
        let mut command = Command::new("grep");
        command.args(["Cpus_allowed_list:", "/proc/self/status"]);
        bind_to_cores(&mut command, one);
        let output = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(output.split_whitespace().last(), Some(core.to_string().as_str()));
        assert_eq!(sched_getaffinity(Pid::from_raw(0)).unwrap(), own);
    }

    #[test]
    fn a_refusal_is_the_error_of_the_start() {
        let mut command = Command::new("true");
        bind_to_cores(&mut command, CpuSet::new());
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
