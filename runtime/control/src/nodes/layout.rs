//! Which ranks are on which node.
//!
//! The ranks of a node are consecutive, so the first rank of each node says everything. Every rank and every agent of a
//! job holds the same layout, except that each knows its own node. A layout may come from outside, so it is checked
//! wherever one is made: the code that uses it can rely on it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::protocol::MAX_WORLD_RANKS;

/// Maximum number of nodes of a job: a layout must fit into a message.
pub const MAX_NODES: usize = 8192;

/// The first rank of each node, and the node of this process.
///
/// ```
/// use mgpu_control::nodes::Layout;
///
/// let layout = Layout::new(vec![0, 8], 12, 1)?;
/// assert_eq!((layout.nodes(), layout.node_of(7), layout.node_of(8)), (2, 0, 1));
/// assert_eq!(layout.local_ranks(), 8..12);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Unchecked")]
pub struct Layout {
    first_ranks: Vec<u32>,
    world_size: u32,
    node: u32,
}

/// A layout of outside.
#[derive(Deserialize)]
struct Unchecked {
    first_ranks: Vec<u32>,
    world_size: u32,
    node: u32,
}

impl TryFrom<Unchecked> for Layout {
    type Error = String;

    fn try_from(Unchecked { first_ranks, world_size, node }: Unchecked) -> Result<Self, String> {
        Layout::new(first_ranks, world_size, node)
    }
}

impl Layout {
    /// The layout of a world of `world_size` ranks, seen from `node`. Node h has the ranks from `first_ranks[h]` to the
    /// first one of the next node.
    ///
    /// # Errors
    /// If a node has no rank, the ranks do not begin at 0, there are too many ranks or nodes, or `node` does not exist.
    pub fn new(first_ranks: Vec<u32>, world_size: u32, node: u32) -> Result<Self, String> {
        if world_size > MAX_WORLD_RANKS {
            return Err(format!("a layout of {world_size} ranks; the maximum is {MAX_WORLD_RANKS}"));
        }
        if first_ranks.len() > MAX_NODES {
            return Err(format!("a layout of {} nodes; the maximum is {MAX_NODES}", first_ranks.len()));
        }
        match first_ranks.first() {
            Some(0) => {}
            Some(first) => return Err(format!("a layout whose node 0 begins at rank {first} instead of 0")),
            None => return Err("a layout without nodes".into()),
        }
        let ends = first_ranks.iter().skip(1).chain([&world_size]);
        if let Some((node, (first, end))) =
            first_ranks.iter().zip(ends).enumerate().find(|(_, (a, b))| a >= b)
        {
            return Err(format!(
                "a layout whose node {node} has no ranks: it begins at rank {first}, and the next one at rank {end}"
            ));
        }
        match (node as usize) < first_ranks.len() {
            true => Ok(Layout { first_ranks, world_size, node }),
            false => Err(format!("a layout of {} nodes for node {node}", first_ranks.len())),
        }
    }

    /// The layout of a world on one host.
    ///
    /// # Panics
    /// If there are no ranks or more than [`MAX_WORLD_RANKS`].
    pub fn one_host(world_size: u32) -> Self {
        Self::new(vec![0], world_size, 0).expect("a world has between 1 and MAX_WORLD_RANKS ranks")
    }

    /// The same layout, seen from another node.
    ///
    /// # Errors
    /// If there is no such node.
    pub fn seen_from(&self, node: u32) -> Result<Self, String> {
        Self::new(self.first_ranks.clone(), self.world_size, node)
    }

    /// Number of ranks of the world.
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Number of nodes.
    pub fn nodes(&self) -> u32 {
        self.first_ranks.len() as u32
    }

    /// The node of this process.
    pub fn node(&self) -> u32 {
        self.node
    }

    /// The first rank of each node.
    pub fn first_ranks(&self) -> &[u32] {
        &self.first_ranks
    }

    /// True if all ranks are on one node.
    pub fn is_one_host(&self) -> bool {
        self.first_ranks.len() == 1
    }

    /// The node of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn node_of(&self, rank: u32) -> u32 {
        assert!(rank < self.world_size, "rank {rank} in a world of {}", self.world_size);
        self.first_ranks.partition_point(|first| *first <= rank) as u32 - 1
    }

    /// The ranks of `node`.
    ///
    /// # Panics
    /// If there is no such node.
    pub fn ranks_of(&self, node: u32) -> Range<u32> {
        let node = node as usize;
        self.first_ranks[node]..self.first_ranks.get(node + 1).copied().unwrap_or(self.world_size)
    }

    /// The ranks of the node of this process.
    pub fn local_ranks(&self) -> Range<u32> {
        self.ranks_of(self.node)
    }

    /// True if `rank` exists and is on the node of this process.
    pub fn is_local(&self, rank: u32) -> bool {
        self.local_ranks().contains(&rank)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_rank_is_on_one_node(sizes in prop::collection::vec(1u32..5, 1..8)) {
            let first_ranks: Vec<u32> = sizes.iter().scan(0, |next, size| {
                *next += size;
                Some(*next - size)
            }).collect();
            let world_size = sizes.iter().sum();
            let last = sizes.len() as u32 - 1;
            let layout = Layout::new(first_ranks, world_size, last).unwrap();
            let mut ranks = 0..world_size;
            for (node, size) in (0..).zip(&sizes) {
                prop_assert_eq!(layout.ranks_of(node).len() as u32, *size);
                for rank in layout.ranks_of(node) {
                    prop_assert_eq!(Some(rank), ranks.next());
                    prop_assert_eq!(layout.node_of(rank), node);
                    prop_assert_eq!(layout.is_local(rank), node == last);
                }
            }
            prop_assert_eq!(ranks.next(), None);
            prop_assert_eq!(layout.is_one_host(), sizes.len() == 1);
            let text = serde_json::to_string(&layout).unwrap();
            prop_assert_eq!(serde_json::from_str::<Layout>(&text).unwrap(), layout);
        }

        #[test]
        fn a_layout_of_outside_never_panics(first_ranks in prop::collection::vec(0u32..9, 0..6), world_size: u32, node in 0u32..6) {
            let json = serde_json::json!({ "first_ranks": first_ranks, "world_size": world_size % 12, "node": node });
            if let Ok(layout) = serde_json::from_value::<Layout>(json) {
                prop_assert!(layout.local_ranks().all(|rank| layout.node_of(rank) == node));
            }
        }
    }

    #[test]
    fn a_wrong_layout_is_refused_with_what_is_wrong() {
        for (first_ranks, world_size, node, why) in [
            (vec![], 4, 0, "without nodes"),
            (vec![1, 2], 4, 0, "node 0 begins at rank 1 instead of 0"),
            (vec![0, 2, 2], 4, 0, "node 1 has no ranks: it begins at rank 2, and the next one at rank 2"),
            (vec![0, 3, 2], 4, 0, "node 1 has no ranks"),
            (vec![0, 4], 4, 0, "node 1 has no ranks: it begins at rank 4, and the next one at rank 4"),
            (vec![0], 0, 0, "node 0 has no ranks"),
            (vec![0, 2], 4, 2, "a layout of 2 nodes for node 2"),
            (vec![0], u32::MAX, 0, "a layout of 4294967295 ranks; the maximum is 65536"),
            ((0..10_000).collect(), 20_000, 0, "a layout of 10000 nodes; the maximum is 8192"),
        ] {
            let refusal = Layout::new(first_ranks, world_size, node).unwrap_err();
            assert!(refusal.contains(why), "{refusal}");
        }
    }
}
