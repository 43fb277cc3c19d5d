//! Which host has which ranks, and so which node number: from what the hosts say about themselves. Pure.

use serde::{Deserialize, Serialize};

use super::nccl_check::NcclArrival;
use crate::nccl::advice::are_plausible;
use crate::nodes::Layout;
use crate::nodes::layout::MAX_NODES;

/// Longest name of a host that is accepted, in bytes.
const MAX_HOST: usize = 256;

/// The ranks that a host has, as its first rank says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Arrival {
    pub(super) first_rank: u32,
    pub(super) ranks: u32,
    pub(super) world_size: u32,
    pub(super) host: String,
    /// Only if the ranks use NCCL, whose interface is to be checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) nccl: Option<NcclArrival>,
}

impl Arrival {
    /// The rank after the last one of this host.
    fn end(&self) -> u32 {
        self.first_rank.saturating_add(self.ranks)
    }

    /// Checks the words of another host; `own` is that of rank 0.
    pub(super) fn check(&self, own: &Arrival) -> Result<(), String> {
        let Arrival { first_rank, ranks, world_size, ref host, ref nccl } = *self;
        if host.len() > MAX_HOST || host.chars().any(char::is_control) {
            return Err("a host with an impossible name".into());
        }
        let is_plausible = |nccl: &NcclArrival| nccl.card.is_plausible() && are_plausible(&nccl.variables);
        if !nccl.as_ref().is_none_or(is_plausible) {
            return Err(format!("host {host} says impossible things about its interfaces"));
        }
        if world_size != own.world_size {
            return Err(format!(
                "host {host} was started for {world_size} ranks, and host {} for {}",
                own.host, own.world_size
            ));
        }
        if ranks == 0 || self.end() > world_size || first_rank.checked_add(ranks).is_none() {
            return Err(format!(
                "host {host} claims {ranks} ranks from rank {first_rank} on, of {world_size}"
            ));
        }
        Ok(())
    }
}

/// The hosts in the order of their ranks, as indices, with the layout seen from node 0. `None` while ranks are missing.
///
/// # Errors
/// If two hosts claim one rank, as they do if the ranks of a host are not consecutive.
pub(super) fn arrange(arrivals: &[Arrival], world_size: u32) -> Result<Option<(Vec<usize>, Layout)>, String> {
    let mut order: Vec<usize> = (0..arrivals.len()).collect();
    order.sort_by_key(|index| arrivals[*index].first_rank);
    for pair in order.windows(2) {
        let (one, other) = (&arrivals[pair[0]], &arrivals[pair[1]]);
        if one.end() > other.first_rank {
            return Err(format!(
                "host {} has ranks {} to {} and host {} begins at rank {}, but the ranks of a host must be consecutive; \
                 start them host by host (srun --distribution block, mpirun --map-by slot)",
                one.host,
                one.first_rank,
                one.end() - 1,
                other.host,
                other.first_rank
            ));
        }
    }
    if order.len() > MAX_NODES {
        return Err(format!("{} hosts; the maximum is {MAX_NODES}", order.len()));
    }
    if arrivals.iter().map(|arrival| u64::from(arrival.ranks)).sum::<u64>() < u64::from(world_size) {
        return Ok(None);
    }
    let first_ranks = order.iter().map(|index| arrivals[*index].first_rank).collect();
    Ok(Some((order, Layout::new(first_ranks, world_size, 0)?)))
}

/// The ranks of no host.
pub(super) fn missing_ranks(arrivals: &[Arrival], world_size: u32) -> Vec<u32> {
    let is_there = |rank: &u32| arrivals.iter().any(|host| (host.first_rank..host.end()).contains(rank));
    (0..world_size).filter(|rank| !is_there(rank)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nccl::{NcclCard, NcclTarget};

    fn arrival(host: &str, first_rank: u32, ranks: u32) -> Arrival {
        Arrival { first_rank, ranks, world_size: 6, host: host.into(), nccl: None }
    }

    proptest! {
        #[test]
        fn hosts_in_any_order_make_the_layout(sizes in prop::collection::vec(1u32..4, 1..6), seed: u64) {
            let mut hosts: Vec<Arrival> = sizes.iter().scan(0, |next, size| {
                *next += size;
                Some(Arrival { first_rank: *next - size, ranks: *size, world_size: 0, host: format!("h{next}"), nccl: None })
            }).collect();
            let (count, world_size) = (hosts.len(), sizes.iter().sum());
            let expected: Vec<u32> = hosts.iter().map(|host| host.first_rank).collect();
            hosts.rotate_left(seed as usize % count);
            let (order, layout) = arrange(&hosts, world_size).unwrap().unwrap();
            prop_assert_eq!(layout.first_ranks(), &expected[..]);
            prop_assert!(order.iter().map(|index| hosts[*index].first_rank).eq(expected));
            let last = hosts.pop().unwrap();
            prop_assert_eq!(arrange(&hosts, world_size).unwrap(), None);
            let missing: Vec<u32> = (last.first_rank..last.first_rank + last.ranks).collect();
            prop_assert_eq!(missing_ranks(&hosts, world_size), missing);
        }

        #[test]
        fn no_claim_panics(claims in prop::collection::vec((any::<u32>(), any::<u32>()), 0..5), world_size in 1u32..9) {
            let own = Arrival { first_rank: 0, ranks: 1, world_size, host: "a".into(), nccl: None };
            let hosts: Vec<Arrival> = claims
                .into_iter()
                .map(|(first_rank, ranks)| Arrival { first_rank: first_rank % 12, ranks, ..own.clone() })
                .filter(|host| host.check(&own).is_ok())
                .collect();
            if let Ok(Some((order, _))) = arrange(&hosts, world_size) {
                prop_assert!(missing_ranks(&hosts, world_size).is_empty() && order.len() == hosts.len());
            }
        }
    }

    #[test]
    fn hosts_with_alternating_ranks_are_named() {
        let error = arrange(&[arrival("b", 1, 3), arrival("a", 0, 3)], 6).unwrap_err();
        assert!(error.starts_with("host a has ranks 0 to 2 and host b begins at rank 1, but"), "{error}");
        assert!(error.contains("--distribution block"), "{error}");
    }

    #[test]
    fn impossible_claims_are_refused() {
        let own = arrival("a", 0, 2);
        let target = NcclTarget { interface: "eth0".into(), address: [10, 0, 0, 1].into(), port: 1 };
        let card = NcclCard { targets: vec![target; 5], tag: String::new(), is_named: false, answer: None };
        let many_interfaces = NcclArrival { card, may_set: false, variables: Vec::new() };
        for (claim, why) in [
            (arrival("b", 2, 0), "host b claims 0 ranks from rank 2 on, of 6"),
            (arrival("b", 4, 3), "host b claims 3 ranks from rank 4 on, of 6"),
            (arrival("b", u32::MAX, 2), "host b claims 2 ranks"),
            (
                Arrival { world_size: 8, ..arrival("b", 2, 2) },
                "host b was started for 8 ranks, and host a for 6",
            ),
            (arrival("b\u{1b}[2J", 2, 2), "impossible name"),
            (Arrival { nccl: Some(many_interfaces), ..arrival("b", 2, 2) }, "host b says impossible things"),
        ] {
            let error = claim.check(&own).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
