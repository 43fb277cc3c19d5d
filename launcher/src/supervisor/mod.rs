//! The supervisor: a pure state machine that determines the culprit of a failure and ends the other ranks.
//!
//! The event loop passes events one at a time; each returns a list of actions. The first rank that fails determines the
//! outcome. Its peers first get 200 ms (`ERROR_TIME`), in which their collectives return an error that names it and
//! they can print what they were doing. Then they get SIGTERM, and after the grace time SIGKILL. If the first rank to
//! end blames another rank, and that rank fails within `ERROR_TIME`, the blamed rank counts as the first; otherwise the message
//! says whom it blames.

mod culprit;
mod event;
mod exit;
mod hosts;
mod outcome;
mod stop;

use std::ops::Range;
use std::time::{Duration, Instant};

use culprit::Failure;
use mgpu_control::rendezvous::{Blame, ProcessEnd};
use nix::sys::signal::Signal;
use stop::Stop;

pub use event::{Action, Event};
pub use exit::Exit;
pub use hosts::RankHosts;
pub use outcome::Outcome;
pub use stop::StopCause;

use crate::exit_code;
use crate::interrupt::ends_the_run;

/// Time between the first failure and SIGTERM to the others: enough to print their errors.
const ERROR_TIME: Duration = Duration::from_millis(200);

/// Longest wait for the end of ranks after SIGKILL. The kernel takes seconds to free hundreds of gigabytes, or what a driver has
/// allocated.
const KILLED_TIME: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RankStatus {
    Running,
    Finished,
    Failed,
}

#[derive(Debug, Clone, Copy)]
struct Rank {
    status: RankStatus,
    /// How its process ended; `None` if that is not known.
    exit: Option<Exit>,
    joined: bool,
}

/// The stage of the shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// No failure so far.
    Running,
    /// A rank has failed; SIGTERM follows at this time.
    Failing(Instant),
    /// The ranks were asked to save their work and end by themselves; SIGKILL follows at this time.
    Stopping(Instant),
    /// The ranks were asked to end by a signal; SIGKILL follows at this time.
    Terminating(Instant),
    /// The ranks were killed; those that have not ended are given up at this time.
    Killed(Instant),
}

/// The state of a run.
#[derive(Debug)]
pub struct Supervisor {
    hosts: RankHosts,
    ranks: Vec<Rank>,
    stage: Stage,
    /// Determined by the first cause; final when it is settled.
    outcome: Option<Outcome>,
    /// The failure that determined the outcome, while the rank that it blames has not ended.
    accusation: Option<Failure>,
    interrupted: bool,
    /// SIGKILL has not ended some ranks. What they hold, such as a GPU, is not free for a restart.
    are_left_behind: bool,
    /// The ranks were asked to stop by themselves.
    stop: Option<Stop>,
    /// The ranks have got SIGTERM because of `--stop-after`, and no signal of a user so far.
    ended_by_time: bool,
    /// The outcome was printed.
    is_settled: bool,
    join_timeout: Duration,
    /// Set when the first rank joins.
    join_deadline: Option<Instant>,
    grace: Duration,
    stop_grace: Duration,
    killed_time: Duration,
    /// How long the ranks had before they were killed.
    time_to_end: Duration,
    started: Instant,
}

impl Supervisor {
    /// The state for `ranks` ranks that have just been started.
    pub fn new(ranks: u32, join_timeout: Duration, grace: Duration, now: Instant) -> Self {
        Supervisor {
            hosts: RankHosts::default(),
            ranks: vec![Rank { status: RankStatus::Running, exit: None, joined: false }; ranks as usize],
            stage: Stage::Running,
            outcome: None,
            accusation: None,
            interrupted: false,
            are_left_behind: false,
            stop: None,
            ended_by_time: false,
            is_settled: false,
            join_timeout,
            join_deadline: None,
            grace,
            stop_grace: grace,
            killed_time: KILLED_TIME,
            time_to_end: grace,
            started: now,
        }
    }

    /// Sets the time that ranks have when they are asked to stop, or the launcher gets a signal (by default, the grace
    /// time).
    pub fn with_stop_grace(self, stop_grace: Duration) -> Self {
        Supervisor { stop_grace, ..self }
    }

    /// Waits longer for the ends of ranks that were killed: news of them may be as old as `silence`.
    pub fn with_silence(self, silence: Duration) -> Self {
        Supervisor { killed_time: KILLED_TIME + silence, ..self }
    }

    /// Names the `hosts` of ranks in messages.
    pub fn on_hosts(self, hosts: RankHosts) -> Self {
        Supervisor { hosts, ..self }
    }

    /// True once some rank has joined the rendezvous.
    pub fn has_joined(&self) -> bool {
        self.ranks.iter().any(|rank| rank.joined)
    }

    /// True until the outcome is determined.
    pub(crate) fn is_undecided(&self) -> bool {
        self.outcome.is_none()
    }

    /// When the next [`Event::Tick`] is due.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running => self.join_deadline,
            Stage::Failing(at) | Stage::Stopping(at) | Stage::Terminating(at) | Stage::Killed(at) => Some(at),
        }
    }

    /// Handles an event and returns the actions to carry out.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Joined(rank) => self.joined(rank, now),
            Event::Exited { rank, exit, blame } => self.exited(rank, exit, blame, now),
            Event::Incompatible { rank, exit_code, why } => {
                let how = format!("was refused: {why}");
                self.stop(Outcome { incompatible: true, ..Outcome::failure(exit_code, rank, why) }, how, now)
            }
            Event::Silent { rank, idle, doing } => self.silent(rank, idle, &doing, now),
            Event::GuardianEnded => self.guardian_ended(now),
            Event::Signalled(signal) => self.signalled(signal, now),
            Event::StopAsked(cause) => self.stop_asked(cause, now),
            Event::TimePassed => self.time_passed(now),
            Event::Stopped(why) => self.stopped(why, now),
            Event::NodeLost { ranks, how, message } => self.node_lost(ranks, &how, message, now),
            Event::Tick => self.tick(now),
        }
    }

    fn joined(&mut self, rank: u32, now: Instant) -> Vec<Action> {
        self.ranks[rank as usize].joined = true;
        let all = self.ranks.iter().all(|rank| rank.joined);
        self.join_deadline = if all { None } else { self.join_deadline.or(Some(now + self.join_timeout)) };
        Vec::new()
    }

    fn silent(&mut self, rank: u32, idle: Duration, doing: &str, now: Instant) -> Vec<Action> {
        let how = format!("made no progress for {:.1} s", idle.as_secs_f64());
        let message = format!(
            "{} {how}: it was last seen {doing}; a rank that is slow rather than stuck needs a longer \
             --progress-timeout",
            self.hosts.name(rank)
        );
        self.stop(Outcome::failure(exit_code::NO_PROGRESS, rank, message), how, now)
    }

    /// Ends a run that cannot continue although no rank has ended. The other ranks get [`ERROR_TIME`], in which they
    /// learn `how` the culprit failed.
    fn stop(&mut self, outcome: Outcome, how: String, now: Instant) -> Vec<Action> {
        if self.outcome.is_some() || self.stage != Stage::Running {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if matches!(outcome.exit_code, exit_code::NO_PROGRESS | exit_code::NEVER_JOINED) {
            actions.push(Action::Report);
        }
        // A process may claim to be any rank.
        let culprit = outcome.culprit.filter(|rank| (*rank as usize) < self.ranks.len());
        actions.extend(culprit.map(|rank| Action::Announce(rank, ProcessEnd::Failed(how))));
        self.outcome = Some(Outcome { culprit, ..outcome });
        self.stage = Stage::Failing(now + ERROR_TIME);
        actions
    }

    fn guardian_ended(&mut self, now: Instant) -> Vec<Action> {
        self.outcome.get_or_insert_with(|| Outcome {
            message: Some("mgpurun was killed, and its ranks with it".into()),
            ..Outcome::interruption(Signal::SIGKILL)
        });
        self.interrupted = true;
        [self.settle(), self.kill_all(now)].concat()
    }

    fn exited(&mut self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let finished = self.has_stopped(exit) || exit == Exit::Code(0);
        let status = if finished { RankStatus::Finished } else { RankStatus::Failed };
        self.ranks[rank as usize] = Rank { status, exit: Some(exit), ..self.ranks[rank as usize] };
        let end = match self.stage {
            _ if finished => ProcessEnd::Finished,
            Stage::Running | Stage::Stopping(_) | Stage::Failing(_) => ProcessEnd::Failed(exit.describe()),
            Stage::Terminating(_) | Stage::Killed(_) => ProcessEnd::Failed(exit.describe_signalled()),
        };
        actions.push(Action::Announce(rank, end));
        if !finished && self.outcome.is_none() {
            // The other ranks still run, so the table shows their state.
            if blame.as_ref().is_some_and(|blame| blame.timed_out) {
                actions.push(Action::Report);
            }
            self.decide(Failure { rank, exit, blame }, now);
            self.stage = Stage::Failing(now + ERROR_TIME);
        } else if let Stage::Failing(_) = self.stage {
            self.reconsider(Failure { rank, exit, blame }, now);
        }
        actions.extend(self.finish_if_all_ended());
        actions
    }

    fn signalled(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        match signal {
            Signal::SIGQUIT => return vec![Action::Report],
            signal if !ends_the_run(signal) => return self.to_all(signal),
            _ => {}
        }
        if let Stage::Stopping(_) = self.stage {
            return self.stop_asked(StopCause::Signal(signal), now);
        }
        // Also a run that is failing already: it must not be restarted.
        self.interrupted = true;
        let is_first = std::mem::take(&mut self.ended_by_time) && signal != Signal::SIGKILL;
        if matches!(self.stage, Stage::Terminating(_)) && is_first {
            // Whoever sends it waits as long from now on.
            self.terminate(self.stop_grace, now);
            return self.to_all(signal);
        }
        if let Stage::Terminating(_) | Stage::Killed(_) = self.stage {
            return self.kill_all(now);
        }
        self.outcome.get_or_insert_with(|| Outcome::interruption(signal));
        self.terminate(self.stop_grace, now);
        [self.settle(), self.to_all(signal), self.to_all(Signal::SIGCONT)].concat()
    }

    /// Ends ranks that do not stop by themselves at the time of `--stop-after`. It is not the first of two signals.
    fn time_passed(&mut self, now: Instant) -> Vec<Action> {
        // Also a run that is failing already: it must not be restarted.
        self.interrupted = true;
        if self.stage != Stage::Running {
            return Vec::new();
        }
        self.ended_by_time = true;
        self.outcome = Some(Outcome {
            message: Some("stopped by SIGTERM (--stop-after)".into()),
            ..Outcome::interruption(Signal::SIGTERM)
        });
        self.terminate(self.stop_grace, now);
        [self.settle(), self.to_all(Signal::SIGTERM), self.to_all(Signal::SIGCONT)].concat()
    }

    /// Ends ranks that have not failed themselves.
    fn stopped(&mut self, why: String, now: Instant) -> Vec<Action> {
        if self.stage != Stage::Running {
            return Vec::new();
        }
        self.outcome = Some(Outcome {
            interrupted: false,
            message: Some(why),
            ..Outcome::interruption(Signal::SIGTERM)
        });
        self.terminate(self.grace, now);
        [self.settle(), self.to_all(Signal::SIGTERM), self.to_all(Signal::SIGCONT)].concat()
    }

    /// Handles the loss of a host. Its ranks count as failed: they cannot be asked to end.
    fn node_lost(&mut self, ranks: Range<u32>, how: &str, message: String, now: Instant) -> Vec<Action> {
        let lost: Vec<u32> = self.running().filter(|rank| ranks.contains(rank)).collect();
        if lost.is_empty() {
            return Vec::new();
        }
        let mut actions = Vec::new();
        for rank in lost {
            self.ranks[rank as usize].status = RankStatus::Failed;
            actions.push(Action::Announce(rank, ProcessEnd::Failed(how.to_owned())));
        }
        if self.outcome.is_none() {
            self.outcome = Some(Outcome::failure(exit_code::NODE_LOST, ranks.start, message));
            self.stage = Stage::Failing(now + ERROR_TIME);
        }
        actions.extend(self.finish_if_all_ended());
        actions
    }

    /// Returns the actions at the end of the last rank; none before it.
    fn finish_if_all_ended(&mut self) -> Vec<Action> {
        if self.running().next().is_some() {
            return Vec::new();
        }
        self.outcome = self.outcome.take().or_else(|| self.stop?.outcome());
        let mut actions = self.settle();
        let outcome = self.outcome.clone().unwrap_or_else(Outcome::success);
        // A signal may have interrupted a run that was already failing.
        let incompatible = outcome.incompatible || self.are_left_behind;
        actions.push(Action::Finish(Outcome { interrupted: self.interrupted, incompatible, ..outcome }));
        actions
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.next_deadline().is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        match self.stage {
            Stage::Running => {
                self.join_deadline = None;
                let Some(outcome) = self.never_joined() else { return Vec::new() };
                let how = format!("did not join within {} s", self.join_timeout.as_secs_f64());
                return self.stop(outcome, how, now);
            }
            Stage::Failing(_) => {}
            Stage::Stopping(_) => {
                let (names, seconds) = (self.name_ranks(self.running()), self.stop_grace.as_secs_f64());
                let text =
                    format!("{names} did not stop within {seconds} s: killed; --stop-grace allows more time");
                return [vec![Action::Say(text)], self.kill_stopping(now)].concat();
            }
            Stage::Terminating(_) => {
                let names = self.name_ranks(self.running());
                let seconds = self.time_to_end.as_secs_f64();
                let text = format!("{names} did not end within {seconds} s: killed");
                return [vec![Action::Say(text)], self.kill_all(now)].concat();
            }
            Stage::Killed(_) => return self.give_up(),
        }
        self.terminate(self.grace, now);
        let mut actions = self.settle();
        actions.extend(self.running().flat_map(|rank| self.ask_to_end(rank)));
        actions
    }

    /// The ranks have this time from now on before they are killed.
    fn terminate(&mut self, time: Duration, now: Instant) {
        self.time_to_end = time;
        self.stage = Stage::Terminating(now + time);
    }

    /// Kills the ranks, also if they were killed before.
    fn kill_all(&mut self, now: Instant) -> Vec<Action> {
        if !matches!(self.stage, Stage::Killed(_)) {
            self.stage = Stage::Killed(now + self.killed_time);
        }
        self.to_all(Signal::SIGKILL)
    }

    /// Ends the run although ranks have not ended after SIGKILL.
    fn give_up(&mut self) -> Vec<Action> {
        let left: Vec<u32> = self.running().collect();
        let text = format!(
            "{} did not end within {} s after SIGKILL: left behind; a process in state D (see `ps`) waits in the kernel, and one of \
             another user cannot be killed",
            self.name_ranks(left.iter().copied()),
            self.killed_time.as_secs()
        );
        self.are_left_behind = true;
        left.into_iter().for_each(|rank| self.ranks[rank as usize].status = RankStatus::Failed);
        [vec![Action::Say(text)], self.finish_if_all_ended()].concat()
    }

    /// Returns the action that prints the outcome, once. The outcome does not change any more: ranks that end from now
    /// on were asked to.
    fn settle(&mut self) -> Vec<Action> {
        if std::mem::replace(&mut self.is_settled, true) {
            return Vec::new();
        }
        self.outcome.clone().map(Action::Settle).into_iter().collect()
    }

    /// A stuck rank is killed without being asked. The others get SIGTERM, and SIGCONT in case they were stopped.
    fn ask_to_end(&self, rank: u32) -> Vec<Action> {
        let is_stuck = self.outcome.as_ref().is_some_and(|outcome| {
            outcome.culprit == Some(rank)
                && matches!(outcome.exit_code, exit_code::NO_PROGRESS | exit_code::NEVER_JOINED)
        });
        let signals: &[Signal] =
            if is_stuck { &[Signal::SIGKILL] } else { &[Signal::SIGTERM, Signal::SIGCONT] };
        signals.iter().map(|signal| Action::Send(rank, *signal)).collect()
    }

    /// The outcome if running ranks have not joined; `None` if all running ranks have joined.
    fn never_joined(&self) -> Option<Outcome> {
        let missing: Vec<u32> = self.running().filter(|rank| !self.ranks[*rank as usize].joined).collect();
        let message = format!(
            "{} did not join within {} s, while others had; a slow start needs a longer --timeout",
            self.name_ranks(missing.iter().copied()),
            self.join_timeout.as_secs_f64()
        );
        let culprit = *missing.first()?;
        Some(Outcome::failure(exit_code::NEVER_JOINED, culprit, message))
    }

    fn running(&self) -> impl Iterator<Item = u32> + '_ {
        self.ranks
            .iter()
            .zip(0..)
            .filter(|(rank, _)| rank.status == RankStatus::Running)
            .map(|(_, number)| number)
    }

    fn to_all(&self, signal: Signal) -> Vec<Action> {
        self.running().map(|rank| Action::Send(rank, signal)).collect()
    }

    /// "rank 1 (host b)" or "ranks 0, 2".
    fn name_ranks(&self, ranks: impl Iterator<Item = u32>) -> String {
        let ranks: Vec<u32> = ranks.collect();
        match ranks[..] {
            [rank] => self.hosts.name(rank),
            _ => format!("ranks {}", ranks.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
        }
    }
}

#[cfg(test)]
mod stop_tests;
#[cfg(test)]
mod tests;
