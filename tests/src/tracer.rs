//! Stops programs before and after every system call, by ptrace.
//!
//! The calling thread is the tracer and waits only for its own children, so tests in parallel do not disturb each
//! other.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::libc::{self, c_long, user_regs_struct};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A thread that is stopped at a system call.
#[derive(Debug)]
pub struct SyscallStop {
    /// Index of the program's thread, from 0, in the order in which threads appeared.
    pub thread: usize,
    /// Number of earlier stops of this thread.
    pub index: usize,
    /// True before the call, false after it.
    pub before: bool,
    /// The call's number.
    pub call: c_long,
    tid: Pid,
    arguments: [u64; 4],
    /// Return value, after the call.
    result: i64,
}

impl SyscallStop {
    /// Whether the call succeeded, after it.
    pub fn succeeded(&self) -> bool {
        self.result >= 0
    }

    /// Argument `index` of the call, from 0 to 3.
    pub fn argument(&self, index: usize) -> u64 {
        self.arguments[index]
    }

    /// The path in argument `index`, relative to the folder whose descriptor is argument `folder`.
    pub fn path(&self, folder: Option<usize>, index: usize) -> PathBuf {
        let path = self.text(self.argument(index)).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        match folder.map(|folder| self.argument(folder) as i32) {
            None | Some(libc::AT_FDCWD) => path,
            Some(descriptor) => self.linked(descriptor).join(path),
        }
    }

    /// The file of the descriptor in argument `index`.
    pub fn file(&self, index: usize) -> PathBuf {
        self.linked(self.argument(index) as i32)
    }

    fn linked(&self, descriptor: i32) -> PathBuf {
        fs::read_link(format!("/proc/{}/fd/{descriptor}", self.tid)).unwrap_or_default()
    }

    /// The zero-terminated string at `address`.
    fn text(&self, address: u64) -> io::Result<PathBuf> {
        let memory = File::open(format!("/proc/{}/mem", self.tid))?;
        let mut text = Vec::new();
        for at in address.. {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, at)?;
            if byte[0] == 0 {
                break;
            }
            text.push(byte[0]);
        }
        Ok(Path::new(&String::from_utf8_lossy(&text).into_owned()).to_owned())
    }
}

/// What happens to a stopped program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It continues.
    Continue,
    /// It is killed by SIGKILL at this point.
    Kill,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramEnd {
    /// With this exit code.
    Exited(i32),
    /// By this signal.
    Killed(Signal),
}

/// Runs `program`, which first waits for the end of its standard input, and stops it at every system call of all its
/// threads between two calls of `marker` on its first thread.
///
/// # Errors
/// `EPERM` where tracing is forbidden.
///
/// # Panics
/// If the program cannot be started.
#[expect(clippy::zombie_processes, reason = "it is waited for together with its threads")]
pub fn trace(
    program: &mut Command,
    marker: c_long,
    mut at: impl FnMut(&SyscallStop) -> Action,
) -> Result<ProgramEnd, Errno> {
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("the program starts");
    let pid = Pid::from_raw(child.id() as i32);
    let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL;
    let attached = ptrace::seize(pid, options).and_then(|()| ptrace::interrupt(pid));
    if let Err(error) = attached {
        drop(child.stdin.take());
        let _ = child.wait();
        return Err(error);
    }
    let mut input = child.stdin.take();
    // For each thread: its number of stops so far, and the arguments of its last call.
    let mut threads = vec![(pid, 0, [0; 4])];
    let mut marks = 0;
    loop {
        let status = waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD))?;
        let (tid, signal) = match status {
            WaitStatus::Exited(tid, code) if tid == pid => return Ok(ProgramEnd::Exited(code)),
            WaitStatus::Signaled(tid, signal, _) if tid == pid => return Ok(ProgramEnd::Killed(signal)),
            WaitStatus::PtraceSyscall(tid) => {
                let mut stop = stopped(tid)?;
                if stop.call == marker && tid == pid {
                    marks += usize::from(stop.before);
                } else if marks == 1 {
                    let thread = threads.iter().position(|(known, ..)| *known == tid);
                    stop.thread = thread.unwrap_or_else(|| {
                        threads.push((tid, 0, stop.arguments));
                        threads.len() - 1
                    });
                    let (_, seen, arguments) = &mut threads[stop.thread];
                    (stop.index, *seen) = (*seen, *seen + 1);
                    // Some processors return the result in the register of an argument.
                    match stop.before {
                        true => *arguments = stop.arguments,
                        false => stop.arguments = *arguments,
                    }
                    if at(&stop) == Action::Kill {
                        kill(pid, Signal::SIGKILL)?;
                        continue;
                    }
                }
                (tid, None)
            }
            // The requested stop, a new thread, or the creation of a thread.
            WaitStatus::PtraceEvent(tid, ..) => {
                // The tracer is attached, so the program may start.
                drop(input.take());
                (tid, None)
            }
            WaitStatus::Stopped(tid, signal) => (tid, Some(signal)),
            _ => continue,
        };
        match ptrace::syscall(tid, signal) {
            // Killed meanwhile; waitpid will report it.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
}

fn stopped(tid: Pid) -> Result<SyscallStop, Errno> {
    let (call, arguments, result) = system_call(&ptrace::getregs(tid)?);
    let before = ptrace::syscall_info(tid)?.op == libc::PTRACE_SYSCALL_INFO_ENTRY;
    Ok(SyscallStop { thread: 0, index: 0, before, call, tid, arguments, result })
}

/// The number, first arguments and result of a thread's system call, in the calling convention of the processor.
#[cfg(target_arch = "x86_64")]
fn system_call(registers: &user_regs_struct) -> (c_long, [u64; 4], i64) {
    let user_regs_struct { orig_rax, rdi, rsi, rdx, r10, rax, .. } = *registers;
    (orig_rax as c_long, [rdi, rsi, rdx, r10], rax as i64)
}

/// As above.
#[cfg(target_arch = "aarch64")]
fn system_call(registers: &user_regs_struct) -> (c_long, [u64; 4], i64) {
    let user_regs_struct { regs: [x0, x1, x2, x3, _, _, _, _, x8, ..], .. } = *registers;
    (x8 as c_long, [x0, x1, x2, x3], x0 as i64)
}
