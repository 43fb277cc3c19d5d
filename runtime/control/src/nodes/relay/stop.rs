//! Where the ranks of all nodes stop. Pure. `progress/stop` says why no rank is beyond that place.

use std::collections::BTreeMap;

/// The choice of the stop check at which all ranks stop.
#[derive(Debug, Default)]
pub(super) struct StopRound {
    is_proposed: bool,
    is_decided: bool,
    /// For each node that has answered: the first stop check that none of its ranks can pass without knowing of the stop.
    bounds: BTreeMap<u32, u64>,
}

impl StopRound {
    /// True if a stop is to be proposed to all nodes; false if it was before.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_proposed, true)
    }

    /// Notes the answer of a node.
    ///
    /// # Errors
    /// If nothing was proposed, or the node has answered before.
    pub(super) fn bound(&mut self, node: u32, check: u64) -> Result<(), String> {
        if !self.is_proposed {
            return Err(format!("node {node} answers to a stop that was not proposed"));
        }
        if self.bounds.insert(node, check).is_some() {
            return Err(format!("node {node} answers twice where it can stop"));
        }
        Ok(())
    }

    /// Returns the check, once each of `nodes` nodes has answered or all its ranks have left, as `has_left` says: these make
    /// no stop check any more, and their node may be unable to answer. `None` in all further calls.
    pub(super) fn decide(&mut self, nodes: u32, has_left: impl Fn(u32) -> bool) -> Option<u64> {
        if !self.is_proposed || self.is_decided {
            return None;
        }
        if !(0..nodes).all(|node| self.bounds.contains_key(&node) || has_left(node)) {
            return None;
        }
        // If all ranks have left, nobody has to be told.
        let check = self.bounds.values().max().copied()?;
        self.is_decided = true;
        Some(check)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_furthest_node_determines_the_check() {
        let mut round = StopRound::default();
        assert!(round.bound(0, 1).is_err());
        assert_eq!(round.decide(3, |_| true), None);
        assert!(round.begin() && !round.begin());
        for (node, check) in [(2, 9), (0, 12), (1, 7)] {
            assert_eq!(round.decide(3, |_| false), None);
            round.bound(node, check).unwrap();
            assert!(round.bound(node, check).is_err());
        }
        assert_eq!(round.decide(3, |_| false), Some(12));
        assert_eq!(round.decide(3, |_| false), None);
    }

    #[test]
    fn a_node_whose_ranks_have_left_need_not_answer() {
        let mut round = StopRound::default();
        round.begin();
        assert_eq!(round.decide(2, |_| true), None);
        round.bound(0, 5).unwrap();
        assert_eq!(round.decide(2, |_| false), None);
        assert_eq!(round.decide(2, |node| node == 1), Some(5));
        // Its answer was on the way.
        round.bound(1, 9).unwrap();
        assert_eq!(round.decide(2, |node| node == 1), None);
    }
}
