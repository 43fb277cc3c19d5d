//! What the hosts say to each other about the interfaces that NCCL takes, and what follows from it. Pure.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a host tries to connect.
pub const REACH_LIMIT: Duration = Duration::from_millis(2500);
/// How long the start waits for the answers of the hosts.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(4);
/// Most interfaces of a host that are tried.
pub const MAX_TARGETS: usize = 4;

/// Longest name of an interface and longest tag that are accepted, in bytes.
const MAX_NAME: usize = 64;
/// Longest reason that is repeated, in characters.
const MAX_REASON: usize = 200;

/// For each target, why it was not reached; `None` if it was.
pub type NcclAnswer = Vec<Option<String>>;

/// What a host says about NCCL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclCard {
    /// The interfaces of which NCCL takes one.
    pub targets: Vec<NcclTarget>,
    /// Names the host, among others that happen to have the same address and port.
    pub tag: String,
    /// The user has named the interfaces.
    pub is_named: bool,
    /// From an agent: its answer about the node before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<NcclAnswer>,
}

/// An interface that NCCL may take, and where the host listens on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclTarget {
    /// Its name.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// The port of the host's listener.
    pub port: u16,
}

impl NcclCard {
    /// Whether the names can be repeated to people, and the card is as small as an honest host's.
    pub fn is_plausible(&self) -> bool {
        let is_name = |name: &str| name.len() <= MAX_NAME && !name.chars().any(char::is_control);
        self.targets.len() <= MAX_TARGETS
            && self.targets.iter().all(|target| is_name(&target.interface))
            && is_name(&self.tag)
            && self.answer.is_none()
    }
}

/// An interface that the next host has not reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreached {
    /// The host that has tried.
    pub from: usize,
    /// The host of the interface.
    pub of: usize,
    interface: String,
    address: IpAddr,
    /// Why the attempt failed.
    pub why: String,
    /// The user has named the interface.
    pub is_named: bool,
}

/// The interfaces that were not reached, at most one of each host. `cards` has what is known of each host and `answers` what
/// each host has found about the one before it; host 0 about the last one. Without a card or an answer nothing is found.
pub fn find_unreached(cards: &[Option<&NcclCard>], answers: &[Option<NcclAnswer>]) -> Vec<Unreached> {
    let hosts = cards.len();
    let of_host = |(from, answer): (usize, &Option<NcclAnswer>)| {
        let of = (from + hosts - 1) % hosts;
        let card = cards.get(of).copied().flatten()?;
        let mut results = card.targets.iter().zip(answer.as_ref()?);
        let (target, why) = results.find_map(|(target, why)| Some((target, why.as_ref()?)))?;
        Some(Unreached {
            from,
            of,
            interface: target.interface.clone(),
            address: target.address,
            why: why.chars().filter(|char| !char.is_control()).take(MAX_REASON).collect(),
            is_named: card.is_named,
        })
    };
    answers.iter().take(hosts).enumerate().filter_map(of_host).collect()
}

impl Unreached {
    /// The beginning of a sentence that says so; `hosts` has the names of all.
    pub fn describe(&self, hosts: &[String]) -> String {
        let name = |host: usize| hosts.get(host).map_or("", String::as_str);
        let Unreached { from, of, interface, address, .. } = self;
        let (from, of) = (name(*from), name(*of));
        format!("host {from} cannot reach {interface} ({address}) of host {of}, which NCCL")
    }

    /// A sentence about an interface that the user has named.
    pub fn describe_named(&self, hosts: &[String]) -> String {
        format!(
            "{} takes because NCCL_SOCKET_IFNAME says so, and may hang: name an interface that all hosts reach, or leave the \
             variable out ({})",
            self.describe(hosts),
            self.why
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn card(interface: &str) -> NcclCard {
        let target =
            NcclTarget { interface: interface.into(), address: "172.17.0.1".parse().unwrap(), port: 7 };
        NcclCard { targets: vec![target], tag: "tag".into(), is_named: false, answer: None }
    }

    #[test]
    fn each_host_is_judged_by_the_next_one() {
        let cards = [card("eth0"), card("eth1"), card("eth2")];
        let cards: Vec<Option<&NcclCard>> = cards.iter().map(Some).collect();
        let hosts = ["a", "b", "c"].map(str::to_owned);
        let failed = || Some(vec![Some("timed out".to_owned())]);
        let found = find_unreached(&cards, &[failed(), Some(vec![None]), None]);
        let found: Vec<String> = found.iter().map(|one| one.describe(&hosts)).collect();
        assert_eq!(found, ["host a cannot reach eth2 (172.17.0.1) of host c, which NCCL"]);
        assert_eq!(find_unreached(&[cards[0], None, cards[2]], &[None, None, failed()]), []);
    }

    proptest! {
        #[test]
        fn no_answer_panics(
            targets in prop::collection::vec((".{0,70}", any::<IpAddr>()), 0..6),
            hosts in 0usize..5,
            answers in prop::collection::vec(prop::option::of(prop::collection::vec(prop::option::of(".*"), 0..6)), 0..7),
        ) {
            let target = |(interface, address)| NcclTarget { interface, address, port: 1 };
            let card = NcclCard { targets: targets.into_iter().map(target).collect(), ..card("") };
            let found = find_unreached(&vec![Some(&card); hosts], &answers);
            prop_assert!(found.len() <= hosts);
            for one in &found {
                prop_assert!(one.why.chars().count() <= MAX_REASON && !one.why.chars().any(char::is_control));
                prop_assert!((one.from + hosts - 1) % hosts == one.of);
            }
            let decoded: NcclCard = serde_json::from_str(&serde_json::to_string(&card).unwrap()).unwrap();
            prop_assert_eq!(decoded.is_plausible(), card.is_plausible());
            prop_assert!(card.targets.len() <= MAX_TARGETS || !card.is_plausible());
        }
    }
}
