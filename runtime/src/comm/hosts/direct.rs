//! Large reductions of ranks that share no memory: the rank that needs a part of the result gets the contributions of all
//! others to it, and combines them in rank order. In an all-reduce every rank does that for a part, and sends the result to
//! all others.
//!
//! The parts are cut into pieces, one for each *turn*. Contributions of some turns are on their way while those of an
//! earlier one are combined, so that no link is idle because one peer is late.

use std::collections::VecDeque;
use std::ops::Range;

use smallvec::SmallVec;

use super::HostsTransport;
use super::frame::PIECE_BYTES;
use super::reductions::reduce_part;
use super::wait::Awaited;
use crate::Result;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, ReduceOp, shard};

/// Number of turns whose contributions are on their way while those of another one are combined.
const AHEAD: usize = 2;
/// Number of turns into which a small payload is cut, and the smallest piece that is worth a message of its own.
const TURNS: usize = 4;
const MIN_PIECE: usize = 128 << 10;
/// Most bytes of memory for contributions, unless there are more ranks than cache lines in it.
const MEMORY: usize = 8 << 20;

/// Who needs which part of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Goal {
    /// All ranks need all of it.
    All,
    /// Every rank needs its shard.
    Shards,
    /// One rank needs all of it.
    One(u32),
}

/// Which elements a rank combines in which turn.
#[derive(Debug, Clone, Copy)]
struct Turns {
    goal: Goal,
    len: usize,
    ranks: u32,
    /// Elements of a piece.
    piece: usize,
}

impl Turns {
    fn new(goal: Goal, len: usize, element: usize, ranks: u32) -> Self {
        let most = (MEMORY / (AHEAD + 1) / ranks as usize).clamp(64, PIECE_BYTES);
        let part = match goal {
            Goal::One(_) => len * element,
            _ => shard(len, ranks, 0).len() * element,
        };
        let piece = (part / TURNS).max(MIN_PIECE).min(most) / 64 * 64;
        Turns { goal, len, ranks, piece: piece / element }
    }

    fn count(&self) -> usize {
        let longest = match self.goal {
            Goal::One(_) => self.len,
            _ => shard(self.len, self.ranks, 0).len(),
        };
        longest.div_ceil(self.piece)
    }

    /// The elements that `rank` combines in this turn.
    fn part(&self, turn: usize, rank: u32) -> Range<usize> {
        let Range { start, end } = match self.goal {
            Goal::All | Goal::Shards => shard(self.len, self.ranks, rank),
            Goal::One(root) => 0..if rank == root { self.len } else { 0 },
        };
        let at = |piece: usize| end.min(start + piece * self.piece);
        at(turn)..at(turn + 1)
    }
}

impl HostsTransport {
    /// Reduces `buffer` to where its result is needed, after the arrival.
    pub(super) fn direct_reduction(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        goal: Goal,
        call: &Signature,
    ) -> Result<()> {
        let (rank, ranks, dtype) = (self.members.rank(), self.members.size(), buffer.dtype());
        let (element, begin) = (dtype.size(), buffer.address());
        let turns = Turns::new(goal, buffer.len(), element, ranks);
        let (stride, count) = (turns.piece * element, turns.count());
        let memory = self.take_memory((AHEAD + 1) * (ranks as usize - 1) * stride);
        let slot = |turn: usize, number: usize| {
            let slot = turn % (AHEAD + 1) * (ranks as usize - 1) + number;
            memory.address().wrapping_add(slot * stride)
        };
        let part = |turn: usize, rank: u32| {
            let range = turns.part(turn, rank);
            (begin.wrapping_add(range.start * element), range.len() * element)
        };
        let in_order = || (0..ranks).filter(|peer| *peer != rank);
        let mut transfer = self.transfer(call);
        // Number of posts for bytes of each rank, so far and up to the contributions of the turns on their way.
        let mut expected: SmallVec<[usize; 8]> = SmallVec::from_elem(0, ranks as usize);
        let mut due = VecDeque::new();
        for turn in 0..count + AHEAD {
            if turn < count {
                for peer in self.others() {
                    let (address, bytes) = part(turn, peer);
                    // SAFETY: nobody writes to this part before its result arrives, for which `peer` needs these bytes.
                    transfer.send(peer, unsafe { std::slice::from_raw_parts(address, bytes) });
                }
                let (_, bytes) = part(turn, rank);
                for (number, peer) in in_order().enumerate() {
                    // SAFETY: a slot of a turn is posted again only when that turn is over.
                    transfer
                        .receive(peer, unsafe { std::slice::from_raw_parts_mut(slot(turn, number), bytes) });
                    expected[peer as usize] += usize::from(bytes > 0);
                }
                due.push_back(expected.clone());
            }
            let Some(turn) = turn.checked_sub(AHEAD) else { continue };
            let due = due.pop_front().expect("an entry for each turn");
            while in_order().any(|peer| transfer.received_posts(peer) < due[peer as usize]) {
                let after = transfer.completed();
                self.wait(Awaited::Change { after }, call, &mut transfer)?;
            }
            let (own, bytes) = part(turn, rank);
            let contributions: SmallVec<[&[u8]; 16]> = (0..ranks as usize - 1)
                // SAFETY: these contributions have arrived, and the slots are not posted again before they are combined.
                .map(|number| unsafe { std::slice::from_raw_parts(slot(turn, number).cast_const(), bytes) })
                .collect();
            // SAFETY: this rank's own part, of which nothing is posted.
            let result = unsafe { std::slice::from_raw_parts_mut(own, bytes) };
            reduce_part(dtype, op, rank, result, &contributions);
            self.membership.page().touch(self.membership.rank());
            for peer in self.others().filter(|_| goal == Goal::All) {
                let (address, theirs) = part(turn, peer);
                // SAFETY: the result is not written again; and the part of `peer` is sent, since its result needs it.
                unsafe {
                    transfer.send(peer, std::slice::from_raw_parts(own, bytes));
                    transfer.receive(peer, std::slice::from_raw_parts_mut(address, theirs));
                }
                expected[peer as usize] += usize::from(theirs > 0);
            }
        }
        self.wait(Awaited::Transfer, call, &mut transfer)?;
        self.staging = Some(memory);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_element_is_combined_once(
            ranks in 2u32..9,
            len in 0usize..3_000_000,
            element in prop::sample::select(vec![1usize, 2, 4, 8]),
            goal in 0u32..3,
        ) {
            let goal = [Goal::All, Goal::Shards, Goal::One(ranks - 1)][goal as usize];
            let turns = Turns::new(goal, len, element, ranks);
            let mut parts: Vec<Range<usize>> = Vec::new();
            for turn in 0..turns.count() {
                parts.extend((0..ranks).map(|rank| turns.part(turn, rank)).filter(|part| !part.is_empty()));
                prop_assert!((0..ranks).all(|rank| turns.part(turn, rank).len() <= turns.piece));
            }
            parts.sort_by_key(|part| part.start);
            let end = parts.iter().try_fold(0, |end, part| (part.start == end).then_some(part.end));
            prop_assert_eq!(end, Some(len));
            prop_assert!(turns.piece * element <= PIECE_BYTES && (turns.piece * element).is_multiple_of(64));
        }
    }
}
