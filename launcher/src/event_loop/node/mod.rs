//! The event loop of one node of a job on several.
//!
//! The same `poll` waits for the ranks of this host, as in the loop for one host, and for the other nodes. What happens to
//! the ranks is reported to the coordinator, and its orders are carried out; on node 0 the coordinator is in this process.
//! If the coordinator is lost, this node ends its ranks by itself.

mod network;
mod ranks;

use std::time::Instant;

use mgpu_control::inject::Injection;
use mgpu_control::nccl::{NcclCard, NcclEndpoint};
use mgpu_control::nodes::Credentials;
use mgpu_control::progress;
use nix::sys::signal::Signal;

use super::attempt::Attempt;
use super::wait::{JobSource, Source, output_sources, poll_sources_and, signal_sources};
use super::{LaunchEnd, SUSPENSION_THRESHOLD, Shared, reap_orphans};
use crate::error::LaunchError;
use crate::events::EventLog;
use crate::interrupt::{Signals, ends_the_run};
use crate::launch::Supervision;
use crate::metrics::Board;
use crate::nodes::{FromAgent, NodeCard, NodeLoss, NodeSettings, Order, ToAgent};
use crate::orphans;
use crate::output::Output;
use crate::plan::LaunchPlan;
use crate::supervisor::{Action, Outcome, StopCause};
use network::{Input, Network};
use ranks::ProgressReport;

/// The part of one node in a job.
pub(crate) struct NodeJob<'a> {
    pub(crate) plan: &'a LaunchPlan,
    pub(crate) settings: &'a NodeSettings,
    pub(crate) supervision: Supervision,
    /// Faults to inject into ranks of the world.
    pub(crate) injections: &'a [Injection],
    /// Print where the ranks run once their numbers are known.
    pub(crate) report_bindings: bool,
    pub(crate) card: NodeCard,
    pub(crate) credentials: Credentials,
}

/// Runs the part of this node to the end of the job.
///
/// # Errors
/// If this node cannot take part: it cannot listen, or reaches no coordinator, or its ranks do not start.
pub(crate) fn run(
    job: &NodeJob<'_>,
    signals: &Signals,
    output: &mut Output,
    events: &mut EventLog,
    board: &Board,
) -> Result<LaunchEnd, LaunchError> {
    let uses_nccl = job.card.backend == "nccl" && *job.settings.nodes.end() > 1;
    let nccl = uses_nccl.then(|| NcclEndpoint::open(&job.credentials, None)).flatten();
    let card = NodeCard { nccl: nccl.as_ref().map(NcclEndpoint::card), ..job.card.clone() };
    let network = Network::new(job, card.clone())?;
    let node = Node {
        job,
        signals,
        shared: Shared::new(output, events, board),
        card,
        network,
        nccl,
        uses_control_interface: false,
        attempt: None,
        hosts: Vec::new(),
        progress: ProgressReport::new(),
        told: None,
        next_stop: job.supervision.stop_at,
        stop_reported: false,
        is_interrupted: false,
        has_lost_coordinator: false,
        outcome: None,
        error: None,
    };
    node.run()
}

/// The state of the loop.
struct Node<'a> {
    job: &'a NodeJob<'a>,
    signals: &'a Signals,
    shared: Shared<'a>,
    card: NodeCard,
    network: Network<'a>,
    /// Where NCCL of the ranks is going to listen, if they use it and that can be predicted.
    nccl: Option<NcclEndpoint>,
    /// The next start: NCCL takes the interface of the connections between the nodes.
    uses_control_interface: bool,
    /// The ranks of this host, while they run.
    attempt: Option<Attempt<'a>>,
    /// The hosts of the nodes, once they are known.
    hosts: Vec<String>,
    progress: ProgressReport,
    /// The last message about an outcome that was printed.
    told: Option<String>,
    /// The time of `--stop-after`, until it is reported while no ranks run.
    next_stop: Option<Instant>,
    /// SIGUSR1 was reported while no ranks ran.
    stop_reported: bool,
    /// A signal that ends the run has arrived.
    is_interrupted: bool,
    /// No coordinator decides about the ranks any more.
    has_lost_coordinator: bool,
    /// Set when the job is over for this node.
    outcome: Option<Outcome>,
    error: Option<LaunchError>,
}

impl<'a> Node<'a> {
    fn run(mut self) -> Result<LaunchEnd, LaunchError> {
        while self.outcome.is_none() {
            let (ready, fds_are_ready) = self.wait();
            let now = Instant::now();
            let of_ranks: Vec<JobSource> = ready
                .iter()
                .filter_map(|source| match source {
                    Source::Job(_, source) => Some(*source),
                    _ => None,
                })
                .collect();
            // Output first: what a rank wrote before it ended is shown before its end is reported.
            if let Some(attempt) = &mut self.attempt {
                attempt.read_output(&of_ranks, &mut self.shared);
            }
            let signals = self.handle_own(&ready);
            let of_network = fds_are_ready.get(..self.network.fds().len());
            let inputs = self.network.service(now, of_network.unwrap_or_default());
            self.handle_inputs(inputs, now);
            self.serve_nccl(now);
            self.handle_signals(&signals, now);
            self.handle_ranks(&of_ranks, &signals, now);
            // On node 0 a report may cause orders for this node at once.
            loop {
                self.report(now);
                let inputs = self.network.flush(now);
                if inputs.is_empty() {
                    break;
                }
                self.handle_inputs(inputs, now);
            }
        }
        // Nothing of this node is left before the others are told goodbye, unless SIGKILL does not end it.
        if let Some(mut attempt) = self.attempt.take() {
            attempt.kill();
            attempt.end(Outcome::success(), &mut self.shared);
        } else if self.job.supervision.adopts_orphans {
            let output = &mut *self.shared.output;
            if let Some(problem) = orphans::end_all(|_| false, |notice| output.say(notice)) {
                output.say(&problem);
            }
        }
        self.network.flush(Instant::now());
        self.network.say_goodbye();
        match (self.error, self.outcome) {
            (Some(error), _) => Err(error),
            (None, outcome) => {
                let outcome = outcome.unwrap_or_else(Outcome::success);
                Ok(LaunchEnd { outcome, job: None })
            }
        }
    }

    /// Sleeps until something is ready or a deadline has passed. The flags are those of the network's descriptors and of
    /// those behind them.
    fn wait(&mut self) -> (Vec<Source>, Vec<bool>) {
        let guardian_ended = self.shared.guardian_ended;
        let is_news = |source: &Source| !(guardian_ended && matches!(source, Source::Guardian));
        let mut sources: Vec<_> =
            signal_sources(self.signals).filter(|(source, _)| is_news(source)).collect();
        let of_ranks = self.attempt.as_ref().map(|attempt| attempt.sources(&self.shared)).unwrap_or_default();
        sources.extend(of_ranks.into_iter().map(|(source, fd)| (Source::Job(0, source), fd)));
        sources.extend(output_sources(self.shared.output));
        let deadlines = [
            self.attempt.as_ref().and_then(Attempt::next_deadline),
            self.shared.output.next_deadline(),
            self.network.next_deadline(),
            self.nccl.as_ref().and_then(NcclEndpoint::next_deadline),
            Some(self.progress.next_deadline()),
            self.next_stop.filter(|_| self.attempt.is_none()),
        ];
        let deadline = deadlines.into_iter().flatten().min();
        let of_nccl = self.nccl.iter().flat_map(NcclEndpoint::fds);
        let fds = self.network.fds().into_iter().chain(of_nccl).collect();
        let ready = poll_sources_and(&sources, fds, deadline);
        if deadline.is_some_and(|deadline| Instant::now() > deadline + SUSPENSION_THRESHOLD) {
            self.shared.awake_since = progress::now();
        }
        ready
    }

    /// Handles sources that belong to no rank. Returns the signals that have arrived.
    fn handle_own(&mut self, ready: &[Source]) -> Vec<Signal> {
        let mut signals = self.shared.handle_own(ready, self.signals);
        let ranks = self.attempt.iter().flat_map(Attempt::unreaped);
        reap_orphans(&mut signals, self.job.supervision.adopts_orphans, ranks);
        signals
    }

    /// Handles messages of the coordinator, and what happened to its connection.
    fn handle_inputs(&mut self, inputs: Vec<Input>, now: Instant) {
        for input in inputs {
            match input {
                Input::Message(message) => self.obey(message, now),
                Input::Say(text) => self.shared.output.say(&text),
                Input::CoordinatorLost(loss) => self.lose_coordinator(&loss, now),
                Input::Failed(outcome) => self.end(outcome),
            }
        }
    }

    /// Carries out a message of the coordinator.
    fn obey(&mut self, message: ToAgent, now: Instant) {
        match message {
            ToAgent::Reach { targets, tag } => {
                self.nccl.iter_mut().for_each(|nccl| nccl.reach(&targets, &tag, now));
            }
            ToAgent::UseControlInterface => self.uses_control_interface = true,
            ToAgent::Start(order) => self.start(&order, now),
            ToAgent::Relay { messages } => {
                let Some(attempt) = &mut self.attempt else { return };
                let delivered = messages.into_iter().try_for_each(|message| attempt.server.deliver(message));
                if let Err(why) = delivered {
                    self.lose_coordinator(&NodeLoss::Failed(why), now);
                }
            }
            ToAgent::Do { orders } => {
                let actions = orders.into_iter().filter_map(|order| self.action(order, now)).collect();
                self.carry_out(actions, now);
            }
            ToAgent::Say { text } => self.shared.output.say(&text),
            ToAgent::LastLines { name, lines } => self.shared.output.repeat_lines(&name, &lines),
            ToAgent::Progress { node, entries, stopped } => {
                if let Some(attempt) = &mut self.attempt {
                    attempt.note_progress_elsewhere(node, &entries, stopped);
                }
            }
            ToAgent::Beat => self.progress.note_beat(),
            ToAgent::Refused { exit_code, why } => self.end(failure(exit_code, why)),
            ToAgent::End { outcome } => self.end(outcome),
        }
    }

    /// Serves the check of the interfaces that NCCL takes, and answers the coordinator.
    fn serve_nccl(&mut self, now: Instant) {
        let Some(nccl) = &mut self.nccl else { return };
        if let Some(answer) = nccl.service(now) {
            let answered = NcclCard { answer: Some(answer), ..nccl.card() };
            let card = NodeCard { nccl: Some(answered), ..self.card.clone() };
            self.network.report(FromAgent::Join(Box::new(card)), now);
        }
    }

    /// The action of an order.
    fn action(&mut self, order: Order, now: Instant) -> Option<Action> {
        match order {
            Order::PassStop { signal } => {
                self.pass_stop(signal, now);
                None
            }
            Order::Send { rank, signal } => {
                Signal::try_from(signal).ok().map(|signal| Action::Send(rank, signal))
            }
            Order::Report => Some(Action::Report),
            Order::Settle { outcome } => {
                self.told.clone_from(&outcome.message);
                Some(Action::Settle(outcome))
            }
            Order::Finish { outcome } => Some(Action::Finish(outcome)),
        }
    }

    /// Reports SIGUSR1, or the time of `--stop-after`, while no ranks run here: the attempt handles them otherwise.
    fn report_stop(&mut self, signals: &[Signal], now: Instant) {
        if self.attempt.as_ref().is_some_and(Attempt::runs_ranks) {
            return;
        }
        let asks = signals.contains(&Signal::SIGUSR1).then_some(StopCause::Signal(Signal::SIGUSR1));
        let has_passed = self.next_stop.take_if(|at| *at <= now).is_some();
        for cause in asks.into_iter().chain(has_passed.then_some(StopCause::Time)) {
            if self.attempt.is_none() && !self.network.is_connected() {
                return self.end(Outcome::stopped(cause));
            }
            let signal = match cause {
                StopCause::Signal(signal) => Some(signal as i32),
                StopCause::Time | StopCause::Rank => None,
            };
            self.stop_reported |= signal.is_some();
            if self.attempt.as_ref().is_some_and(|attempt| attempt.leftovers.is_none()) && signal.is_some() {
                let text = format!(
                    "{}: no rank of this host is running any more; those of other hosts are asked to stop if they can",
                    cause.name()
                );
                self.shared.output.say(&text);
            }
            self.network.report(FromAgent::StopAsked { signal, can_stop: None }, now);
        }
    }

    /// Asks the ranks to stop because of a signal that an agent without running ranks has got. Ranks that do not stop by
    /// themselves are not sent it: whoever signals the agents of several nodes signals each of them.
    fn pass_stop(&mut self, signal: i32, now: Instant) {
        if self.attempt.as_ref().is_some_and(Attempt::can_stop) {
            self.network.report(FromAgent::StopAsked { signal: Some(signal), can_stop: Some(true) }, now);
        }
    }

    /// Handles the signals of this process that concern the job and not its ranks.
    fn handle_signals(&mut self, signals: &[Signal], now: Instant) {
        self.report_stop(signals, now);
        let guardian = self.shared.guardian_ended.then_some(Signal::SIGKILL);
        let ending = signals.iter().copied().filter(|signal| ends_the_run(*signal)).chain(guardian);
        for signal in ending {
            let is_second = std::mem::replace(&mut self.is_interrupted, true);
            let is_connected = self.network.is_connected();
            if signal == Signal::SIGKILL {
                let why = "its guardian was killed, and its ranks are killed with it".to_owned();
                self.network.report(FromAgent::Failed { why }, now);
                return self.end(Outcome::interruption(signal));
            }
            match (&mut self.attempt, is_connected) {
                // The coordinator may be out of reach: whoever asks twice does not wait for it.
                (Some(attempt), _) if is_second => attempt.signal_all(Signal::SIGKILL),
                // Reported as an event of the ranks.
                (Some(attempt), _) if attempt.leftovers.is_none() => {}
                (_, true) if !is_second => {
                    let signalled = FromAgent::Signalled { signal: signal as i32, can_stop: false };
                    self.network.report(signalled, now);
                }
                (Some(_), _) => {}
                (None, _) => self.end(Outcome::interruption(signal)),
            }
        }
    }

    /// Ends the part of this node. Ranks that still run are killed.
    fn end(&mut self, outcome: Outcome) {
        if self.outcome.is_some() {
            return;
        }
        if let Some(message) = &outcome.message
            && self.told.as_ref() != Some(message)
            && !self.shared.output.is_muted()
        {
            self.shared.output.say(message);
        }
        self.outcome = Some(outcome);
    }
}

/// The outcome of a node that cannot take part, or has lost the job.
fn failure(exit_code: u8, message: String) -> Outcome {
    Outcome { exit_code, culprit: None, incompatible: true, message: Some(message), interrupted: false }
}
