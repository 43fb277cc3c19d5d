//! Which bytes a rank sends to and receives from every other rank in a collective without a reduction. Pure functions.

use std::ops::Range;

use smallvec::SmallVec;

use super::runs::Runs;
use crate::comm::call::{Call, SegmentUpdate};
use crate::comm::exchange::{Exchange, Partition};
use crate::comm::shard;

/// Ranges of elements with the rank that they go to or come from.
type Parts = SmallVec<[(u32, Range<usize>); 8]>;

/// The payload of one rank in a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Moves {
    /// In the order in which they are sent.
    pub(super) send: Parts,
    pub(super) receive: Parts,
    /// Number of elements of the most that any rank sends to another one: the same on all ranks.
    pub(super) longest: usize,
}

impl Moves {
    /// The payload of `rank` of `ranks` in a call on `len` elements; `None` if it is a reduction or a message.
    pub(super) fn of(call: &Call<'_>, (rank, ranks): (u32, u32), len: usize) -> Option<Self> {
        let others = || (1..ranks).map(move |distance| (rank + distance) % ranks);
        let moves = match call {
            Call::Barrier => Moves { send: Parts::new(), receive: Parts::new(), longest: 0 },
            Call::AllGather => Self::of_segments(std::slice::from_ref(&(0..len)), (rank, ranks)),
            Call::UpdateAllGather(SegmentUpdate { segments, .. }) => {
                Self::of_segments(segments, (rank, ranks))
            }
            Call::Broadcast { root } if *root == rank => Moves {
                send: others().map(|peer| (peer, 0..len)).collect(),
                receive: Parts::new(),
                longest: len,
            },
            Call::Broadcast { root } => {
                Moves { send: Parts::new(), receive: Parts::from_iter([(*root, 0..len)]), longest: len }
            }
            _ => {
                let Exchange { send, receive, longest, .. } = Exchange::of(call, rank, ranks, len)?;
                let parts = |ranges: &[Range<usize>]| {
                    others().map(|peer| (peer, ranges[peer as usize].clone())).collect()
                };
                Moves { send: parts(&send), receive: parts(&receive), longest }
            }
        };
        Some(moves)
    }

    /// Gathers the shards of all ranks of each segment.
    fn of_segments(segments: &[Range<usize>], (rank, ranks): (u32, u32)) -> Self {
        let shard_of = |segment: &Range<usize>, rank: u32| {
            let shard = Partition::Shards { len: segment.len(), ranks }.range(rank);
            segment.start + shard.start..segment.start + shard.end
        };
        let (mut send, mut receive) = (Parts::new(), Parts::new());
        for distance in 1..ranks {
            let peer = (rank + distance) % ranks;
            send.extend(segments.iter().map(|segment| (peer, shard_of(segment, rank))));
            receive.extend(segments.iter().map(|segment| (peer, shard_of(segment, peer))));
        }
        let longest = segments.iter().map(|segment| shard(segment.len(), ranks, 0).len()).sum();
        Moves { send, receive, longest }
    }
}

/// The payload of one rank in a call in which each part is sent to all ranks.
pub(super) struct Relayed {
    /// What crosses from one rank to another by the wire.
    pub(super) moves: Moves,
    /// Parts of this rank that it copies to the other ranks of its run.
    pub(super) copies: SmallVec<[Range<usize>; 8]>,
}

impl Moves {
    /// Leaves out what the ranks of a run that are `in_place` copy to each other. One rank of such a run receives each
    /// part of another run.
    pub(super) fn relayed(self, runs: &Runs, in_place: &[bool]) -> Relayed {
        let own_run = in_place[runs.position()];
        let is_own = |rank: u32| runs.own().contains(&rank);
        let mut copies = SmallVec::new();
        for (_, range) in self.send.iter().filter(|(to, _)| own_run && is_own(*to)) {
            if copies.last() != Some(range) && !copies.contains(range) {
                copies.push(range.clone());
            }
        }
        let part = runs.part_of(runs.rank());
        let takes = |to: u32| !in_place[runs.index_of(to)] || runs.worker_beside(to, part) == to;
        let send = self.send.into_iter().filter(|(to, _)| if is_own(*to) { !own_run } else { takes(*to) });
        let is_taker = |from: u32| !own_run || runs.worker(runs.part_of(from)) == runs.rank();
        let receive = self
            .receive
            .into_iter()
            .filter(|(from, _)| if is_own(*from) { !own_run } else { is_taker(*from) });
        let moves = Moves { send: send.collect(), receive: receive.collect(), longest: self.longest };
        Relayed { moves, copies }
    }
}

/// Parts of a buffer that are written while others are read.
pub(super) struct Carved<'a> {
    /// The parts that are written, in the order of the request.
    pub(super) written: Vec<&'a mut [u8]>,
    /// The rest, with the position of each part.
    rest: Vec<(usize, &'a [u8])>,
}

/// Cuts `bytes` into the parts to be written, which are disjoint, and the rest.
pub(super) fn carve<'a>(mut bytes: &'a mut [u8], written: &[Range<usize>]) -> Carved<'a> {
    let mut order: Vec<usize> = (0..written.len()).collect();
    order.sort_unstable_by_key(|index| (written[*index].start, written[*index].end));
    let mut parts: Vec<&mut [u8]> = written.iter().map(|_| &mut [][..]).collect();
    let (mut rest, mut at) = (Vec::new(), 0);
    for index in order {
        let Range { start, end } = written[index];
        let (before, from_start) = bytes.split_at_mut(start - at);
        let (part, behind) = from_start.split_at_mut(end - start);
        rest.push((at, &*before));
        parts[index] = part;
        (bytes, at) = (behind, end);
    }
    rest.push((at, &*bytes));
    Carved { written: parts, rest }
}

impl<'a> Carved<'a> {
    /// Bytes that are not written.
    ///
    /// # Panics
    /// If some of them are.
    pub(super) fn read(&self, range: &Range<usize>) -> &'a [u8] {
        let holds = |(at, bytes): &&(usize, &[u8])| *at <= range.start && range.end <= at + bytes.len();
        let (at, bytes) = self.rest.iter().find(holds).expect("a part that is sent is not received");
        &bytes[range.start - at..range.end - at]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What one rank sends is what the other one receives, and no rank sends what it receives, except in an
        /// all-to-all.
        #[test]
        fn senders_and_receivers_agree(ranks in 2u32..6, len in 0usize..50, root in 0u32..6) {
            let (root, len) = (root % ranks, len * ranks as usize);
            let segments = [len / 9..len / 3, len / 2..len];
            for index in 0..7 {
                let mut nothing = |_: usize, _: usize, _: &mut crate::Buffer| ();
                let update = SegmentUpdate { segments: &segments, block: 1, update: &mut nothing };
                let counts = vec![len / ranks as usize; ranks as usize];
                let call = match index {
                    0 => Call::Barrier,
                    1 => Call::AllGather,
                    2 => Call::UpdateAllGather(update),
                    3 => Call::Broadcast { root },
                    4 => Call::Gather { root },
                    5 => Call::Scatter { root },
                    _ => Call::AllGatherV { counts: &counts },
                };
                let all: Vec<Moves> =
                    (0..ranks).map(|rank| Moves::of(&call, (rank, ranks), len).unwrap()).collect();
                for (from, moves) in (0..).zip(&all) {
                    let mut bytes = vec![0; len];
                    let receive: Vec<_> = moves.receive.iter().map(|(_, range)| range.clone()).collect();
                    let carved = carve(&mut bytes, &receive);
                    for (to, range) in &moves.send {
                        prop_assert_eq!(carved.read(range).len(), range.len());
                        let theirs = all[*to as usize].receive.iter().filter(|(peer, _)| *peer == from);
                        prop_assert!(theirs.clone().any(|(_, theirs)| theirs == range), "{} to {}", from, to);
                        let total: usize = theirs.map(|(_, range)| range.len()).sum();
                        prop_assert!(total <= moves.longest && moves.longest == all[0].longest);
                    }
                }
            }
        }

        /// Every rank gets each part of the others: by the wire, or from a rank of its run that shares memory. No part
        /// enters a run in place twice.
        #[test]
        fn each_part_enters_a_run_once(hosts in prop::collection::vec(0u32..3, 2..8), shares: [bool; 8], root in 0u32..8) {
            let ranks = hosts.len() as u32;
            let len = 10 * ranks as usize;
            for call in [Call::AllGather, Call::Broadcast { root: root % ranks }] {
                let relayed: Vec<(Runs, Relayed)> = (0..ranks)
                    .map(|rank| {
                        let runs = Runs::new(hosts.iter().copied(), rank);
                        let in_place: Vec<bool> =
                            (0..runs.count()).map(|run| runs.run(run).len() == 1 || shares[run]).collect();
                        let relayed = Moves::of(&call, (rank, ranks), len).unwrap().relayed(&runs, &in_place);
                        (runs, relayed)
                    })
                    .collect();
                let mut has = vec![vec![0; len]; ranks as usize];
                for (rank, (runs, Relayed { moves, copies })) in (0..).zip(&relayed) {
                    let shares = runs.own().len() > 1 && shares[runs.position()];
                    let received = moves.receive.iter().map(|(_, range)| range);
                    received.clone().cloned().flatten().for_each(|element| has[rank as usize][element] += 1);
                    if shares {
                        for other in runs.own().filter(|other| *other != rank) {
                            let copied = received.clone().chain(copies).cloned().flatten();
                            copied.for_each(|element| has[other as usize][element] += 1);
                        }
                    }
                    for (to, range) in &moves.send {
                        let theirs = &relayed[*to as usize].1.moves.receive;
                        prop_assert!(theirs.contains(&(rank, range.clone())));
                    }
                    let sent_to = |from: u32| relayed[from as usize].1.moves.send.iter().filter(|(to, _)| *to == rank).count();
                    let from = |from: u32| moves.receive.iter().filter(|(rank, _)| *rank == from).count();
                    prop_assert!((0..ranks).all(|rank| sent_to(rank) == from(rank)));
                }
                for (rank, elements) in (0..).zip(has) {
                    let own = |element: usize| match call {
                        Call::Broadcast { root } => rank == root,
                        _ => shard(len, ranks, rank).contains(&element),
                    };
                    prop_assert!(elements.iter().enumerate().all(|(element, count)| *count == i32::from(!own(element))));
                }
            }
        }
    }
}
