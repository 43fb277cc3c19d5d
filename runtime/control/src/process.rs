//! Operating-system functions for child processes that the standard library lacks.

use std::io;
use std::mem::MaybeUninit;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::unistd::{Pid, getpid, getppid};

/// A stream on the Unix socket with this number that the starter of this process has left open for it. Programs that this
/// process starts do not inherit the socket.
///
/// # Errors
/// If there is no such descriptor, or it is not a stream socket.
pub fn inherited_stream(descriptor: RawFd) -> io::Result<UnixStream> {
    if descriptor < 0 {
        return Err(Errno::EBADF.into());
    }
    // SAFETY: the number is used for three system calls, which fail if nothing is open under it; nobody closes it.
    let inherited = unsafe { BorrowedFd::borrow_raw(descriptor) };
    if getsockopt(&inherited, sockopt::SockType)? != SockType::Stream {
        return Err(Errno::EPROTOTYPE.into());
    }
    fcntl(inherited, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    Ok(UnixStream::from(inherited.try_clone_to_owned()?))
}

/// Makes the kernel kill the child of `command` when this process ends, and starts it with no signal blocked.
///
/// The kernel sends SIGKILL to the child when the *thread* that spawned it ends (`PR_SET_PDEATHSIG`), so spawn from a
/// thread that outlives the child. If this process has ended before the child can request that, the child does not start.
pub fn kill_with_parent(command: &mut Command) {
    let parent = getpid();
    let in_child = move || {
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The parent may have died between fork and the line above; then no signal is sent.
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

/// What to try if a process or thread could not be started; empty if `error` says enough. The kernel does not say which
/// of its limits was reached.
pub fn start_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "; a limit on processes was reached: the user's (raise `ulimit -u`), the control group's (pids.max, set by \
             containers and systemd) or the machine's (sysctl kernel.pid_max and kernel.threads-max); or start fewer \
             ranks"
        }
        _ => "",
    }
}

/// Why no process or thread could be started, and what to try.
pub fn start_failure(error: &io::Error) -> String {
    format!("{error}{}", start_hint(error))
}

/// The process in which a [`fork`] has returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fork {
    /// The calling process, with the pid of its child.
    Parent(Pid),
    /// The new process.
    Child,
}

/// Forks this process.
///
/// # Errors
/// If this process has more than one thread (a fork copies only the calling one, and the others may hold locks), the limit
/// on processes is reached, or /proc is not mounted.
pub fn fork() -> io::Result<Fork> {
    let threads = "/proc/self/task";
    let tasks = std::fs::read_dir(threads).map_err(|error| {
        let hint = if error.kind() == io::ErrorKind::NotFound { "; is /proc mounted?" } else { "" };
        io::Error::new(error.kind(), format!("cannot read {threads}: {error}{hint}"))
    })?;
    if tasks.count() != 1 {
        return Err(io::Error::other("a process with threads cannot be forked"));
    }
    // SAFETY: this is the only thread, so no lock in the child can be held by a thread that does not exist there.
    let forked = unsafe { nix::unistd::fork() };
    match forked
        .map_err(|errno| io::Error::other(format!("cannot fork: {}", start_failure(&errno.into()))))?
    {
        nix::unistd::ForkResult::Parent { child } => Ok(Fork::Parent(child)),
        nix::unistd::ForkResult::Child => Ok(Fork::Child),
    }
}

/// Resets SIGCHLD to its default action. If the parent has set it to be ignored, the kernel discards the exit statuses of
/// children.
///
/// # Errors
/// If the kernel refuses, which it has no reason to do.
pub fn reset_sigchld() -> io::Result<()> {
    // SAFETY: the default action runs no code of ours.
    unsafe { nix::sys::signal::signal(Signal::SIGCHLD, nix::sys::signal::SigHandler::SigDfl) }?;
    Ok(())
}

/// Puts the child of `command` into its own session, so that no signal to this process's group or terminal reaches it.
pub fn detach(command: &mut Command) {
    let in_child = || nix::unistd::setsid().map(drop).map_err(io::Error::from);
    // SAFETY: between fork and exec the closure makes one system call, async-signal-safe, and does not allocate.
    unsafe { command.pre_exec(in_child) };
}

/// Blocks SIGXFSZ in this thread and in those that it starts. A write beyond the limit on file sizes (`ulimit -f`) then
/// fails, like a write to a full disk, and does not end the process.
pub fn block_sigxfsz() {
    let mut blocked = SigSet::empty();
    blocked.add(Signal::SIGXFSZ);
    // Fails only for invalid masks.
    let _ = blocked.thread_block();
}

/// Command of fcntl that sets the signal to send in place of SIGIO; missing in the bindings of the C library.
const F_SETSIG: libc::c_int = 10;

/// Makes the kernel kill a process group when this guard is dropped or when this process ends, however it ends.
///
/// `PR_SET_PDEATHSIG` reaches only the child that requested it (unless it has changed its user since) and none of that
/// child's own children. This guard reaches all members of the group that this process may signal: when one end of a
/// socket pair is closed, the kernel sends SIGKILL to the group (`O_ASYNC` on the other end). This process holds both
/// ends, and both request the signal, because the kernel closes the descriptors of an ending process in an order of its
/// choice. The kernel keeps a reference to the group, not its number, so a later group with the same number is never
/// hit.
#[derive(Debug)]
pub struct GroupKillGuard {
    _ends: [UnixStream; 2],
}

impl GroupKillGuard {
    /// Guards the process group `group`.
    ///
    /// # Errors
    /// If there is no such group, descriptors run out, or the kernel does not support this.
    pub fn new(group: Pid) -> io::Result<Self> {
        let (first, second) = UnixStream::pair()?;
        let ends = [first, second];
        for end in &ends {
            kill_when_closed(end.as_fd(), group)?;
        }
        Ok(GroupKillGuard { _ends: ends })
    }
}

/// Makes the kernel send SIGKILL to `group` when the other end of `socket` is closed.
fn kill_when_closed(socket: BorrowedFd<'_>, group: Pid) -> io::Result<()> {
    let set = |command: libc::c_int, value: libc::c_int| {
        // SAFETY: both commands take an integer, and the descriptor is open as long as it is borrowed.
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
/// If there is no such process, or the kernel is older than Linux 5.3.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Sends a signal to the process of a pidfd, never to another one that has got the same number.
///
/// # Errors
/// `ESRCH` if the process has ended, `EPERM` if it belongs to another user.
pub fn pidfd_send_signal(process: BorrowedFd<'_>, signal: Signal) -> nix::Result<()> {
    let (fd, info) = (process.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
    // SAFETY: there is no information to pass, so the kernel reads no memory of this process.
    let result = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal as libc::c_int, info, 0) };
    Errno::result(result).map(drop)
}

/// True once the process of a [`pidfd_open`] has ended.
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Peak resident memory in bytes of child process `pid`, which has ended and was not waited for yet; `None` if there is
/// no such child. It is the maximum over the child and those of its own children that it has waited for.
///
/// `/proc` does not have it any more when a process has ended.
pub fn peak_memory(pid: Pid) -> Option<u64> {
    let flags = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    let no_status = std::ptr::null_mut::<libc::siginfo_t>();
    // The C library's function has no argument for the usage.
    // SAFETY: waitid takes four numbers, no place for the status, and a place for the usage that lives for the call.
    let result = unsafe {
        libc::syscall(libc::SYS_waitid, libc::P_PID, pid.as_raw(), no_status, flags, usage.as_mut_ptr())
    };
    if result != 0 {
        return None;
    }
    // SAFETY: zeros are valid numbers, and the kernel writes numbers only.
    let kib = unsafe { usage.assume_init() }.ru_maxrss;
    // It stays 0 while the child runs.
    u64::try_from(kib).ok().filter(|kib| *kib > 0).map(|kib| kib * 1024)
}

/// The state of process `pid` as the letter that `ps` shows; `None` if there is no such process.
pub fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    // The process name in front of it may contain any bytes.
    let end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(end + 2).map(|state| char::from(*state))
}

/// Detects whether the current process is the one that created this value or a forked child with a copy of it.
///
/// Every collective checks this, and a system call would cost too much there. So it uses a page of memory that the kernel
/// clears in children (`MADV_WIPEONFORK`, since Linux 4.14), and compares process ids if there is no such page.
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
    /// A detector for which the current process is the original.
    pub fn for_this_process() -> Self {
        ForkDetector { process: std::process::id(), page: Self::marked_page().ok() }
    }

    fn marked_page() -> nix::Result<NonNull<AtomicBool>> {
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other mapping.
        let page = unsafe { mmap_anonymous(None, PAGE, access, MapFlags::MAP_PRIVATE) }?;
        // SAFETY: the range is the mapping just made, which nothing uses yet.
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

    /// True in the process that created this value, false in its forked children.
    #[inline]
    pub fn is_original_process(&self) -> bool {
        match self.page {
            // SAFETY: the page is mapped as long as `self` lives; a child has a zeroed page in its place.
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
    use std::process::Stdio;

    use super::*;

    #[test]
    fn an_inherited_stream_is_a_socket_that_children_do_not_get() {
        let (left, mut right) = UnixStream::pair().unwrap();
        let flags = |stream: &UnixStream| FdFlag::from_bits_retain(fcntl(stream, FcntlArg::F_GETFD).unwrap());
        fcntl(&left, FcntlArg::F_SETFD(FdFlag::empty())).unwrap();
        let mut stream = inherited_stream(left.as_raw_fd()).unwrap();
        assert!([&left, &stream].iter().all(|stream| flags(stream).contains(FdFlag::FD_CLOEXEC)));
        io::Write::write_all(&mut right, b"x").unwrap();
        let mut byte = [0];
        io::Read::read_exact(&mut stream, &mut byte).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(inherited_stream(file.as_raw_fd()).is_err() && inherited_stream(-1).is_err());
    }

    #[test]
    fn dropping_the_guard_kills_the_process_group() {
        let mut child =
            Command::new("sh").args(["-c", "sleep 1000 & wait"]).process_group(0).spawn().unwrap();
        let guard = GroupKillGuard::new(Pid::from_raw(child.id() as i32)).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        drop(guard);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn the_peak_memory_of_a_child_is_known_between_its_end_and_its_wait() {
        let mut child = Command::new("sh").args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id() as i32);
        assert_eq!(peak_memory(pid), None);
        let ended = pidfd_open(child.id()).unwrap();
        drop(child.stdin.take());
        poll(&mut [PollFd::new(ended.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        let peak = peak_memory(pid).unwrap();
        assert!((1 << 16..1 << 30).contains(&peak), "{peak}");
        child.wait().unwrap();
        assert_eq!(peak_memory(pid), None);
    }

    #[test]
    fn the_original_process_is_detected_by_page_and_by_pid() {
        let own = ForkDetector::for_this_process();
        assert!(own.is_original_process() && own.page.is_some());
        let by_number = ForkDetector { process: own.process + 1, page: None };
        assert!(!by_number.is_original_process());
    }

    #[test]
    fn the_hint_names_all_limits_on_processes() {
        let reached = start_failure(&io::Error::from_raw_os_error(libc::EAGAIN));
        for name in ["ulimit -u", "pids.max", "kernel.pid_max", "kernel.threads-max"] {
            assert!(reached.contains(name), "{reached}");
        }
        assert_eq!(start_hint(&io::Error::from_raw_os_error(libc::ENOENT)), "");
    }

    #[test]
    fn the_state_of_a_process_is_read() {
        assert!(state(std::process::id()).is_some_and(|state| "RSD".contains(state)));
        assert_eq!(state(0), None);
    }
}
