//! Splitting a communicator: which ranks form which group. No I/O of its own.

use std::sync::Arc;

use crate::Result;
use crate::membership::Membership;

/// The members of a communicator, in the order of their ranks in it.
///
/// A communicator numbers its members from 0. Errors, the progress page and shared memory use ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Members {
    /// The world rank of each member.
    world_ranks: Arc<[u32]>,
    /// This rank's position.
    rank: u32,
}

impl Members {
    /// All ranks of a world of `size`, for rank `rank`.
    pub(crate) fn everyone(rank: u32, size: u32) -> Self {
        assert!(rank < size, "rank {rank} in a world of {size}");
        Members { world_ranks: (0..size).collect(), rank }
    }

    /// This rank, in this communicator.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of members.
    pub(crate) fn size(&self) -> u32 {
        self.world_ranks.len() as u32
    }

    /// The world rank of member `rank`.
    #[inline]
    pub(crate) fn world_rank(&self, rank: u32) -> u32 {
        self.world_ranks[rank as usize]
    }

    /// The world rank of each member.
    pub(crate) fn world_ranks(&self) -> &[u32] {
        &self.world_ranks
    }

    /// Whether all of these are members of `other`, too.
    pub(crate) fn are_within(&self, other: &Members) -> bool {
        Arc::ptr_eq(&self.world_ranks, &other.world_ranks)
            || self.world_ranks.iter().all(|rank| other.world_ranks.contains(rank))
    }
}

/// What a rank passes to a split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SplitArguments {
    /// Ranks of the same colour form a group; a rank without colour is in none.
    pub(super) colour: Option<u32>,
    /// Orders the ranks of a group.
    pub(super) key: i32,
    /// The number of the next group in which this rank can take part.
    pub(super) next_group: u32,
}

impl SplitArguments {
    /// For the exchange.
    pub(super) fn encode(self) -> [i64; 3] {
        let colour = self.colour.map_or(-1, i64::from);
        [colour, self.key.into(), self.next_group.into()]
    }

    /// Reverses [`encode`](Self::encode).
    pub(super) fn decode(words: &[i64]) -> Self {
        let &[colour, key, next_group] = words else { unreachable!("three words for each rank") };
        SplitArguments { colour: u32::try_from(colour).ok(), key: key as i32, next_group: next_group as u32 }
    }
}

/// The group of a rank after a split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitGroup {
    pub(crate) members: Members,
    /// The members' ranks in the parent communicator.
    pub(crate) parent_ranks: Vec<u32>,
    /// From 1. The same for all groups of a split; no rank is in two groups of the same number.
    pub(crate) number: u32,
}

impl SplitGroup {
    /// Names the group at the rendezvous: groups of the same number have no member in common.
    pub(crate) fn key(&self) -> String {
        format!("group-{}-{}", self.number, self.members.world_rank(0))
    }

    /// Names the group in messages: `group 1 (ranks 0, 2)`, in the order of the group's own ranks.
    pub(crate) fn title(&self) -> String {
        const SHOWN: usize = 8;
        let ranks = self.members.world_ranks();
        let mut shown: Vec<String> = ranks.iter().take(SHOWN).map(u32::to_string).collect();
        if ranks.len() > SHOWN {
            shown.push(format!("… {} in all", ranks.len()));
        }
        format!("group {} (ranks {})", self.number, shown.join(", "))
    }
}

/// The arguments of all ranks, from which a [number](group_number) follows that all of them have taken for the groups.
/// `gather` returns the words of all ranks in their order. Without a membership there is one rank.
pub(super) fn agree_on_split(
    membership: Option<&Membership>,
    (colour, key): (Option<u32>, i32),
    mut gather: impl FnMut(&[i64]) -> Result<Vec<i64>>,
) -> Result<Vec<SplitArguments>> {
    loop {
        let next_group = membership.map_or(1, Membership::next_group);
        let own = SplitArguments { colour, key, next_group }.encode();
        let all: Vec<_> = gather(&own)?.chunks(own.len()).map(SplitArguments::decode).collect();
        let number = group_number(&all);
        let is_taken = membership.is_none_or(|membership| membership.take_group_number(number));
        // Another thread of some rank may have taken it for a split of another communicator.
        if gather(&[is_taken.into()])?.iter().all(|is_taken| *is_taken == 1) {
            return Ok(all);
        }
    }
}

/// The number of the groups of a split with these arguments of all ranks of the parent.
pub(super) fn group_number(arguments: &[SplitArguments]) -> u32 {
    arguments.iter().map(|rank| rank.next_group).max().unwrap_or(1)
}

/// The group of rank `own` of `parent`; `None` if it has no colour. Ranks are ordered by key, and by their rank in the
/// parent if keys are equal.
pub(super) fn form_group(arguments: &[SplitArguments], parent: &Members) -> Option<SplitGroup> {
    let own = parent.rank();
    let colour = arguments[own as usize].colour?;
    let same_colour = arguments.iter().zip(0u32..).filter(|(rank, _)| rank.colour == Some(colour));
    let mut ordered: Vec<(i32, u32)> = same_colour.map(|(rank, number)| (rank.key, number)).collect();
    ordered.sort_unstable();
    let parent_ranks: Vec<u32> = ordered.into_iter().map(|(_, rank)| rank).collect();
    let rank = parent_ranks.iter().position(|rank| *rank == own).expect("a rank has its own colour");
    let world_ranks = parent_ranks.iter().map(|rank| parent.world_rank(*rank)).collect();
    let members = Members { world_ranks, rank: rank as u32 };
    Some(SplitGroup { members, parent_ranks, number: group_number(arguments) })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn arguments() -> impl Strategy<Value = Vec<SplitArguments>> {
        let rank = (prop::option::of(0u32..4), -2i32..3, 1u32..9)
            .prop_map(|(colour, key, next_group)| SplitArguments { colour, key, next_group });
        prop::collection::vec(rank, 1..12)
    }

    proptest! {
        #[test]
        fn arguments_survive_the_exchange(
            colour in prop::option::of(any::<u32>()), key in any::<i32>(), next_group in any::<u32>(),
        ) {
            let arguments = SplitArguments { colour, key, next_group };
            prop_assert_eq!(SplitArguments::decode(&arguments.encode()), arguments);
        }

        /// Every rank computes its group by itself: all members must find the same one, in the order of their keys.
        #[test]
        fn the_members_of_a_group_agree_on_it(arguments in arguments()) {
            let size = arguments.len() as u32;
            // The parent is a group itself, with other world ranks than ranks.
            let world_ranks: Arc<[u32]> = (0..size).map(|rank| 100 - rank).collect();
            for own in 0..size {
                let parent = Members { world_ranks: Arc::clone(&world_ranks), rank: own };
                let Some(group) = form_group(&arguments, &parent) else {
                    prop_assert_eq!(arguments[own as usize].colour, None);
                    continue;
                };
                prop_assert_eq!(group.members.world_rank(group.members.rank()), 100 - own);
                prop_assert!(group.members.are_within(&parent));
                for (position, rank) in (0u32..).zip(&group.parent_ranks) {
                    let theirs = Members { world_ranks: Arc::clone(&world_ranks), rank: *rank };
                    let theirs = form_group(&arguments, &theirs).unwrap();
                    prop_assert_eq!(theirs.members.rank(), position);
                    prop_assert_eq!(&theirs.parent_ranks, &group.parent_ranks);
                    prop_assert_eq!((theirs.number, theirs.key()), (group.number, group.key()));
                    prop_assert!(group.number >= arguments[*rank as usize].next_group);
                }
                let keys: Vec<_> = group.parent_ranks.iter().map(|rank| (arguments[*rank as usize].key, rank)).collect();
                prop_assert!(keys.is_sorted());
            }
        }
    }

    #[test]
    fn titles_of_large_groups_are_short() {
        let group =
            |size| SplitGroup { members: Members::everyone(0, size), parent_ranks: Vec::new(), number: 3 };
        assert_eq!(group(2).title(), "group 3 (ranks 0, 1)");
        assert_eq!(group(64).title(), "group 3 (ranks 0, 1, 2, 3, 4, 5, 6, 7, … 64 in all)");
    }
}
