//! Starts ranks: processes that cannot outlive the launcher, each in its own process group, so that their children are
//! killed, too.
//!
//! Dropping a [`Process`] that has not been reaped kills it. So no path through the launcher, such as an early return
//! or a panic, leaves a process running.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mgpu_control::process::{GroupKillGuard, pidfd_open};
use mgpu_control::protocol::{MGPU_INJECT, MGPU_PROGRESS};
use mgpu_control::spawn_batch::{Invocation, SpawnBatch, SpawnFailure, Spawned};
use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

use crate::descriptor_limits;
use crate::error::LaunchError;
use crate::nodes::variables_to_remove;
use crate::placement::CoreSet;
use crate::plan::{LaunchPlan, ProgramCommand, RankPlan, RunContext};
use crate::program::find;
use crate::supervisor::Exit;

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
    /// How and when it ended, once it has.
    pub(crate) exit: Option<(Exit, SystemTime)>,
    /// It exited with code 0, or with that of a stop on request.
    pub(crate) has_finished: bool,
    /// Its peak resident memory in bytes, once it has ended.
    pub(crate) peak_memory: Option<u64>,
    /// A message for the user about its start.
    pub(crate) notice: Option<String>,
    /// Kills its group if this process is killed.
    kill_guard: Option<GroupKillGuard>,
}

/// Descriptors that the launcher needs besides those for its ranks, with those of `--metrics-listen`: a listener and 32
/// connections.
const OWN_DESCRIPTORS: u64 = 72;
/// Descriptors for each rank, with those of its [`GroupKillGuard`].
const DESCRIPTORS_OF_A_RANK: u64 = 6;

/// Starts the ranks of a plan on this node, each in its own process group, with `/dev/null` as standard input. Returns when
/// all of them have executed their program. The kernel kills them when the calling thread ends.
///
/// A rank is bound to its cores. If the kernel refuses that (the cores may have been removed since the plan was made, or
/// a sandbox forbids the call), it runs unbound, with a notice: a slower run is better than none.
///
/// # Errors
/// If a rank cannot be started; none is left then.
pub(crate) fn spawn(plan: &LaunchPlan, context: &RunContext) -> Result<Vec<Process>, LaunchError> {
    let ranks = || plan.ranks.iter().map(|rank| (rank, plan.command_of(rank)));
    let Some(first) = ranks().next() else { return Ok(Vec::new()) };
    let mut batch = SpawnBatch::new().map_err(|error| failure(first, error))?;
    // Dropped before the batch: it waits for children that have not executed their program, and those are killed then.
    let mut processes = Vec::with_capacity(plan.ranks.len());
    for (rank, command) in ranks() {
        let started = start(&mut batch, command, rank, context);
        processes.push(started.map_err(|error| failure((rank, command), error))?);
    }
    // After the starts, because every child begins with a copy of this process's descriptors.
    for process in &mut processes {
        process.kill_guard = guard_group(context.launch_ranks, process.pid);
    }
    let failures = batch.finish().map_err(|error| failure(first, error))?;
    for (index, reported) in failures {
        let (Some(process), Some(rank)) = (processes.get_mut(index), ranks().nth(index)) else { continue };
        match reported {
            SpawnFailure::NotStarted(error) => return Err(failure(rank, error)),
            SpawnFailure::Unbound(error) => {
                let (rank, _) = rank;
                let cores = rank.cores.iter().map(|cores| format!(" to cores {cores}")).collect::<String>();
                process.notice = Some(format!("rank {} is not bound{cores}: {error}", rank.rank));
            }
        }
    }
    Ok(processes)
}

fn failure((rank, command): (&RankPlan, &ProgramCommand), error: io::Error) -> LaunchError {
    LaunchError::Spawn { rank: rank.rank, program: command.program.clone(), hint: hint(&error), error }
}

fn start(
    batch: &mut SpawnBatch,
    command: &ProgramCommand,
    rank: &RankPlan,
    context: &RunContext,
) -> io::Result<Process> {
    let Spawned { pid, pipes } = batch.start(&Invocation {
        program: &path_of(&command.program)?,
        arguments: &command.arguments,
        environment: &environment(rank, context),
        cores: rank.cores.as_ref().map(CoreSet::to_cpu_set),
        descriptor_limits: descriptor_limits::of_ranks(),
    })?;
    let pidfd = pidfd_open(pid.as_raw() as u32).inspect_err(|_| end(pid))?;
    Ok(Process {
        pid,
        pidfd,
        pipes: pipes.map(Some),
        group: Vec::new(),
        sent: Sent::Nothing,
        step: 0,
        reaped: false,
        ended: None,
        exit: None,
        has_finished: false,
        peak_memory: None,
        notice: None,
        kill_guard: None,
    })
}

/// The path of a program, which users of the library may name without one.
fn path_of(program: &Path) -> io::Result<Cow<'_, Path>> {
    if program.as_os_str().as_encoded_bytes().contains(&b'/') {
        return Ok(Cow::Borrowed(program));
    }
    let search = std::env::var_os("PATH").unwrap_or_default();
    let search: Vec<PathBuf> = std::env::split_paths(&search).collect();
    let found = find(program.as_os_str(), &search, None);
    found.map(Cow::Owned).map_err(|error| io::Error::new(io::ErrorKind::NotFound, error))
}

/// What differs between the environments of a rank and of this process.
fn environment(rank: &RankPlan, context: &RunContext) -> BTreeMap<OsString, Option<OsString>> {
    // If this launcher is a rank of another launcher: its own output settings apply to its ranks, and the other
    // launcher's faults do not.
    let mut removed = vec![MGPU_PROGRESS.to_owned(), MGPU_INJECT.to_owned()];
    if context.place.is_some() {
        // Set by an engine for this agent.
        let inherited: Vec<String> =
            std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
        removed.extend(variables_to_remove(inherited.iter().map(String::as_str)));
    }
    let removed = removed.into_iter().map(|name| (name.into(), None));
    let own = rank.full_environment(context).into_iter();
    removed.chain(own.map(|(name, value)| (name.into(), Some(value.into())))).collect()
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
