//! Starts a rank: a process that cannot outlive the launcher, in its own process group, so that its children are
//! killed, too.
//!
//! Dropping a [`Process`] that has not been reaped kills it. So no path through the launcher, such as an early return
//! or a panic, leaves a process running.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use mgpu_control::process::GroupKillGuard;
use mgpu_control::protocol::{MGPU_INJECT, MGPU_PROGRESS};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::error::LaunchError;
use crate::nodes::variables_to_remove;
use crate::placement::CoreSet;
use crate::plan::{ProgramCommand, RankPlan, RunContext};

/// The strongest signal that the launcher has sent to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sent {
    /// None that ends it.
    Nothing,
    /// A request to end.
    Request,
    /// SIGKILL.
    Kill,
}

/// A rank's process.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its pid, which is also the number of its process group.
    pub(crate) pid: Pid,
    /// Readable when the process has ended.
    pub(crate) pidfd: OwnedFd,
    /// Its standard output and error, non-blocking; `None` once they are closed.
    pub(crate) pipes: [Option<OwnedFd>; 2],
    /// Pidfds of the remaining processes of its group after it has ended, while they have time to end.
    pub(crate) group: Vec<OwnedFd>,
    /// The strongest signal sent to it.
    pub(crate) sent: Sent,
    /// Its last recorded step.
    pub(crate) step: u64,
    /// It has been reaped: its pid may have been reused.
    pub(crate) reaped: bool,
    /// How it ended, as a predicate. If it has not been reaped, its group may still have processes.
    pub(crate) ended: Option<String>,
    /// Its peak resident memory in bytes, once it has ended.
    pub(crate) peak_memory: Option<u64>,
    /// A message for the user about its start.
    pub(crate) notice: Option<String>,
    /// Kills its group if this process is killed.
    _kill_guard: Option<GroupKillGuard>,
}

/// Descriptors that the launcher needs besides those for its ranks.
const OWN_DESCRIPTORS: u64 = 32;
/// Descriptors for each rank, with those of its [`GroupKillGuard`].
const DESCRIPTORS_OF_A_RANK: u64 = 6;

/// Starts a rank in its own process group, with `/dev/null` as standard input. The kernel kills it when the calling
/// thread ends.
///
/// The rank is bound to its cores. If the kernel refuses that (the cores may have been removed since the plan was made,
/// or a sandbox forbids the call), it starts unbound, with a notice: a slower run is better than none.
pub(crate) fn spawn(
    command: &ProgramCommand,
    rank: &RankPlan,
    context: &RunContext,
) -> Result<Process, LaunchError> {
    let Some(cores) = &rank.cores else { return start(command, rank, context, None) };
    start(command, rank, context, Some(cores)).or_else(|refusal| {
        // If it does not start unbound either, the binding was not the reason.
        let mut process = start(command, rank, context, None)?;
        if let LaunchError::Spawn { error, .. } = refusal {
            process.notice = Some(format!("rank {} is not bound to cores {cores}: {error}", rank.rank));
        }
        Ok(process)
    })
}

fn start(
    program: &ProgramCommand,
    rank: &RankPlan,
    context: &RunContext,
    cores: Option<&CoreSet>,
) -> Result<Process, LaunchError> {
    let failed = |error: io::Error| LaunchError::Spawn {
        rank: rank.rank,
        program: program.program.clone(),
        hint: hint(&error),
        error,
    };
    let mut command = Command::new(&program.program);
    command
        .args(&program.arguments)
        // If this launcher is a rank of another launcher: its own output settings apply to its ranks, and the other
        // launcher's faults do not.
        .env_remove(MGPU_PROGRESS)
        .env_remove(MGPU_INJECT)
        .envs(rank.full_environment(context))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    mgpu_control::process::kill_with_parent(&mut command);
    if context.place.is_some() {
        remove_agent_variables(&mut command, rank, context);
    }
    if let Some(cores) = cores {
        mgpu_control::process::bind_to_cores(&mut command, cores.to_cpu_set());
    }
    let mut child = command.spawn().map_err(failed)?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else { unreachable!("both are piped") };
    let pipes = [OwnedFd::from(stdout), OwnedFd::from(stderr)];
    let pid = Pid::from_raw(child.id() as i32);
    let open = || {
        for pipe in &pipes {
            fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        }
        mgpu_control::process::pidfd_open(child.id())
    };
    match open() {
        Ok(pidfd) => Ok(Process {
            pid,
            pidfd,
            pipes: pipes.map(Some),
            group: Vec::new(),
            sent: Sent::Nothing,
            step: 0,
            reaped: false,
            ended: None,
            peak_memory: None,
            notice: None,
            _kill_guard: guard_group(context.launch_ranks, pid),
        }),
        Err(error) => {
            end(pid);
            Err(failed(error))
        }
    }
}

/// Takes variables from a rank's environment that an engine has set for this agent.
fn remove_agent_variables(command: &mut Command, rank: &RankPlan, context: &RunContext) {
    let own: Vec<&str> = rank.full_environment(context).into_iter().map(|(name, _)| name).collect();
    let inherited: Vec<String> =
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    for name in variables_to_remove(inherited.iter().map(String::as_str)) {
        if !own.contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
}

/// Makes the kernel kill a rank's group when this process ends. This matters only if guardian and launcher are killed at
/// once, so it must not use descriptors that the launch itself needs, with all its `ranks`.
fn guard_group(ranks: u32, group: Pid) -> Option<GroupKillGuard> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let needed = OWN_DESCRIPTORS + DESCRIPTORS_OF_A_RANK * u64::from(ranks);
    if limit < needed { None } else { GroupKillGuard::new(group).ok() }
}

/// What to try if an existing program does not start.
fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT) => "; the interpreter in its first line, or its loader, is missing",
        Some(Errno::ENOEXEC) => "; a script needs a first line such as #!/bin/sh",
        Some(Errno::EACCES) => "; check the permissions of its folder and the mount option noexec",
        Some(Errno::EMFILE | Errno::ENFILE) => {
            "; a rank takes four descriptors of the launcher: raise `ulimit -n` or start fewer ranks"
        }
        _ => mgpu_control::process::start_hint(error),
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.reaped {
            end(self.pid);
        }
    }
}

/// Sends a signal to the group of a rank that has not been reaped. Sends it to the process itself if that fails, and
/// SIGKILL in any case, since the process may have left its group.
pub(crate) fn send(pid: Pid, signal: Signal) {
    if killpg(pid, signal).is_err() || signal == Signal::SIGKILL {
        let _ = kill(pid, signal);
    }
}

/// Kills a process with its group and reaps it.
fn end(pid: Pid) {
    send(pid, Signal::SIGKILL);
    let _ = waitpid(pid, None);
}
