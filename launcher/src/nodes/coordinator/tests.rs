//! The coordinator without network, clock and processes.

mod endings;
mod hostile;
mod scale;
mod stops;

use std::ops::Range;

use mgpu_control::nodes::RelayMessage;
use mgpu_control::progress::{Phase, ProgressEntry, RankState};
use proptest::prelude::*;

use super::super::card::tests::card;
use super::super::message::{MAX_LAST_LINE, MAX_LAST_LINES, Order};
use super::doubt::{DOUBT, MAX_HOLD};
use super::loss::DETECTION_TIME;
use super::*;
use crate::supervisor::Exit;

const JOIN_TIMEOUT: Duration = Duration::from_secs(60);
const NODE_TIMEOUT: Duration = Duration::from_secs(30);
const GRACE: Duration = Duration::from_secs(5);
/// Longer than the supervisor leaves ranks to print their errors.
const ERROR_TIME: Duration = Duration::from_millis(250);

/// A coordinator on host `a`, with a clock.
struct Job {
    coordinator: Coordinator,
    nodes: (u32, u32),
    now: Instant,
    sent: Vec<(MemberId, ToAgent)>,
}

impl Job {
    /// Of so many nodes at least and at most; host `a` has two ranks.
    fn new(min: u32, max: u32, max_restarts: u32) -> Self {
        let config = Config {
            nodes: min..=max,
            join_timeout: JOIN_TIMEOUT,
            node_timeout: NODE_TIMEOUT,
            grace: GRACE,
            stop_grace: GRACE,
            restart: RestartPolicy { max_restarts, always: false },
            run_id: "run".into(),
            master_port: 29500,
        };
        let now = Instant::now();
        let own = NodeCard { nodes: (min, max), ..card("a", None) };
        let coordinator = Coordinator::new(config, own, now);
        Job { coordinator, nodes: (min, max), now, sent: Vec::new() }
    }

    /// A job whose nodes on hosts `a`, `b`, … run two ranks each.
    fn running(min: u32, max: u32, max_restarts: u32) -> Self {
        let mut job = Job::new(min, max, max_restarts);
        for (id, host) in (1..max).zip(["b", "c", "d"]) {
            job.join(id.into(), host, None);
        }
        assert_eq!(job.started().len(), max as usize);
        job
    }

    /// An agent connects and joins with two ranks.
    fn join(&mut self, id: MemberId, host: &str, node_rank: Option<u32>) {
        self.join_with(id, card(host, node_rank));
    }

    fn join_with(&mut self, id: MemberId, card: NodeCard) {
        self.coordinator.connected(id, format!("10.0.0.{id}").parse().ok(), self.now);
        let card = NodeCard { nodes: self.nodes, ..card };
        self.say(id, FromAgent::Join(Box::new(card)));
    }

    #[track_caller]
    fn say(&mut self, id: MemberId, message: FromAgent) {
        self.coordinator.handle(id, message, self.now).unwrap();
        self.tick();
    }

    fn refusal(&mut self, id: MemberId, message: FromAgent) -> String {
        self.coordinator.handle(id, message, self.now).unwrap_err()
    }

    fn lose(&mut self, id: MemberId, loss: &NodeLoss) {
        self.coordinator.lost(id, loss, self.now);
        self.tick();
    }

    fn exit(&mut self, id: MemberId, rank: u32, code: i32) {
        let last_lines = vec![format!("last line of rank {rank}")];
        self.say(id, FromAgent::Exited { rank, exit: Exit::Code(code), blame: None, last_lines });
    }

    /// The ranks of an agent end, and it reports that nothing is left.
    fn end_node(&mut self, id: MemberId, ranks: Range<u32>) {
        ranks.for_each(|rank| self.exit(id, rank, 143));
        self.say(id, FromAgent::Gone { reader_is_gone: false });
    }

    fn tick(&mut self) {
        self.coordinator.tick(self.now);
        self.sent.extend(self.coordinator.take_outbox());
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.tick();
    }

    /// What was sent since it was asked last.
    fn sent(&mut self) -> Vec<(MemberId, ToAgent)> {
        std::mem::take(&mut self.sent)
    }

    /// The agents that were told to start, with their nodes and ranks, by node.
    fn started(&mut self) -> Vec<(MemberId, u32, Range<u32>)> {
        let starts = self.sent().into_iter().filter_map(|(id, message)| match message {
            ToAgent::Start(order) => Some((id, order.layout.node(), order.layout.local_ranks())),
            _ => None,
        });
        starts.collect()
    }

    /// The lines for the user on node 0.
    fn said(&mut self) -> String {
        let lines = self.sent().into_iter().filter_map(|(id, message)| match message {
            ToAgent::Say { text } if id == OWN => Some(text),
            _ => None,
        });
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The orders to agents.
    fn orders(&mut self) -> Vec<(MemberId, Order)> {
        let orders = self.sent().into_iter().filter_map(|(id, message)| match message {
            ToAgent::Do { orders } => Some(orders.into_iter().map(move |order| (id, order))),
            _ => None,
        });
        orders.flatten().collect()
    }

    /// The signals that agents were told to send.
    fn signals(&mut self) -> Vec<(MemberId, u32, Signal)> {
        let signals = self.orders().into_iter().filter_map(|(id, order)| match order {
            Order::Send { rank, signal } => Some((id, rank, Signal::try_from(signal).unwrap())),
            _ => None,
        });
        signals.collect()
    }

    /// How the job has ended, and for which agents.
    #[track_caller]
    fn end(&mut self) -> (Vec<MemberId>, Outcome) {
        let ends = self.sent().into_iter().filter_map(|(id, message)| match message {
            ToAgent::End { outcome } => Some((id, outcome)),
            _ => None,
        });
        let (ids, mut outcomes): (Vec<_>, Vec<_>) = ends.unzip();
        (ids, outcomes.pop().expect("the job is over"))
    }
}

fn message(outcome: &Outcome) -> &str {
    outcome.message.as_deref().unwrap_or_default()
}

fn entry(steps_begun: u64) -> ProgressEntry {
    ProgressEntry {
        state: RankState::Joined,
        pid: 7,
        phase: Phase::Step,
        step: steps_begun,
        steps_begun,
        operation: None,
        idle: Duration::ZERO,
    }
}

fn heartbeat() -> FromAgent {
    FromAgent::Progress { entries: Vec::new(), stopped: Vec::new(), has_heard: true }
}

proptest! {
    #[test]
    fn nodes_start_together_in_whatever_order_they_join(
        order in Just((1u32..6).collect::<Vec<_>>()).prop_shuffle(),
        sizes in prop::collection::vec(1u32..5, 5),
    ) {
        let mut job = Job::new(6, 6, 0);
        for (id, node) in (1..).zip(&order) {
            prop_assert_eq!(job.started(), []);
            let ranks = sizes[*node as usize - 1];
            job.join_with(id, NodeCard { ranks, ..card("x", Some(*node)) });
        }
        let is_unequal = sizes.iter().any(|ranks| *ranks != 2);
        let unequal = job.sent.iter().any(|(_, message)| {
            matches!(message, ToAgent::Say { text } if text.contains("unequal numbers of ranks: 2, "))
        });
        prop_assert_eq!(unequal, is_unequal);
        let started = job.started();
        let mut first = 0;
        for (node, (id, number, ranks)) in (0..).zip(started) {
            let size = if node == 0 { 2 } else { sizes[node as usize - 1] };
            prop_assert_eq!((number, ranks), (node, first..first + size));
            let expected = order.iter().position(|other| *other == node).map_or(OWN, |index| index as u64 + 1);
            prop_assert_eq!(id, expected);
            first += size;
        }
        prop_assert_eq!(first, 2 + sizes.iter().sum::<u32>());
    }
}

#[test]
fn a_contradiction_before_the_start_ends_the_job_for_all() {
    for (other, expected) in [
        (card("c", Some(1)), "hosts b and c both have node rank 1"),
        (card("c", Some(3)), "host c has node rank 3 of 3 nodes"),
        (NodeCard { version: "2".into(), ..card("c", None) }, "1 on host a, 2 on host c"),
    ] {
        let mut job = Job::new(3, 3, 2);
        job.join(1, "b", Some(1));
        job.join_with(2, other);
        let (ids, outcome) = job.end();
        assert_eq!((ids, outcome.exit_code), (vec![OWN, 1, 2], exit_code::NODES_DIFFER));
        assert!(message(&outcome).contains(expected), "{outcome:?}");
    }
}

#[test]
fn another_node_0_is_a_contradiction() {
    for (own_rank, expected) in [
        (Some(0), "hosts a and b both have node rank 0: give each its own --node-rank"),
        (None, "host a is node 0, and host b has node rank 0: give each its own --node-rank"),
    ] {
        let mut job = Job::new(2, 2, 0);
        job.coordinator.members[0].card.as_mut().unwrap().node_rank = own_rank;
        job.join(1, "b", Some(0));
        let (ids, outcome) = job.end();
        assert_eq!((ids, outcome.exit_code), (vec![OWN, 1], exit_code::NODES_DIFFER));
        assert_eq!(message(&outcome), expected);
    }
}

#[test]
fn node_0_that_joins_itself_is_refused_alone() {
    let mut job = Job::new(2, 2, 0);
    job.coordinator.members[0].card.as_mut().unwrap().node_rank = Some(0);
    assert!(job.coordinator.waits_alone() && !job.coordinator.has_met_itself());
    job.join(1, "a", Some(0));
    assert!(job.coordinator.waits_alone() && job.coordinator.has_met_itself());
    let sent = job.sent();
    let [(1, ToAgent::Refused { why, .. })] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!(why, "hosts a and a both have node rank 0: give each its own --node-rank");
    job.join(2, "b", Some(1));
    assert!(!job.coordinator.waits_alone());
    assert_eq!(job.started().len(), 2);
}

#[test]
fn who_does_not_fit_a_running_job_is_refused_alone() {
    let mut job = Job::running(2, 2, 1);
    for (id, newcomer, expected) in [
        (7, card("c", None), "the job has all its 2 nodes already: a, b"),
        (8, NodeCard { backend: "nccl".into(), ..card("c", None) }, "cpu on host a, nccl on host c"),
        (9, card("c", Some(2)), "host c has node rank 2 of 2 nodes"),
        (10, card("c", Some(0)), "host a is node 0, and host c has node rank 0"),
    ] {
        job.join_with(id, newcomer);
        let sent = job.sent();
        let [(to, ToAgent::Refused { exit_code, why })] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((*to, *exit_code), (id, exit_code::NODES_DIFFER));
        assert!(why.contains(expected), "{why}");
        // Nothing that it still says counts.
        job.say(id, FromAgent::Gone { reader_is_gone: false });
    }
}

#[test]
fn nodes_that_do_not_come_are_named() {
    let mut job = Job::new(3, 3, 0);
    job.join(1, "b", Some(2));
    assert_eq!(job.coordinator.next_deadline(), Some(job.now + HEARTBEAT));
    for _ in 0..JOIN_TIMEOUT.as_secs() {
        job.pass(HEARTBEAT);
        job.say(1, heartbeat());
    }
    let (_, outcome) = job.end();
    assert_eq!(outcome.exit_code, exit_code::NEVER_JOINED);
    assert!(
        message(&outcome).contains("2 of 3 nodes joined within 60 s (a, b); missing: node 1"),
        "{outcome:?}"
    );
}

#[test]
fn a_node_lost_before_the_start_can_be_replaced() {
    let mut job = Job::new(2, 2, 0);
    // One that has not said who it is makes no difference.
    job.coordinator.connected(1, None, job.now);
    job.lose(1, &NodeLoss::Ended);
    assert_eq!(job.said(), "");
    let mut job = Job::new(3, 3, 0);
    job.join(1, "b", Some(1));
    job.lose(1, &NodeLoss::Ended);
    assert_eq!(job.said(), "mgpurun on b ended without a goodbye; waiting for it or a replacement");
    job.join(2, "c", Some(1));
    job.join(3, "d", Some(2));
    assert_eq!(job.started(), [(OWN, 0, 0..2), (2, 1, 2..4), (3, 2, 4..6)]);
}

#[test]
fn a_node_lost_while_ranks_run_ends_them_on_all_others() {
    let mut job = Job::running(3, 3, 0);
    job.lose(1, &NodeLoss::Unreachable);
    job.pass(ERROR_TIME);
    let mut signals = job.signals();
    signals.retain(|(_, _, signal)| *signal == Signal::SIGTERM);
    let ranks: Vec<(MemberId, u32)> = signals.into_iter().map(|(id, rank, _)| (id, rank)).collect();
    assert_eq!(ranks, [(OWN, 0), (OWN, 1), (2, 4), (2, 5)]);
    job.end_node(OWN, 0..2);
    job.exit(2, 4, 143);
    // The last one is lost as well before it has reported.
    job.exit(2, 5, 143);
    job.sent();
    job.lose(2, &NodeLoss::Ended);
    let (ids, outcome) = job.end();
    assert_eq!((ids, outcome.exit_code), (vec![OWN], exit_code::NODE_LOST));
    let expected = "host b does not answer; its ranks 2-3 are lost, and the other ranks are stopped";
    assert_eq!(message(&outcome), expected);
}

#[test]
fn a_silent_agent_is_refused_and_a_heartbeat_keeps_it() {
    let mut job = Job::running(2, 2, 0);
    for _ in 0..40 {
        job.pass(HEARTBEAT);
        job.say(1, heartbeat());
    }
    let beats = job.sent().iter().filter(|sent| **sent == (1, ToAgent::Beat)).count();
    assert_eq!(beats, 40);
    job.pass(NODE_TIMEOUT);
    let sent = job.sent();
    let refused = sent.iter().any(|(id, message)| matches!(message, ToAgent::Refused { .. }) && *id == 1);
    assert!(refused, "{sent:?}");
    job.end_node(OWN, 0..2);
    let (_, outcome) = job.end();
    assert!(message(&outcome).starts_with("mgpurun on b has been silent for 30 s, though"), "{outcome:?}");
}

#[test]
fn ranks_are_restarted_on_fewer_nodes_and_on_more_again() {
    let mut job = Job::running(2, 3, 3);
    job.lose(1, &NodeLoss::Ended);
    job.pass(ERROR_TIME);
    job.end_node(OWN, 0..2);
    assert!(!job.said().contains("restart"), "host c still has processes");
    job.end_node(2, 4..6);
    assert_eq!(job.said(), "restart 1 of 3 in 0.5 s");
    job.pass(Duration::from_millis(500));
    // It waits for a third node as long as for the first ones.
    assert_eq!(job.started(), []);
    for _ in 0..60 {
        job.say(2, heartbeat());
        job.pass(HEARTBEAT);
    }
    assert_eq!(job.started(), [(OWN, 0, 0..2), (2, 1, 2..4)]);
    job.join(3, "d", None);
    let sent = job.sent();
    assert!(matches!(&sent[..], [(3, ToAgent::Say { text })] if text.contains("joins them at")), "{sent:?}");
    assert!(job.refusal(3, FromAgent::Joined { rank: 4 }).contains("takes no part"));
    job.exit(2, 3, 1);
    job.pass(ERROR_TIME);
    job.end_node(2, 2..3);
    job.end_node(OWN, 0..2);
    assert!(job.said().contains("restart 2 of 3 in 1 s"));
    job.pass(Duration::from_secs(1));
    assert_eq!(job.started(), [(OWN, 0, 0..2), (2, 1, 2..4), (3, 2, 4..6)]);
}

#[test]
fn ranks_that_joined_and_made_no_step_are_not_restarted() {
    for (steps, is_restarted) in [(1, false), (2, true)] {
        let mut job = Job::running(2, 2, 3);
        job.say(1, FromAgent::Joined { rank: 2 });
        job.say(
            1,
            FromAgent::Progress { entries: vec![(2, entry(steps))], stopped: Vec::new(), has_heard: true },
        );
        job.exit(1, 2, 1);
        job.end_node(1, 3..4);
        job.end_node(OWN, 0..2);
        let said = job.said();
        assert_eq!(said.contains("restart 1 of 3"), is_restarted, "{said}");
    }
}

#[test]
fn processes_of_a_lost_host_have_time_to_end_before_a_restart() {
    let mut job = Job::running(2, 2, 3);
    let lost = job.now;
    job.lose(1, &NodeLoss::Unreachable);
    job.pass(ERROR_TIME);
    job.end_node(OWN, 0..2);
    job.join(2, "c", None);
    job.pass(Duration::from_secs(1));
    assert_eq!(job.started(), []);
    let earliest = lost + DETECTION_TIME + GRACE;
    while job.now < earliest {
        let next = job.coordinator.next_deadline().expect("it waits").max(job.now);
        assert!(next <= earliest, "it would sleep for too long");
        assert_eq!(job.started(), []);
        job.now = next;
        job.say(2, heartbeat());
    }
    assert_eq!(job.started(), [(OWN, 0, 0..2), (2, 1, 2..4)]);
}

#[test]
fn all_agents_are_asked_once_to_stop_where_the_furthest_is() {
    let sigterm = FromAgent::Signalled { signal: Signal::SIGTERM as i32, can_stop: true };
    let relayed = |sent: Vec<(MemberId, ToAgent)>| -> Vec<(MemberId, RelayMessage)> {
        let messages = sent.into_iter().filter_map(|(id, message)| match message {
            ToAgent::Relay { messages } => Some(messages.into_iter().map(move |message| (id, message))),
            _ => None,
        });
        messages.flatten().collect()
    };
    for asks in [
        sigterm.clone(),
        FromAgent::StopAsked { signal: Some(Signal::SIGUSR1 as i32), can_stop: Some(true) },
        FromAgent::StopAsked { signal: None, can_stop: Some(true) },
        FromAgent::Relay { messages: vec![RelayMessage::AskToStop] },
    ] {
        let mut job = Job::running(2, 2, 3);
        job.say(1, asks);
        let proposed = [(OWN, RelayMessage::ProposeStop), (1, RelayMessage::ProposeStop)];
        assert_eq!(relayed(job.sent()), proposed);
        // The batch system signals the other agent, too, and both have reached the end of --stop-after.
        job.say(OWN, sigterm.clone());
        job.say(OWN, FromAgent::StopAsked { signal: None, can_stop: Some(true) });
        assert_eq!(relayed(job.sent()), []);
        job.say(1, FromAgent::Relay { messages: vec![RelayMessage::StopBound { check: 8 }] });
        assert_eq!(relayed(job.sent()), []);
        job.say(OWN, FromAgent::Relay { messages: vec![RelayMessage::StopBound { check: 5 }] });
        let at = RelayMessage::StopAt { check: 8 };
        assert_eq!(relayed(job.sent()), [(OWN, at.clone()), (1, at)]);
        (2..4).for_each(|rank| job.exit(1, rank, 74));
        (0..2).for_each(|rank| job.exit(OWN, rank, 74));
        [1, OWN].into_iter().for_each(|id| job.say(id, FromAgent::Gone { reader_is_gone: false }));
        let (ids, outcome) = job.end();
        assert_eq!((ids, outcome.exit_code, outcome.culprit), (vec![OWN, 1], 74, None));
    }
    // The second signal of an agent kills.
    let mut job = Job::running(2, 2, 3);
    [1, OWN].into_iter().for_each(|id| job.say(id, sigterm.clone()));
    assert!(job.signals().iter().all(|(_, _, signal)| *signal == Signal::SIGCONT));
    job.say(OWN, sigterm);
    let signals = job.signals();
    assert_eq!(signals.iter().filter(|(_, _, signal)| *signal == Signal::SIGKILL).count(), 4, "{signals:?}");
}

#[test]
fn interrupts_of_several_agents_are_one() {
    let interrupt = FromAgent::Signalled { signal: Signal::SIGINT as i32, can_stop: false };
    let mut job = Job::running(2, 2, 3);
    job.say(1, interrupt.clone());
    let signals = job.signals();
    let expected = [(OWN, 0), (OWN, 1), (1, 2), (1, 3)];
    assert!(expected.iter().all(|(id, rank)| signals.contains(&(*id, *rank, Signal::SIGINT))), "{signals:?}");
    job.say(OWN, interrupt.clone());
    assert_eq!(job.signals(), []);
    // The second one of the same agent is the user's.
    job.say(1, interrupt.clone());
    assert!(job.signals().iter().all(|(_, _, signal)| *signal == Signal::SIGKILL));
    job.end_node(1, 2..4);
    job.end_node(OWN, 0..2);
    let (ids, outcome) = job.end();
    assert_eq!((ids, outcome.exit_code, outcome.interrupted), (vec![OWN, 1], 130, true));
    // Before the ranks run there is nothing to wait for.
    let mut job = Job::new(2, 2, 0);
    job.say(OWN, interrupt);
    assert_eq!(job.end().1.exit_code, 130);
}

#[test]
fn a_node_speaks_for_its_own_ranks() {
    let mut job = Job::running(2, 2, 0);
    let exit = Exit::Code(0);
    for foreign in [
        FromAgent::Joined { rank: 1 },
        FromAgent::Incompatible { rank: 1, exit_code: 65, why: "x".into() },
        FromAgent::Exited { rank: 1, exit, blame: None, last_lines: Vec::new() },
        FromAgent::Progress { entries: vec![(1, entry(1))], stopped: Vec::new(), has_heard: true },
        FromAgent::Progress { entries: Vec::new(), stopped: vec![1], has_heard: true },
    ] {
        let why = job.refusal(1, foreign);
        assert_eq!(why, "sent a message about rank 1, which is not on host b");
    }
    let silent = FromAgent::Silent { rank: 2, idle: Duration::ZERO, doing: String::new() };
    assert!(job.refusal(1, silent).contains("which node 0 does"));
    assert_eq!(job.refusal(1, FromAgent::Signalled { signal: 99, can_stop: true }), "sent signal 99");
    assert_eq!(job.refusal(1, FromAgent::Join(Box::new(card("b", None)))), "joined twice");
    job.coordinator.connected(5, None, job.now);
    assert_eq!(job.refusal(5, heartbeat()), "did not join first");
    let without = NodeCard { ranks: 0, ..card("c", None) };
    assert_eq!(job.refusal(5, FromAgent::Join(Box::new(without))), "joined without ranks");
    // None of this has done anything to the ranks.
    assert_eq!(job.signals(), []);
}

#[test]
fn last_lines_of_a_culprit_elsewhere_reach_node_0_and_are_bounded() {
    let mut job = Job::running(2, 2, 0);
    let last_lines = vec!["é".repeat(MAX_LAST_LINE + 1); MAX_LAST_LINES + 1];
    let exit = Exit::Code(3);
    job.say(1, FromAgent::Exited { rank: 2, exit, blame: None, last_lines });
    job.end_node(1, 3..4);
    job.end_node(OWN, 0..2);
    let sent = job.sent();
    let lines = sent.iter().find_map(|(id, message)| match message {
        ToAgent::LastLines { name, lines } => Some((*id, name.as_str(), lines)),
        _ => None,
    });
    let Some((OWN, "rank 2 (host b)", lines)) = lines else { panic!("{sent:?}") };
    assert_eq!((lines.len(), lines[0].chars().count()), (MAX_LAST_LINES, MAX_LAST_LINE));
}

#[test]
fn ranks_that_end_one_after_another_are_told_together() {
    let mut job = Job::running(3, 3, 0);
    let relayed = |sent: Vec<(MemberId, ToAgent)>| {
        sent.iter().filter(|(id, message)| *id == 1 && matches!(message, ToAgent::Relay { .. })).count()
    };
    job.exit(2, 4, 0);
    assert_eq!(relayed(job.sent()), 1);
    job.exit(2, 5, 0);
    job.exit(OWN, 0, 0);
    job.exit(OWN, 1, 0);
    assert_eq!(relayed(job.sent()), 0);
    let due = job.coordinator.next_deadline().unwrap();
    job.now = due;
    job.tick();
    assert_eq!(relayed(job.sent()), 1);
    job.exit(1, 2, 0);
    job.exit(1, 3, 0);
    for id in [OWN, 1, 2] {
        job.say(id, FromAgent::Gone { reader_is_gone: false });
    }
    let (ids, outcome) = job.end();
    assert_eq!((ids, outcome), (vec![OWN, 1, 2], Outcome::success()));
}

/// The outcome that all agents are told to print.
fn settled(job: &mut Job) -> Option<Outcome> {
    job.sent().into_iter().find_map(|(_, message)| match message {
        ToAgent::Do { orders } => orders.into_iter().find_map(|order| match order {
            Order::Settle { outcome } => Some(outcome),
            _ => None,
        }),
        _ => None,
    })
}

#[test]
fn a_rank_that_fails_because_its_peers_host_is_lost_is_not_the_culprit() {
    for (is_lost, exit_code) in [(true, exit_code::NODE_LOST), (false, 9)] {
        let mut job = Job::running(2, 2, 0);
        // Packets to host b are lost, those from it arrive.
        for _ in 0..3 {
            job.pass(HEARTBEAT);
            job.say(1, FromAgent::Progress { entries: Vec::new(), stopped: Vec::new(), has_heard: false });
        }
        job.exit(OWN, 0, 9);
        job.pass(ERROR_TIME);
        assert_eq!(settled(&mut job), None);
        match is_lost {
            true => job.lose(1, &NodeLoss::Unreachable),
            false => job.say(1, heartbeat()),
        }
        job.pass(ERROR_TIME);
        assert_eq!(settled(&mut job).unwrap().exit_code, exit_code);
    }
}

#[test]
fn the_end_of_a_rank_is_not_held_back_for_long() {
    let mut job = Job::running(2, 2, 0);
    job.pass(DOUBT);
    job.exit(OWN, 0, 9);
    job.pass(MAX_HOLD);
    job.pass(ERROR_TIME);
    assert_eq!(settled(&mut job).unwrap().exit_code, 9);
}
