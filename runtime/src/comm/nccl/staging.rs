//! How host buffers are transferred through staging memory: pure functions.
//!
//! A buffer of any size is transferred in chunks through memory of a fixed size. For each chunk, this module decides
//! which bytes of the buffer are copied to which place of the stage, on which part of the stage NCCL works, and which
//! bytes are copied back.

use std::ops::Range;

use smallvec::{SmallVec, smallvec};

use super::call::NcclOp;
use crate::comm::exchange::Exchange;

/// Bytes to copy between buffer and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// First byte in the buffer.
    pub(super) host: usize,
    /// First byte in the stage.
    pub(super) stage: usize,
    pub(super) bytes: usize,
}

/// An NCCL call on the stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StageCall {
    pub(super) kind: NcclOp,
    /// Byte offsets in the stage at which NCCL reads and writes.
    pub(super) from: usize,
    pub(super) to: usize,
    /// Number of elements as NCCL counts them.
    pub(super) count: usize,
}

/// One pass through the stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) to_stage: Vec<Piece>,
    /// Calls that are enqueued together.
    pub(super) calls: SmallVec<[StageCall; 1]>,
    pub(super) from_stage: Vec<Piece>,
}

/// The transfer of a buffer through a stage.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    pub(super) kind: NcclOp,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Elements of the buffer.
    pub(super) len: usize,
    /// Bytes of an element.
    pub(super) element: usize,
    /// Bytes of the stage, at least one element for every rank.
    pub(super) stage: usize,
}

impl Transfer {
    /// All chunks; none for an empty buffer. Their number and lengths are the same on all ranks.
    pub(super) fn chunks(self) -> impl Iterator<Item = Chunk> {
        let shards = if self.is_sharded() { self.ranks as usize } else { 1 };
        let (shard, most) = (self.len.div_ceil(shards), (self.stage / self.element / shards).max(1));
        (0..shard).step_by(most).map(move |begin| self.chunk(begin, most.min(shard - begin), shard))
    }

    fn is_sharded(&self) -> bool {
        matches!(self.kind, NcclOp::ReduceScatter(_) | NcclOp::AllGather)
    }

    /// The chunk of `count` elements from `begin` of each shard.
    fn chunk(&self, begin: usize, count: usize, shard: usize) -> Chunk {
        let bytes = count * self.element;
        // NCCL's shards are equal: if the buffer's last ones are shorter, the stage has padding.
        let piece = |index: usize| {
            let host = (index * shard + begin) * self.element;
            let bytes = bytes.min((self.len * self.element).saturating_sub(host));
            Piece { host, stage: index * count * self.element, bytes }
        };
        let own = self.rank as usize;
        let all = || (0..self.ranks as usize).map(piece).filter(|piece| piece.bytes > 0).collect::<Vec<_>>();
        let own_piece = || Some(piece(own)).filter(|piece| piece.bytes > 0).into_iter().collect();
        let if_root = |root: u32| if root == self.rank { vec![piece(0)] } else { Vec::new() };
        let (to_stage, from_stage, from, to) = match self.kind {
            NcclOp::AllReduce(_) => (vec![piece(0)], vec![piece(0)], 0, 0),
            NcclOp::ReduceScatter(_) => (all(), own_piece(), 0, own * bytes),
            NcclOp::AllGather => (own_piece(), all(), own * bytes, 0),
            NcclOp::Broadcast { root } => {
                (if_root(root), if root == self.rank { Vec::new() } else { vec![piece(0)] }, 0, 0)
            }
            NcclOp::Reduce { root, .. } => (vec![piece(0)], if_root(root), 0, 0),
            NcclOp::Send { .. } => (vec![piece(0)], Vec::new(), 0, 0),
            NcclOp::Recv { .. } => (Vec::new(), vec![piece(0)], 0, 0),
        };
        let calls = smallvec![StageCall { kind: self.kind, from, to, count }];
        Chunk { to_stage, calls, from_stage }
    }
}

/// The chunks of messages between pairs of ranks, with elements of `element` bytes. Half of the stage is for sending
/// and half for receiving, with a piece for every rank. Both ends of a message cut it in the same way.
pub(super) fn exchange_chunks(
    exchange: &Exchange,
    element: usize,
    stage: usize,
) -> impl Iterator<Item = Chunk> {
    let half = stage / 2;
    let most = (half / exchange.send.len() / element).max(1);
    let messages = || exchange.send.iter().chain(&exchange.receive);
    let longest = messages().map(Range::len).max().unwrap_or_default();
    (0..longest).step_by(most).map(move |begin| {
        let mut chunk = Chunk { to_stage: Vec::new(), calls: SmallVec::new(), from_stage: Vec::new() };
        let piece = |message: &Range<usize>, offset: usize| {
            let count = message.len().saturating_sub(begin).min(most);
            let (host, bytes) = ((message.start + begin) * element, count * element);
            (count > 0).then_some((Piece { host, stage: offset, bytes }, count))
        };
        for (peer, (send, receive)) in (0..).zip(exchange.send.iter().zip(&exchange.receive)) {
            let offset = peer as usize * most * element;
            if let Some((piece, count)) = piece(send, offset) {
                chunk.to_stage.push(piece);
                chunk.calls.push(StageCall {
                    kind: NcclOp::Send { to: peer },
                    from: piece.stage,
                    to: 0,
                    count,
                });
            }
            if let Some((piece, count)) = piece(receive, half + offset) {
                chunk.from_stage.push(piece);
                chunk.calls.push(StageCall {
                    kind: NcclOp::Recv { from: peer },
                    from: 0,
                    to: piece.stage,
                    count,
                });
            }
        }
        chunk
    })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::comm::call::Call;
    use crate::comm::exchange::Counts;
    use crate::comm::{Buffer, ReduceOp};

    fn kinds() -> impl Strategy<Value = NcclOp> {
        let sum = ReduceOp::Sum;
        prop_oneof![
            Just(NcclOp::AllReduce(sum)),
            Just(NcclOp::ReduceScatter(sum)),
            Just(NcclOp::AllGather),
            (0u32..3).prop_map(|root| NcclOp::Broadcast { root }),
            (0u32..3).prop_map(move |root| NcclOp::Reduce { op: sum, root }),
        ]
    }

    /// What NCCL does to the stages of all ranks, with wrapping bytes.
    fn simulate_nccl(kind: NcclOp, chunks: &[Chunk], element: usize, stages: &mut [Vec<u8>]) {
        let before = stages.to_vec();
        let bytes = chunks[0].calls[0].count * element;
        let sum = |at: usize| {
            before.iter().zip(chunks).fold(0u8, |sum, (s, c)| sum.wrapping_add(s[c.calls[0].from + at]))
        };
        for (rank, stage) in stages.iter_mut().enumerate() {
            let to = chunks[rank].calls[0].to;
            for at in 0..bytes {
                match kind {
                    NcclOp::AllReduce(_) => stage[to + at] = sum(at),
                    NcclOp::ReduceScatter(_) => stage[to + at] = sum(rank * bytes + at),
                    NcclOp::AllGather => {
                        for peer in 0..before.len() {
                            stage[to + peer * bytes + at] = before[peer][chunks[peer].calls[0].from + at];
                        }
                    }
                    NcclOp::Broadcast { root } => stage[to + at] = before[root as usize][at],
                    NcclOp::Reduce { root, .. } if root as usize == rank => stage[to + at] = sum(at),
                    _ => {}
                }
            }
        }
    }

    proptest! {
        #[test]
        fn chunks_carry_out_the_operation(kind in kinds(), len in 0usize..120, element in 1usize..3, room in 1usize..9) {
            let ranks = 3usize;
            let stage = room * ranks * element;
            let transfer = |rank: usize| Transfer { kind, rank: rank as u32, ranks: 3, len, element, stage };
            let input: Vec<Vec<u8>> =
                (0..ranks).map(|rank| (0..len * element).map(|i| (i * 7 + rank * 91) as u8).collect()).collect();
            let (mut buffers, mut stages) = (input.clone(), vec![vec![0; stage]; ranks]);
            let plans: Vec<Vec<Chunk>> = (0..ranks).map(|rank| transfer(rank).chunks().collect()).collect();
            for turn in 0..plans[0].len() {
                let chunks: Vec<Chunk> = plans.iter().map(|plan| plan[turn].clone()).collect();
                for rank in 0..ranks {
                    for piece in &chunks[rank].to_stage {
                        stages[rank][piece.stage..][..piece.bytes].copy_from_slice(&buffers[rank][piece.host..][..piece.bytes]);
                    }
                }
                simulate_nccl(kind, &chunks, element, &mut stages);
                for rank in 0..ranks {
                    for piece in &chunks[rank].from_stage {
                        buffers[rank][piece.host..][..piece.bytes].copy_from_slice(&stages[rank][piece.stage..][..piece.bytes]);
                    }
                }
            }
            let sum = |i: usize| input.iter().fold(0u8, |sum, input| sum.wrapping_add(input[i]));
            for (rank, buffer) in buffers.iter().enumerate() {
                for (i, found) in buffer.iter().enumerate() {
                    let owner = i / (len.div_ceil(ranks) * element);
                    let expected = match kind {
                        NcclOp::AllReduce(_) => sum(i),
                        NcclOp::ReduceScatter(_) if owner == rank => sum(i),
                        NcclOp::AllGather => input[owner][i],
                        NcclOp::Broadcast { root } => input[root as usize][i],
                        NcclOp::Reduce { root, .. } if root as usize == rank => sum(i),
                        _ => input[rank][i],
                    };
                    prop_assert_eq!(*found, expected, "byte {} of rank {}", i, rank);
                }
            }
        }

        /// Messages of any lengths between three ranks.
        #[test]
        fn exchanged_messages_arrive_unchanged(lens in prop::collection::vec(0usize..40, 9), element in 1usize..3, room in 1usize..9) {
            let ranks = 3usize;
            let stage = 2 * room * ranks * element;
            let counts: Vec<usize> = (0..ranks)
                .flat_map(|rank| {
                    let sent = (0..ranks).map(move |to| 3 * rank + to);
                    sent.chain((0..ranks).map(move |from| 3 * from + rank))
                })
                .map(|message| lens[message])
                .collect();
            let counts = Counts::new(3, counts).unwrap();
            let of = |rank: usize| {
                let len = counts.received_by(rank as u32).iter().sum();
                let from = Buffer::zeroed::<u8>(0);
                Exchange::of(&Call::AllToAllV { from: &from, counts: &counts }, rank as u32, 3, len).unwrap()
            };
            let input = |rank: usize, at: usize| (at * 7 + rank * 91) as u8;
            let mut received: Vec<Vec<Option<u8>>> =
                (0..ranks).map(|rank| vec![None; counts.received_by(rank as u32).iter().sum::<usize>() * element]).collect();
            // Bytes in flight, by sender and receiver.
            let mut links = vec![VecDeque::new(); ranks * ranks];
            let plans: Vec<Vec<Chunk>> = (0..ranks).map(|rank| exchange_chunks(&of(rank), element, stage).collect()).collect();
            for turn in 0..plans.iter().map(Vec::len).max().unwrap() {
                let mut stages = vec![vec![0u8; stage]; ranks];
                let chunks = || (0..ranks).filter_map(|rank| Some((rank, plans[rank].get(turn)?)));
                for (rank, chunk) in chunks() {
                    for piece in &chunk.to_stage {
                        for at in 0..piece.bytes {
                            stages[rank][piece.stage + at] = input(rank, piece.host + at);
                        }
                    }
                    for call in &chunk.calls {
                        if let NcclOp::Send { to } = call.kind {
                            let bytes = &stages[rank][call.from..][..call.count * element];
                            links[rank * ranks + to as usize].push_back(bytes.to_vec());
                        }
                    }
                }
                for (rank, chunk) in chunks() {
                    for call in &chunk.calls {
                        if let NcclOp::Recv { from } = call.kind {
                            let bytes = links[from as usize * ranks + rank].pop_front().unwrap();
                            stages[rank][call.to..][..call.count * element].copy_from_slice(&bytes);
                        }
                    }
                    for piece in &chunk.from_stage {
                        for at in 0..piece.bytes {
                            let byte = &mut received[rank][piece.host + at];
                            prop_assert_eq!(byte.replace(stages[rank][piece.stage + at]), None);
                        }
                    }
                }
            }
            prop_assert!(links.iter().all(VecDeque::is_empty));
            for to in 0..ranks {
                let mut at = 0;
                for from in 0..ranks {
                    let begin = counts.sent_by(from as u32)[..to].iter().sum::<usize>() * element;
                    for byte in 0..lens[3 * from + to] * element {
                        let expected = (from != to).then(|| input(from, begin + byte));
                        prop_assert_eq!(received[to][at], expected);
                        at += 1;
                    }
                }
            }
        }
    }
}
