//! `mgpurun stop`: asks a running job of this user to save its work and stop.
//!
//! The runs are found as `mgpurun ps` finds them. The request is SIGUSR1 to the launcher, which asks its ranks; a program
//! that cannot stop by itself would be ended by that signal, so such a run is refused.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::process::ExitCode;

use clap::Parser;
use mgpu_control::process::pidfd_open;
use mgpu_control::progress::{ProgressPage, RankState};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::status::runs::{OWN_ENTRY, pages, title};
use crate::stdout;

/// Ask a running job to save its work and stop.
///
/// All ranks stop after the same step, and mgpurun exits with code 74 within --stop-grace seconds. The job continues to
/// run if its program cannot stop by itself.
///
/// To start a program named stop: mgpurun -- stop
#[derive(Debug, Parser)]
#[command(name = "mgpurun stop", bin_name = "mgpurun stop", max_term_width = 100)]
pub(crate) struct Args {
    /// The process of mgpurun, its launcher, or one of its ranks; may be left out if there is only one job.
    #[arg(value_name = "PID")]
    process: Option<u32>,

    /// Wait until the job has ended.
    #[arg(long)]
    wait: bool,
}

/// The command, with the arguments from `stop` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    let args = match stdout::parse::<Args>(arguments.iter().cloned())? {
        Ok(args) => args,
        Err(code) => return Ok(code),
    };
    // Without /proc no run can be found, although there may be some.
    fs::read_link(OWN_ENTRY).map_err(|error| {
        format!("cannot find the runs: cannot read {OWN_ENTRY}: {error}; is /proc mounted?")
    })?;
    let pages: Vec<ProgressPage> = pages().collect();
    let launcher = choose(&pages, args.process)?;
    // A pidfd first: the launcher may end at any time, and its number may be reused.
    let ended = pidfd_open(launcher).map_err(|error| format!("launcher {launcher} has ended: {error}"))?;
    let of_launcher: Vec<&ProgressPage> =
        pages.iter().filter(|page| page.run().launcher == launcher).collect();
    if let Some(page) = of_launcher.iter().find(|page| !can_stop(page)) {
        return Err(format!(
            "{}: not all of its ranks can stop by themselves (yet); kill {} ends it",
            title(&page.run()),
            parent_of(launcher).unwrap_or(launcher)
        )
        .into());
    }
    kill(Pid::from_raw(launcher.cast_signed()), Signal::SIGUSR1)
        .map_err(|error| format!("cannot signal launcher {launcher}: {error}"))?;
    let asked: String =
        of_launcher.iter().map(|page| format!("asked to stop: {}\n", title(&page.run()))).collect();
    let code = stdout::print(&asked, ExitCode::SUCCESS)?;
    if args.wait {
        while poll(&mut [PollFd::new(ended.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).is_err() {
            // Interrupted by a signal.
        }
    }
    Ok(code)
}

/// The launcher of the job that the user means.
fn choose(pages: &[ProgressPage], process: Option<u32>) -> Result<u32, String> {
    let list = || -> String { pages.iter().map(|page| format!("\n  {}", title(&page.run()))).collect() };
    let is_meant = |page: &&ProgressPage| {
        let launcher = page.run().launcher;
        let is_rank = |pid| (0..page.world_size()).any(|rank| page.process(rank) == Some(pid));
        process.is_none_or(|pid| pid == launcher || Some(pid) == parent_of(launcher) || is_rank(pid))
    };
    let mut launchers: Vec<u32> = pages.iter().filter(is_meant).map(|page| page.run().launcher).collect();
    launchers.sort_unstable();
    launchers.dedup();
    match (&launchers[..], process) {
        ([launcher], _) => Ok(*launcher),
        ([], None) => Err("no run of this user".into()),
        ([], Some(pid)) => Err(format!("process {pid} belongs to none of this user's runs:{}", list())),
        _ => Err(format!("there are several runs; name the process of one, such as its launcher:{}", list())),
    }
}

/// The parent of a launcher: the process that the user has started.
fn parent_of(process: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// True if all ranks that run stop by themselves. Ranks of other hosts are known there only.
fn can_stop(page: &ProgressPage) -> bool {
    (0..page.world_size()).filter(|rank| page.host(*rank).is_none()).all(|rank| {
        page.checks_for_stops(rank) || matches!(page.state(rank), RankState::Left | RankState::Failed)
    })
}
