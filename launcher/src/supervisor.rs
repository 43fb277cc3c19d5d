//! Who is to blame, and what happens to the others: a pure state machine.
//!
//! Events come in one line from the event loop; each gives a list of actions. The first rank to fail decides the
//! outcome. Its peers first get a moment in which their collectives return an error that names it, so that they
//! can say what they were doing; then they are asked to end, and after the grace time they are made to. A rank that a
//! faster peer blames, and that ends by itself in that moment, counts as the first.

use std::time::{Duration, Instant};

use mgpu::rendezvous::{Blame, Departure};
use nix::sys::signal::Signal;

use crate::exit_code;

/// Time between the first failure and SIGTERM to the others: enough for their errors to be printed.
const NOTICE: Duration = Duration::from_millis(200);

/// How a rank's process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

impl Exit {
    fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code as u8,
            Exit::Signal(signal) => exit_code::signalled(signal),
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
    Announce(u32, Departure),
    /// Send a signal to a rank's process group.
    Send(u32, Signal),
    /// Tell the user.
    Say(String),
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
    /// What happened, in one line; `None` if all ranks finished.
    pub message: Option<String>,
    /// A signal or an [`Interrupter`](crate::Interrupter) asked for the end.
    pub interrupted: bool,
}

impl Outcome {
    fn success() -> Self {
        Outcome { exit_code: exit_code::SUCCESS, culprit: None, message: None, interrupted: false }
    }

    fn failure(exit_code: u8, culprit: u32, message: String) -> Self {
        Outcome { exit_code, culprit: Some(culprit), message: Some(message), interrupted: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    Running,
    Finished,
    Failed,
}

#[derive(Debug, Clone, Copy)]
struct Rank {
    life: Life,
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
    Noticed(Instant),
    /// The ranks were asked to end; SIGKILL follows.
    Asked(Instant),
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
            ranks: vec![Rank { life: Life::Running, joined: false }; ranks as usize],
            stage: Stage::Running,
            outcome: None,
            accusation: None,
            interrupted: false,
            join_timeout,
            join_deadline: None,
            grace,
            started: now,
        }
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Running => self.join_deadline,
            Stage::Noticed(at) | Stage::Asked(at) => Some(at),
            Stage::Killed => None,
        }
    }

    /// Takes an event and says what to do.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Action> {
        match event {
            Event::Joined(rank) => self.joined(rank, now),
            Event::Exited { rank, exit, blame } => self.exited(rank, exit, blame, now),
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

    fn exited(&mut self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let finished = exit == Exit::Code(0);
        self.ranks[rank as usize].life = if finished { Life::Finished } else { Life::Failed };
        let departure = if finished { Departure::Finished } else { Departure::Failed(exit.describe()) };
        actions.push(Action::Announce(rank, departure));
        if !finished && self.outcome.is_none() {
            self.condemn(Failure { rank, exit, blame }, now);
            self.stage = Stage::Noticed(now + NOTICE);
        } else if let Stage::Noticed(_) = self.stage {
            self.reconsider(Failure { rank, exit, blame }, now);
        }
        if self.running().next().is_none() {
            let outcome = self.outcome.clone().unwrap_or_else(Outcome::success);
            // Somebody may be waiting for the end that another cause had begun.
            actions.push(Action::Finish(Outcome { interrupted: self.interrupted, ..outcome }));
        }
        actions
    }

    /// Decides the outcome by a failure, for the time being if it was blamed on a rank that is still running.
    fn condemn(&mut self, failure: Failure, now: Instant) {
        let Failure { rank, exit, blame } = &failure;
        self.outcome = Some(self.judge(*rank, *exit, blame.clone(), now));
        self.accusation = self.accused(&failure).is_some().then_some(failure);
    }

    /// Takes in the end of a rank soon after the first failure, before anybody was asked to end.
    ///
    /// Processes end in another order than they fail: a rank that panics has told its peers so before it has unwound
    /// and exited, and a peer may be faster. If the accused ends by itself within the notice, it was the cause.
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
                && self.ranks.get(blame.culprit as usize).map(|rank| rank.life) == Some(Life::Failed)
        });
        if ended.exit == Exit::Code(0) {
            self.condemn(accusation, now);
        } else if !is_victim {
            self.condemn(ended, now);
        }
    }

    /// The running rank that a failure is blamed on.
    fn accused(&self, failure: &Failure) -> Option<u32> {
        let blame = failure.blame.as_ref().filter(|blame| !blame.timed_out)?;
        self.running().find(|rank| *rank == blame.culprit)
    }

    /// The outcome if `rank` is the first to fail.
    fn judge(&self, rank: u32, exit: Exit, blame: Option<Blame>, now: Instant) -> Outcome {
        let others = if self.running().next().is_some() { "; the other ranks are stopped" } else { "" };
        let after = (now - self.started).as_secs_f64();
        let life = |rank: u32| self.ranks.get(rank as usize).map(|rank| rank.life);
        // A rank that nobody started cannot be to blame, whatever is written in shared memory.
        match blame.filter(|blame| (blame.culprit as usize) < self.ranks.len()) {
            Some(blame) if blame.timed_out => Outcome::failure(
                exit_code::NO_PROGRESS,
                blame.culprit,
                format!("rank {} made no progress: {}{others}", blame.culprit, blame.message),
            ),
            Some(blame) if life(blame.culprit) == Some(Life::Finished) => Outcome::failure(
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
        if matches!(signal, Signal::SIGUSR1 | Signal::SIGUSR2) {
            return self.to_all(signal);
        }
        if let Stage::Asked(_) | Stage::Killed = self.stage {
            self.stage = Stage::Killed;
            return self.to_all(Signal::SIGKILL);
        }
        self.outcome.get_or_insert_with(|| Outcome {
            exit_code: exit_code::signalled(signal as i32),
            culprit: None,
            message: Some(format!("stopped by {signal}")),
            interrupted: false,
        });
        self.interrupted = true;
        self.stage = Stage::Asked(now + self.grace);
        self.to_all(signal)
    }

    fn tick(&mut self, now: Instant) -> Vec<Action> {
        if self.next_deadline().is_none_or(|deadline| now < deadline) {
            return Vec::new();
        }
        match self.stage {
            Stage::Running => {
                self.outcome = self.never_joined();
                self.join_deadline = None;
                if self.outcome.is_none() {
                    return Vec::new();
                }
            }
            Stage::Noticed(_) => {}
            Stage::Asked(_) | Stage::Killed => {
                self.stage = Stage::Killed;
                let names = name_ranks(self.running());
                let seconds = self.grace.as_secs_f64();
                let mut actions =
                    vec![Action::Say(format!("{names} did not end within {seconds} s: killed"))];
                actions.extend(self.to_all(Signal::SIGKILL));
                return actions;
            }
        }
        self.stage = Stage::Asked(now + self.grace);
        self.to_all(Signal::SIGTERM)
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
        self.ranks.iter().zip(0..).filter(|(rank, _)| rank.life == Life::Running).map(|(_, number)| number)
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    const JOIN: Duration = Duration::from_secs(60);
    const GRACE: Duration = Duration::from_secs(5);

    fn supervisor(ranks: u32) -> (Supervisor, Instant) {
        let now = Instant::now();
        (Supervisor::new(ranks, JOIN, GRACE, now), now)
    }

    fn exited(rank: u32, code: i32) -> Event {
        Event::Exited { rank, exit: Exit::Code(code), blame: None }
    }

    fn finish(actions: &[Action]) -> Option<&Outcome> {
        actions.iter().find_map(|action| match action {
            Action::Finish(outcome) => Some(outcome),
            _ => None,
        })
    }

    fn any_event(ranks: u32) -> impl Strategy<Value = (u8, u32, i32)> {
        (0u8..6, 0..ranks, prop_oneof![Just(0), 1i32..255])
    }

    proptest! {
        /// Whatever happens in whatever order: one end, decided by the first failure, and no signal to the dead.
        #[test]
        fn one_end_and_no_signal_to_the_dead(
            events in prop::collection::vec(any_event(4), 0..60), steps in prop::collection::vec(0u64..3000, 60)
        ) {
            let (mut supervisor, mut now) = supervisor(4);
            let (mut alive, mut first, mut ends) = ([true; 4], None, 0);
            let mut clean_up: Vec<(u8, u32, i32)> = (0..4).map(|rank| (0, rank, 0)).collect();
            let mut events = events;
            events.append(&mut clean_up);
            for ((kind, rank, code), step) in events.into_iter().zip(steps.into_iter().chain([1; 4])) {
                now += Duration::from_millis(step);
                let event = match kind {
                    0 if alive[rank as usize] => {
                        alive[rank as usize] = false;
                        if code != 0 && first.is_none() {
                            first = Some(code as u8);
                        }
                        exited(rank, code)
                    }
                    1 => Event::Joined(rank),
                    2 => Event::Signalled(Signal::SIGUSR1),
                    3 if code == 0 => {
                        first = first.or(Some(143));
                        Event::Signalled(Signal::SIGTERM)
                    }
                    _ => Event::Tick,
                };
                let before = supervisor.outcome.clone();
                for action in supervisor.handle(event, now) {
                    match action {
                        Action::Send(rank, _) => prop_assert!(alive[rank as usize]),
                        Action::Finish(outcome) => {
                            ends += 1;
                            prop_assert!(alive.iter().all(|alive| !alive));
                            if outcome.exit_code != exit_code::NEVER_JOINED {
                                prop_assert_eq!(outcome.exit_code, first.unwrap_or(0));
                            }
                        }
                        Action::Announce(..) | Action::Say(_) => {}
                    }
                }
                prop_assert!(before.is_none() || before == supervisor.outcome, "the first cause stays");
                if ends > 0 {
                    break;
                }
            }
            prop_assert_eq!(ends, i32::from(alive.iter().all(|alive| !alive)));
        }
    }

    #[test]
    fn a_failure_stops_the_others_in_three_steps() {
        let (mut supervisor, now) = supervisor(3);
        let actions = supervisor.handle(exited(1, 3), now);
        assert_eq!(actions, [Action::Announce(1, Departure::Failed("exited with code 3".into()))]);
        let at = supervisor.next_deadline().unwrap();
        assert_eq!(at, now + NOTICE);
        let term = |rank| Action::Send(rank, Signal::SIGTERM);
        assert_eq!(supervisor.handle(Event::Tick, at), [term(0), term(2)]);
        supervisor.handle(exited(0, 143), at);
        let at = supervisor.next_deadline().unwrap();
        let said = Action::Say("rank 2 did not end within 5 s: killed".into());
        assert_eq!(supervisor.handle(Event::Tick, at), [said, Action::Send(2, Signal::SIGKILL)]);
        let end = Event::Exited { rank: 2, exit: Exit::Signal(9), blame: None };
        let actions = supervisor.handle(end, at);
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.culprit), (3, Some(1)));
        let message = outcome.message.as_deref().unwrap();
        assert_eq!(message, "rank 1 exited with code 3 after 0.0 s; the other ranks are stopped");
    }

    #[test]
    fn a_rank_that_left_early_is_the_culprit() {
        let (mut supervisor, now) = supervisor(2);
        supervisor.handle(exited(0, 0), now);
        let blame = Some(Blame { culprit: 0, timed_out: false, message: "rank 1 lost rank 0".into() });
        let actions = supervisor.handle(Event::Exited { rank: 1, exit: Exit::Code(7), blame }, now);
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.culprit), (7, Some(0)));
        assert!(
            outcome.message.as_deref().unwrap().contains("rank 0 exited with code 0 while others needed it")
        );
    }

    #[test]
    fn a_silent_rank_is_the_culprit() {
        let (mut supervisor, now) = supervisor(2);
        let blame = Some(Blame { culprit: 1, timed_out: true, message: "rank 0 waited".into() });
        supervisor.handle(Event::Exited { rank: 0, exit: Exit::Code(1), blame }, now);
        let killed = Event::Exited { rank: 1, exit: Exit::Signal(9), blame: None };
        let actions = supervisor.handle(killed, now);
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.culprit), (exit_code::NO_PROGRESS, Some(1)));
    }

    fn lost(rank: u32, code: i32, culprit: u32) -> Event {
        let blame = Blame { culprit, timed_out: false, message: format!("rank {rank} lost rank {culprit}") };
        Event::Exited { rank, exit: Exit::Code(code), blame: Some(blame) }
    }

    fn end_of(events: &[Event]) -> (u8, Option<u32>) {
        let (mut supervisor, now) = supervisor(events.len() as u32);
        let actions: Vec<Action> =
            events.iter().flat_map(|event| supervisor.handle(event.clone(), now)).collect();
        let outcome = finish(&actions).unwrap();
        (outcome.exit_code, outcome.culprit)
    }

    #[test]
    fn a_victim_that_exits_before_the_culprit_is_not_the_culprit() {
        assert_eq!(end_of(&[lost(1, 9, 2), lost(0, 9, 2), exited(2, 101)]), (101, Some(2)));
        assert_eq!(end_of(&[lost(0, 9, 1), lost(1, 8, 2), exited(2, 7)]), (7, Some(2)));
        assert_eq!(end_of(&[lost(1, 9, 0), exited(0, 0)]), (9, Some(0)));
        // Both say it was the other: the first to end stays.
        assert_eq!(end_of(&[lost(1, 9, 0), lost(0, 8, 1)]), (9, Some(1)));
        // Not accused: ends later, so it is not the first.
        assert_eq!(end_of(&[lost(1, 9, 0), exited(2, 4), lost(0, 8, 1)]), (9, Some(1)));
    }

    #[test]
    fn an_accused_rank_that_had_to_be_stopped_does_not_decide() {
        let (mut supervisor, now) = supervisor(2);
        supervisor.handle(lost(1, 9, 0), now);
        let at = supervisor.next_deadline().unwrap();
        supervisor.handle(Event::Tick, at);
        let killed = Event::Exited { rank: 0, exit: Exit::Signal(15), blame: None };
        let actions = supervisor.handle(killed, at);
        assert_eq!(finish(&actions).unwrap().exit_code, 9);
    }

    #[test]
    fn nobody_blames_a_rank_that_does_not_exist() {
        let (mut supervisor, now) = supervisor(2);
        supervisor.handle(exited(0, 0), now);
        let blame = Some(Blame { culprit: 7, timed_out: true, message: String::new() });
        let actions = supervisor.handle(Event::Exited { rank: 1, exit: Exit::Code(6), blame }, now);
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.culprit), (6, Some(1)));
    }

    #[test]
    fn a_rank_that_never_joins_is_waited_for_once_another_has() {
        let (mut supervisor, now) = supervisor(3);
        assert_eq!(supervisor.next_deadline(), None);
        supervisor.handle(Event::Joined(0), now);
        supervisor.handle(Event::Joined(2), now + JOIN / 2);
        let at = supervisor.next_deadline().unwrap();
        assert_eq!(at, now + JOIN);
        assert_eq!(supervisor.handle(Event::Tick, at).len(), 3);
        assert_eq!(supervisor.outcome.as_ref().unwrap().exit_code, exit_code::NEVER_JOINED);
        assert!(supervisor.outcome.unwrap().message.unwrap().starts_with("rank 1 did not join within 60 s"));
    }

    #[test]
    fn the_second_signal_kills() {
        let (mut supervisor, now) = supervisor(2);
        let sent = supervisor.handle(Event::Signalled(Signal::SIGINT), now);
        assert_eq!(sent, [Action::Send(0, Signal::SIGINT), Action::Send(1, Signal::SIGINT)]);
        let sent = supervisor.handle(Event::Signalled(Signal::SIGINT), now);
        assert_eq!(sent, [Action::Send(0, Signal::SIGKILL), Action::Send(1, Signal::SIGKILL)]);
        supervisor.handle(exited(0, 0), now);
        let actions = supervisor.handle(exited(1, 0), now);
        let outcome = finish(&actions).unwrap();
        assert_eq!((outcome.exit_code, outcome.interrupted), (130, true));
    }
}
