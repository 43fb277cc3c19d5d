//! Which node has which number, and what the hosts are called. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::coordinator::{MemberId, OWN};

/// The members in the order of their node numbers. The coordinator is node 0. A node with a wish gets that number; if a
/// node is missing, the nodes keep the order of their wishes. The others fill the gaps, by the names of their hosts.
pub(crate) fn arrange(members: &[(MemberId, Option<u32>, &str)]) -> Vec<MemberId> {
    let is_missing_one =
        members.iter().any(|(_, wish, _)| wish.is_some_and(|wish| wish as usize >= members.len()));
    let mut slots: Vec<Option<MemberId>> = vec![None; members.len()];
    slots[0] = Some(OWN);
    let mut rest: Vec<&(MemberId, Option<u32>, &str)> = Vec::new();
    for member in members.iter().filter(|(id, ..)| *id != OWN) {
        let wish = member.1.filter(|_| !is_missing_one);
        match wish.and_then(|wish| slots.get_mut(wish as usize)).filter(|slot| slot.is_none()) {
            Some(slot) => *slot = Some(member.0),
            None => rest.push(member),
        }
    }
    rest.sort_by_key(|(id, wish, host)| (wish.is_none(), *wish, *host, *id));
    let mut rest = rest.into_iter().map(|(id, ..)| *id);
    slots.into_iter().filter_map(|slot| slot.or_else(|| rest.next())).collect()
}

/// The names of hosts in messages: their own names, with the address behind it if several have the same name.
pub(crate) fn name_hosts<'a>(hosts: impl Iterator<Item = (&'a str, Option<IpAddr>)> + Clone) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    hosts.clone().for_each(|(host, _)| *counts.entry(host).or_default() += 1);
    let name = |(node, (host, address)): (usize, (&str, Option<IpAddr>))| match address {
        _ if counts[host] == 1 => host.to_owned(),
        Some(address) if !address.is_loopback() => format!("{host} at {address}"),
        // Several nodes on one host.
        _ => format!("{host}, node {node}"),
    };
    hosts.enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_get_the_numbers_that_they_want() {
        assert_eq!(arrange(&[(OWN, None, "a")]), [OWN]);
        assert_eq!(arrange(&[(OWN, Some(0), "z"), (1, Some(2), "b"), (2, Some(1), "c")]), [OWN, 2, 1]);
        // By name, whoever came first.
        assert_eq!(arrange(&[(OWN, None, "z"), (1, None, "c"), (2, None, "b")]), [OWN, 2, 1]);
        // One of three is missing: the others keep their order.
        assert_eq!(arrange(&[(OWN, None, "a"), (1, Some(3), "b"), (2, Some(2), "c")]), [OWN, 2, 1]);
        assert_eq!(arrange(&[(OWN, None, "a"), (1, None, "b"), (2, Some(1), "c")]), [OWN, 2, 1]);
        // Two with one wish, as after a replacement.
        assert_eq!(arrange(&[(OWN, None, "a"), (1, Some(1), "c"), (2, Some(1), "b")]), [OWN, 1, 2]);
    }

    #[test]
    fn hosts_of_one_name_are_told_apart() {
        let address = |text: &str| text.parse().ok();
        let hosts = [("a", None), ("b", address("10.0.0.2")), ("b", address("10.0.0.3"))];
        assert_eq!(name_hosts(hosts.into_iter()), ["a", "b at 10.0.0.2", "b at 10.0.0.3"]);
        let hosts = [("a", None), ("a", address("127.0.0.1"))];
        assert_eq!(name_hosts(hosts.into_iter()), ["a, node 0", "a, node 1"]);
    }
}
