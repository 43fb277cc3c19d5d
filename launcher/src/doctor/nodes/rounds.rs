//! Every pair of nodes once, in rounds of pairs that have no node in common. Pure.
//!
//! This is the circle method of round-robin tournaments: one place stays, the others rotate around it, and those that
//! face each other meet. With an odd number of nodes one of them rests in each round.

/// The rounds; in each pair the smaller number is first.
pub(super) fn rounds(nodes: u32) -> Vec<Vec<(u32, u32)>> {
    let places = nodes.next_multiple_of(2);
    let circle = places.saturating_sub(1);
    let meet = |round: u32, index: u32| match index {
        0 => (round, circle),
        _ => ((round + index) % circle, (round + circle - index) % circle),
    };
    let round = |round: u32| {
        let pairs = (0..places / 2).map(move |index| meet(round, index));
        let ordered = pairs.map(|(a, b)| (a.min(b), a.max(b)));
        ordered.filter(|(_, b)| *b < nodes).collect()
    };
    (0..circle).map(round).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_pair_meets_once_and_no_node_twice_in_a_round() {
        assert!(rounds(0).is_empty());
        for nodes in 1..20 {
            let rounds = rounds(nodes);
            for round in &rounds {
                let met: BTreeSet<u32> = round.iter().flat_map(|(a, b)| [*a, *b]).collect();
                assert_eq!(met.len(), 2 * round.len(), "{nodes} nodes: {round:?}");
            }
            let all: Vec<_> = rounds.concat();
            let pairs: BTreeSet<_> = all.iter().copied().collect();
            let expected: BTreeSet<_> = (0..nodes).flat_map(|b| (0..b).map(move |a| (a, b))).collect();
            assert_eq!((pairs, all.len()), (expected.clone(), expected.len()), "{nodes} nodes");
        }
    }
}
