//! The check of the interfaces that NCCL takes, as rank 0's host conducts it once all hosts have come. Pure.
//!
//! Each host tries to reach the one before it. A host that has not answered in time is not judged: it may be gone, which its
//! link will tell.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::arrangement::Arrival;
use crate::nccl::advice::{MAX_NOTICE, MAX_NOTICES, NcclVariables};
use crate::nccl::{ANSWER_LIMIT, MAX_TARGETS, NcclAnswer, NcclCard, NcclTarget, Unreached, find_unreached};
use crate::protocol::MGPU_NCCL_PREFLIGHT;

/// Most hosts whose variables are listed in an error.
const MAX_LISTED: usize = 8;

/// What a host says about NCCL when it arrives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NcclArrival {
    pub(super) card: NcclCard,
    /// The ranks may set the variables themselves.
    pub(super) may_set: bool,
    /// The variables that make NCCL take the interface of the connection with rank 0's host; none if the user has named
    /// the interfaces, or there is no such interface.
    pub(super) variables: NcclVariables,
}

/// What a node has to reach: the interfaces of the node before it.
pub(super) struct Task {
    pub(super) targets: Vec<NcclTarget>,
    pub(super) tag: String,
}

/// A check in progress.
pub(super) struct NcclCheck {
    pub(super) begun: Instant,
    pub(super) deadline: Instant,
    /// The answer of each node about the one before it; `None` before it has come.
    answers: Vec<Option<NcclAnswer>>,
}

/// What the check has found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The run starts. `sets`: the ranks of all hosts set their variables.
    Start { notices: Vec<String>, sets: bool },
    /// It does not start, and why.
    Refuse(String),
}

impl NcclCheck {
    /// Begins to check `hosts`, the arrivals by node. Returns the task of each node, or `None` if there is nothing to
    /// check: one node, or one of which nothing is known.
    pub(super) fn begin(hosts: &[&Arrival], now: Instant) -> Option<(Self, Vec<Task>)> {
        let known: Vec<&NcclArrival> = hosts.iter().map(|host| host.nccl.as_ref()).collect::<Option<_>>()?;
        let before = |node: usize| &known[(node + known.len() - 1) % known.len()].card;
        let task = |node| Task { targets: before(node).targets.clone(), tag: before(node).tag.clone() };
        let tasks = (0..known.len()).map(task).collect();
        let answers = vec![None; known.len()];
        let check = NcclCheck { begun: now, deadline: now + ANSWER_LIMIT, answers };
        (known.len() > 1).then_some((check, tasks))
    }

    /// Takes the answer of a node.
    ///
    /// # Errors
    /// If an honest host says no such thing.
    pub(super) fn take_answer(&mut self, node: usize, answer: NcclAnswer) -> Result<(), String> {
        match self.answers.get_mut(node) {
            Some(slot @ None) if answer.len() <= MAX_TARGETS => *slot = Some(answer),
            _ => return Err("an answer to no question".into()),
        }
        Ok(())
    }

    /// Whether nothing more is waited for.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        now >= self.deadline || self.answers.iter().all(Option::is_some)
    }

    /// What follows from the answers about `hosts`, the arrivals by node.
    pub(super) fn judge(&self, hosts: &[&Arrival]) -> Verdict {
        let known: Vec<Option<&NcclArrival>> = hosts.iter().map(|host| host.nccl.as_ref()).collect();
        let answered =
            known.iter().zip(&self.answers).map(|(known, answer)| known.filter(|_| answer.is_some()));
        let cards: Vec<Option<&NcclCard>> = answered.map(|known| known.map(|known| &known.card)).collect();
        let names: Vec<String> = hosts.iter().map(|host| host.host.clone()).collect();
        let (named, unnamed): (Vec<Unreached>, Vec<Unreached>) =
            find_unreached(&cards, &self.answers).into_iter().partition(|unreached| unreached.is_named);
        // The last one may be about setting variables.
        let mut notices: Vec<String> =
            named.iter().take(MAX_NOTICES - 1).map(|one| cut(&one.describe_named(&names))).collect();
        let Some(unreached) = unnamed.first() else { return Verdict::Start { notices, sets: false } };
        let is_unknown = |arrival: &&NcclArrival| !arrival.card.is_named && arrival.variables.is_empty();
        let (found, why) = (unreached.describe(&names), &unreached.why);
        let is_settable = !known.iter().flatten().any(is_unknown);
        let advice = match is_settable {
            true => assignments(hosts),
            false => "NCCL_SOCKET_IFNAME to an interface that all hosts reach".to_owned(),
        };
        if is_settable && known.iter().flatten().all(|arrival| arrival.may_set) {
            notices.push(cut(&format!(
                "{found} would take: the ranks have set the interface of the connections between the hosts, {advice} ({why})"
            )));
            return Verdict::Start { notices, sets: true };
        }
        let or = match is_settable {
            true => format!(" (with {MGPU_NCCL_PREFLIGHT}=set the ranks do that themselves)"),
            false => String::new(),
        };
        Verdict::Refuse(cut(&format!(
            "{found} would take, and the ranks would wait for each other forever ({why}): set {advice}{or}"
        )))
    }
}

/// The beginning of a text that is too long.
fn cut(text: &str) -> String {
    let ends = text.char_indices().map(|(at, char)| at + char.len_utf8());
    let end = ends.take_while(|end| *end <= MAX_NOTICE).last().unwrap_or(0);
    text[..end].to_owned()
}

/// The variables of all hosts whose interfaces the user has not named, for people.
fn assignments(hosts: &[&Arrival]) -> String {
    let of_host = |host: &&Arrival| {
        let nccl = host.nccl.as_ref().filter(|nccl| !nccl.card.is_named)?;
        let variables: Vec<String> =
            nccl.variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Some((host.host.clone(), variables.join(" ")))
    };
    let all: Vec<(String, String)> = hosts.iter().filter_map(of_host).collect();
    match all.first() {
        Some((_, first)) if all.len() == hosts.len() && all.iter().all(|(_, other)| other == first) => {
            format!("{first} on all hosts")
        }
        _ => {
            let listed =
                all.iter().take(MAX_LISTED).map(|(host, variables)| format!("{variables} on host {host}"));
            let mut listed: Vec<String> = listed.collect();
            if all.len() > MAX_LISTED {
                listed.push(format!("and that of {} more hosts", all.len() - MAX_LISTED));
            }
            listed.join(", ")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn arrival(host: &str, is_named: bool, may_set: bool, interface: Option<&str>) -> Arrival {
        let target =
            NcclTarget { interface: "docker0".into(), address: "172.17.0.1".parse().unwrap(), port: 7 };
        let card = NcclCard { targets: vec![target], tag: format!("tag-{host}"), is_named, answer: None };
        let variable = |name: &str| ("NCCL_SOCKET_IFNAME".to_owned(), format!("={name}"));
        let nccl = NcclArrival { card, may_set, variables: interface.map(variable).into_iter().collect() };
        Arrival { first_rank: 0, ranks: 1, world_size: 2, host: host.into(), nccl: Some(nccl) }
    }

    /// The verdict about hosts of which some do not reach the one before.
    fn verdict(hosts: &[Arrival], answers: &[Option<Option<&str>>]) -> Verdict {
        let hosts: Vec<&Arrival> = hosts.iter().collect();
        let (mut check, tasks) = NcclCheck::begin(&hosts, Instant::now()).unwrap();
        assert_eq!(tasks.len(), hosts.len());
        for (node, answer) in answers.iter().enumerate() {
            assert!(!check.is_over(check.begun));
            if let Some(why) = answer {
                check.take_answer(node, vec![why.map(str::to_owned)]).unwrap();
            }
        }
        assert!(check.is_over(check.deadline));
        check.judge(&hosts)
    }

    const REFUSED: Option<Option<&str>> = Some(Some("connection refused"));
    const REACHED: Option<Option<&str>> = Some(None);

    #[test]
    fn interfaces_that_are_reached_are_left_alone() {
        let hosts = [arrival("a", false, false, Some("eth0")), arrival("b", false, false, Some("eth0"))];
        assert_eq!(verdict(&hosts, &[REACHED, REACHED]), Verdict::Start { notices: Vec::new(), sets: false });
    }

    #[test]
    fn an_interface_that_is_not_reached_ends_the_start_with_advice() {
        let hosts = [arrival("a", false, true, Some("eth0")), arrival("b", false, false, Some("eth0"))];
        assert_eq!(
            verdict(&hosts, &[REACHED, REFUSED]),
            Verdict::Refuse(
                "host b cannot reach docker0 (172.17.0.1) of host a, which NCCL would take, and the ranks would wait for each \
                 other forever (connection refused): set NCCL_SOCKET_IFNAME==eth0 on all hosts (with \
                 MGPU_NCCL_PREFLIGHT=set the ranks do that themselves)"
                    .into()
            )
        );
        let hosts = [arrival("a", false, true, None), arrival("b", false, true, Some("eth0"))];
        let Verdict::Refuse(why) = verdict(&hosts, &[REFUSED, REACHED]) else { panic!("it starts") };
        assert!(why.contains("of host b,") && why.ends_with("to an interface that all hosts reach"), "{why}");
    }

    #[test]
    fn with_leave_of_all_hosts_the_ranks_set_the_interface() {
        let hosts = [arrival("a", false, true, Some("eth0")), arrival("b", false, true, Some("eno1"))];
        let Verdict::Start { notices, sets: true } = verdict(&hosts, &[REFUSED, REFUSED]) else {
            panic!("refused")
        };
        assert_eq!(
            notices,
            [
                "host a cannot reach docker0 (172.17.0.1) of host b, which NCCL would take: the ranks have set the interface of \
                 the connections between the hosts, NCCL_SOCKET_IFNAME==eth0 on host a, NCCL_SOCKET_IFNAME==eno1 on host b \
                 (connection refused)"
            ]
        );
    }

    #[test]
    fn an_interface_that_the_user_has_named_is_kept() {
        let hosts = [arrival("a", true, true, None), arrival("b", false, false, Some("eth0"))];
        let Verdict::Start { notices, sets: false } = verdict(&hosts, &[REACHED, REFUSED]) else {
            panic!("refused")
        };
        assert!(
            notices[0].contains("of host a, which NCCL takes because NCCL_SOCKET_IFNAME says so"),
            "{notices:?}"
        );
        // The other one is not.
        let Verdict::Refuse(why) = verdict(&hosts, &[REFUSED, REFUSED]) else { panic!("it starts") };
        assert!(why.contains(": set NCCL_SOCKET_IFNAME==eth0 on host b ("), "{why}");
    }

    #[test]
    fn a_host_without_an_answer_is_not_judged() {
        let hosts = [arrival("a", false, false, Some("eth0")), arrival("b", false, false, Some("eth0"))];
        assert_eq!(verdict(&hosts, &[REFUSED, None]), Verdict::Start { notices: Vec::new(), sets: false });
    }

    #[test]
    fn nothing_is_checked_on_one_host_or_without_nccl() {
        let (a, b) = (arrival("a", false, false, None), arrival("b", false, false, None));
        assert!(NcclCheck::begin(&[&a], Instant::now()).is_none());
        assert!(NcclCheck::begin(&[&a, &Arrival { nccl: None, ..b }], Instant::now()).is_none());
    }

    #[test]
    fn an_answer_counts_once() {
        let (a, b) = (arrival("a", false, false, None), arrival("b", false, false, None));
        let (mut check, _) = NcclCheck::begin(&[&a, &b], Instant::now()).unwrap();
        check.take_answer(1, vec![None]).unwrap();
        assert!(check.take_answer(1, vec![None]).is_err());
        assert!(check.take_answer(2, vec![None]).is_err());
        assert!(check.take_answer(0, vec![None; MAX_TARGETS + 1]).is_err());
    }

    proptest! {
        #[test]
        fn texts_are_short_for_any_number_of_hosts(
            hosts in prop::collection::vec((".{0,80}", any::<bool>(), any::<bool>(), prop::option::of("[a-z]{1,20}")), 2..40),
            answers in prop::collection::vec(prop::option::of(prop::option::of(".{0,300}")), 2..40),
        ) {
            let hosts: Vec<Arrival> = hosts
                .iter()
                .map(|(host, is_named, may_set, interface)| arrival(host, *is_named, *may_set, interface.as_deref()))
                .collect();
            let hosts: Vec<&Arrival> = hosts.iter().collect();
            let (mut check, _) = NcclCheck::begin(&hosts, Instant::now()).unwrap();
            for (node, answer) in answers.into_iter().enumerate().take(hosts.len()) {
                if let Some(answer) = answer {
                    check.take_answer(node, vec![answer]).unwrap();
                }
            }
            let texts = match check.judge(&hosts) {
                Verdict::Start { notices, .. } => notices,
                Verdict::Refuse(why) => vec![why],
            };
            prop_assert!(texts.len() <= MAX_NOTICES && texts.iter().all(|text| text.len() <= MAX_NOTICE));
        }
    }
}
