//! Where the ranks of all nodes stop. Pure. `progress/stop` says why no rank is beyond that place.

use std::collections::BTreeMap;

/// The choice of the stop check at which all ranks stop.
#[derive(Debug, Default)]
pub(super) struct StopRound {
    is_proposed: bool,
    /// For each node that has answered: the first stop check that none of its ranks can pass without knowing of the stop.
    bounds: BTreeMap<u32, u64>,
}

impl StopRound {
    /// True if a stop is to be proposed to all nodes; false if it was before.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_proposed, true)
    }

    /// Notes the answer of one of `nodes` nodes. Returns the check, once all have answered.
    ///
    /// # Errors
    /// If nothing was proposed, or the node has answered before.
    pub(super) fn bound(&mut self, node: u32, check: u64, nodes: u32) -> Result<Option<u64>, String> {
        if !self.is_proposed {
            return Err(format!("node {node} answers to a stop that was not proposed"));
        }
        if self.bounds.insert(node, check).is_some() {
            return Err(format!("node {node} answers twice where it can stop"));
        }
        let is_complete = self.bounds.len() == nodes as usize;
        Ok(self.bounds.values().max().copied().filter(|_| is_complete))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_furthest_node_determines_the_check() {
        let mut round = StopRound::default();
        assert!(round.bound(0, 1, 3).is_err());
        assert!(round.begin() && !round.begin());
        assert_eq!(round.bound(2, 9, 3), Ok(None));
        assert!(round.bound(2, 9, 3).is_err());
        assert_eq!(round.bound(0, 12, 3), Ok(None));
        assert_eq!(round.bound(1, 7, 3), Ok(Some(12)));
    }
}
