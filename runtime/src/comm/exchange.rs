//! Which elements each rank sends to and receives from every other rank: pure functions.
//!
//! Gather, scatter, all-to-all and their variants with different lengths are messages between pairs of ranks. A
//! transport without a faster algorithm executes the [`Exchange`] of a call.

use std::ops::Range;

use smallvec::SmallVec;

use super::call::Call;
use super::shard;

/// Ranges of elements, by rank. No allocation up to 8 ranks.
pub(crate) type Ranges = SmallVec<[Range<usize>; 8]>;

/// The partition of a buffer into one contiguous part per rank.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Partition<'a> {
    /// The [shards](shard) of `len` elements.
    Shards { len: usize, ranks: u32 },
    /// One number of elements per rank.
    Counts(&'a [usize]),
}

impl Partition<'_> {
    /// The elements of `rank`.
    pub(crate) fn range(&self, rank: u32) -> Range<usize> {
        match *self {
            Partition::Shards { len, ranks } => shard(len, ranks, rank),
            Partition::Counts(counts) => {
                let begin = counts[..rank as usize].iter().sum();
                begin..begin + counts[rank as usize]
            }
        }
    }

    /// Elements of the longest part.
    pub(crate) fn longest(&self) -> usize {
        match *self {
            Partition::Shards { len, ranks } => shard(len, ranks, 0).len(),
            Partition::Counts(counts) => counts.iter().copied().max().unwrap_or_default(),
        }
    }

    /// The parts of all ranks.
    fn ranges(&self, ranks: u32) -> Ranges {
        (0..ranks).map(|rank| self.range(rank)).collect()
    }
}

/// How many elements each rank sends to and receives from each rank in an `all_to_all_v`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Counts {
    ranks: usize,
    /// For each rank: the number of elements that it sends to each rank, then the number that it receives from each.
    counts: Vec<usize>,
}

/// A pair of ranks with different numbers of elements sent and received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CountMismatch {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) sent: usize,
    pub(crate) received: usize,
}

impl Counts {
    /// From the gathered counts: for each of `ranks` ranks, what it sends to each rank, then what it receives from
    /// each.
    ///
    /// # Errors
    /// The first pair of ranks whose counts differ.
    pub(crate) fn new(ranks: u32, counts: Vec<usize>) -> Result<Self, CountMismatch> {
        let counts = Counts { ranks: ranks as usize, counts };
        for from in 0..ranks {
            for to in 0..ranks {
                let sent = counts.sent_by(from)[to as usize];
                let received = counts.received_by(to)[from as usize];
                if sent != received {
                    return Err(CountMismatch { from, to, sent, received });
                }
            }
        }
        Ok(counts)
    }

    /// Elements that `rank` sends, by receiver.
    pub(crate) fn sent_by(&self, rank: u32) -> &[usize] {
        &self.counts[2 * rank as usize * self.ranks..][..self.ranks]
    }

    /// Elements that `rank` receives, by sender.
    pub(crate) fn received_by(&self, rank: u32) -> &[usize] {
        &self.counts[(2 * rank as usize + 1) * self.ranks..][..self.ranks]
    }

    fn longest(&self) -> usize {
        self.counts.iter().copied().max().unwrap_or_default()
    }
}

/// The messages of one rank in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exchange {
    /// Ranges of the send buffer, by receiver. The rank's own range is empty.
    pub(crate) send: Ranges,
    /// Ranges of the receive buffer, by sender.
    pub(crate) receive: Ranges,
    /// The range of the send buffer that stays on this rank, and its destination; empty if it does not move.
    pub(crate) own: (Range<usize>, usize),
    /// Number of elements of the longest message of all ranks.
    pub(crate) longest: usize,
}

impl Exchange {
    /// The messages of `rank` of `ranks` ranks in a call on `len` elements; `None` if the call does not consist of
    /// messages only.
    pub(crate) fn of(call: &Call<'_>, rank: u32, ranks: u32, len: usize) -> Option<Self> {
        let nothing = || -> Ranges { (0..ranks).map(|_| 0..0).collect() };
        let shards = Partition::Shards { len, ranks };
        let (mut send, mut receive, longest) = match call {
            Call::AllToAll => (shards.ranges(ranks), shards.ranges(ranks), shards.longest()),
            Call::Gather { root } | Call::Scatter { root } => {
                // A scatter is a gather with sends and receives swapped.
                let (mut of_root, mut of_others) = (nothing(), nothing());
                if rank == *root {
                    of_root = shards.ranges(ranks);
                } else {
                    of_others[*root as usize] = shards.range(rank);
                }
                match call {
                    Call::Gather { .. } => (of_others, of_root, shards.longest()),
                    _ => (of_root, of_others, shards.longest()),
                }
            }
            Call::AllGatherV { counts } => {
                let parts = Partition::Counts(counts);
                let own = parts.range(rank);
                ((0..ranks).map(|_| own.clone()).collect(), parts.ranges(ranks), parts.longest())
            }
            Call::AllToAllV { counts, .. } => (
                Partition::Counts(counts.sent_by(rank)).ranges(ranks),
                Partition::Counts(counts.received_by(rank)).ranges(ranks),
                counts.longest(),
            ),
            &Call::SendRecv { peer, .. } => {
                let mut with_peer = nothing();
                with_peer[peer as usize] = 0..len;
                (with_peer.clone(), with_peer, len)
            }
            _ => return None,
        };
        let own = (&mut send[rank as usize], &mut receive[rank as usize]);
        let (own_sent, own_received) = (std::mem::take(own.0), std::mem::take(own.1));
        let own = match call {
            Call::AllToAllV { .. } => (own_sent, own_received.start),
            _ => (0..0, 0),
        };
        Some(Exchange { send, receive, own, longest })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn unequal_counts_are_found() {
        let counts = |received: usize| Counts::new(2, vec![5, 3, 5, 1, 1, 2, received, 2]);
        assert_eq!(counts(3).unwrap().sent_by(0), [5, 3]);
        assert_eq!(counts(3).unwrap().received_by(1), [3, 2]);
        assert_eq!(counts(4).unwrap_err(), CountMismatch { from: 0, to: 1, sent: 3, received: 4 });
    }

    proptest! {
        /// What one rank sends is what the other one receives.
        #[test]
        fn sender_and_receiver_agree_on_the_length(ranks in 1u32..6, len in 0usize..40, root in 0u32..6) {
            let (root, counts) = (root % ranks, [3, 0, 5, 1, 2, 4]);
            let calls = [
                (Call::AllToAll, len * ranks as usize),
                (Call::Gather { root }, len),
                (Call::Scatter { root }, len),
                (Call::AllGatherV { counts: &counts[..ranks as usize] }, counts[..ranks as usize].iter().sum()),
            ];
            for (call, len) in calls {
                let of = |rank| Exchange::of(&call, rank, ranks, len).unwrap();
                for from in 0..ranks {
                    for to in (0..ranks).filter(|to| *to != from) {
                        let message = of(from).send[to as usize].len();
                        prop_assert_eq!(message, of(to).receive[from as usize].len());
                        prop_assert!(message <= of(from).longest && of(from).longest == of(to).longest);
                    }
                }
            }
        }
    }
}
