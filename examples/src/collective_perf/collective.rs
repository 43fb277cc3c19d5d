//! The collectives that can be measured, and their results.

use std::ops::Range;

use clap::ValueEnum;
use mgpu::{Buffer, Communicator, ReduceOp};
use serde::{Deserialize, Serialize};

/// Root of broadcast, scatter, reduce and gather.
pub(super) const ROOT: u32 = 0;

/// A collective of the communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    AllToAll,
    Gather,
    Scatter,
}

impl std::fmt::Display for Collective {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::AllToAll => "all_to_all",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
        })
    }
}

/// The contents of a part of a buffer after a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Contents {
    /// The reduction over all ranks.
    Reduction,
    /// The input of this rank at the same place.
    InputOf(u32),
    /// The input of `rank`, `by` elements further on.
    MovedInputOf { rank: u32, by: isize },
}

impl Collective {
    /// Runs the collective and waits for it.
    pub(super) fn run(self, comm: &mut Communicator, buffer: Buffer, op: ReduceOp) -> mgpu::Result<Buffer> {
        match self {
            Collective::AllReduce => comm.all_reduce(buffer, op),
            Collective::ReduceScatter => comm.reduce_scatter(buffer, op),
            Collective::AllGather => comm.all_gather(buffer),
            Collective::Broadcast => comm.broadcast(buffer, ROOT),
            Collective::Reduce => comm.reduce(buffer, op, ROOT),
            Collective::AllToAll => comm.all_to_all(buffer),
            Collective::Gather => comm.gather(buffer, ROOT),
            Collective::Scatter => comm.scatter(buffer, ROOT),
        }?
        .wait()
    }

    /// Whether the buffer consists of one shard per rank.
    pub(super) fn is_sharded(self) -> bool {
        !matches!(self, Collective::AllReduce | Collective::Broadcast | Collective::Reduce)
    }

    /// Whether it is a reduction.
    pub(super) fn is_reduction(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce)
    }

    /// Whether one buffer in GPU memory is enough: NCCL's send and receive need two for an exchange of shards.
    pub(super) fn works_in_place_on_devices(self) -> bool {
        self != Collective::AllToAll
    }

    /// Factor from bytes per second to bus bandwidth, as derived in nccl-tests' `doc/PERFORMANCE.md`.
    pub(super) fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::AllToAll
            | Collective::Gather
            | Collective::Scatter => (n - 1.0) / n,
            Collective::Broadcast | Collective::Reduce => 1.0,
        }
    }

    /// The contents of the `len` elements of `rank` afterwards. Parts that are not listed are unspecified.
    pub(super) fn outcome(self, rank: u32, ranks: u32, len: usize) -> Vec<(Range<usize>, Contents)> {
        let shard = |rank: u32| {
            let shard = len / ranks as usize;
            rank as usize * shard..(rank as usize + 1) * shard
        };
        let shards_of_all = || (0..ranks).map(|rank| (shard(rank), Contents::InputOf(rank))).collect();
        match self {
            Collective::AllReduce => vec![(0..len, Contents::Reduction)],
            Collective::ReduceScatter => vec![(shard(rank), Contents::Reduction)],
            Collective::AllGather => shards_of_all(),
            Collective::Gather if rank == ROOT => shards_of_all(),
            Collective::Gather => vec![(0..len, Contents::InputOf(rank))],
            Collective::Scatter => {
                let own = shard(rank);
                let others = [0..own.start, own.end..len].map(|part| (part, Contents::InputOf(rank)));
                others.into_iter().chain([(own, Contents::InputOf(ROOT))]).collect()
            }
            Collective::AllToAll => {
                let by = |peer: u32| (rank as isize - peer as isize) * (len / ranks as usize) as isize;
                let from = |peer| (shard(peer), Contents::MovedInputOf { rank: peer, by: by(peer) });
                (0..ranks).map(from).collect()
            }
            Collective::Broadcast => vec![(0..len, Contents::InputOf(ROOT))],
            Collective::Reduce if rank == ROOT => vec![(0..len, Contents::Reduction)],
            Collective::Reduce => vec![(0..len, Contents::InputOf(rank))],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_same_everywhere() {
        for collective in Collective::value_variants() {
            let name = collective.to_string();
            assert_eq!(Collective::from_str(&name, false), Ok(*collective));
            assert_eq!(serde_json::to_value(collective).unwrap(), name);
        }
    }

    #[test]
    fn shards_tile_the_buffer() {
        let gathered = Collective::AllGather.outcome(1, 3, 12);
        let expected =
            [(0..4, 0), (4..8, 1), (8..12, 2)].map(|(range, rank)| (range, Contents::InputOf(rank)));
        assert_eq!(gathered, expected);
        assert_eq!(Collective::ReduceScatter.outcome(2, 3, 12), [(8..12, Contents::Reduction)]);
    }
}
