//! One start of a job's ranks, from their first output to the end of the last process.
//!
//! It passes events to the [`Supervisor`] and carries out its actions. It never blocks: all waiting is in the loop.

mod progress;
mod stop_requests;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mgpu_control::inject::Injection;
use mgpu_control::protocol::MGPU_RUN_ID;
use mgpu_control::rendezvous::{Server, ServerEvent};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::Shared;
use super::leftovers::Leftovers;
use super::wait::JobSource;
use crate::error_file::{self, RecordedError};
use crate::events;
use crate::faults;
use crate::group::wait_for_end;
use crate::interrupt::ends_the_run;
use crate::launch::Supervision;
use crate::mpi::MpiWatch;
use crate::output::Output;
use crate::restart::Reached;
use crate::spawn::{Process, Sent, send};
use crate::supervisor::{Action, Event, Outcome, StopCause, Supervisor};
use crate::{exit_code, mpi, orphans};
use stop_requests::TIME_TO_FIRST_CHECK;

/// Interval at which the ranks' steps are polled if events are recorded.
const STEP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// What a job is called, and where its output goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JobId {
    /// Its number; `None` if the launch has only one.
    pub(crate) number: Option<u32>,
    /// The number of its rank 0 among the ranks of all jobs, by which the output knows it.
    pub(crate) first_rank: u32,
}

impl JobId {
    /// Prints a message about the job.
    pub(super) fn say(self, shared: &mut Shared<'_>, text: &str) {
        self.say_to(shared.output, text);
    }

    /// Prints a message about the job to `output`.
    pub(crate) fn say_to(self, output: &mut Output, text: &str) {
        match self.number {
            None => output.say(text),
            Some(job) => output.say(&format!("job {job}: {text}")),
        }
    }

    /// Prints how the job ends. A signal ends all jobs, and is reported once.
    pub(super) fn say_end(self, shared: &mut Shared<'_>, outcome: &Outcome, message: &str) {
        match outcome.culprit {
            None if outcome.interrupted => {
                if !std::mem::replace(&mut shared.told_of_interruption, true) {
                    shared.output.say(message);
                }
            }
            _ => self.say(shared, message),
        }
    }
}

/// Who decides what the events of an attempt mean.
#[expect(clippy::large_enum_variant, reason = "there is one for each attempt")]
pub(super) enum Judge {
    /// This process.
    Supervisor(Supervisor),
    /// The coordinator of the job's nodes. These events have not been reported to it.
    Coordinator(Vec<Event>),
}

impl Judge {
    /// The supervisor of this process.
    fn supervisor(&self) -> Option<&Supervisor> {
        match self {
            Judge::Supervisor(supervisor) => Some(supervisor),
            Judge::Coordinator(_) => None,
        }
    }
}

/// The ranks of one start of a job on this host, and what is known about them.
///
/// A *rank* is counted in the world, a `number` among the ranks of this host.
pub(super) struct Attempt<'a> {
    pub(super) job: JobId,
    pub(super) ranks: Vec<Process>,
    /// The first rank of this host.
    pub(super) first: u32,
    pub(super) server: Server,
    pub(super) judge: Judge,
    pub(super) supervision: Supervision,
    /// Earliest time at which a rank may have exceeded the progress timeout.
    next_progress_check: Option<Instant>,
    /// When to poll the ranks' steps, if events are recorded.
    next_step_poll: Option<Instant>,
    /// When the ranks are asked to stop, if at a certain time.
    next_stop: Option<Instant>,
    /// SIGUSR1 to ranks that have made no stop check is held until this time.
    hold_until: Instant,
    /// SIGUSR1 is held; the ranks' stop checks are polled at this time.
    held_stop: Option<Instant>,
    mpi: MpiWatch,
    /// Faults to inject; those that have not happened are reported at the end.
    injections: &'a [Injection],
    run_id: String,
    /// Ranks of other hosts whose processes are stopped.
    stopped_elsewhere: Vec<u32>,
    /// When each of the other nodes has last reported the progress of its ranks (of [`mgpu_control::progress::now`]).
    reported: BTreeMap<u32, Duration>,
    knows_end_of_guardian: bool,
    /// The outcome as it was printed, although ranks may still run.
    pub(super) settled: Option<Outcome>,
    /// Set when all ranks have ended.
    pub(super) leftovers: Option<Leftovers>,
}

/// The processes of an attempt.
pub(super) struct Started<'a> {
    pub(super) job: JobId,
    pub(super) processes: Vec<Process>,
    /// The first rank among them.
    pub(super) first: u32,
    pub(super) server: Server,
    pub(super) injections: &'a [Injection],
    pub(super) run_id: String,
}

/// The end of an attempt.
pub(super) struct AttemptEnd {
    pub(super) outcome: Outcome,
    pub(super) reached: Reached,
    /// Injected faults that have not happened, one line each.
    pub(super) missed_faults: Vec<String>,
    /// The error that the culprit has recorded, if it is a rank of this host.
    pub(super) error: Option<RecordedError>,
}

impl<'a> Attempt<'a> {
    /// For processes that have just been started.
    pub(super) fn new(
        started: Started<'a>,
        judge: Judge,
        supervision: Supervision,
        records_events: bool,
    ) -> Self {
        let Started { job, processes: ranks, first, server, injections, run_id } = started;
        let now = Instant::now();
        let progress_timeout = supervision.progress_timeout;
        Attempt {
            job,
            mpi: MpiWatch::new(ranks.len()),
            first,
            judge,
            next_progress_check: progress_timeout.and_then(|timeout| now.checked_add(timeout)),
            next_step_poll: records_events.then_some(now),
            next_stop: supervision.stop_at,
            hold_until: now + TIME_TO_FIRST_CHECK,
            held_stop: None,
            ranks,
            server,
            supervision,
            injections,
            run_id,
            stopped_elsewhere: Vec::new(),
            reported: BTreeMap::new(),
            knows_end_of_guardian: false,
            settled: None,
            leftovers: None,
        }
    }

    /// What to wait for.
    pub(super) fn sources<'s>(&'s self, shared: &'s Shared<'_>) -> Vec<(JobSource, BorrowedFd<'s>)> {
        let mut sources: Vec<_> = self.pipes(shared).collect();
        if let Some(leftovers) = &self.leftovers {
            sources.extend(leftovers.sources());
            return sources;
        }
        sources.extend(self.server.fds().into_iter().map(|fd| (JobSource::Server, fd)));
        for (rank, number) in self.ranks.iter().zip(0..) {
            if rank.ended.is_none() {
                // For a rank that has ended: the remaining processes of its group.
                let end = rank.group.first().unwrap_or(&rank.pidfd);
                sources.push((JobSource::Exit(number), end.as_fd()));
            }
        }
        sources
    }

    /// When [`handle`](Self::handle) has to be called at the latest.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        if let Some(leftovers) = &self.leftovers {
            return Some(leftovers.deadline());
        }
        let deadlines = [
            self.judge.supervisor().and_then(Supervisor::next_deadline),
            self.server.next_deadline(),
            self.next_progress_check,
            self.next_step_poll,
            self.next_stop,
            self.held_stop,
            self.mpi.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// The processes that have not been reaped.
    pub(super) fn unreaped(&self) -> impl Iterator<Item = Pid> {
        self.ranks.iter().filter(|rank| !rank.reaped).map(|rank| rank.pid)
    }

    /// Reads what the ranks have written.
    pub(super) fn read_output(&mut self, ready: &[JobSource], shared: &mut Shared<'_>) {
        for source in ready {
            if let JobSource::Pipe(rank, stream) = source {
                self.read_pipe(*rank, *stream, shared);
            }
        }
    }

    /// Handles ready sources, signals and deadlines. Returns the end of the attempt; no process of the ranks is left then.
    pub(super) fn handle(
        &mut self,
        ready: &[JobSource],
        signals: &[Signal],
        shared: &mut Shared<'_>,
    ) -> Option<AttemptEnd> {
        if self.leftovers.is_some() {
            return self.wait_for_leftovers(ready, signals, shared);
        }
        let events = self.events(ready, signals, shared);
        self.process(events, shared)
    }

    /// Asks the ranks to end, for a reason outside their world.
    pub(super) fn stop(&mut self, why: String, shared: &mut Shared<'_>) -> Option<AttemptEnd> {
        self.process(vec![Event::Stopped(why)], shared)
    }

    /// Passes events to the supervisor, and carries out what it decides. Keeps them for the coordinator, if there is one.
    pub(super) fn process(&mut self, events: Vec<Event>, shared: &mut Shared<'_>) -> Option<AttemptEnd> {
        for event in events {
            let actions = match &mut self.judge {
                Judge::Supervisor(supervisor) => supervisor.handle(event, Instant::now()),
                Judge::Coordinator(unreported) => {
                    unreported.push(event);
                    continue;
                }
            };
            if let Some(end) = self.carry_out_all(actions, shared) {
                return Some(end);
            }
        }
        None
    }

    /// Carries out what was decided. Returns the end of the attempt.
    pub(super) fn carry_out_all(
        &mut self,
        actions: Vec<Action>,
        shared: &mut Shared<'_>,
    ) -> Option<AttemptEnd> {
        for action in actions {
            if let Some(outcome) = self.carry_out(action, shared) {
                return self.begin_leftovers(outcome, shared);
            }
        }
        None
    }

    /// How far the ranks have come.
    pub(super) fn reached(&self) -> Reached {
        let page = self.server.page();
        let made_a_step = (0..page.world_size()).any(|rank| page.progress(rank).steps_begun > 1);
        match self.judge.supervisor().is_some_and(Supervisor::has_joined) {
            _ if made_a_step => Reached::Step,
            true => Reached::Join,
            false => Reached::Start,
        }
    }

    /// Kills the ranks that run.
    pub(super) fn kill(&self) {
        self.unreaped().for_each(|pid| send(pid, Signal::SIGKILL));
    }

    /// Cleans up: no process of the ranks is left when this returns, unless SIGKILL does not end it.
    pub(super) fn end(&mut self, mut outcome: Outcome, shared: &mut Shared<'_>) -> AttemptEnd {
        if self.holds_stop() {
            outcome.ask_to_stop();
        }
        self.end_leftovers();
        self.drain_all(shared);
        self.record_steps(shared);
        for event in self.server.drain_rejections() {
            if let ServerEvent::Rejected { group, connections, why } = event {
                self.say_rejected(group, connections, &why, shared);
            }
        }
        if self.supervision.adopts_orphans {
            self.end_orphans(shared);
        } else {
            wait_for_end(self.ranks.iter().map(|rank| rank.pid));
        }
        // A rank that SIGKILL does not end was waited for long enough.
        for rank in self.ranks.iter_mut().filter(|rank| rank.ended.is_none()) {
            rank.reaped = true;
        }
        let missed_faults = faults::missed(self.injections, self.local_ranks(), self.server.page());
        let error = outcome.culprit.and_then(|rank| self.error_of(rank));
        AttemptEnd { outcome, reached: self.reached(), missed_faults, error }
    }

    /// The error that a rank of this host, which has ended, has recorded.
    pub(super) fn error_of(&self, rank: u32) -> Option<RecordedError> {
        let number = rank.checked_sub(self.first).filter(|_| self.local_ranks().contains(&rank))?;
        let (exit, ended) = self.process_of(rank)?.exit?;
        error_file::read(&self.server.error_file(number)?, exit, ended)
    }

    /// Kills the processes that have left the groups of the ranks: all children of this process. While other jobs run,
    /// only those that were started with the identifier of this one; the others are killed at the end of the last job.
    fn end_orphans(&self, shared: &mut Shared<'_>) {
        let others_run = shared.unreaped_elsewhere > 0;
        // A process that is ending has no environment any more.
        let known = RefCell::new(HashSet::new());
        let is_own = |child: Pid| {
            let mut known = known.borrow_mut();
            known.contains(&child)
                || orphans::has_variable(child, MGPU_RUN_ID, &self.run_id) && known.insert(child)
        };
        let is_kept = |child| others_run && !is_own(child);
        if let Some(problem) = orphans::end_all(is_kept, |notice| self.job.say(shared, notice)) {
            self.job.say(shared, &problem);
        }
    }

    /// The events of the ready sources, in the order in which the supervisor should see them.
    fn events(&mut self, ready: &[JobSource], signals: &[Signal], shared: &mut Shared<'_>) -> Vec<Event> {
        let mut events: Vec<Event> = signals.iter().filter_map(|signal| self.event_of(*signal)).collect();
        // Without a rank here there is nothing to ask: the agent of a node reports the request.
        if self.next_stop.take_if(|at| *at <= Instant::now()).is_some() && self.runs_ranks() {
            events.push(match self.can_stop() {
                true => Event::StopAsked(StopCause::Time),
                false => Event::TimePassed,
            });
        }
        events.extend(self.release_held_stop());
        for signal in signals.iter().filter(|signal| ends_the_run(**signal)) {
            self.signal_leftovers(*signal);
        }
        if shared.guardian_ended && !std::mem::replace(&mut self.knows_end_of_guardian, true) {
            events.push(Event::GuardianEnded);
        }
        // One call serves all connections.
        let is_due = self.server.next_deadline().is_some_and(|deadline| deadline <= Instant::now());
        if is_due || ready.iter().any(|source| matches!(source, JobSource::Server)) {
            events.extend(self.serve(shared));
        }
        let mut exits = Vec::new();
        for source in ready {
            if let JobSource::Exit(rank) = source {
                exits.extend(self.reap(*rank, shared));
            }
        }
        // If several ranks ended in one iteration, a rank that blames another one failed after it.
        exits.sort_by_key(|exit| matches!(exit, Event::Exited { blame: Some(_), .. }));
        events.extend(exits);
        if self.next_step_poll.is_some_and(|at| at <= Instant::now()) {
            self.record_steps(shared);
            self.next_step_poll = Some(Instant::now() + STEP_POLL_INTERVAL);
        }
        self.check_for_mpi(shared);
        events.extend(self.check_progress(shared));
        events.push(Event::Tick);
        events
    }

    /// Tells the user if the ranks are MPI programs.
    fn check_for_mpi(&mut self, shared: &mut Shared<'_>) {
        match self.ranks.first().filter(|rank| !rank.reaped) {
            Some(rank) if self.mpi.check(rank.pid.as_raw(), Instant::now()) => {
                self.job.say(shared, mpi::ADVICE);
            }
            Some(_) => {}
            None => self.mpi.end(),
        }
    }

    /// The process started as `rank`, if it is on this host.
    fn process_of(&self, rank: u32) -> Option<&Process> {
        self.ranks.get(rank.checked_sub(self.first)? as usize)
    }

    /// The process of a rank: the one that has joined, which may be a child of the started process.
    fn pid_of(&self, started: &Process, rank: u32) -> u32 {
        match self.server.page().progress(rank).pid {
            0 => started.pid.as_raw() as u32,
            joined => joined,
        }
    }

    /// The ranks of this host.
    pub(super) fn local_ranks(&self) -> Range<u32> {
        self.first..self.first + self.ranks.len() as u32
    }

    /// The ranks of this host whose processes have ended.
    pub(super) fn ended_ranks(&self) -> Vec<u32> {
        let ranks = (self.first..).zip(&self.ranks);
        ranks.filter(|(_, process)| process.ended.is_some()).map(|(rank, _)| rank).collect()
    }

    /// The events that the coordinator has not been told.
    pub(super) fn take_unreported(&mut self) -> Vec<Event> {
        match &mut self.judge {
            Judge::Supervisor(_) => Vec::new(),
            Judge::Coordinator(unreported) => std::mem::take(unreported),
        }
    }

    /// Sends a signal to all ranks of this host.
    pub(super) fn signal_all(&mut self, signal: Signal) {
        self.local_ranks().for_each(|rank| self.send(rank, signal));
    }

    fn serve(&mut self, shared: &mut Shared<'_>) -> Vec<Event> {
        let mut events = Vec::new();
        for event in self.server.service() {
            match event {
                ServerEvent::Joined { rank, pid } => {
                    self.mpi.end();
                    shared.events.record_of(self.job.number, events::Event::Join { rank, pid });
                    events.push(Event::Joined(rank));
                }
                ServerEvent::Left { .. } => {}
                ServerEvent::StopAsked { .. } => events.push(Event::StopAsked(StopCause::Rank)),
                ServerEvent::Incompatible { rank, fault, why } => {
                    events.push(Event::Incompatible { rank, exit_code: exit_code::preflight(fault), why });
                }
                ServerEvent::Rejected { group, connections, why } => {
                    self.say_rejected(group, connections, &why, shared);
                }
            }
        }
        events
    }

    /// Reports rejected connections. The processes that a rank starts are in its group.
    fn say_rejected(&self, group: Option<u32>, connections: u64, why: &str, shared: &mut Shared<'_>) {
        let what = match connections {
            1 => "a connection".to_owned(),
            many => format!("{many} connections, the first"),
        };
        let is_its = |rank: &Process| group == u32::try_from(rank.pid.as_raw()).ok();
        let rank = self.ranks.iter().position(is_its);
        let whose = rank.map_or(String::new(), |number| format!(" of rank {}", self.first + number as u32));
        self.job.say(shared, &format!("rejected {what}{whose}: {why}"));
    }

    fn carry_out(&mut self, action: Action, shared: &mut Shared<'_>) -> Option<Outcome> {
        match action {
            Action::Announce(rank, end) => self.server.rank_ended(rank, end),
            Action::Send(rank, signal) => self.send(rank, signal),
            Action::AskToStop => _ = self.server.ask_to_stop(),
            Action::Say(text) => self.job.say(shared, &text),
            Action::Report => self.report(shared),
            Action::Settle(outcome) => self.settle(outcome, shared),
            Action::Finish(outcome) => return Some(outcome),
        }
        None
    }

    /// Sends a signal to a rank of this host.
    fn send(&mut self, rank: u32, signal: Signal) {
        let number = rank.checked_sub(self.first).map(|number| number as usize);
        let process = number.and_then(|number| self.ranks.get_mut(number)).filter(|process| !process.reaped);
        if let Some(process) = process {
            send(process.pid, signal);
            process.sent = process.sent.max(match signal {
                Signal::SIGKILL => Sent::Kill,
                signal if ends_the_run(signal) => Sent::Request,
                _ => Sent::Nothing,
            });
        }
    }

    /// Prints how the run ends, and records the culprit as an event.
    fn settle(&mut self, outcome: Outcome, shared: &mut Shared<'_>) {
        if self.ranks.iter().all(|rank| rank.reaped) {
            // Their output comes first.
            self.drain_all(shared);
        }
        if let Some(rank) = outcome.culprit {
            let cause = outcome.message.clone().unwrap_or_default();
            shared.events.record_of(
                self.job.number,
                events::Event::Fault { rank, cause, exit_code: outcome.exit_code },
            );
        }
        // If the reader has exited, the run ends quietly, as `cat` would.
        if !shared.output.is_muted() {
            outcome.message.iter().for_each(|message| self.job.say_end(shared, &outcome, message));
        }
        self.settled = Some(outcome);
    }
}
