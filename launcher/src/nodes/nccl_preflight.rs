//! Does every node reach the interface that NCCL takes on the node before it? Pure.
//!
//! NCCL chooses an interface by its name and never tries it: if it leads nowhere, as `docker0` does, the ranks wait for
//! each other forever. So before the ranks start, each node listens at the addresses that NCCL may choose there, and
//! the next node tries to connect. If one fails, all nodes are told to give NCCL the interface of the connection that they
//! have. Interfaces that the user has named are kept, and only reported.
//!
//! This stands between the coordinator and the connections to the nodes. It holds the orders to start back until
//! the nodes have answered, at most [`ANSWER_LIMIT`]. If the coordinator has anything else to say to one of these nodes, the
//! check ends early: the ranks must exist before anything is said about them.

use std::collections::BTreeMap;
use std::time::Instant;

use mgpu_control::nccl::{ANSWER_LIMIT, MAX_TARGETS, NcclAnswer, NcclCard, find_unreached};

use super::card::NodeCard;
use super::coordinator::{MemberId, OWN};
use super::message::{FromAgent, StartOrder, ToAgent};

/// A message, and the member that gets it.
type Outgoing = (MemberId, ToAgent);

/// The check.
#[derive(Default)]
pub(crate) struct NcclPreflight {
    /// Cards of the members whose ranks use NCCL.
    cards: BTreeMap<MemberId, NodeCard>,
    check: Option<Check>,
}

/// A check in progress.
struct Check {
    /// The orders to start, in the order of the nodes.
    starts: Vec<(MemberId, Box<StartOrder>)>,
    /// The answer of each node about the one before it; `None` before it has come.
    answers: Vec<Option<NcclAnswer>>,
    deadline: Instant,
}

impl Check {
    /// The number of a member's node.
    fn node_of(&self, id: MemberId) -> Option<usize> {
        self.starts.iter().position(|(other, _)| *other == id)
    }
}

impl NcclPreflight {
    /// Takes a message of a member in. Returns it, unless it was an answer.
    pub(crate) fn take_answer(&mut self, id: MemberId, message: FromAgent) -> Option<FromAgent> {
        let FromAgent::Join(card) = &message else { return Some(message) };
        let answer = card.nccl.as_ref().and_then(|nccl| nccl.answer.clone());
        match (answer, self.cards.contains_key(&id)) {
            // It may also be late.
            (Some(answer), true) => {
                if let Some(check) = &mut self.check
                    && let Some(node) = check.node_of(id)
                {
                    check.answers[node] = Some(answer);
                }
                None
            }
            _ => {
                if card.backend == "nccl" {
                    self.cards.insert(id, NodeCard::clone(card));
                }
                Some(message)
            }
        }
    }

    /// A member is lost.
    pub(crate) fn forget(&mut self, id: MemberId) {
        self.cards.remove(&id);
    }

    /// When [`filter`](Self::filter) has to be called at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.check.as_ref().map(|check| check.deadline)
    }

    /// Passes the coordinator's messages on, in order, with those of the check. `own_interface` is that of the connections
    /// to this host, for people.
    pub(crate) fn filter(
        &mut self,
        messages: Vec<Outgoing>,
        own_interface: impl Fn() -> Option<String>,
        now: Instant,
    ) -> Vec<Outgoing> {
        let mut passed = Vec::new();
        let mut starts: Vec<(MemberId, Box<StartOrder>)> = Vec::new();
        for (id, message) in messages {
            match message {
                ToAgent::Start(order) if order.layout.nodes() > 1 => starts.push((id, order)),
                ToAgent::Beat | ToAgent::Say { .. } | ToAgent::Progress { .. } => passed.push((id, message)),
                message => {
                    if starts.iter().any(|(other, _)| *other == id) {
                        passed.extend(starts.drain(..).map(|(id, order)| (id, ToAgent::Start(order))));
                    }
                    if self.check.as_ref().is_some_and(|check| check.node_of(id).is_some()) {
                        passed.extend(self.release(&own_interface));
                    }
                    if matches!(message, ToAgent::Refused { .. }) {
                        self.forget(id);
                    }
                    passed.push((id, message));
                }
            }
        }
        passed.extend(self.begin(starts, now));
        let is_over = |check: &Check| check.deadline <= now || check.answers.iter().all(Option::is_some);
        if self.check.as_ref().is_some_and(is_over) {
            passed.extend(self.release(&own_interface));
        }
        passed
    }

    /// Begins to check the nodes that are about to start ranks, if these use NCCL.
    fn begin(&mut self, starts: Vec<(MemberId, Box<StartOrder>)>, now: Instant) -> Vec<Outgoing> {
        let cards: Vec<&NodeCard> = starts.iter().filter_map(|(id, _)| self.cards.get(id)).collect();
        let mut messages = Vec::new();
        if cards.iter().any(|card| card.ranks != cards[0].ranks) {
            let text = "NCCL 2.31.2 hangs if nodes have unequal numbers of ranks (NVIDIA/nccl#2385): give each node as many, \
                        or use another release";
            messages.push((OWN, ToAgent::Say { text: text.to_owned() }));
        }
        let known: Option<Vec<&NcclCard>> =
            starts.iter().map(|(id, _)| self.cards.get(id)?.nccl.as_ref()).collect();
        let Some(known) = known.filter(|known| !known.is_empty()) else {
            messages.extend(starts.into_iter().map(|(id, order)| (id, ToAgent::Start(order))));
            return messages;
        };
        let before = |node: usize| known[(node + known.len() - 1) % known.len()];
        for (node, (id, _)) in starts.iter().enumerate() {
            let NcclCard { targets, tag, .. } = before(node);
            let targets = targets.iter().take(MAX_TARGETS).cloned().collect();
            messages.push((*id, ToAgent::Reach { targets, tag: tag.clone() }));
        }
        let answers = vec![None; starts.len()];
        self.check = Some(Check { starts, answers, deadline: now + ANSWER_LIMIT });
        messages
    }

    /// Ends the check: what the nodes have found, and the orders to start.
    fn release(&mut self, own_interface: impl Fn() -> Option<String>) -> Vec<Outgoing> {
        let Some(Check { starts, answers, .. }) = self.check.take() else { return Vec::new() };
        let card_of = |id: &MemberId| self.cards.get(id).and_then(|card| card.nccl.as_ref());
        let cards: Vec<Option<&NcclCard>> = starts.iter().map(|(id, _)| card_of(id)).collect();
        let hosts = starts.first().map_or(&[][..], |(_, order)| &order.hosts);
        let mut messages = Vec::new();
        let mut uses_control = false;
        for unreached in find_unreached(&cards, &answers) {
            let text = match unreached.is_named {
                true => unreached.describe_named(hosts),
                // Once is enough: it is the same for all nodes.
                false if uses_control => continue,
                false => {
                    uses_control = true;
                    let own = own_interface().map(|name| format!(", {name} on host {}", hosts[0]));
                    format!(
                        "{} would take: NCCL_SOCKET_IFNAME is set to the interface of the connections between the nodes{} ({})",
                        unreached.describe(hosts),
                        own.unwrap_or_default(),
                        unreached.why
                    )
                }
            };
            messages.push((OWN, ToAgent::Say { text }));
        }
        if uses_control {
            messages.extend(starts.iter().map(|(id, _)| (*id, ToAgent::UseControlInterface)));
        }
        messages.extend(starts.into_iter().map(|(id, order)| (id, ToAgent::Start(order))));
        messages
    }
}

#[cfg(test)]
mod tests {
    use mgpu_control::nccl::NcclTarget;
    use mgpu_control::nodes::Layout;

    use super::super::card::tests::card;
    use super::*;

    fn nccl_card(host: &str, interface: &str) -> NodeCard {
        let target =
            NcclTarget { interface: interface.into(), address: "172.17.0.1".parse().unwrap(), port: 7 };
        let nccl =
            NcclCard { targets: vec![target], tag: format!("tag-{host}"), is_named: false, answer: None };
        NodeCard { backend: "nccl".into(), nccl: Some(nccl), ..card(host, None) }
    }

    fn answer(card: &NodeCard, why: Option<&str>) -> FromAgent {
        let nccl = card.nccl.clone().unwrap();
        let answer = Some(vec![why.map(str::to_owned)]);
        FromAgent::Join(Box::new(NodeCard { nccl: Some(NcclCard { answer, ..nccl }), ..card.clone() }))
    }

    /// The orders to start one rank on each of these nodes.
    fn starts(hosts: &[&str]) -> Vec<Outgoing> {
        let layout = Layout::new((0..hosts.len() as u32).collect(), hosts.len() as u32, 0).unwrap();
        let order = |node: u32| StartOrder {
            layout: layout.seen_from(node).unwrap(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            run_id: "run".into(),
            net: crate::nodes::net::NetChoice::Tcp,
            master_port: 1,
            restarts: 0,
            max_restarts: 0,
        };
        (0..hosts.len() as u32)
            .map(|node| (MemberId::from(node), ToAgent::Start(Box::new(order(node)))))
            .collect()
    }

    struct Job {
        preflight: NcclPreflight,
        cards: Vec<NodeCard>,
        now: Instant,
    }

    impl Job {
        fn new(cards: Vec<NodeCard>) -> Self {
            let mut preflight = NcclPreflight::default();
            for (id, card) in (0..).zip(&cards) {
                assert!(preflight.take_answer(id, FromAgent::Join(Box::new(card.clone()))).is_some());
            }
            Job { preflight, cards, now: Instant::now() }
        }

        fn filter(&mut self, messages: Vec<Outgoing>) -> Vec<Outgoing> {
            self.preflight.filter(messages, || Some("eth0".into()), self.now)
        }

        fn start(&mut self) -> Vec<Outgoing> {
            let hosts: Vec<String> = self.cards.iter().map(|card| card.host.clone()).collect();
            self.filter(starts(&hosts.iter().map(String::as_str).collect::<Vec<_>>()))
        }

        fn answer(&mut self, node: usize, why: Option<&str>) {
            let answer = answer(&self.cards[node], why);
            assert_eq!(self.preflight.take_answer(node as MemberId, answer), None);
        }
    }

    /// What the messages are, in short.
    fn kinds(messages: &[Outgoing]) -> Vec<String> {
        let kind = |(id, message): &Outgoing| match message {
            ToAgent::Reach { tag, .. } => format!("{id} reach {tag}"),
            ToAgent::UseControlInterface => format!("{id} control"),
            ToAgent::Start(_) => format!("{id} start"),
            ToAgent::Say { text } => format!("{id} say {text}"),
            ToAgent::Beat => format!("{id} beat"),
            _ => format!("{id} other"),
        };
        messages.iter().map(kind).collect()
    }

    #[test]
    fn the_start_waits_until_each_node_has_reached_the_one_before() {
        let mut job = Job::new(vec![nccl_card("a", "eth0"), nccl_card("b", "eth0"), nccl_card("c", "eth0")]);
        assert_eq!(kinds(&job.start()), ["0 reach tag-c", "1 reach tag-a", "2 reach tag-b"]);
        job.answer(1, None);
        job.answer(0, None);
        assert_eq!(kinds(&job.filter(vec![(1, ToAgent::Beat)])), ["1 beat"]);
        let heartbeat = ToAgent::Progress { node: 1, entries: Vec::new(), stopped: Vec::new() };
        assert_eq!(kinds(&job.filter(vec![(OWN, heartbeat)])), ["0 other"]);
        job.answer(2, None);
        assert_eq!(kinds(&job.filter(Vec::new())), ["0 start", "1 start", "2 start"]);
        assert_eq!(job.preflight.next_deadline(), None);
        // A restart is checked again.
        assert_eq!(job.start().len(), 3);
        // An answer that comes twice changes nothing.
        job.answer(2, None);
        job.answer(2, None);
        assert!(job.filter(Vec::new()).is_empty());
    }

    #[test]
    fn an_interface_that_is_not_reached_is_replaced_on_all_nodes() {
        let mut job = Job::new(vec![nccl_card("a", "docker0"), nccl_card("b", "docker0")]);
        job.start();
        job.answer(0, Some("connection refused"));
        job.answer(1, Some("connection refused"));
        assert_eq!(
            kinds(&job.filter(Vec::new())),
            [
                "0 say host a cannot reach docker0 (172.17.0.1) of host b, which NCCL would take: NCCL_SOCKET_IFNAME is \
                 set to the interface of the connections between the nodes, eth0 on host a (connection refused)",
                "0 control",
                "1 control",
                "0 start",
                "1 start"
            ]
        );
    }

    #[test]
    fn an_interface_that_the_user_has_named_is_kept() {
        let mut named = nccl_card("a", "docker0");
        named.nccl.as_mut().unwrap().is_named = true;
        let mut job = Job::new(vec![named, nccl_card("b", "eth0")]);
        job.start();
        job.answer(0, None);
        job.answer(1, Some("timed out"));
        let messages = kinds(&job.filter(Vec::new()));
        assert_eq!(messages[1..], ["0 start", "1 start"]);
        let text =
            "host b cannot reach docker0 (172.17.0.1) of host a, which NCCL takes because NCCL_SOCKET_IFNAME";
        assert!(messages[0].contains(text), "{messages:?}");
    }

    #[test]
    fn nothing_waits_for_an_answer_that_does_not_come() {
        let mut job = Job::new(vec![nccl_card("a", "eth0"), nccl_card("b", "eth0")]);
        job.start();
        job.answer(0, None);
        job.now = job.preflight.next_deadline().unwrap();
        assert_eq!(kinds(&job.filter(Vec::new())), ["0 start", "1 start"]);
        // The ranks have to exist before the coordinator ends them.
        job.start();
        job.preflight.forget(1);
        let orders = |id| (id, ToAgent::Do { orders: Vec::new() });
        assert_eq!(kinds(&job.filter(vec![orders(0)])), ["0 start", "1 start", "0 other"]);
        assert_eq!(
            kinds(&job.filter([starts(&["a", "b"]), vec![orders(1)]].concat())),
            ["0 start", "1 start", "1 other"]
        );
    }

    #[test]
    fn a_node_that_is_refused_meanwhile_does_not_end_the_check() {
        let mut job = Job::new(vec![nccl_card("a", "eth0"), nccl_card("b", "eth0")]);
        job.start();
        let refused = ToAgent::Refused { exit_code: 73, why: "there are enough nodes".into() };
        assert_eq!(kinds(&job.filter(vec![(7, refused)])), ["7 other"]);
        job.answer(0, None);
        job.answer(1, None);
        assert_eq!(kinds(&job.filter(Vec::new())), ["0 start", "1 start"]);
    }

    #[test]
    fn ranks_without_nccl_start_at_once() {
        let mut job = Job::new(vec![card("a", None), card("b", None)]);
        assert_eq!(kinds(&job.start()), ["0 start", "1 start"]);
        // Of one node it is not known what NCCL takes.
        let unknown = NodeCard { nccl: None, ranks: 3, ..nccl_card("b", "") };
        let mut job = Job::new(vec![nccl_card("a", "eth0"), unknown]);
        let messages = kinds(&job.start());
        assert!(
            messages[0].contains("NCCL 2.31.2 hangs if nodes have unequal numbers of ranks"),
            "{messages:?}"
        );
        assert_eq!(messages[1..], ["0 start", "1 start"]);
    }

    #[test]
    fn a_second_card_without_an_answer_is_the_coordinators_to_judge() {
        let mut preflight = NcclPreflight::default();
        let join = || FromAgent::Join(Box::new(nccl_card("a", "eth0")));
        assert!(preflight.take_answer(1, join()).is_some());
        assert!(preflight.take_answer(1, join()).is_some());
        // An answer before the card is none.
        assert!(preflight.take_answer(2, answer(&nccl_card("b", "eth0"), None)).is_some());
    }
}
