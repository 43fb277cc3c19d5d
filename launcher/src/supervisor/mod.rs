//! The supervisor: a pure state machine that determines the culprit of a failure and ends the other ranks.
//!
//! The event loop passes events one at a time; each returns a list of actions. The first rank that fails determines the
//! outcome. Its peers first get 200 ms (`ERROR_TIME`), in which their collectives return an error that names it and
//! they can print what they were doing. Then they get SIGTERM, and after the grace time SIGKILL. If the first rank to
//! end blames another rank, and that rank fails within `ERROR_TIME`, the blamed rank counts as the first.

mod stop;

use std::ops::Range;
use std::time::{Duration, Instant};

use mgpu_control::rendezvous::{Blame, ProcessEnd};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use stop::Stop;
pub use stop::StopCause;

use crate::exit_code;
use crate::interrupt::ends_the_run;

/// Time between the first failure and SIGTERM to the others: enough to print their errors.
const ERROR_TIME: Duration = Duration::from_millis(200);

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Exit {
    /// It exited with this code.
    Code(i32),
    /// It was killed by this signal.
    Signal(i32),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => exit_code::signalled(signal),
        }
    }

    /// As [`describe`](Self::describe), for a rank to which the launcher has sent signals: says so, because the end is
    /// not the rank's own failure.
    pub(crate) fn describe_signalled(self) -> String {
        match self {
            Exit::Signal(signal) if Signal::try_from(signal).is_ok_and(ends_the_run) => {
                format!("{}, which mgpurun sent", self.describe())
            }
            _ => self.describe(),
        }
    }

    /// A predicate: "exited with code 3".
    pub fn describe(self) -> String {
        match self {
            Exit::Code(code) => format!("exited with code {code}"),
            Exit::Signal(signal) => match Signal::try_from(signal) {
                Ok(name) => format!("was killed by {name}"),
                Err(_) => format!("was killed by signal {signal}"),
            },
        }
    }
}

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A rank joined the rendezvous.
    Joined(u32),
    /// A rank is incompatible with the run.
    Incompatible {
        /// The rank.
        rank: u32,
        /// Exit code for this kind of incompatibility.
        exit_code: u8,
        /// The difference.
        why: String,
    },
    /// A rank has exceeded the progress timeout.
    Silent {
        /// The rank.
        rank: u32,
        /// For how long.
        idle: Duration,
        /// Its last known action.
        doing: String,
    },
    /// The guardian was killed.
    GuardianEnded,
    /// A rank's process ended.
    Exited {
        /// The rank.
        rank: u32,
        /// How.
        exit: Exit,
        /// The rank that it blamed.
        blame: Option<Blame>,
    },
    /// The launcher got a signal.
    Signalled(Signal),
    /// The ranks, which stop by themselves when they are asked to, are to be asked.
    StopAsked(StopCause),
    /// The time of `--stop-after` has passed, and not all ranks stop by themselves.
    TimePassed,
    /// The ranks have to end because of something outside their world, as the text says.
    Stopped(String),
    /// A host is lost, and with it its ranks.
    NodeLost {
        /// The ranks on it.
        ranks: Range<u32>,
        /// How they ended for their peers, as a predicate.
        how: String,
        /// What happened, as the message of the outcome.
        message: String,
    },
    /// A deadline may have passed.
    Tick,
}

/// An output of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell the peers that a rank has ended or failed.
    Announce(u32, ProcessEnd),
    /// Send a signal to a rank's process group.
    Send(u32, Signal),
    /// Ask all ranks to stop at the same place, if that was not done before.
    AskToStop,
    /// Print a message.
    Say(String),
    /// The outcome is final, though ranks may still run: print it. Occurs once, before the end of a run that did not
    /// succeed.
    Settle(Outcome),
    /// Print the table of what every rank is doing.
    Report,
    /// All ranks have ended.
    Finish(Outcome),
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Exit code of the launcher; see [`crate::exit_code`].
    pub exit_code: u8,
    /// The culprit.
    pub culprit: Option<u32>,
    /// The ranks are incompatible: a restart would not help.
    pub incompatible: bool,
    /// What happened, in one line; `None` if all ranks finished.
    pub message: Option<String>,
    /// A signal or an [`Interrupter`](crate::Interrupter) asked for the end.
    pub interrupted: bool,
}

impl Outcome {
    /// Changes the outcome for a `signal` that arrived after all ranks had ended, while leftover processes were running.
    pub(crate) fn interrupt(&mut self, signal: Signal) {
        self.interrupted = true;
        if self.exit_code == exit_code::SUCCESS {
            self.exit_code = exit_code::signalled(signal as i32);
            self.message = Some(format!("stopped by {signal}"));
        }
    }

    /// Notes a request to stop that came too late for the ranks: they are not restarted.
    pub(crate) fn ask_to_stop(&mut self) {
        self.interrupted |= self.culprit.is_some();
    }

    /// True if the ranks ended because somebody asked for it, and not because of a failure.
    pub(crate) fn is_interruption(&self) -> bool {
        self.interrupted && self.culprit.is_none()
    }

    pub(crate) fn success() -> Self {
        Outcome {
            exit_code: exit_code::SUCCESS,
            culprit: None,
            incompatible: false,
            message: None,
            interrupted: false,
        }
    }

    fn failure(exit_code: u8, culprit: u32, message: String) -> Self {
        Outcome {
            exit_code,
            culprit: Some(culprit),
            incompatible: false,
            message: Some(message),
            interrupted: false,
        }
    }

    /// The outcome of a run that `signal` interrupts.
    pub(crate) fn interruption(signal: Signal) -> Self {
        Outcome {
            exit_code: exit_code::signalled(signal as i32),
            culprit: None,
            incompatible: false,
            message: Some(format!("stopped by {signal}")),
            interrupted: true,
        }
    }
}

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

/// The end of a rank, and the rank that it blamed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failure {
    rank: u32,
    exit: Exit,
    blame: Option<Blame>,
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
    /// The ranks were killed.
    Killed,
}

/// The hosts of the ranks, if there are several: messages name them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankHosts {
    /// The first rank of each host and the name of the host, in ascending order.
    pub hosts: Vec<(u32, String)>,
}

impl RankHosts {
    /// "rank 5", or "rank 5 (host b)" if there are several hosts.
    pub fn name(&self, rank: u32) -> String {
        let host = self.hosts.iter().rev().find(|(first, _)| *first <= rank);
        match host.filter(|_| self.hosts.len() > 1) {
            Some((_, host)) => format!("rank {rank} (host {host})"),
            None => format!("rank {rank}"),
        }
    }
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
            stop: None,
            ended_by_time: false,
            is_settled: false,
            join_timeout,
            join_deadline: None,
            grace,
            stop_grace: grace,
            time_to_end: grace,
            started: now,
        }
    }

    /// Sets the time that ranks have when they are asked to stop, or the launcher gets a signal (by default, the grace
    /// time).
    pub fn with_stop_grace(self, stop_grace: Duration) -> Self {
        Supervisor { stop_grace, ..self }
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
            Stage::Failing(at) | Stage::Stopping(at) | Stage::Terminating(at) => Some(at),
            Stage::Killed => None,
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
            Event::GuardianEnded => self.guardian_ended(),
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

    fn guardian_ended(&mut self) -> Vec<Action> {
        self.outcome.get_or_insert_with(|| Outcome {
            message: Some("mgpurun was killed, and its ranks with it".into()),
            ..Outcome::interruption(Signal::SIGKILL)
        });
        self.interrupted = true;
        self.stage = Stage::Killed;
        [self.settle(), self.to_all(Signal::SIGKILL)].concat()
    }

    fn exited(&mut self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let finished = self.has_stopped(exit) || exit == Exit::Code(0);
        let status = if finished { RankStatus::Finished } else { RankStatus::Failed };
        self.ranks[rank as usize] = Rank { status, exit: Some(exit), ..self.ranks[rank as usize] };
        let end = match self.stage {
            _ if finished => ProcessEnd::Finished,
            Stage::Running | Stage::Stopping(_) | Stage::Failing(_) => ProcessEnd::Failed(exit.describe()),
            Stage::Terminating(_) | Stage::Killed => ProcessEnd::Failed(exit.describe_signalled()),
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

    /// Determines the outcome from a failure; provisional if the failure blames a rank that is still running.
    fn decide(&mut self, failure: Failure, now: Instant) {
        let Failure { rank, exit, blame } = &failure;
        self.outcome = Some(self.outcome_of(*rank, *exit, blame.clone(), now));
        self.accusation = self.running_culprit(&failure).is_some().then_some(failure);
    }

    /// Handles the end of a rank soon after the first failure, before any rank was asked to end.
    ///
    /// Processes may end in another order than they fail: a rank that panics tells its peers before it has unwound and
    /// exited, and a peer may exit earlier. If the blamed rank fails by itself within [`ERROR_TIME`], it was the cause.
    fn reconsider(&mut self, ended: Failure, now: Instant) {
        let is_accused =
            |accusation: &Failure| accusation.blame.as_ref().map(|blame| blame.culprit) == Some(ended.rank);
        if !self.accusation.as_ref().is_some_and(is_accused) {
            return;
        }
        let Some(accusation) = self.accusation.take() else { return };
        // A rank that blames a rank that had failed before is a victim, too.
        let is_victim = ended.blame.as_ref().is_some_and(|blame| {
            !blame.timed_out
                && self.ranks.get(blame.culprit as usize).map(|rank| rank.status) == Some(RankStatus::Failed)
        });
        if self.finished(ended.rank).is_some() {
            self.decide(accusation, now);
        } else if !is_victim {
            self.decide(ended, now);
        }
    }

    /// The rank that a failure blames, if it is still running.
    fn running_culprit(&self, failure: &Failure) -> Option<u32> {
        let blame = failure.blame.as_ref().filter(|blame| !blame.timed_out)?;
        self.running().find(|rank| *rank == blame.culprit)
    }

    /// The outcome if `rank` is the first to fail.
    fn outcome_of(&self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Outcome {
        let others = if self.running().next().is_some() { "; the other ranks are stopped" } else { "" };
        let after = (now - self.started).as_secs_f64();
        // Shared memory may contain anything: a rank that does not exist cannot be the culprit.
        let blame = blame.filter(|blame| (blame.culprit as usize) < self.ranks.len());
        let finish = blame.as_ref().and_then(|blame| self.finished(blame.culprit));
        match (blame, finish) {
            (Some(blame), _) if blame.timed_out => Outcome::failure(
                exit_code::NO_PROGRESS,
                blame.culprit,
                format!("{} made no progress: {}{others}", self.hosts.name(blame.culprit), blame.message),
            ),
            (Some(blame), Some(finish)) => Outcome::failure(
                exit.code(),
                blame.culprit,
                format!(
                    "{} {} while others needed it: {}{others}",
                    self.hosts.name(blame.culprit),
                    finish.describe(),
                    blame.message
                ),
            ),
            _ => Outcome::failure(
                exit.code(),
                rank,
                format!("{} {} after {after:.1} s{others}", self.hosts.name(rank), exit.describe()),
            ),
        }
    }

    /// How a rank ended, if it has not failed.
    fn finished(&self, rank: u32) -> Option<Exit> {
        let rank = self.ranks.get(rank as usize)?;
        rank.exit.filter(|_| rank.status == RankStatus::Finished)
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
        if let Stage::Terminating(_) | Stage::Killed = self.stage {
            self.stage = Stage::Killed;
            return self.to_all(Signal::SIGKILL);
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
        actions.push(Action::Finish(Outcome { interrupted: self.interrupted, ..outcome }));
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
                return [vec![Action::Say(text)], self.kill_stopping()].concat();
            }
            Stage::Terminating(_) | Stage::Killed => {
                self.stage = Stage::Killed;
                let names = self.name_ranks(self.running());
                let seconds = self.time_to_end.as_secs_f64();
                let mut actions =
                    vec![Action::Say(format!("{names} did not end within {seconds} s: killed"))];
                actions.extend(self.to_all(Signal::SIGKILL));
                return actions;
            }
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
