//! What a child does in the memory of its parent until it executes its program: system calls only, see the parent module.

use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr;

use nix::libc;
use nix::sched::CpuSet;
use nix::sys::signal::Signal;
use syscalls::{Sysno, syscall2, syscall3, syscall4};

use super::SpawnFailure;

/// Number of signals of Linux, real-time signals included.
pub(super) const SIGNALS: c_int = 64;
/// Size of the kernel's set of signals in bytes.
const SIGNAL_SET_BYTES: usize = 8;
/// Room for the kernel's `struct sigaction` on every architecture; all zeros is the default action.
const SIGACTION_BYTES: usize = 64;
/// Runs files that have execute permission but no format that the kernel knows, as `execvp` does.
pub(super) const SHELL: &std::ffi::CStr = c"/bin/sh";

/// What [`run_child`] reads. The pointers refer to the memory of the same value or of the batch.
pub(super) struct Child {
    pub(super) index: u32,
    pub(super) parent: c_int,
    /// Standard input, output and error, none of them among the numbers 0 to 2; and the pipe for failures.
    pub(super) streams: [RawFd; 3],
    pub(super) failures: RawFd,
    pub(super) handled: *const [c_int],
    pub(super) cores: Option<CpuSet>,
    pub(super) descriptor_limits: Option<[u64; 2]>,
    pub(super) program: CString,
    /// The shell, then the arguments, the first of which is the program; ends with null.
    pub(super) arguments: Vec<*const c_char>,
    pub(super) environment: Vec<*const c_char>,
    pub(super) _texts: Vec<CString>,
    pub(super) stack: Box<[MaybeUninit<u128>]>,
}

/// The step at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Step {
    Bind,
    Start,
}

/// A report of a child: its index, the step and the error, as three numbers.
pub(super) const REPORT_BYTES: usize = 12;

/// Prepares the child and executes its program. Returns the child's exit code if that fails.
pub(super) extern "C" fn run_child(child: *mut c_void) -> c_int {
    // SAFETY: the batch keeps the value until the child has executed its program or has ended, and nobody writes it.
    let child = unsafe { &*child.cast_const().cast::<Child>() };
    // SAFETY: `prepare_and_execute` runs in the child of a clone.
    let Err(errno) = unsafe { prepare_and_execute(child) };
    // SAFETY: as above.
    unsafe { report(child, Step::Start, errno) };
    127
}

/// Prepares the child and executes its program.
///
/// # Safety
/// Only in the child of a clone: it changes signals, descriptors and more of the calling process.
unsafe fn prepare_and_execute(child: &Child) -> Result<std::convert::Infallible, syscalls::Errno> {
    let default_action = [0u64; SIGACTION_BYTES / 8];
    // SAFETY: system calls with numbers and with pointers to memory that lives for the call: the child's own stack, or
    // what the batch keeps. They change the child only: it shares memory with its parent, but neither descriptors nor
    // signal actions.
    unsafe {
        syscall2(Sysno::setpgid, 0, 0)?;
        discard_pending_signals()?;
        for (number, stream) in child.streams.iter().enumerate() {
            syscall3(Sysno::dup3, *stream as usize, number, 0)?;
        }
        syscall2(Sysno::prctl, libc::PR_SET_PDEATHSIG as usize, Signal::SIGKILL as usize)?;
        // The parent may have died between the clone and the line above; then no signal is sent.
        if syscalls::syscall0(Sysno::getppid)? != child.parent as usize {
            return Err(syscalls::Errno::ESRCH);
        }
        for signal in &*child.handled {
            let action = default_action.as_ptr() as usize;
            syscall4(Sysno::rt_sigaction, *signal as usize, action, 0, SIGNAL_SET_BYTES)?;
        }
        if let Some(cores) = &child.cores {
            let (size, set) = (size_of::<CpuSet>(), ptr::from_ref(cores) as usize);
            if let Err(errno) = syscall3(Sysno::sched_setaffinity, 0, size, set) {
                report(child, Step::Bind, errno);
            }
        }
        if let Some(limits) = &child.descriptor_limits {
            let limits = limits.as_ptr() as usize;
            syscall4(Sysno::prlimit64, 0, libc::RLIMIT_NOFILE as usize, limits, 0)?;
        }
        let unblocked = 0u64;
        let set = ptr::from_ref(&unblocked) as usize;
        syscall4(Sysno::rt_sigprocmask, libc::SIG_SETMASK as usize, set, 0, SIGNAL_SET_BYTES)?;
        let (shell, environment) = (child.arguments.as_ptr(), child.environment.as_ptr() as usize);
        let execute = |program: *const c_char, arguments: *const *const c_char| match syscall3(
            Sysno::execve,
            program as usize,
            arguments as usize,
            environment,
        ) {
            Ok(_) => syscalls::Errno::EINVAL,
            Err(errno) => errno,
        };
        match execute(child.program.as_ptr(), shell.add(1)) {
            syscalls::Errno::ENOEXEC => Err(execute(SHELL.as_ptr(), shell)),
            errno => Err(errno),
        }
    }
}

/// Discards the signals that are pending. Until the child has its own group, it gets the signals to the group of its
/// parent. They are the parent's, which decides what the child is sent. If the child unblocked one, it would end before
/// it executes its program, and where SIGQUIT dumps core, older kernels end all processes that share its memory with it.
///
/// # Safety
/// As [`prepare_and_execute`].
pub(super) unsafe fn discard_pending_signals() -> Result<(), syscalls::Errno> {
    let mut pending = 0u64;
    // The action is the first field of the kernel's `struct sigaction`.
    let mut ignore = [0u64; SIGACTION_BYTES / 8];
    ignore[0] = libc::SIG_IGN as u64;
    let mut before = [0u64; SIGACTION_BYTES / 8];
    let before = before.as_mut_ptr() as usize;
    // SAFETY: system calls with pointers to memory of this function, which the kernel writes (`pending`, `before`) or
    // reads.
    unsafe {
        syscall2(Sysno::rt_sigpending, ptr::from_mut(&mut pending) as usize, SIGNAL_SET_BYTES)?;
        for signal in (1..=SIGNALS as usize).filter(|signal| pending >> (signal - 1) & 1 == 1) {
            // The kernel discards a pending signal when it becomes ignored.
            syscall4(Sysno::rt_sigaction, signal, ignore.as_ptr() as usize, before, SIGNAL_SET_BYTES)?;
            syscall4(Sysno::rt_sigaction, signal, before, 0, SIGNAL_SET_BYTES)?;
        }
    }
    Ok(())
}

/// Reports a failure to the parent.
///
/// # Safety
/// As [`prepare_and_execute`].
unsafe fn report(child: &Child, step: Step, errno: syscalls::Errno) {
    let report = [child.index, step as u32, errno.into_raw() as u32];
    // SAFETY: the report lives for the call. It is shorter than PIPE_BUF, so reports do not mix.
    let _ =
        unsafe { syscall3(Sysno::write, child.failures as usize, report.as_ptr() as usize, REPORT_BYTES) };
}

/// The child's index and failure in a report.
pub(super) fn parse_report(bytes: &[u8]) -> Option<(usize, SpawnFailure)> {
    let number = |at: usize| Some(u32::from_ne_bytes(*bytes.get(4 * at..)?.first_chunk()?));
    let error = io::Error::from_raw_os_error(number(2)? as i32);
    let failure = if number(1)? == Step::Bind as u32 {
        SpawnFailure::Unbound(error)
    } else {
        SpawnFailure::NotStarted(error)
    };
    Some((number(0)? as usize, failure))
}
