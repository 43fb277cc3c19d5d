//! The table of what every rank is doing: for a stuck run, for SIGQUIT, and for `mgpurun ps`.
//!
//! The progress page has the last action of a rank, whether it is alive or not. The kernel reports what its process is
//! doing now, as far as permissions allow: the state of each thread, the kernel function it sleeps in and its system
//! call.

mod collectives;
pub(crate) mod gpus;
pub(crate) mod runs;
pub(crate) mod snapshot;
mod threads;
pub(crate) mod totals;

use std::time::Duration;

pub(crate) use collectives::Histories;
use mgpu_control::progress::{Phase, Progress, ProgressPage, RankState};
use threads::Threads;
pub(crate) use threads::is_stopped;

/// The row of one rank.
#[derive(Debug)]
pub(crate) struct Row {
    rank: u32,
    progress: Progress,
    /// Its process id; 0 if unknown. Known to the launcher even before the rank joins.
    pid: u32,
    /// How it ended.
    ended: Option<String>,
    /// Its host, if that is another one.
    host: Option<String>,
    threads: Threads,
}

impl Row {
    /// Reads the progress of a rank from its page, and the state of process `pid` unless it has `ended` or runs on another
    /// host, whose processes this kernel does not know.
    pub(crate) fn of(page: &ProgressPage, rank: u32, pid: Option<u32>, ended: Option<String>) -> Self {
        let (progress, host) = (page.progress(rank), page.host(rank));
        let pid = pid.unwrap_or(progress.pid);
        let is_here = ended.is_none() && host.is_none() && pid != 0;
        let threads = if is_here { Threads::of(pid) } else { Threads::default() };
        Row { rank, progress, pid, ended, host, threads }
    }

    /// The same without the threads of the process, as an observer of the page sees it.
    fn without_threads(page: &ProgressPage, rank: u32) -> Self {
        let (progress, host) = (page.progress(rank), page.host(rank));
        let (pid, ended) = (page.process(rank).unwrap_or_default(), page.process_end_description(rank));
        let is_here = ended.is_none() && host.is_none() && pid != 0;
        let threads = if is_here { Threads::of_process_only(pid) } else { Threads::default() };
        Row { rank, progress, pid, ended, host, threads }
    }

    /// Its last known action, as a phrase.
    pub(crate) fn doing(&self) -> String {
        let Progress { state, phase, step, operation, .. } = &self.progress;
        let place = match phase {
            Phase::Step => format!("in step {step}"),
            Phase::Start => "before the first step".into(),
            phase if *step > 0 => format!("in {} after step {step}", phase.name()),
            phase => format!("in {}", phase.name()),
        };
        match operation {
            _ if *state == RankState::Absent => "before it joined".into(),
            None => place,
            Some(last) => {
                let size = if last.bytes == 0 { String::new() } else { format!(", {}", bytes(last.bytes)) };
                let when = if last.running { "in" } else { "after" };
                format!("{place}, {when} {} #{}{size}", last.operation.name(), last.sequence)
            }
        }
    }

    /// A line for each kind of its threads.
    pub(crate) fn thread_lines(&self) -> Vec<String> {
        self.threads.lines()
    }

    fn state(&self) -> String {
        let state = match &self.host {
            Some(host) => format!("on host {host}"),
            None => self.threads.state().to_owned(),
        };
        match (&self.ended, self.progress.state) {
            (Some(ended), _) => ended.clone(),
            (None, RankState::Absent) => format!("{state}, not joined"),
            (None, RankState::Left) => format!("{state}, left the run"),
            (None, _) => state,
        }
    }

    fn waits_for(&self) -> String {
        let peer = self.progress.operation.filter(|last| last.running).and_then(|last| last.waits_for);
        peer.map_or_else(|| "-".into(), |peer| format!("rank {peer}"))
    }

    fn cells(&self, now: Duration) -> [String; 6] {
        let since = match self.progress.state {
            RankState::Absent => "-".into(),
            _ => format!("{:.1} s", now.saturating_sub(self.progress.changed).as_secs_f64()),
        };
        let pid = if self.pid == 0 { "-".into() } else { self.pid.to_string() };
        [self.rank.to_string(), pid, self.state(), self.doing(), since, self.waits_for()]
    }
}

const TITLES: [&str; 6] = ["rank", "pid", "state", "last seen", "since", "waits for"];

/// The table: a line for each rank, followed by one for each kind of its threads.
pub(crate) fn table(rows: &[Row], now: Duration) -> String {
    let cells: Vec<[String; 6]> = rows.iter().map(|row| row.cells(now)).collect();
    let widths: [usize; 6] = std::array::from_fn(|column| {
        cells.iter().map(|row| row[column].len()).chain([TITLES[column].len()]).max().unwrap_or(0)
    });
    let line = |cells: &[String; 6]| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = padded.collect::<Vec<_>>().join("  ");
        format!("{}\n", line.trim_end())
    };
    let mut text = line(&TITLES.map(str::to_owned));
    for (row, cells) in rows.iter().zip(&cells) {
        text += &line(cells);
        for thread in row.threads.lines() {
            text += &format!("      {thread}\n");
        }
    }
    text
}

/// "4.2 MB".
fn bytes(count: u64) -> String {
    match count {
        0..1_000 => format!("{count} B"),
        1_000..1_000_000 => format!("{:.1} kB", count as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", count as f64 / 1e6),
        _ => format!("{:.1} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use mgpu_control::progress::{LastOperation, Operation};

    use super::*;

    fn row(rank: u32, state: RankState, operation: Option<LastOperation>, ended: Option<&str>) -> Row {
        let joined = state != RankState::Absent;
        let progress = Progress {
            state,
            pid: 100 + rank,
            phase: if joined { Phase::Step } else { Phase::Start },
            step: if joined { 100 } else { 0 },
            steps_begun: 0,
            operation,
            changed: Duration::from_secs(5),
        };
        let ended = ended.map(str::to_owned);
        Row { rank, progress, pid: 100 + rank, ended, host: None, threads: Threads::default() }
    }

    #[test]
    fn the_table_shows_who_waits_for_whom() {
        let last = |running, waits_for| {
            let operation = Operation::AllReduce;
            Some(LastOperation { operation, sequence: 2041, bytes: 4_200_000, running, waits_for })
        };
        let rows = [
            row(0, RankState::Joined, last(true, Some(1)), None),
            row(1, RankState::Joined, last(false, None), None),
            row(2, RankState::Absent, None, None),
            row(3, RankState::Failed, last(false, None), Some("was killed by SIGKILL")),
        ];
        insta::assert_snapshot!(table(&rows, Duration::from_millis(8_300)));
    }
}
