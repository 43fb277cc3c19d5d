//! How a host buffer travels through staging memory: pure.
//!
//! A buffer of any size goes through memory of a fixed size in chunks. For each chunk it is decided here which bytes of
//! the buffer are put where in the stage, on what part of it NCCL works, and which bytes are taken back to where.

use super::call::Kind;

/// Bytes that travel between buffer and stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// First byte in the buffer.
    pub(super) host: usize,
    /// First byte in the stage.
    pub(super) stage: usize,
    pub(super) bytes: usize,
}

/// One turn through the stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) put: Vec<Piece>,
    /// Bytes of the stage where NCCL reads and where it writes.
    pub(super) from: usize,
    pub(super) to: usize,
    /// Elements as NCCL counts them.
    pub(super) count: usize,
    pub(super) take: Vec<Piece>,
}

/// A buffer and the stage it goes through.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) kind: Kind,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Elements of the buffer.
    pub(super) len: usize,
    /// Bytes of an element.
    pub(super) element: usize,
    /// Bytes of the stage: room for an element of every rank at least.
    pub(super) stage: usize,
}

impl Route {
    /// All chunks, none for an empty buffer. They are the same in number and length on all ranks.
    pub(super) fn chunks(self) -> impl Iterator<Item = Chunk> {
        let shards = if self.is_sharded() { self.ranks as usize } else { 1 };
        let (shard, most) = (self.len.div_ceil(shards), (self.stage / self.element / shards).max(1));
        (0..shard).step_by(most).map(move |begin| self.chunk(begin, most.min(shard - begin), shard))
    }

    fn is_sharded(&self) -> bool {
        matches!(self.kind, Kind::ReduceScatter(_) | Kind::AllGather)
    }

    /// The chunk of `count` elements from `begin` of each shard.
    fn chunk(&self, begin: usize, count: usize, shard: usize) -> Chunk {
        let bytes = count * self.element;
        // NCCL's shards are equal: where the buffer's last ones are shorter, the stage holds what belongs to nobody.
        let piece = |index: usize| {
            let host = (index * shard + begin) * self.element;
            let bytes = bytes.min((self.len * self.element).saturating_sub(host));
            Piece { host, stage: index * count * self.element, bytes }
        };
        let own = self.rank as usize;
        let all = || (0..self.ranks as usize).map(piece).filter(|piece| piece.bytes > 0).collect::<Vec<_>>();
        let own_piece = || Some(piece(own)).filter(|piece| piece.bytes > 0).into_iter().collect();
        let if_root = |root: u32| if root == self.rank { vec![piece(0)] } else { Vec::new() };
        let (put, take, from, to) = match self.kind {
            Kind::AllReduce(_) => (vec![piece(0)], vec![piece(0)], 0, 0),
            Kind::ReduceScatter(_) => (all(), own_piece(), 0, own * bytes),
            Kind::AllGather => (own_piece(), all(), own * bytes, 0),
            Kind::Broadcast { root } => {
                (if_root(root), if root == self.rank { Vec::new() } else { vec![piece(0)] }, 0, 0)
            }
            Kind::Reduce { root, .. } => (vec![piece(0)], if_root(root), 0, 0),
            Kind::Send { .. } => (vec![piece(0)], Vec::new(), 0, 0),
            Kind::Recv { .. } => (Vec::new(), vec![piece(0)], 0, 0),
        };
        Chunk { put, from, to, count, take }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::comm::ReduceOp;

    fn kinds() -> impl Strategy<Value = Kind> {
        let sum = ReduceOp::Sum;
        prop_oneof![
            Just(Kind::AllReduce(sum)),
            Just(Kind::ReduceScatter(sum)),
            Just(Kind::AllGather),
            (0u32..3).prop_map(|root| Kind::Broadcast { root }),
            (0u32..3).prop_map(move |root| Kind::Reduce { op: sum, root }),
        ]
    }

    /// What NCCL does to the stages of all ranks, on bytes that wrap.
    fn carry_out(kind: Kind, chunks: &[Chunk], element: usize, stages: &mut [Vec<u8>]) {
        let before = stages.to_vec();
        let bytes = chunks[0].count * element;
        let sum =
            |at: usize| before.iter().zip(chunks).fold(0u8, |sum, (s, c)| sum.wrapping_add(s[c.from + at]));
        for (rank, stage) in stages.iter_mut().enumerate() {
            let to = chunks[rank].to;
            for at in 0..bytes {
                match kind {
                    Kind::AllReduce(_) => stage[to + at] = sum(at),
                    Kind::ReduceScatter(_) => stage[to + at] = sum(rank * bytes + at),
                    Kind::AllGather => {
                        for peer in 0..before.len() {
                            stage[to + peer * bytes + at] = before[peer][chunks[peer].from + at];
                        }
                    }
                    Kind::Broadcast { root } => stage[to + at] = before[root as usize][at],
                    Kind::Reduce { root, .. } if root as usize == rank => stage[to + at] = sum(at),
                    _ => {}
                }
            }
        }
    }

    proptest! {
        #[test]
        fn what_arrives_is_what_the_operation_means(kind in kinds(), len in 0usize..120, element in 1usize..3, room in 1usize..9) {
            let ranks = 3usize;
            let stage = room * ranks * element;
            let route = |rank: usize| Route { kind, rank: rank as u32, ranks: 3, len, element, stage };
            let input: Vec<Vec<u8>> =
                (0..ranks).map(|rank| (0..len * element).map(|i| (i * 7 + rank * 91) as u8).collect()).collect();
            let (mut buffers, mut stages) = (input.clone(), vec![vec![0; stage]; ranks]);
            let plans: Vec<Vec<Chunk>> = (0..ranks).map(|rank| route(rank).chunks().collect()).collect();
            for turn in 0..plans[0].len() {
                let chunks: Vec<Chunk> = plans.iter().map(|plan| plan[turn].clone()).collect();
                for rank in 0..ranks {
                    for piece in &chunks[rank].put {
                        stages[rank][piece.stage..][..piece.bytes].copy_from_slice(&buffers[rank][piece.host..][..piece.bytes]);
                    }
                }
                carry_out(kind, &chunks, element, &mut stages);
                for rank in 0..ranks {
                    for piece in &chunks[rank].take {
                        buffers[rank][piece.host..][..piece.bytes].copy_from_slice(&stages[rank][piece.stage..][..piece.bytes]);
                    }
                }
            }
            let sum = |i: usize| input.iter().fold(0u8, |sum, input| sum.wrapping_add(input[i]));
            for (rank, buffer) in buffers.iter().enumerate() {
                for (i, found) in buffer.iter().enumerate() {
                    let owner = i / (len.div_ceil(ranks) * element);
                    let expected = match kind {
                        Kind::AllReduce(_) => sum(i),
                        Kind::ReduceScatter(_) if owner == rank => sum(i),
                        Kind::AllGather => input[owner][i],
                        Kind::Broadcast { root } => input[root as usize][i],
                        Kind::Reduce { root, .. } if root as usize == rank => sum(i),
                        _ => input[rank][i],
                    };
                    prop_assert_eq!(*found, expected, "byte {} of rank {}", i, rank);
                }
            }
        }
    }
}
