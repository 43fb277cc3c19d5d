//! Programs that are stopped at every system call, before it and after it, by ptrace.
//!
//! The tracer is a thread: everything here happens on the one that calls, and it waits for its own children only, so that tests
//! side by side do not take each other's.

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
    /// Which thread of the program, from 0, in the order in which they were seen.
    pub thread: usize,
    /// How many stops this thread has had before.
    pub index: usize,
    /// Before the call, or after it.
    pub before: bool,
    /// The call's number.
    pub call: c_long,
    tid: Pid,
    arguments: [u64; 4],
    /// What it has returned, after it.
    result: i64,
}

impl SyscallStop {
    /// Whether the call has succeeded, after it.
    pub fn succeeded(&self) -> bool {
        self.result >= 0
    }

    /// The call's argument number `index`, from 0 to 3.
    pub fn argument(&self, index: usize) -> u64 {
        self.arguments[index]
    }

    /// The path that argument `index` points to, relative to the folder that argument `folder` is a descriptor of.
    pub fn path(&self, folder: Option<usize>, index: usize) -> PathBuf {
        let path = self.text(self.argument(index)).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        match folder.map(|folder| self.argument(folder) as i32) {
            None | Some(libc::AT_FDCWD) => path,
            Some(descriptor) => self.linked(descriptor).join(path),
        }
    }

    /// What the descriptor in argument `index` is open for.
    pub fn file(&self, index: usize) -> PathBuf {
        self.linked(self.argument(index) as i32)
    }

    fn linked(&self, descriptor: i32) -> PathBuf {
        fs::read_link(format!("/proc/{}/fd/{descriptor}", self.tid)).unwrap_or_default()
    }

    /// The text that ends with a zero byte at `address`.
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

/// What to do with a stopped program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Let it go on.
    Continue,
    /// End it by SIGKILL, where it is.
    Kill,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramEnd {
    /// By itself, with this exit code.
    Exited(i32),
    /// By this signal.
    Killed(Signal),
}

/// Runs `program`, which waits for the end of its standard input first, and stops it at every system call of all its threads
/// between two calls of `marker` on its first one.
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
                    // Some processors return the result in the place of an argument.
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
            // The stop that was asked for, a thread that begins, one that has begun another.
            WaitStatus::PtraceEvent(tid, ..) => {
                // Under control, so it may begin.
                drop(input.take());
                (tid, None)
            }
            WaitStatus::Stopped(tid, signal) => (tid, Some(signal)),
            _ => continue,
        };
        match ptrace::syscall(tid, signal) {
            // It has been killed meanwhile, and will be told of.
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

/// The number of a thread's system call, its first arguments and its result, by the kernel's convention for the processor.
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
