//! Starts many child processes without waiting for each of them.
//!
//! `std::process::Command::spawn` forks and returns when the child has executed its program. So children start one after
//! another, although each spends a millisecond in its loader on some other core, and each `fork` copies the page tables
//! of the parent. A batch does neither: a child runs in the memory of the parent, on a stack of its own, until it
//! executes its program (`CLONE_VM`, as `posix_spawn` does it), and the parent starts the next child meanwhile.
//! 256 processes take a third of the time.
//!
//! What a child does before its program runs therefore must not disturb the parent, which runs at the same time in the
//! same memory: [`run_child`] makes system calls directly (the C library's functions would write `errno` of the parent's
//! thread), allocates nothing, and writes nothing but its own stack. All signals are blocked in it until the parent's
//! handlers are removed. Everything it reads belongs to the batch, which lives until every child has executed its program
//! or has ended: then the kernel has closed the last copy of the pipe on which children report failures.

mod child;

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString, c_char, c_int};
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sched::CpuSet;
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::unistd::{Pid, getpid, pipe2, setpgid};

use child::{Child, REPORT_BYTES, SHELL, SIGNALS, parse_report, run_child};

/// Size of a child's stack. [`run_child`] needs less than 1 KiB of it, also without optimisation.
const STACK_BYTES: usize = 16 << 10;

/// Children that are being started.
pub struct SpawnBatch {
    null: File,
    /// Children write their failures to it.
    failures: Option<(File, OwnedFd)>,
    /// The environment of this process.
    inherited: Vec<(OsString, CString)>,
    /// Signals whose action is not kept when a program is executed, or should not be.
    handled: Vec<c_int>,
    /// What the children read.
    #[expect(clippy::vec_box, reason = "a child has the address of its own")]
    children: Vec<Box<Child>>,
}

/// What a child is.
#[derive(Debug, Clone, Copy)]
pub struct Invocation<'a> {
    /// Path of its program, with a slash.
    pub program: &'a Path,
    /// Its arguments after the program.
    pub arguments: &'a [OsString],
    /// What differs from the environment of this process: a new value, or `None` for a variable to be removed.
    pub environment: &'a BTreeMap<OsString, Option<OsString>>,
    /// The cores that it may use; `None` for those of this process.
    pub cores: Option<CpuSet>,
    /// Its soft and its hard limit on descriptors; `None` for those of this process.
    pub descriptor_limits: Option<[u64; 2]>,
}

/// A child of a [`SpawnBatch`].
#[derive(Debug)]
pub struct Spawned {
    /// Its pid, which is also the number of its process group.
    pub pid: Pid,
    /// The read ends of its standard output and error; non-blocking.
    pub pipes: [OwnedFd; 2],
}

/// What a child could not do.
#[derive(Debug)]
pub enum SpawnFailure {
    /// It runs, on the cores of this process, because the kernel has refused its own.
    Unbound(io::Error),
    /// It has not executed its program and has ended.
    NotStarted(io::Error),
}

impl SpawnBatch {
    /// An empty batch.
    ///
    /// # Errors
    /// If descriptors run out, or there is no `/dev/null`.
    pub fn new() -> io::Result<Self> {
        let null = File::open("/dev/null")?;
        let null = File::from(above_standard_streams(null.into())?);
        let (reader, writer) = pipe2(OFlag::O_CLOEXEC)?;
        let inherited = std::env::vars_os().filter_map(|(name, value)| {
            let text = variable(&name, &value).ok()?;
            Some((name, text))
        });
        Ok(SpawnBatch {
            null,
            failures: Some((reader.into(), above_standard_streams(writer)?)),
            inherited: inherited.collect(),
            handled: handled_signals(),
            children: Vec::new(),
        })
    }

    /// Starts a child in its own process group, with `/dev/null` as standard input and no signal blocked. The kernel kills
    /// it when the calling thread ends.
    ///
    /// The child may not have executed its program yet: [`finish`](Self::finish) waits for that.
    ///
    /// # Errors
    /// If a text contains a zero byte, the program's name has no slash, or the kernel refuses.
    pub fn start(&mut self, invocation: &Invocation<'_>) -> io::Result<Spawned> {
        let (out, err) = (pipe2(OFlag::O_CLOEXEC)?, pipe2(OFlag::O_CLOEXEC)?);
        let ends = [above_standard_streams(out.1)?, above_standard_streams(err.1)?];
        let pipes = [out.0, err.0];
        for pipe in &pipes {
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        let streams = [self.null.as_fd(), ends[0].as_fd(), ends[1].as_fd()];
        let mut child = self.describe(invocation, streams)?;
        let pid = clone_without_signals(&mut child)?;
        self.children.push(child);
        // The child does the same. Whoever is first: the group exists when this returns. It fails if the child has
        // executed its program, so has made the group, or has ended.
        let _ = setpgid(pid, pid);
        Ok(Spawned { pid, pipes })
    }

    fn describe(&self, invocation: &Invocation<'_>, streams: [BorrowedFd<'_>; 3]) -> io::Result<Box<Child>> {
        let Some((_, failures)) = &self.failures else { unreachable!("the batch is not finished") };
        let program = CString::new(invocation.program.as_os_str().as_bytes())?;
        if !program.as_bytes().contains(&b'/') {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "its name needs a path"));
        }
        let mut texts = Vec::new();
        for argument in invocation.arguments {
            texts.push(CString::new(argument.as_bytes())?);
        }
        let first = [SHELL.as_ptr(), program.as_ptr()];
        let arguments = first.into_iter().chain(texts.iter().map(|text| text.as_ptr()));
        let arguments = arguments.chain([ptr::null()]).collect();
        let changes = invocation.environment;
        let kept = self.inherited.iter().filter(|(name, _)| !changes.contains_key(name));
        let mut environment: Vec<*const c_char> = kept.map(|(_, text)| text.as_ptr()).collect();
        for (name, value) in changes {
            let Some(value) = value else { continue };
            let text = variable(name, value)?;
            environment.push(text.as_ptr());
            texts.push(text);
        }
        environment.push(ptr::null());
        Ok(Box::new(Child {
            index: self.children.len() as u32,
            parent: getpid().as_raw(),
            streams: streams.map(|stream| stream.as_raw_fd()),
            failures: failures.as_raw_fd(),
            handled: ptr::from_ref(self.handled.as_slice()),
            cores: invocation.cores,
            descriptor_limits: invocation.descriptor_limits,
            program,
            arguments,
            environment,
            _texts: texts,
            stack: Box::new_uninit_slice(STACK_BYTES / size_of::<u128>()),
        }))
    }

    /// Waits until every child has executed its program or has ended. Returns what failed, with the indices of the
    /// children in the order of their starts.
    ///
    /// # Errors
    /// If the pipe cannot be read, which the kernel has no reason for.
    pub fn finish(mut self) -> io::Result<Vec<(usize, SpawnFailure)>> {
        let bytes = self.wait()?;
        Ok(bytes.chunks_exact(REPORT_BYTES).filter_map(parse_report).collect())
    }

    /// Waits until no child uses the memory of the batch. Returns what they have reported.
    fn wait(&mut self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        if let Some((mut reports, own_end)) = self.failures.take() {
            drop(own_end);
            reports.read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    }
}

impl Drop for SpawnBatch {
    fn drop(&mut self) {
        if self.wait().is_err() {
            // Children may still read it.
            std::mem::take(&mut self.children).into_iter().for_each(std::mem::forget);
            std::mem::forget(std::mem::take(&mut self.inherited));
            std::mem::forget(std::mem::take(&mut self.handled));
        }
    }
}

/// `NAME=VALUE`.
fn variable(name: &OsStr, value: &OsStr) -> io::Result<CString> {
    let mut text = name.to_owned().into_vec();
    text.push(b'=');
    text.extend(value.as_bytes());
    Ok(CString::new(text)?)
}

/// The descriptor, or a copy of it if its number is that of a standard stream: a child would overwrite it.
fn above_standard_streams(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > libc::STDERR_FILENO { Ok(fd) } else { fd.try_clone() }
}

/// The signals for which this process has a handler, and SIGPIPE, which Rust's runtime ignores.
fn handled_signals() -> Vec<c_int> {
    let has_handler = |signal: &c_int| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: a query, which writes the action to a place that lives for the call; zeros are a valid action.
        let action = unsafe {
            libc::sigaction(*signal, ptr::null(), action.as_mut_ptr());
            action.assume_init()
        };
        action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN
    };
    (1..=SIGNALS).filter(|signal| *signal == libc::SIGPIPE || has_handler(signal)).collect()
}

/// Starts [`run_child`] with all signals blocked: a handler of this process must not run in the child.
fn clone_without_signals(child: &mut Child) -> io::Result<Pid> {
    let mut mask = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut mask))?;
    // QEMU's user mode, which runs programs of another architecture, refuses a child in the same memory, except after
    // vfork, which it replaces by fork: the child then reads a copy of what it needs.
    let cloned = match clone_in_same_memory(child, 0) {
        Err(Errno::EINVAL) => clone_in_same_memory(child, libc::CLONE_VFORK),
        cloned => cloned,
    };
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)?;
    Ok(cloned?)
}

fn clone_in_same_memory(child: &mut Child, further_flags: c_int) -> nix::Result<Pid> {
    let stack_end = child.stack.as_mut_ptr_range().end;
    // SAFETY: the child runs `run_child` on a stack of its own, which ends at an address aligned to 16 bytes. The stack
    // and everything that `run_child` reads live until it has executed its program or has ended, because the batch waits
    // for that before it frees them. See the module for why the child does not disturb this process.
    let pid = unsafe {
        let flags = libc::CLONE_VM | libc::SIGCHLD | further_flags;
        libc::clone(run_child, stack_end.cast(), flags, ptr::from_mut(child).cast())
    };
    Errno::result(pid).map(Pid::from_raw)
}

#[cfg(test)]
mod tests;
