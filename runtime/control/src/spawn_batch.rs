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

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString, c_char, c_int, c_void};
use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::sched::CpuSet;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::unistd::{Pid, getpid, pipe2, setpgid};
use syscalls::{Sysno, syscall2, syscall3, syscall4};

/// Size of a child's stack. [`run_child`] needs less than 1 KiB of it, also without optimisation.
const STACK_BYTES: usize = 16 << 10;
/// Number of signals of Linux, real-time signals included.
const SIGNALS: c_int = 64;
/// Size of the kernel's set of signals in bytes.
const SIGNAL_SET_BYTES: usize = 8;
/// Room for the kernel's `struct sigaction` on every architecture; all zeros is the default action.
const SIGACTION_BYTES: usize = 64;
/// Runs files that have execute permission but no format that the kernel knows, as `execvp` does.
const SHELL: &std::ffi::CStr = c"/bin/sh";

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

/// What [`run_child`] reads. The pointers refer to the memory of the same value or of the batch.
struct Child {
    index: u32,
    parent: c_int,
    /// Standard input, output and error, none of them among the numbers 0 to 2; and the pipe for failures.
    streams: [RawFd; 3],
    failures: RawFd,
    handled: *const [c_int],
    cores: Option<CpuSet>,
    descriptor_limits: Option<[u64; 2]>,
    program: CString,
    /// The shell, then the arguments, the first of which is the program; ends with null.
    arguments: Vec<*const c_char>,
    environment: Vec<*const c_char>,
    _texts: Vec<CString>,
    stack: Box<[MaybeUninit<u128>]>,
}

/// The step at which a child failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Step {
    Bind,
    Start,
}

/// A report of a child: its index, the step and the error, as three numbers.
const REPORT_BYTES: usize = 12;

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

/// Prepares the child and executes its program. Returns the child's exit code if that fails.
extern "C" fn run_child(child: *mut c_void) -> c_int {
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
unsafe fn discard_pending_signals() -> Result<(), syscalls::Errno> {
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

fn parse_report(bytes: &[u8]) -> Option<(usize, SpawnFailure)> {
    let number = |at: usize| Some(u32::from_ne_bytes(*bytes.get(4 * at..)?.first_chunk()?));
    let error = io::Error::from_raw_os_error(number(2)? as i32);
    let failure = if number(1)? == Step::Bind as u32 {
        SpawnFailure::Unbound(error)
    } else {
        SpawnFailure::NotStarted(error)
    };
    Some((number(0)? as usize, failure))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, sigaction};
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::*;

    /// Everything that a child writes to one of its streams, and how it ends.
    fn finish_child(child: Spawned, stream: usize) -> (String, WaitStatus) {
        let [out, err] = child.pipes;
        let mut pipe = File::from(if stream == 1 { out } else { err });
        let mut bytes = Vec::new();
        loop {
            poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
            match pipe.read_to_end(&mut bytes) {
                Ok(_) => break,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        (String::from_utf8(bytes).unwrap(), waitpid(child.pid, None).unwrap())
    }

    /// An [`Invocation`] that owns its texts.
    struct Text {
        program: PathBuf,
        arguments: Vec<OsString>,
        environment: BTreeMap<OsString, Option<OsString>>,
    }

    fn program(path: impl Into<PathBuf>, arguments: &[&str]) -> Text {
        let arguments = arguments.iter().map(OsString::from).collect();
        Text { program: path.into(), arguments, environment: BTreeMap::new() }
    }

    fn shell(script: &str) -> Text {
        program("/bin/sh", &["-c", script])
    }

    impl Text {
        fn set(mut self, name: &str, value: Option<&str>) -> Self {
            self.environment.insert(name.into(), value.map(OsString::from));
            self
        }

        fn start(&self, batch: &mut SpawnBatch, cores: Option<CpuSet>) -> io::Result<Spawned> {
            let Text { program, arguments, environment } = self;
            batch.start(&Invocation { program, arguments, environment, cores, descriptor_limits: None })
        }
    }

    /// Starts one child, which has to start, and returns its standard output.
    fn output_of(text: &Text) -> String {
        let mut batch = SpawnBatch::new().unwrap();
        let child = text.start(&mut batch, None).unwrap();
        assert!(batch.finish().unwrap().is_empty());
        let (output, end) = finish_child(child, 1);
        assert!(matches!(end, WaitStatus::Exited(_, 0)), "{end:?}: {output}");
        output
    }

    #[test]
    fn each_child_gets_its_own_arguments_and_environment() {
        let mut batch = SpawnBatch::new().unwrap();
        let mut children = Vec::new();
        for number in 0..40 {
            let script = "echo $0 $1 $NUMBER ${HOME-none}; echo error >&2; exit $NUMBER";
            let text = program("/bin/sh", &["-c", script, "zero", "two words"]);
            let text = text.set("NUMBER", Some(&number.to_string())).set("HOME", None);
            children.push(text.start(&mut batch, None).unwrap());
        }
        assert!(batch.finish().unwrap().is_empty());
        for (child, number) in children.into_iter().zip(0..) {
            let stream = 1 + number as usize % 2;
            let (output, end) = finish_child(child, stream);
            let expected = format!("zero two words {number} none\n");
            assert_eq!(output, if stream == 1 { &expected } else { "error\n" });
            assert!(matches!(end, WaitStatus::Exited(_, code) if code == number));
        }
    }

    #[test]
    fn a_child_has_a_group_of_its_own_and_no_blocked_caught_or_ignored_signal() {
        extern "C" fn ignore(_: c_int) {}
        let action = SigAction::new(SigHandler::Handler(ignore), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, and nothing else in this program uses the signal.
        unsafe { sigaction(Signal::SIGWINCH, &action) }.unwrap();
        let mut blocked = SigSet::empty();
        blocked.add(Signal::SIGTERM);
        blocked.thread_block().unwrap();
        let script = "read pid name state parent group rest < /proc/self/stat; [ $pid = $group ] || exit 1; \
                      readlink /proc/self/fd/0; cat /proc/self/status";
        let output = output_of(&shell(script));
        assert!(output.starts_with("/dev/null\n"), "{output}");
        let has = |set: &str, signal: Signal| {
            let line = output.lines().find_map(|line| line.strip_prefix(set)?.strip_prefix(":\t"));
            u64::from_str_radix(line.unwrap(), 16).unwrap() >> (signal as u32 - 1) & 1 == 1
        };
        assert!(!has("SigBlk", Signal::SIGTERM), "{output}");
        assert!(!has("SigIgn", Signal::SIGPIPE), "{output}");
        assert!(!has("SigCgt", Signal::SIGWINCH) && !has("SigIgn", Signal::SIGWINCH), "{output}");
    }

    #[test]
    fn a_child_that_does_not_start_is_reported_and_the_others_run() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let mut batch = SpawnBatch::new().unwrap();
        let programs = [shell("echo first"), program(missing, &[]), shell("echo last")];
        let children = programs.map(|text| text.start(&mut batch, None).unwrap());
        let failures = batch.finish().unwrap();
        assert!(
            matches!(&failures[..], [(1, SpawnFailure::NotStarted(error))]
                if error.raw_os_error() == Some(libc::ENOENT)),
            "{failures:?}"
        );
        let outputs = children.map(|child| finish_child(child, 1).0);
        assert_eq!(outputs, ["first\n", "", "last\n"]);
    }

    #[test]
    fn a_refused_binding_is_reported_and_the_child_runs() {
        let mut batch = SpawnBatch::new().unwrap();
        let child = shell("echo unbound").start(&mut batch, Some(CpuSet::new())).unwrap();
        let failures = batch.finish().unwrap();
        assert!(
            matches!(&failures[..], [(0, SpawnFailure::Unbound(error))]
                if error.raw_os_error() == Some(libc::EINVAL)),
            "{failures:?}"
        );
        assert_eq!(finish_child(child, 1).0, "unbound\n");
    }

    #[test]
    fn a_child_is_bound_to_its_cores() {
        let own = nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap();
        let core = (0..CpuSet::count()).find(|core| own.is_set(*core).unwrap()).unwrap();
        let mut one = CpuSet::new();
        one.set(core).unwrap();
        let mut batch = SpawnBatch::new().unwrap();
        let child = shell("grep Cpus_allowed_list /proc/self/status").start(&mut batch, Some(one)).unwrap();
        assert!(batch.finish().unwrap().is_empty());
        assert_eq!(finish_child(child, 1).0, format!("Cpus_allowed_list:\t{core}\n"));
        assert_eq!(nix::sched::sched_getaffinity(Pid::from_raw(0)).unwrap(), own);
    }

    #[test]
    fn a_child_has_the_given_limits_on_descriptors() {
        let own = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
        let mut batch = SpawnBatch::new().unwrap();
        let Text { program, arguments, environment } = &shell("ulimit -Sn; ulimit -Hn");
        let (cores, descriptor_limits) = (None, Some([60, 70]));
        let invocation = Invocation { program, arguments, environment, cores, descriptor_limits };
        let child = batch.start(&invocation).unwrap();
        assert!(batch.finish().unwrap().is_empty());
        assert_eq!(finish_child(child, 1).0, "60\n70\n");
        let after = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
        assert_eq!(after, own);
    }

    #[test]
    fn a_clone_that_suspends_the_parent_works_as_well() {
        let batch = SpawnBatch::new().unwrap();
        let (out, err) = (pipe2(OFlag::O_CLOEXEC).unwrap(), pipe2(OFlag::O_CLOEXEC).unwrap());
        let Text { program, arguments, environment } = &shell("echo started");
        let invocation = Invocation { program, arguments, environment, cores: None, descriptor_limits: None };
        let streams = [batch.null.as_fd(), out.1.as_fd(), err.1.as_fd()];
        let mut described = batch.describe(&invocation, streams).unwrap();
        let pid = clone_in_same_memory(&mut described, libc::CLONE_VFORK).unwrap();
        drop((out.1, err.1));
        let (output, end) = finish_child(Spawned { pid, pipes: [out.0, err.0] }, 1);
        assert_eq!((output.as_str(), end), ("started\n", WaitStatus::Exited(pid, 0)));
        assert!(batch.finish().unwrap().is_empty());
    }

    #[test]
    fn pending_signals_are_discarded_and_actions_stay() {
        let signals: SigSet = [Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGXCPU].into_iter().collect();
        let mut before = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), Some(&mut before)).unwrap();
        extern "C" fn fail(_: c_int) {
            std::process::abort();
        }
        let action = SigAction::new(SigHandler::Handler(fail), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler is async-signal-safe, and nothing else in this program uses the signal.
        unsafe { sigaction(Signal::SIGXCPU, &action) }.unwrap();
        for signal in &signals {
            // To this thread: other threads do not block them.
            nix::sys::signal::raise(signal).unwrap();
        }
        // SAFETY: it changes the actions of signals for a moment; nothing else in this program sends these three.
        unsafe { discard_pending_signals() }.unwrap();
        // Ends this process if one is left.
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).unwrap();
        let kept = handled_signals();
        assert!(kept.contains(&libc::SIGXCPU) && !kept.contains(&libc::SIGQUIT), "{kept:?}");
    }

    #[test]
    fn a_script_without_a_first_line_is_run_by_the_shell() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        std::fs::write(&script, "echo \"$0 $1\"\n").unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let text = program(&script, &["word"]);
        assert_eq!(output_of(&text), format!("{} word\n", script.display()));
    }

    #[test]
    fn texts_with_a_zero_byte_and_names_without_a_path_are_refused() {
        let mut batch = SpawnBatch::new().unwrap();
        let texts = [
            shell("echo \0"),
            program("sh", &[]),
            program("/bin/\0", &[]),
            shell("").set("A", Some("\0")),
            shell("").set("A\0", Some("")),
        ];
        for text in texts {
            assert_eq!(text.start(&mut batch, None).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        // A batch that is dropped waits for the children that it has started.
        let child = shell("echo started").start(&mut batch, None).unwrap();
        drop(batch);
        assert_eq!(finish_child(child, 1).0, "started\n");
    }

    #[test]
    fn reports_are_parsed() {
        let bytes =
            |numbers: [u32; 3]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
        let parsed = parse_report(&bytes([7, Step::Start as u32, libc::EACCES as u32]));
        assert!(matches!(parsed, Some((7, SpawnFailure::NotStarted(error)))
            if error.raw_os_error() == Some(libc::EACCES)));
        assert!(parse_report(&bytes([7, 0, 1])[..11]).is_none());
    }
}
