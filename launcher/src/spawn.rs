//! Starting a rank: a process that cannot outlive its launcher, in a group of its own so that its children go too.
//!
//! Whatever happens afterwards, an early return or a panic, dropping a [`Process`] that has not been waited for ends
//! it, so no path through the launcher leaves one behind.

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
use crate::placement::CoreSet;
use crate::plan::{LaunchPlan, RankPlan, RunContext};

/// What a rank was sent by its launcher, the most that there was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sent {
    /// Nothing that ends it.
    Nothing,
    /// The request to end.
    Request,
    /// SIGKILL.
    Kill,
}

/// A rank's process.
#[derive(Debug)]
pub(crate) struct Process {
    /// The process, and its process group.
    pub(crate) pid: Pid,
    /// Readable when the process has ended.
    pub(crate) pidfd: OwnedFd,
    /// Its standard output and error, to be read without blocking; `None` once they are closed.
    pub(crate) pipes: [Option<OwnedFd>; 2],
    /// What is left of its group after it has ended, while that may take its time.
    pub(crate) group: Vec<OwnedFd>,
    /// What it was sent.
    pub(crate) sent: Sent,
    /// Its last step that was recorded.
    pub(crate) step: u64,
    /// It has been waited for: its number may belong to somebody else by now.
    pub(crate) reaped: bool,
    /// How it ended, as a predicate. If it has not been waited for, its group still has its number and may be running.
    pub(crate) ended: Option<String>,
    /// Something the user should know about how it was started.
    pub(crate) notice: Option<String>,
    /// Ends its group if this process is killed.
    _kill_guard: Option<GroupKillGuard>,
}

/// Descriptors that a launcher needs beside those for its ranks.
const OWN_DESCRIPTORS: u64 = 32;
/// Descriptors for each rank, with those of its [`GroupKillGuard`].
const DESCRIPTORS_OF_A_RANK: u64 = 6;

/// Starts a rank in a process group of its own, with `/dev/null` as standard input. It dies with the calling thread.
///
/// It starts on its cores, or, should the kernel refuse them (they may have been taken away since the plan was made, or
/// a sandbox forbids the call), on all of them, with a notice: a run that is slower is better than none.
pub(crate) fn spawn(
    plan: &LaunchPlan,
    rank: &RankPlan,
    context: &RunContext,
) -> Result<Process, LaunchError> {
    let Some(cores) = &rank.cores else { return start(plan, rank, context, None) };
    start(plan, rank, context, Some(cores)).or_else(|refusal| {
        // If it does not start without them either, they were not the reason.
        let mut process = start(plan, rank, context, None)?;
        if let LaunchError::Spawn { error, .. } = refusal {
            process.notice = Some(format!("rank {} is not bound to cores {cores}: {error}", rank.rank));
        }
        Ok(process)
    })
}

fn start(
    plan: &LaunchPlan,
    rank: &RankPlan,
    context: &RunContext,
    cores: Option<&CoreSet>,
) -> Result<Process, LaunchError> {
    let failed = |error: io::Error| LaunchError::Spawn {
        rank: rank.rank,
        program: plan.program.clone(),
        hint: hint(&error),
        error,
    };
    let mut command = Command::new(&plan.program);
    command
        .args(&plan.arguments)
        // A launcher that is itself a rank of another one has its own idea of where output goes, and its ranks have not
        // deserved the other one's faults.
        .env_remove(MGPU_PROGRESS)
        .env_remove(MGPU_INJECT)
        .envs(rank.full_environment(context))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    mgpu_control::process::kill_with_parent(&mut command);
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
            notice: None,
            _kill_guard: guard_group(plan, pid),
        }),
        Err(error) => {
            end(pid);
            Err(failed(error))
        }
    }
}

/// Ties a rank's group to this process. That is for the worst case, in which guardian and launcher are killed at once, so
/// it must not cost descriptors that the run itself needs.
fn guard_group(plan: &LaunchPlan, group: Pid) -> Option<GroupKillGuard> {
    let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let needed = OWN_DESCRIPTORS + DESCRIPTORS_OF_A_RANK * plan.ranks.len() as u64;
    if limit < needed { None } else { GroupKillGuard::new(group).ok() }
}

/// What to try when a program that is there does not start.
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

/// Sends a signal to a rank that has not been waited for, and to its group; to itself also if it has left that.
pub(crate) fn send(pid: Pid, signal: Signal) {
    if killpg(pid, signal).is_err() || signal == Signal::SIGKILL {
        let _ = kill(pid, signal);
    }
}

/// Kills a process with its group and waits for it.
fn end(pid: Pid) {
    send(pid, Signal::SIGKILL);
    let _ = waitpid(pid, None);
}
