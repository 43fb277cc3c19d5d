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
