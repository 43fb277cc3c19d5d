//! `mgpurun ps`: finds the runs of this user.
//!
//! A run registers no name that could become stale. But its launcher holds the progress page open, and `/proc` lists
//! the descriptors of a user's own processes. So the page can be opened through `/proc` and read without the launcher's
//! help, even if the launcher is stopped.

use std::collections::HashSet;
use std::error::Error;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use mgpu_control::progress::{PAGE_NAME, ProgressPage, RunInfo, now};

use super::collectives::MOST;
use super::{Histories, Row, table};
use crate::output::TailReader;
use crate::stdout;

/// Show the runs of this user and what each rank is doing.
///
/// For every rank: its process and its state (running, sleeping, stopped), the last known step and collective and the
/// time since then, the rank it waits for, and what its threads are doing in the kernel.
///
/// To start a program named ps: mgpurun -- ps
#[derive(Debug, Parser)]
#[command(name = "mgpurun ps", bin_name = "mgpurun ps", max_term_width = 100)]
pub(crate) struct Args {
    /// Also show where the ranks' collectives part, and the last N of each rank [default: 64].
    ///
    /// A rank records its last 64 collectives in memory that is shared with mgpurun, so they can be read without its
    /// help, also after it has died, while mgpurun runs. Ranks of another host are shown there.
    #[arg(long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "64",
        value_parser = clap::value_parser!(u32).range(1..=MOST as i64))]
    collectives: Option<u32>,
}

/// An entry that exists wherever /proc is mounted.
pub(crate) const OWN_ENTRY: &str = "/proc/self";

/// The command, with the arguments from `ps` on.
pub(crate) fn main(arguments: &[OsString]) -> Result<ExitCode, Box<dyn Error>> {
    match stdout::parse(arguments.iter().cloned())? {
        Ok(Args { collectives }) => {
            check_proc()?;
            stdout::print(&describe(collectives.map(|count| count as usize)), ExitCode::SUCCESS)
        }
        Err(code) => Ok(code),
    }
}

/// Without /proc no run can be found, although there may be some.
///
/// # Errors
/// If /proc cannot be read.
pub(crate) fn check_proc() -> Result<(), String> {
    fs::read_link(OWN_ENTRY).map(|_| ()).map_err(|error| {
        format!("cannot print the runs: cannot read {OWN_ENTRY}: {error}; is /proc mounted?")
    })
}

/// Every run with the table of its ranks, and so many of their last collectives, oldest first.
fn describe(collectives: Option<usize>) -> String {
    let mut pages: Vec<(RunInfo, ProgressPage)> = pages().map(|page| (page.run(), page)).collect();
    pages.sort_by_key(|(run, _)| run.started);
    if pages.is_empty() {
        return "no run of this user\n".into();
    }
    let mut text = String::new();
    for (run, page) in pages {
        let rows: Vec<Row> = (0..run.world_size)
            .map(|rank| Row::of(&page, rank, page.process(rank), page.process_end_description(rank)))
            .collect();
        text += &format!("{}\n{}", title(&run), table(&rows, now()));
        text += &collectives.map_or_else(String::new, |count| Histories::of(&page).list(&page, count));
        text.push('\n');
    }
    text
}

/// The pages that this user's processes hold open.
pub(crate) fn pages() -> impl Iterator<Item = ProgressPage> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_process = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().iter().all(u8::is_ascii_digit))
    };
    processes.map(|entry| entry.path()).filter(is_process).flat_map(|process| pages_of(&process))
}

/// The last lines of the ranks that this process has launched.
pub(crate) fn last_lines(launcher: u32) -> Option<TailReader> {
    let descriptors = fs::read_dir(format!("/proc/{launcher}/fd")).ok()?.flatten();
    let is_named = |path: &PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_str().is_some_and(TailReader::is_named))
    };
    let path = descriptors.map(|entry| entry.path()).find(is_named)?;
    File::open(path).ok().map(TailReader::new)
}

/// The pages of the runs that this process has launched, one for each job.
pub(crate) fn pages_of(process: &Path) -> Vec<ProgressPage> {
    let launcher = process.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    let name = format!("/memfd:{PAGE_NAME}");
    // Other users' descriptors cannot be listed.
    let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
    let is_page = |path: &PathBuf| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_str().is_some_and(|target| target.trim_end_matches(" (deleted)") == name)
    };
    let mut known = HashSet::new();
    let open = |path: PathBuf| {
        let file = File::open(path).ok()?;
        let is_new = known.insert(file.metadata().ok()?.ino());
        let page = ProgressPage::inspect(file.as_fd()).ok().filter(|_| is_new)?;
        // A rank that is mapping the page also holds it open for a short time.
        (Some(page.run().launcher) == launcher).then_some(page)
    };
    descriptors.map(|entry| entry.path()).filter(is_page).filter_map(open).collect()
}

pub(crate) fn title(run: &RunInfo) -> String {
    let RunInfo { launcher, world_size, restarts, program, .. } = run;
    let times = match restarts {
        0 => String::new(),
        1 => ", restarted once".into(),
        times => format!(", restarted {times} times"),
    };
    let age = duration(now().saturating_sub(run.started));
    let ranks = if *world_size == 1 { "rank" } else { "ranks" };
    format!("launcher {launcher}: {program} on {world_size} {ranks} for {age}{times}")
}

/// "1 h 02 min", "3 min 20 s", "7 s".
pub(crate) fn duration(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        seconds => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn titles_have_age_and_restarts() {
        let run = RunInfo {
            launcher: 7,
            world_size: 2,
            restarts: 0,
            started: now(),
            program: "train_mnist --net deep".into(),
        };
        assert_eq!(title(&run), "launcher 7: train_mnist --net deep on 2 ranks for 0 s");
        assert!(title(&RunInfo { restarts: 2, ..run }).ends_with(", restarted 2 times"));
        let said = [59, 61, 3_725].map(|seconds| duration(Duration::from_secs(seconds)));
        assert_eq!(said, ["59 s", "1 min 01 s", "1 h 02 min"]);
    }
}
