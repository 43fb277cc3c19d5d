//! Who is to blame, and what happens to the others: a pure state machine.
//!
//! Events come in one line from the event loop; each gives a list of actions. The first rank to fail decides the
//! outcome. Its peers first get a moment in which their collectives return an error that names it, so that they
//! can say what they were doing; then they are asked to end, and after the grace time they are made to. A rank that a
//! faster peer blames, and that ends by itself in that moment, counts as the first.

use std::time::{Duration, Instant};

use mgpu_control::rendezvous::{Blame, ProcessEnd};
use nix::sys::signal::Signal;

use crate::exit_code;
use crate::interrupt::ends_the_run;

/// Time between the first failure and SIGTERM to the others: enough for their errors to be printed.
const ERROR_TIME: Duration = Duration::from_millis(200);

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => exit_code::signalled(signal),
        }
    }

    /// As [`describe`](Self::describe), for a rank that was sent signals by its launcher: its end says nothing of its own.
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

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A rank joined the rendezvous.
    Joined(u32),
    /// A rank does not go together with the others.
    Incompatible {
        /// The rank.
        rank: u32,
        /// Exit code for this kind of fault.
        exit_code: u8,
        /// What was found.
        why: String,
    },
    /// A rank has made no progress for longer than it may.
    Silent {
        /// The rank.
        rank: u32,
        /// For how long.
        idle: Duration,
        /// What it was last seen doing.
        doing: String,
    },
    /// The process that stands between the user and the launcher was killed: there is nobody left to launch for.
    GuardianEnded,
    /// A rank's process ended.
    Exited {
        /// The rank.
        rank: u32,
        /// How.
        exit: Exit,
        /// Whom it held responsible.
        blame: Option<Blame>,
    },
    /// The launcher got a signal.
    Signalled(Signal),
    /// A deadline may have passed.
    Tick,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell the peers that a rank is gone.
    Announce(u32, ProcessEnd),
    /// Send a signal to a rank's process group.
    Send(u32, Signal),
    /// Tell the user.
    Say(String),
    /// It is settled how the run ends, though ranks may still run: tell the user. Comes once, before the end of a run that
    /// did not succeed.
    Settle(Outcome),
    /// Show the user what every rank is doing.
    Report,
    /// Everything is over.
    Finish(Outcome),
}

/// How the run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Exit code of the launcher; see [`crate::exit_code`].
    pub exit_code: u8,
    /// The rank to blame.
    pub culprit: Option<u32>,
    /// The ranks do not go together: starting them again would not help.
    pub incompatible: bool,
    /// What happened, in one line; `None` if all ranks finished.
    pub message: Option<String>,
    /// A signal or an [`Interrupter`](crate::Interrupter) asked for the end.
    pub interrupted: bool,
}

impl Outcome {
    /// `signal` came after all ranks had ended, and cut short what they had left running.
    pub(crate) fn interrupt(&mut self, signal: Signal) {
        self.interrupted = true;
        if self.exit_code == exit_code::SUCCESS {
            self.exit_code = exit_code::signalled(signal as i32);
            self.message = Some(format!("stopped by {signal}"));
        }
    }

    fn success() -> Self {
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

    /// The outcome of a run that `signal` ends.
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
    joined: bool,
}

/// The end of a rank, and whom it held responsible.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Failure {
    rank: u32,
    exit: Exit,
    blame: Option<Blame>,
}

/// How far the end of the ranks has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nothing is wrong.
    Running,
    /// A rank has failed; SIGTERM follows.
    Failing(Instant),
    /// The ranks were asked to end; SIGKILL follows.
    Terminating(Instant),
    /// The ranks were killed.
    Killed,
}

/// The state of a run.
#[derive(Debug)]
pub struct Supervisor {
    ranks: Vec<Rank>,
    stage: Stage,
    /// Decided by the first cause, complete at the end.
    outcome: Option<Outcome>,
    /// The failure that decided the outcome, while the rank it is blamed on has not ended.
    accusation: Option<Failure>,
    interrupted: bool,
    /// The outcome was told.
    is_settled: bool,
    join_timeout: Duration,
    /// Set by the first rank that joins.
    join_deadline: Option<Instant>,
    grace: Duration,
    started: Instant,
}

impl Supervisor {
    /// `ranks` ranks that have just been started.
    pub fn new(ranks: u32, join_timeout: Duration, grace: Duration, now: Instant) -> Self {
        Supervisor {
            ranks: vec![Rank { status: RankStatus::Running, joined: false }; ranks as usize],
            stage: Stage::Running,
            outcome: None,
            accusation: None,
            interrupted: false,
            is_settled: false,
            join_timeout,
            join_deadline: None,
            grace,
            started: now,
        }
    }

    /// True once some rank has joined the rendezvous.
    pub fn has_joined(&self) -> bool {
        self.ranks.iter().any(|rank| rank.joined)
    }

    /// True until something has decided how the run ends.
    pub(crate) fn is_undecided(&self) -> bool {
        self.outcome.is_none()
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running => self.join_deadline,
            Stage::Failing(at) | Stage::Terminating(at) => Some(at),
            Stage::Killed => None,
        }
    }

    /// Takes an event and says what to do.
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
            "rank {rank} {how}: it was last seen {doing}; a rank that is slow rather than stuck needs a longer \
             --progress-timeout"
        );
        self.stop(Outcome::failure(exit_code::NO_PROGRESS, rank, message), how, now)
    }

    /// Ends a run that cannot go on although no rank has ended. The others get a moment in which they learn `how` the
    /// culprit failed.
    fn stop(&mut self, outcome: Outcome, how: String, now: Instant) -> Vec<Action> {
        if self.outcome.is_some() || self.stage != Stage::Running {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if matches!(outcome.exit_code, exit_code::NO_PROGRESS | exit_code::NEVER_JOINED) {
            actions.push(Action::Report);
        }
        // A rank may claim any number.
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
        let finished = exit == Exit::Code(0);
        self.ranks[rank as usize].status = if finished { RankStatus::Finished } else { RankStatus::Failed };
        let end = match self.stage {
            _ if finished => ProcessEnd::Finished,
            Stage::Running | Stage::Failing(_) => ProcessEnd::Failed(exit.describe()),
            Stage::Terminating(_) | Stage::Killed => ProcessEnd::Failed(exit.describe_signalled()),
        };
        actions.push(Action::Announce(rank, end));
        if !finished && self.outcome.is_none() {
            // The others are still there to be looked at.
            if blame.as_ref().is_some_and(|blame| blame.timed_out) {
                actions.push(Action::Report);
            }
            self.decide(Failure { rank, exit, blame }, now);
            self.stage = Stage::Failing(now + ERROR_TIME);
        } else if let Stage::Failing(_) = self.stage {
            self.reconsider(Failure { rank, exit, blame }, now);
        }
        if self.running().next().is_none() {
            actions.extend(self.settle());
            let outcome = self.outcome.clone().unwrap_or_else(Outcome::success);
            // Somebody may be waiting for the end that another cause had begun.
            actions.push(Action::Finish(Outcome { interrupted: self.interrupted, ..outcome }));
        }
        actions
    }

    /// Decides the outcome by a failure, for the time being if it was blamed on a rank that is still running.
    fn decide(&mut self, failure: Failure, now: Instant) {
        let Failure { rank, exit, blame } = &failure;
        self.outcome = Some(self.outcome_of(*rank, *exit, blame.clone(), now));
        self.accusation = self.running_culprit(&failure).is_some().then_some(failure);
    }

    /// Takes in the end of a rank soon after the first failure, before anybody was asked to end.
    ///
    /// Processes end in another order than they fail: a rank that panics has told its peers so before it has unwound
    /// and exited, and a peer may be faster. If the running_culprit ends by itself within the notice, it was the cause.
    fn reconsider(&mut self, ended: Failure, now: Instant) {
        let is_accused =
            |accusation: &Failure| accusation.blame.as_ref().map(|blame| blame.culprit) == Some(ended.rank);
        if !self.accusation.as_ref().is_some_and(is_accused) {
            return;
        }
        let Some(accusation) = self.accusation.take() else { return };
        // One that blames a rank that had failed before is a victim like the first.
        let is_victim = ended.blame.as_ref().is_some_and(|blame| {
            !blame.timed_out
                && self.ranks.get(blame.culprit as usize).map(|rank| rank.status) == Some(RankStatus::Failed)
        });
        if ended.exit == Exit::Code(0) {
            self.decide(accusation, now);
        } else if !is_victim {
            self.decide(ended, now);
        }
    }

    /// The running rank that a failure is blamed on.
    fn running_culprit(&self, failure: &Failure) -> Option<u32> {
        let blame = failure.blame.as_ref().filter(|blame| !blame.timed_out)?;
        self.running().find(|rank| *rank == blame.culprit)
    }

    /// The outcome if `rank` is the first to fail.
    fn outcome_of(&self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Outcome {
        let others = if self.running().next().is_some() { "; the other ranks are stopped" } else { "" };
        let after = (now - self.started).as_secs_f64();
        let status = |rank: u32| self.ranks.get(rank as usize).map(|rank| rank.status);
        // A rank that nobody started cannot be to blame, whatever is written in shared memory.
        match blame.filter(|blame| (blame.culprit as usize) < self.ranks.len()) {
            Some(blame) if blame.timed_out => Outcome::failure(
                exit_code::NO_PROGRESS,
                blame.culprit,
                format!("rank {} made no progress: {}{others}", blame.culprit, blame.message),
            ),
            Some(blame) if status(blame.culprit) == Some(RankStatus::Finished) => Outcome::failure(
                exit.code(),
                blame.culprit,
                format!(
                    "rank {} exited with code 0 while others needed it: {}{others}",
                    blame.culprit, blame.message
                ),
            ),
            _ => Outcome::failure(
                exit.code(),
                rank,
                format!("rank {rank} {} after {after:.1} s{others}", exit.describe()),
            ),
        }
    }

    fn signalled(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        match signal {
            Signal::SIGUSR1 | Signal::SIGUSR2 => return self.to_all(signal),
            Signal::SIGQUIT => return vec![Action::Report],
            _ => {}
        }
        if let Stage::Terminating(_) | Stage::Killed = self.stage {
            self.stage = Stage::Killed;
            return self.to_all(Signal::SIGKILL);
        }
        self.outcome.get_or_insert_with(|| Outcome::interruption(signal));
        self.interrupted = true;
        self.stage = Stage::Terminating(now + self.grace);
        [self.settle(), self.to_all(signal), self.to_all(Signal::SIGCONT)].concat()
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
            Stage::Terminating(_) | Stage::Killed => {
                self.stage = Stage::Killed;
                let names = name_ranks(self.running());
                let seconds = self.grace.as_secs_f64();
                let mut actions =
                    vec![Action::Say(format!("{names} did not end within {seconds} s: killed"))];
                actions.extend(self.to_all(Signal::SIGKILL));
                return actions;
            }
        }
        self.stage = Stage::Terminating(now + self.grace);
        let mut actions = self.settle();
        actions.extend(self.running().flat_map(|rank| self.ask_to_end(rank)));
        actions
    }

    /// Tells the outcome, which does not change any more: ranks that end from now on were asked to. Once.
    fn settle(&mut self) -> Vec<Action> {
        if std::mem::replace(&mut self.is_settled, true) {
            return Vec::new();
        }
        self.outcome.clone().map(Action::Settle).into_iter().collect()
    }

    /// A rank that has shown that it does nothing any more need not be asked. The others are, and woken for it if they
    /// were stopped.
    fn ask_to_end(&self, rank: u32) -> Vec<Action> {
        let is_stuck = self.outcome.as_ref().is_some_and(|outcome| {
            outcome.culprit == Some(rank)
                && matches!(outcome.exit_code, exit_code::NO_PROGRESS | exit_code::NEVER_JOINED)
        });
        let signals: &[Signal] =
            if is_stuck { &[Signal::SIGKILL] } else { &[Signal::SIGTERM, Signal::SIGCONT] };
        signals.iter().map(|signal| Action::Send(rank, *signal)).collect()
    }

    /// The outcome if some running ranks have not joined; `None` if those that have not have ended.
    fn never_joined(&self) -> Option<Outcome> {
        let missing: Vec<u32> = self.running().filter(|rank| !self.ranks[*rank as usize].joined).collect();
        let message = format!(
            "{} did not join within {} s, while others had; a slow start needs a longer --timeout",
            name_ranks(missing.iter().copied()),
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
}

/// "rank 1" or "ranks 0, 2".
fn name_ranks(ranks: impl Iterator<Item = u32>) -> String {
    let names: Vec<String> = ranks.map(|rank| rank.to_string()).collect();
    format!("rank{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

#[cfg(test)]
mod tests;
