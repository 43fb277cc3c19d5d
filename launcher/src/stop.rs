//! `mgpurun stop`: asks a running job of this user to save its work and stop.
//!
//! The runs are found as `mgpurun ps` finds them. The request is SIGUSR1 to the launcher, which asks its ranks; a program
//! that cannot stop by itself would be ended by that signal, so such a run is refused. The launcher may also be a program
//! that embeds the library, or one whose ranks are threads: it is refused unless it handles the signal.

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::os::fd::AsFd;
use std::process::ExitCode;

use clap::Parser;
use mgpu_control::process::{pidfd_open, pidfd_send_signal};
use mgpu_control::progress::{ProgressPage, RankState};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use crate::interrupt::signal_mask;
use crate::status::runs::{OWN_ENTRY, identified_pages_of, pages, title};
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
    // The process of the descriptor is the one whose pages are found now, unless it has ended, and then no signal arrives.
    let of_launcher: Vec<ProgressPage> =
        identified_pages_of(launcher).into_iter().map(|(_, page)| page).collect();
    if of_launcher.is_empty() {
        return Err(format!("launcher {launcher} has ended").into());
    }
    if let Some(page) = of_launcher.iter().find(|page| !can_stop(page)) {
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
        let title = title(&of_launcher[0].run());
        return Err(
            format!("{title}: process {launcher} does not handle SIGUSR1; kill {launcher} ends it").into()
        );
    }
    pidfd_send_signal(ended.as_fd(), Signal::SIGUSR1)
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
    use std::process::Command;

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

    #[test]
    fn the_signal_goes_to_the_process_of_the_descriptor() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pidfd = pidfd_open(child.id()).unwrap();
        pidfd_send_signal(pidfd.as_fd(), Signal::SIGUSR1).unwrap();
        let ended = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap());
        assert_eq!(ended, Some(Signal::SIGUSR1 as i32));
        assert_eq!(pidfd_send_signal(pidfd.as_fd(), Signal::SIGUSR1), Err(nix::errno::Errno::ESRCH));
    }
}
