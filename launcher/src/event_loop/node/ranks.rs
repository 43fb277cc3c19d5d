//! The ranks of this node: their start, what is reported about them, and their end.

use std::time::Instant;

use mgpu_control::progress::Snapshot;
use mgpu_control::rendezvous::Server;
use nix::sys::signal::Signal;

use super::super::attempt::{Attempt, AttemptEnd, JobId, Judge, Started};
use super::super::wait::JobSource;
use super::{Node, failure};
use crate::error::LaunchError;
use crate::events;
use crate::exit_code;
use crate::interrupt::ends_the_run;
use crate::launch::Supervision;
use crate::nodes::{FromAgent, HEARTBEAT, MAX_LAST_LINE, MAX_LAST_LINES, MAX_RELAYED, NodeLoss, StartOrder};
use crate::plan::{NodePlace, RunContext};
use crate::spawn::spawn;
use crate::supervisor::{Action, Event, Exit, Outcome, StopCause, Supervisor};
use crate::writer::Start;

/// A job on several nodes is the only one of its launch.
const JOB: JobId = JobId { number: None, first_rank: 0 };

/// What was reported of the ranks' progress, and when it is reported next. The report is also the heartbeat.
pub(super) struct ProgressReport {
    snapshot: Snapshot,
    next: Instant,
    /// The coordinator's heartbeat has arrived since the last report.
    has_heard: bool,
}

impl ProgressReport {
    pub(super) fn new() -> Self {
        ProgressReport { snapshot: Snapshot::of(0..0), next: Instant::now() + HEARTBEAT, has_heard: false }
    }

    pub(super) fn next_deadline(&self) -> Instant {
        self.next
    }

    /// Notes a heartbeat of the coordinator.
    pub(super) fn note_beat(&mut self) {
        self.has_heard = true;
    }
}

impl<'a> Node<'a> {
    /// Starts the ranks of this node.
    pub(super) fn start(&mut self, order: &StartOrder, now: Instant) {
        self.hosts.clone_from(&order.hosts);
        self.progress.snapshot = Snapshot::of(order.layout.local_ranks());
        match self.try_start(order) {
            Ok(mut attempt) => {
                // The coordinator had not got the request when it sent the order.
                if std::mem::take(&mut self.stop_reported) {
                    attempt.hold_stop();
                }
                self.attempt = Some(attempt);
            }
            Err(error) => {
                self.network.report(FromAgent::Failed { why: error.to_string() }, now);
                // The error says everything.
                self.end(Outcome { message: None, ..failure(exit_code::LAUNCHER, String::new()) });
                self.error = Some(error);
            }
        }
    }

    /// Starts all ranks of this node or none.
    fn try_start(&mut self, order: &StartOrder) -> Result<Attempt<'a>, LaunchError> {
        let (plan, layout) = (self.job.plan, &order.layout);
        let (first, ranks) = (layout.local_ranks().start, plan.ranks.len() as u32);
        let server = Server::of_node(layout.clone(), self.network.own_address(), &order.run_id)?;
        server.describe(&plan.command_line(), order.restarts);
        for rank in (0..layout.world_size()).filter(|rank| layout.node_of(*rank) != layout.node()) {
            let host = order.hosts.get(layout.node_of(rank) as usize);
            host.into_iter().for_each(|host| server.page().set_host(rank, host));
        }
        let logs = if order.restarts == 0 { Start::Empty } else { Start::Append };
        self.shared.output.set_ranks(first, ranks, logs)?;
        let context = RunContext {
            rendezvous: server.address().to_owned(),
            run_id: order.run_id.clone(),
            torch_run_id: self.job.settings.run_id.clone().unwrap_or_else(|| order.run_id.clone()),
            master_port: order.master_port.to_string(),
            progress: self.shared.output.shows_progress(),
            restart_count: order.restarts,
            max_restarts: order.max_restarts,
            launch_ranks: ranks,
            error_files: (0..ranks).filter_map(|number| server.error_file(number)).collect(),
            place: Some(NodePlace {
                node: layout.node(),
                nodes: layout.nodes(),
                first_rank: first,
                world_size: layout.world_size(),
                master_addr: self.network.master_address(),
                net: order.net.name(),
                injections: mgpu_control::inject::join(self.job.injections),
                nccl_interface: self.nccl_variables(),
            }),
        };
        if self.job.report_bindings {
            let locations = (first..).zip(&plan.ranks).map(|(rank, plan)| plan.location_as(rank));
            locations.for_each(|line| JOB.say(&mut self.shared, &line));
        }
        let processes = spawn(plan, &context)?;
        for (process, rank) in processes.iter().zip(first..) {
            server.rank_started(rank, process.pid.as_raw() as u32);
            process.notice.iter().for_each(|notice| JOB.say(&mut self.shared, notice));
        }
        let command = &plan.commands[0];
        self.shared.events.record(events::Event::Start {
            ranks: layout.world_size(),
            program: command.program.to_string_lossy().into_owned(),
            arguments: command.arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            run_id: order.run_id.clone(),
            restart: order.restarts,
        });
        let (injections, run_id) = (self.job.injections, order.run_id.clone());
        self.shared.board.put(JOB.number, server.shared_page());
        let started = Started { job: JOB, processes, first, server, injections, run_id };
        // The agent of node 0 watches the ranks of all nodes.
        let progress_timeout = self.job.supervision.progress_timeout.filter(|_| layout.node() == 0);
        let supervision = Supervision { progress_timeout, ..self.job.supervision };
        let judge = Judge::Coordinator(Vec::new());
        Ok(Attempt::new(started, judge, supervision, self.shared.events.is_enabled()))
    }

    /// The variables that make NCCL take the interface of the connections between the nodes, if the coordinator says so.
    fn nccl_variables(&mut self) -> Vec<(&'static str, String)> {
        let is_told = std::mem::take(&mut self.uses_control_interface);
        let nccl = self.nccl.as_ref().filter(|_| is_told);
        let nccl = nccl.zip(self.network.own_address());
        nccl.map(|(nccl, address)| nccl.variables_for(address)).unwrap_or_default()
    }

    /// Handles what has happened to the ranks.
    pub(super) fn handle_ranks(&mut self, ready: &[JobSource], signals: &[Signal], now: Instant) {
        let Some(attempt) = &mut self.attempt else { return };
        if let Some(end) = attempt.handle(ready, signals, &mut self.shared) {
            self.finish(end, now);
        }
    }

    /// Carries out decisions of the supervisor.
    pub(super) fn carry_out(&mut self, actions: Vec<Action>, now: Instant) {
        let Some(attempt) = &mut self.attempt else { return };
        if let Some(end) = attempt.carry_out_all(actions, &mut self.shared) {
            self.finish(end, now);
        }
    }

    /// Reports to the coordinator what has happened to the ranks, and their progress if that is due.
    pub(super) fn report(&mut self, now: Instant) {
        if let Some(attempt) = &mut self.attempt {
            for messages in attempt.server.take_outbox().chunks(MAX_RELAYED) {
                self.network.report(FromAgent::Relay { messages: messages.to_vec() }, now);
            }
            let events = attempt.take_unreported();
            // How far a rank came decides whether it is restarted.
            if events.iter().any(|event| matches!(event, Event::Exited { .. })) {
                self.report_progress(now);
            }
            events.into_iter().for_each(|event| self.report_event(event, now));
        }
        if self.progress.next <= now {
            self.report_progress(now);
        }
    }

    fn report_event(&mut self, event: Event, now: Instant) {
        let Some(attempt) = &mut self.attempt else { return };
        let message = match event {
            Event::Joined(rank) => FromAgent::Joined { rank },
            Event::Incompatible { rank, exit_code, why } => FromAgent::Incompatible { rank, exit_code, why },
            Event::Silent { rank, idle, doing } => FromAgent::Silent { rank, idle, doing },
            Event::Exited { rank, exit, blame } => {
                let cause = attempt.error_of(rank).filter(|error| error.has_ended_it);
                let last_lines = match (exit, cause) {
                    (Exit::Code(0), _) => Vec::new(),
                    (_, Some(error)) => error.last_lines(MAX_LAST_LINES, MAX_LAST_LINE),
                    (_, None) => {
                        let number = rank - attempt.first;
                        self.shared.output.last_lines(number, MAX_LAST_LINES, MAX_LAST_LINE)
                    }
                };
                FromAgent::Exited { rank, exit, blame, last_lines }
            }
            Event::Signalled(Signal::SIGQUIT) => return attempt.report(&mut self.shared),
            Event::Signalled(signal) if ends_the_run(signal) => {
                FromAgent::Signalled { signal: signal as i32, can_stop: false }
            }
            Event::StopAsked(StopCause::Signal(signal)) if ends_the_run(signal) => {
                FromAgent::Signalled { signal: signal as i32, can_stop: true }
            }
            Event::StopAsked(StopCause::Signal(signal)) => {
                FromAgent::StopAsked { signal: Some(signal as i32), can_stop: Some(true) }
            }
            Event::StopAsked(StopCause::Time) => FromAgent::StopAsked { signal: None, can_stop: Some(true) },
            Event::TimePassed => FromAgent::StopAsked { signal: None, can_stop: Some(false) },
            // The hub tells the coordinator.
            Event::StopAsked(StopCause::Rank) => return,
            // Whoever signals the agents of several nodes signals each of them.
            Event::Signalled(signal) => return attempt.signal_all(signal),
            // Handled by this node itself.
            Event::GuardianEnded | Event::Stopped(_) | Event::NodeLost { .. } | Event::Tick => return,
        };
        self.network.report(message, now);
    }

    /// Reports what has changed on the progress page since the last report.
    fn report_progress(&mut self, now: Instant) {
        self.progress.next = now + HEARTBEAT;
        let (entries, stopped) = match &self.attempt {
            Some(attempt) => {
                let ranks = attempt.local_ranks();
                (
                    attempt.server.page().changes_since(&mut self.progress.snapshot),
                    ranks.filter(|rank| attempt.is_stopped(*rank)).collect(),
                )
            }
            None => (Vec::new(), Vec::new()),
        };
        let has_heard = std::mem::take(&mut self.progress.has_heard);
        self.network.report(FromAgent::Progress { entries, stopped, has_heard }, now);
    }

    /// Handles the end of an attempt: no process of the ranks is left.
    fn finish(&mut self, end: AttemptEnd, now: Instant) {
        let AttemptEnd { outcome, missed_faults, error, .. } = end;
        self.report(now);
        self.report_progress(now);
        let Some(attempt) = self.attempt.take() else { return };
        let output = &mut *self.shared.output;
        let reader_is_gone = output.is_muted();
        if !reader_is_gone {
            missed_faults.iter().for_each(|fault| output.say(fault));
            if let Some(culprit) = outcome.culprit.filter(|rank| attempt.local_ranks().contains(rank)) {
                output.show_cause(culprit - attempt.first, error.as_ref());
            }
        }
        if attempt.holds_stop() {
            let signal = Some(Signal::SIGUSR1 as i32);
            self.network.report(FromAgent::StopAsked { signal, can_stop: None }, now);
        }
        self.network.report(FromAgent::Gone { reader_is_gone }, now);
        if self.has_lost_coordinator {
            self.told.clone_from(&outcome.message);
            self.end(outcome);
        }
    }

    /// Handles the loss of the coordinator: from now on this node decides about its ranks, and ends them.
    pub(super) fn lose_coordinator(&mut self, loss: &NodeLoss, now: Instant) {
        if std::mem::replace(&mut self.has_lost_coordinator, true) || self.outcome.is_some() {
            return;
        }
        let said = loss.describe(self.network.coordinator(&self.hosts));
        let Some(attempt) = &mut self.attempt else {
            let message = format!("{said}; it coordinates the job, which ends");
            return self.end(failure(exit_code::NODE_LOST, message));
        };
        if attempt.leftovers.is_some() {
            return;
        }
        let message = format!("{said}; it coordinates the job, and the ranks here are stopped");
        let how = format!("was lost: {said}");
        let own = attempt.local_ranks();
        let world_size = attempt.server.page().world_size();
        let Supervision { join_timeout, grace, stop_grace, .. } = self.job.supervision;
        let mut supervisor =
            Supervisor::new(world_size, join_timeout, grace, now).with_stop_grace(stop_grace);
        for rank in attempt.ended_ranks() {
            supervisor.handle(Event::Exited { rank, exit: Exit::Code(0), blame: None }, now);
        }
        let others = [0..own.start, own.end..world_size];
        let lost = others.map(|ranks| Event::NodeLost { ranks, how: how.clone(), message: message.clone() });
        let actions = lost.into_iter().flat_map(|event| supervisor.handle(event, now)).collect();
        attempt.judge = Judge::Supervisor(supervisor);
        self.carry_out(actions, now);
    }
}
