//! `mgpurun stop`: asks a running job of this user to save its work and stop.
//!
//! The runs are found as `mgpurun ps` finds them. The request is SIGUSR1 to the launcher, which asks its ranks; a program
//! that cannot stop by itself would be ended by that signal, so such a run is refused. The launcher may also be a program
//! that embeds the library, or one whose ranks are threads: it is refused unless it handles the signal.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::process::ExitCode;

use clap::Parser;
use mgpu_control::progress::{ProgressPage, RankState};
use nix::sys::signal::Signal;

use crate::interrupt::signal_mask;
use crate::running_launcher::{RunningLauncher, signal_failure};
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
    let running = RunningLauncher::open(launcher).map_err(|error| signal_failure(launcher, &error))?;
    let ended = || format!("launcher {launcher} has ended");
    let running = running.ok_or_else(ended)?;
    let of_launcher = || running.pages.iter().map(|(_, page)| page);
    if let Some(page) = of_launcher().find(|page| !can_stop(page)) {
        return Err(format!(
            "{}: not all of its ranks can stop by themselves (yet); kill {} ends it",
            title(&page.run()),
            parent_of(launcher).unwrap_or(launcher)
        )
        .into());
    }
    let status = fs::read_to_string(format!("/proc/{launcher}/status"))
        .map_err(|error| format!("launcher {launcher} has ended: {error}"))?;
    if !handles_stops(&status) {
        let title = of_launcher().next().map_or_else(String::new, |page| title(&page.run()));
        return Err(
            format!("{title}: process {launcher} does not handle SIGUSR1; kill {launcher} ends it").into()
        );
    }
    if !running.signal(Signal::SIGUSR1).map_err(|error| signal_failure(launcher, &error))? {
        return Err(ended().into());
    }
    let asked: String =
        of_launcher().map(|page| format!("asked to stop: {}\n", title(&page.run()))).collect();
    let code = stdout::print(&asked, ExitCode::SUCCESS)?;
    if args.wait {
        running.wait();
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

/// True if a process with this `/proc/PID/status` does something when it gets SIGUSR1, and is not ended by it.
fn handles_stops(status: &str) -> bool {
    let has = |name| signal_mask(status, name) & (1 << (Signal::SIGUSR1 as u32 - 1)) != 0;
    // mgpurun blocks the signal and reads it from a descriptor.
    (has("SigCgt:") || has("SigBlk:")) && !has("SigIgn:")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_that_handles_the_signal_is_asked() {
        let status = |caught: u64, blocked: u64, ignored: u64| {
            format!("Name:\tx\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n")
        };
        let usr1 = 1 << 9;
        assert!(handles_stops(&status(usr1, 0, 0)));
        assert!(handles_stops(&status(0, usr1 | 1, 0)));
        assert!(!handles_stops(&status(!usr1, !usr1, 0)));
        assert!(!handles_stops(&status(0, usr1, usr1)));
        assert!(!handles_stops(""));
    }
}
