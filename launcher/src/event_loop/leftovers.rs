//! Leftover processes: those that a rank leaves running in its process group when it exits with code 0.
//!
//! A shell script may end while the filter of its output is still running (`exec > >(tee log)`), and a program may
//! leave a child that still writes its last file. Their output belongs to the run, so they get time to finish. For the
//! supervisor the rank has finished. While other ranks of the job run, leftover processes may run, too. After the end of
//! the job's last rank they have [`TIME_TO_FINISH`]; then they are named and killed.
//!
//! The launcher waits until the group is empty. Closed pipes are not enough, because a process that has closed its output
//! may still be writing a file. A process that has left the group is not waited for: `orphans` kills it.
//!
//! The rank is not reaped before its group is empty: its zombie keeps the number of the group from being reused.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::waitpid;

use super::Shared;
use super::attempt::{Attempt, AttemptEnd};
use super::wait::JobSource;
use crate::group::{members, name_of, running_in};
use crate::interrupt::ends_the_run;
use crate::orphans;
use crate::output::STREAMS;
use crate::spawn::{Process, send};
use crate::supervisor::Outcome;

/// Time to finish after the end of the last rank. Time during which the reader of our output accepts nothing is not
/// counted: the leftover processes may be blocked by it.
const TIME_TO_FINISH: Duration = Duration::from_secs(2);

/// Maximum number of processes that are named.
const MAX_NAMES: usize = 8;

/// The leftover processes of a job whose ranks have ended.
pub(super) struct Leftovers {
    /// How the ranks ended.
    outcome: Outcome,
    /// The groups of the ranks that have not been reaped.
    groups: Vec<i32>,
    /// The running processes of these groups.
    processes: Vec<OwnedFd>,
    time_left: Duration,
    /// When `time_left` was last updated.
    checked: Instant,
    /// Since then, output of theirs was not read because our own reader is too slow.
    is_held_up: bool,
}

impl Leftovers {
    /// The processes to wait for.
    pub(super) fn sources(&self) -> impl Iterator<Item = (JobSource, BorrowedFd<'_>)> {
        (0..).zip(&self.processes).map(|(index, end)| (JobSource::Exit(index), end.as_fd()))
    }

    /// When their time has passed.
    pub(super) fn deadline(&self) -> Instant {
        self.checked + self.time_left
    }

    /// Notes the processes that have ended. True if none is left.
    fn have_ended(&mut self, ready: &[JobSource]) -> bool {
        let mut index = 0..;
        let is_ready =
            |number: u32| ready.iter().any(|source| matches!(source, JobSource::Exit(end) if *end == number));
        self.processes.retain(|_| index.next().is_none_or(|number| !is_ready(number)));
        if self.processes.is_empty() {
            // They may have started other processes.
            self.processes = running_in(&self.groups);
        }
        self.processes.is_empty()
    }
}

impl Attempt<'_> {
    /// False if no rank can have a child that outlives it.
    pub(super) fn may_have_leftovers(&self, shared: &Shared<'_>) -> bool {
        // When a rank's end is noticed, its children have already become children of this process.
        let ranks = self.unreaped().count() + shared.unreaped_elsewhere;
        !self.supervision.adopts_orphans || orphans::children().len() > ranks
    }

    /// Forwards a signal to leftover processes.
    pub(super) fn signal_leftovers(&self, signal: Signal) {
        self.ended().for_each(|(_, rank)| send(rank.pid, signal));
    }

    /// Handles the end of the last rank: gives leftover processes time to finish. Returns the end of the attempt if there
    /// are none.
    pub(super) fn begin_leftovers(
        &mut self,
        outcome: Outcome,
        shared: &mut Shared<'_>,
    ) -> Option<AttemptEnd> {
        let groups: Vec<i32> = self.ended().map(|(_, rank)| rank.pid.as_raw()).collect();
        // Ranks that have stopped on request have finished what they had to do, and so may their filters. Whoever has ended
        // the others does not wait.
        let hurries = outcome.interrupted && !self.ranks.iter().all(|rank| rank.has_finished);
        let processes = if groups.is_empty() || hurries { Vec::new() } else { running_in(&groups) };
        if processes.is_empty() {
            return Some(self.end(outcome, shared));
        }
        let (time_left, checked) = (TIME_TO_FINISH, Instant::now());
        let is_held_up = self.holds_up_leftovers(shared);
        self.leftovers = Some(Leftovers { outcome, groups, processes, time_left, checked, is_held_up });
        None
    }

    /// Waits for leftover processes. Returns the end of the attempt when they have ended, when their time has passed, or
    /// when a signal ends the run.
    pub(super) fn wait_for_leftovers(
        &mut self,
        ready: &[JobSource],
        signals: &[Signal],
        shared: &mut Shared<'_>,
    ) -> Option<AttemptEnd> {
        if signals.contains(&Signal::SIGQUIT) {
            self.report(shared);
        }
        let mut leftovers = self.leftovers.take()?;
        if signals.contains(&Signal::SIGUSR1) {
            leftovers.outcome.ask_to_stop();
        }
        let now = Instant::now();
        if !leftovers.is_held_up {
            leftovers.time_left = leftovers.time_left.saturating_sub(now - leftovers.checked);
        }
        leftovers.checked = now;
        if let Some(signal) = signals.iter().find(|signal| ends_the_run(**signal)) {
            let was_success = leftovers.outcome.message.is_none();
            leftovers.outcome.interrupt(*signal);
            if let Some(message) = leftovers.outcome.message.as_ref().filter(|_| was_success) {
                self.job.say_end(shared, &leftovers.outcome, message);
            }
        } else if !leftovers.have_ended(ready) && !shared.guardian_ended {
            if !leftovers.time_left.is_zero() {
                leftovers.is_held_up = self.holds_up_leftovers(shared);
                self.leftovers = Some(leftovers);
                return None;
            }
            self.name_leftovers(&leftovers.groups, shared);
        }
        Some(self.end(leftovers.outcome, shared))
    }

    /// Kills leftover processes. Their end is waited for later, with that of all other processes.
    pub(super) fn end_leftovers(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_some() && !rank.reaped) {
            // While its zombie exists, the number of its group is not reused.
            let _ = killpg(rank.pid, Signal::SIGKILL);
            let _ = waitpid(rank.pid, None);
            rank.reaped = true;
        }
    }

    /// The ranks that have ended and whose groups may still have processes.
    fn ended(&self) -> impl Iterator<Item = (u32, &Process)> {
        (0..).zip(&self.ranks).filter(|(_, rank)| rank.ended.is_some() && !rank.reaped)
    }

    /// True while output of such a group is not read because our own reader is too slow.
    fn holds_up_leftovers(&self, shared: &Shared<'_>) -> bool {
        let is_unread = |number: u32, rank: &Process| {
            STREAMS.iter().any(|stream| {
                let writer = self.job.first_rank + number;
                rank.pipes[*stream as usize].is_some() && !shared.output.has_room(writer, *stream)
            })
        };
        self.ended().any(|(number, rank)| is_unread(number, rank))
    }

    fn name_leftovers(&self, groups: &[i32], shared: &mut Shared<'_>) {
        let rank_of = |group| self.ranks.iter().position(|rank| rank.pid.as_raw() == group);
        let left: Vec<(u32, Option<usize>)> =
            members(groups).map(|(pid, stat)| (pid, rank_of(stat.group))).collect();
        let name = |(pid, rank): &(u32, Option<usize>)| {
            let rank = self.first as usize + rank.unwrap_or_default();
            format!("{} (pid {pid}, of rank {rank})", name_of(*pid))
        };
        let mut names: Vec<String> = left.iter().take(MAX_NAMES).map(name).collect();
        if left.len() > MAX_NAMES {
            names.push(format!("{} more", left.len() - MAX_NAMES));
        }
        if !names.is_empty() {
            let seconds = TIME_TO_FINISH.as_secs();
            self.job.say(
                shared,
                &format!(
                    "still running {seconds} s after all ranks had ended: {}: killed; a rank should wait for its children",
                    names.join(", ")
                ),
            );
        }
    }
}
