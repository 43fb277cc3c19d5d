//! What a launcher needs of the operating system to own a child process, and the standard library lacks.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{Pid, getpid, getppid};

/// Makes the child of `command` die with this process, and start with no signal blocked.
///
/// The kernel sends SIGKILL to the child when the *thread* that spawned it ends, so spawn from a thread that
/// outlives the child. If this process is already gone when the child gets to ask for that, the child does not
/// start.
pub fn kill_with_parent(command: &mut Command) {
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

/// What to try when no process or thread could be started; empty where `error` says enough. The kernel does not tell which of
/// its limits is reached.
pub fn start_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "; a limit of processes is reached: that of the user (raise `ulimit -u`), of the control group (pids.max, which \
             containers and systemd set) or of the machine (sysctl kernel.pid_max and kernel.threads-max); or start fewer \
             ranks"
        }
        _ => "",
    }
}

/// Why no process or thread could be started, and what to try.
pub fn start_failure(error: &io::Error) -> String {
    format!("{error}{}", start_hint(error))
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
/// If this process has more than one thread (a fork takes only one along, and the others may hold locks), the limit of
/// processes is reached, or /proc is not mounted.
pub fn fork() -> io::Result<Fork> {
    let threads = "/proc/self/task";
    let tasks = std::fs::read_dir(threads).map_err(|error| {
        let hint = if error.kind() == io::ErrorKind::NotFound { "; is /proc mounted?" } else { "" };
        io::Error::new(error.kind(), format!("cannot read {threads}: {error}{hint}"))
    })?;
    if tasks.count() != 1 {
        return Err(io::Error::other("a process with threads cannot be forked"));
    }
    // SAFETY: this is the only thread, so the child has all there is: no lock is held by a thread that is not there.
    let forked = unsafe { nix::unistd::fork() };
    match forked
        .map_err(|errno| io::Error::other(format!("cannot fork: {}", start_failure(&errno.into()))))?
    {
        nix::unistd::ForkResult::Parent { child } => Ok(Fork::Parent(child)),
        nix::unistd::ForkResult::Child => Ok(Fork::Child),
    }
}

/// Sets SIGCHLD to its default, which an ignored signal that this process was started with is not.
///
/// # Errors
/// The kernel has none to give.
pub fn reset_sigchld() -> io::Result<()> {
    // SAFETY: the default action runs no code of ours.
    unsafe { nix::sys::signal::signal(Signal::SIGCHLD, nix::sys::signal::SigHandler::SigDfl) }?;
    Ok(())
}

/// Gives the child of `command` a session of its own: no signal to this process's group or terminal reaches it.
pub fn detach(command: &mut Command) {
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

/// Lets a write beyond the limit of file sizes (`ulimit -f`) fail, as one to a full disk does: SIGXFSZ, which would end the
/// process, is blocked in this thread and in those that it starts.
pub fn block_sigxfsz() {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGXFSZ);
    // Fails for masks that do not exist only.
    let _ = blocked.thread_block();
}

/// Number of the call that chooses a signal in place of SIGIO, which the C library's bindings lack.
const F_SETSIG: libc::c_int = 10;

/// Makes the kernel kill a process group when this is dropped, and at the latest when this process ends, however it ends.
///
/// `PR_SET_PDEATHSIG` reaches the child that asked for it, unless that has changed its user since, and none of the child's
/// own children. This reaches all members of the group that this process may send signals to: the kernel is asked to
/// signal the group when one end of a socket pair finds the other closed (`O_ASYNC`), and to send SIGKILL. Both ends are
/// here, and both ask for it, because a process that ends closes them in an order of the kernel's choice. The kernel holds
/// on to the group, not to its number, so no later group of that number is hit.
#[derive(Debug)]
pub struct GroupKillGuard {
    _ends: [UnixStream; 2],
}

impl GroupKillGuard {
    /// For the group `group`.
    ///
    /// # Errors
    /// If there is no such group, descriptors run out, or the kernel does not offer this.
    pub fn new(group: Pid) -> io::Result<Self> {
        let (first, second) = UnixStream::pair()?;
        let ends = [first, second];
        for end in &ends {
            kill_when_closed(end.as_fd(), group)?;
        }
        Ok(GroupKillGuard { _ends: ends })
    }
}

/// Lets the kernel send SIGKILL to `group` when the other end of `socket` is closed.
fn kill_when_closed(socket: BorrowedFd<'_>, group: Pid) -> io::Result<()> {
    let set = |command: libc::c_int, value: libc::c_int| {
        // SAFETY: both commands take an integer, and concern a descriptor that is open for as long as it is borrowed.
        Errno::result(unsafe { libc::fcntl(socket.as_raw_fd(), command, value) })
    };
    set(libc::F_SETOWN, -group.as_raw())?;
    set(F_SETSIG, Signal::SIGKILL as libc::c_int)?;
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    fcntl(socket, FcntlArg::F_SETFL(flags | OFlag::O_ASYNC))?;
    Ok(())
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

/// True once the process of a [`pidfd_open`] has ended.
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// The state of process `pid`, a letter as `ps` shows it; `None` if there is no such process.
pub fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may contain anything.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).map(|state| char::from(*state))
}

/// Tells the process that made it from the children that it forks, which get a copy.
///
/// It is asked in every collective, where a system call would be felt, so it is a page of memory that the kernel clears in
/// children (`MADV_WIPEONFORK`, since Linux 4.14). Where there is none, the process's number decides.
#[derive(Debug)]
pub struct ForkDetector {
    process: u32,
    page: Option<NonNull<AtomicBool>>,
}

// SAFETY: the page belongs to this value alone, lives as long as it, and holds an atomic.
unsafe impl Send for ForkDetector {}
// SAFETY: as above.
unsafe impl Sync for ForkDetector {}

const PAGE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

impl ForkDetector {
    /// This process.
    pub fn for_this_process() -> Self {
        ForkDetector { process: std::process::id(), page: Self::marked_page().ok() }
    }

    fn marked_page() -> nix::Result<NonNull<AtomicBool>> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing of ours.
        let page = unsafe { mmap_anonymous(None, PAGE, access, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: the range is the mapping just made, which nobody uses yet.
        if let Err(errno) = unsafe { madvise(page, PAGE.get(), MmapAdvise::MADV_WIPEONFORK) } {
            // SAFETY: as above.
            let _ = unsafe { munmap(page, PAGE.get()) };
            return Err(errno);
        }
        let mark: NonNull<AtomicBool> = page.cast();
        // SAFETY: the mapping is writable, aligned, and zeroed, which is a valid value.
        unsafe { mark.as_ref() }.store(true, Ordering::Relaxed);
        Ok(mark)
    }

    /// True in the process that has made this, false in its children.
    #[inline]
    pub fn is_original_process(&self) -> bool {
        match self.page {
            // SAFETY: the page is mapped as long as `self`; a child has one of zeros in its place.
            Some(mark) => unsafe { mark.as_ref() }.load(Ordering::Relaxed),
            None => std::process::id() == self.process,
        }
    }
}

impl Drop for ForkDetector {
    fn drop(&mut self) {
        if let Some(mark) = self.page {
            // SAFETY: the range is the one mapped at the construction, and no reference into it outlives `self`.
            let _ = unsafe { munmap(mark.cast(), PAGE.get()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use nix::sched::sched_getaffinity;

    use super::*;

    #[test]
    fn a_group_goes_with_its_leash() {
        let mut child =
            Command::new("sh").args(["-c", "sleep 1000 & wait"]).process_group(0).spawn().unwrap();
        let guard = GroupKillGuard::new(Pid::from_raw(child.id() as i32)).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        drop(guard);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

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
    fn a_forked_child_is_not_the_process_that_it_is_a_copy_of() {
        let own = ForkDetector::for_this_process();
        assert!(own.is_original_process() && own.page.is_some());
        let by_number = ForkDetector { process: own.process + 1, page: None };
        assert!(!by_number.is_original_process());
    }

    #[test]
    fn all_limits_of_processes_are_named() {
        let reached = start_failure(&io::Error::from_raw_os_error(libc::EAGAIN));
        for name in ["ulimit -u", "pids.max", "kernel.pid_max", "kernel.threads-max"] {
            assert!(reached.contains(name), "{reached}");
        }
        assert_eq!(start_hint(&io::Error::from_raw_os_error(libc::ENOENT)), "");
    }

    #[test]
    fn the_state_of_a_process_is_a_letter() {
        assert!(state(std::process::id()).is_some_and(|state| "RSD".contains(state)));
        assert_eq!(state(0), None);
    }

    #[test]
    fn a_refusal_is_the_error_of_the_start() {
        let mut command = Command::new("true");
        bind_to_cores(&mut command, CpuSet::new());
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
