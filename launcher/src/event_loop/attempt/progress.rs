//! What the ranks are doing: steps for the events, ranks without progress, and the table.

use std::time::{Duration, Instant};

use mgpu_control::progress::{self, ProgressEntry, RankState};

use super::super::Shared;
use super::Attempt;
use crate::events;
use crate::status::{Histories, Row, is_stopped, table};
use crate::supervisor::Event;
use crate::watch::{self, Verdict, WatchedRank};

impl Attempt<'_> {
    /// The event of a rank that has exceeded the progress timeout, if a check is due.
    pub(super) fn check_progress(&mut self, shared: &Shared<'_>) -> Option<Event> {
        let timeout = self
            .supervision
            .progress_timeout
            .filter(|_| self.next_progress_check.is_some_and(|at| at <= Instant::now()))?;
        let (page, now) = (self.server.page(), progress::now());
        let watched = |rank: u32| {
            let mut progress = page.progress(rank);
            progress.changed = progress.changed.max(shared.awake_since) + self.age_of_report(rank, now);
            WatchedRank { rank, progress }
        };
        let mut ranks: Vec<WatchedRank> = (0..page.world_size()).map(watched).collect();
        if ranks.iter().any(|rank| rank.progress.state == RankState::Absent) {
            // The ranks that have joined wait for the others: the join timeout covers this.
            self.next_progress_check = Instant::now().checked_add(timeout);
            return None;
        }
        let has_ended = |rank: u32| self.process_of(rank).is_some_and(|process| process.ended.is_some());
        ranks.retain(|rank| rank.progress.state == RankState::Joined && !has_ended(rank.rank));
        let stopped = |rank: u32| self.is_stopped(rank);
        match watch::find_silent_rank(&ranks, timeout, now, stopped) {
            Verdict::Healthy(next) => {
                let wait = next.map_or(timeout, |next| next.saturating_sub(now));
                self.next_progress_check = Instant::now().checked_add(wait);
                None
            }
            Verdict::Silent(rank, idle) => {
                self.next_progress_check = None;
                Some(Event::Silent { rank, idle, doing: self.row(rank).doing() })
            }
        }
    }

    /// How old the last report about a rank of another node is: what it has done since is unknown. That a node does not report
    /// at all is noticed elsewhere.
    fn age_of_report(&self, rank: u32, now: Duration) -> Duration {
        if self.local_ranks().contains(&rank) {
            return Duration::ZERO;
        }
        let reported = self.reported.get(&self.server.layout().node_of(rank)).copied();
        now.saturating_sub(reported.unwrap_or_default())
    }

    /// Records the steps that have changed since the last call.
    pub(super) fn record_steps(&mut self, shared: &mut Shared<'_>) {
        for (rank, process) in (self.first..).zip(&mut self.ranks) {
            let step = self.server.page().progress(rank).step;
            if std::mem::replace(&mut process.step, step) != step {
                shared.events.record_of(self.job.number, events::Event::Step { rank, step });
            }
        }
    }

    /// The row of a rank in the table.
    fn row(&self, rank: u32) -> Row {
        let page = self.server.page();
        match self.process_of(rank) {
            Some(process) => Row::of(page, rank, Some(self.pid_of(process, rank)), process.ended.clone()),
            None => Row::of(page, rank, None, page.process_end_description(rank)),
        }
    }

    /// True if the process of a rank is stopped, by SIGSTOP for instance.
    pub(in super::super) fn is_stopped(&self, rank: u32) -> bool {
        match self.process_of(rank) {
            Some(process) => is_stopped(self.pid_of(process, rank)),
            None => self.stopped_elsewhere.contains(&rank),
        }
    }

    /// Notes the progress of the ranks of another node, and which of their processes are stopped.
    pub(in super::super) fn note_progress_elsewhere(
        &mut self,
        node: u32,
        entries: &[(u32, ProgressEntry)],
        stopped: Vec<u32>,
    ) {
        for (rank, entry) in entries {
            // The coordinator has checked the ranks.
            let _ = self.server.page().apply(*rank, entry);
        }
        self.reported.insert(node, progress::now());
        let ranks = self.server.layout().ranks_of(node);
        self.stopped_elsewhere.retain(|rank| !ranks.contains(rank));
        self.stopped_elsewhere.extend(stopped);
    }

    /// Prints the table of what every rank is doing.
    pub(in super::super) fn report(&self, shared: &mut Shared<'_>) {
        if self.job.number.is_some() {
            self.job.say(shared, &self.server.page().run().program);
        }
        let rows: Vec<Row> = (0..self.server.page().world_size()).map(|rank| self.row(rank)).collect();
        for line in table(&rows, progress::now()).lines() {
            shared.output.say(line);
        }
        for line in Histories::of(self.server.page()).divergence(progress::now()) {
            shared.output.say(&line);
        }
    }
}
