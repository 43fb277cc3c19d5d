//! What `mgpurun top` and `--metrics-listen` show of a run: the state of every rank with totals and rates.

use std::fs;
use std::path::Path;

use mgpu_control::progress::{ProgressPage, RankState, RunInfo, now};
use nix::unistd::{SysconfVar, sysconf};
use serde::Serialize;

use super::Row;
use super::totals::{RankRates, RankTotals, Totals};
use crate::group::Stat;

/// A run at one moment.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RunSnapshot {
    /// The number of the job, if the launch has several.
    pub(crate) job: Option<u32>,
    /// The launcher's process.
    pub(crate) launcher: u32,
    /// The command of the ranks.
    pub(crate) program: String,
    /// How often the ranks have been restarted.
    pub(crate) restarts: u32,
    /// Seconds since the ranks were started.
    pub(crate) age_s: f64,
    pub(crate) ranks: Vec<RankSnapshot>,
}

/// A rank at one moment.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RankSnapshot {
    pub(crate) rank: u32,
    /// Its process on its own host; 0 if unknown.
    pub(crate) pid: u32,
    /// Its host, if that is another one.
    pub(crate) host: Option<String>,
    /// The state of its process in words, or how it ended.
    pub(crate) state: String,
    /// Its process has not ended.
    pub(crate) is_up: bool,
    /// It has joined, so that the following are known.
    pub(crate) has_joined: bool,
    /// Its last action, as a phrase.
    pub(crate) doing: String,
    /// Its training step, 0 before the first.
    pub(crate) step: u64,
    /// Seconds since its last action.
    pub(crate) idle_s: f64,
    /// The rank it waits for.
    pub(crate) waits_for: Option<u32>,
    /// Bytes of memory that it has resident, if the kernel tells.
    pub(crate) resident_bytes: Option<u64>,
    /// Seconds of a core that it has used, if the kernel tells.
    pub(crate) cpu_s: Option<f64>,
    pub(crate) totals: RankTotals,
    pub(crate) rates: RankRates,
}

impl RunSnapshot {
    /// Reads the page and what the kernel tells of the processes.
    pub(crate) fn of(job: Option<u32>, page: &ProgressPage, totals: &Totals) -> Self {
        let RunInfo { launcher, restarts, started, program, world_size } = page.run();
        let ranks = (0..world_size).map(|rank| RankSnapshot::of(page, rank, totals)).collect();
        let age_s = now().saturating_sub(started).as_secs_f64();
        RunSnapshot { job, launcher, program, restarts, age_s, ranks }
    }

    /// Steps a second: those of the slowest rank that takes part.
    pub(crate) fn steps_per_s(&self) -> f64 {
        let rates = self.ranks.iter().filter(|rank| rank.is_up && rank.step > 0).map(|rank| rank.rates.steps);
        rates.reduce(f64::min).unwrap_or_default()
    }

    /// Samples a second of all ranks together; `None` if no rank tells.
    pub(crate) fn samples_per_s(&self) -> Option<f64> {
        let tells = self.ranks.iter().any(|rank| rank.totals.samples > 0);
        tells.then(|| self.ranks.iter().map(|rank| rank.rates.samples).sum())
    }

    /// The rank for which others wait most: for a tenth of the time or more.
    pub(crate) fn straggler(&self) -> Option<&RankSnapshot> {
        let slowest = self.ranks.iter().max_by(|a, b| a.rates.waited_for.total_cmp(&b.rates.waited_for));
        slowest.filter(|rank| rank.rates.waited_for >= 0.1)
    }
}

impl RankSnapshot {
    fn of(page: &ProgressPage, rank: u32, totals: &Totals) -> Self {
        let row = Row::without_threads(page, rank);
        let progress = &row.progress;
        let is_up = row.ended.is_none() && !(row.host.is_none() && row.threads.state() == "gone");
        let is_here = is_up && row.host.is_none() && row.pid != 0;
        let folder = Path::new("/proc").join(row.pid.to_string());
        let has_joined = progress.state != RankState::Absent;
        RankSnapshot {
            rank,
            pid: row.pid,
            host: row.host.clone(),
            state: row.state(),
            is_up,
            has_joined,
            doing: row.doing(),
            step: progress.step,
            idle_s: if has_joined { now().saturating_sub(progress.changed).as_secs_f64() } else { 0.0 },
            waits_for: progress.operation.filter(|last| last.running).and_then(|last| last.waits_for),
            resident_bytes: is_here.then(|| resident_bytes(&folder)).flatten(),
            cpu_s: is_here.then(|| core_seconds(&folder)).flatten(),
            totals: totals.of(rank),
            rates: totals.rates(rank),
        }
    }
}

/// Memory that the process with this folder in `/proc` has resident.
fn resident_bytes(folder: &Path) -> Option<u64> {
    let sizes = fs::read_to_string(folder.join("statm")).ok()?;
    let pages: u64 = sizes.split(' ').nth(1)?.parse().ok()?;
    Some(pages * mgpu_control::shm::page_size() as u64)
}

fn core_seconds(folder: &Path) -> Option<f64> {
    let ticks_per_s = sysconf(SysconfVar::CLK_TCK).ok().flatten().filter(|ticks| *ticks > 0)?;
    Some(Stat::of(folder)?.ticks as f64 / ticks_per_s as f64)
}

#[cfg(test)]
mod tests {
    use mgpu_control::progress::{Ending, Operation};

    use super::*;

    #[test]
    fn a_snapshot_shows_what_the_page_and_the_kernel_know() {
        let (page, _fd) = ProgressPage::create(3).unwrap();
        page.describe("train --fast", 2);
        page.start(0, std::process::id());
        page.join(0, std::process::id());
        page.begin_step(0, 7);
        page.enter(0, Operation::AllReduce, 9, 4096);
        page.wait(0, 1);
        page.record_end(1, Ending::Failed("was killed by SIGKILL"));
        let snapshot = RunSnapshot::of(None, &page, &Totals::new(3));
        assert_eq!((snapshot.restarts, snapshot.program.as_str()), (2, "train --fast"));
        let [first, second, third] = &snapshot.ranks[..] else { panic!("three ranks") };
        assert_eq!((first.is_up, first.step, first.waits_for), (true, 7, Some(1)));
        assert_eq!(first.doing, "in step 7, in all_reduce #9, 4.1 kB");
        assert!(first.resident_bytes.unwrap() > 0 && first.cpu_s.is_some());
        assert_eq!((second.is_up, second.state.as_str()), (false, "was killed by SIGKILL"));
        assert_eq!((third.has_joined, third.pid, third.resident_bytes), (false, 0, None));
        assert_eq!((snapshot.samples_per_s(), snapshot.straggler().map(|rank| rank.rank)), (None, None));
        serde_json::to_string(&snapshot).unwrap();
    }
}
