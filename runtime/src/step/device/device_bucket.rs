//! A bucket on a GPU: the elements that this rank updates, and where they are.
//!
//! A sharded bucket is cut into n equal shards of whole vectors, one for each rank. Every rank updates the rest,
//! fewer than 8·n elements, itself. A replicated bucket has no shards and consists of the rest only. (On the CPU,
//! where ranks share memory, shards may differ in length; NCCL's must be equal.) Under [`Placement::Shared`] rank 0
//! updates everything, and under [`Placement::Host`] no GPU updates anything.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use mgpu_kernels::cuda::{Device, Event};
use mgpu_kernels::digest::cuda::{Part, parts, whole_parts};
use mgpu_kernels::optimizer::chunk::{Chunk, chunks};

use super::super::config::{DataParallelConfig, Placement};
use super::ALIGNMENT;
use crate::bucket::BucketPlan;
use crate::{Layout, Result};

/// A shard's length is a multiple of this many elements: 16 bytes of bf16.
const VECTOR: usize = 8;

/// A bucket on a GPU, and the events of its exchange.
#[derive(Debug)]
pub(super) struct DeviceBucket {
    pub(super) plan: BucketPlan,
    /// Elements of the arena: the bucket's tensors and the padding after them.
    pub(super) elements: Range<usize>,
    /// Length of the shard of each rank, and this rank's number.
    shard: usize,
    rank: usize,
    /// Elements that this rank updates besides its shard.
    rest: Range<usize>,
    /// Where the optimizer's state of this rank's elements begins: first that of its shard, then that of the rest.
    state: usize,
    /// Byte ranges in the table of chunks: those of this rank's shard, and those of the rest.
    pub(super) chunks: [Range<usize>; 2],
    /// Byte range in the table of what is checked for non-finite gradients.
    pub(super) parts: Range<usize>,
    /// Recorded after the compute stream has written all gradients of the bucket, or updated this rank's shard of the
    /// parameters.
    pub(super) written: Event,
    /// Recorded after the exchange stream has reduced the gradients, or gathered the parameters.
    pub(super) exchanged: Event,
}

impl DeviceBucket {
    /// Elements of all shards.
    pub(super) fn shards(&self, ranks: u32) -> Range<usize> {
        self.elements.start..self.elements.start + self.shard * ranks as usize
    }

    /// Elements of this rank's shard; empty in a replicated bucket.
    pub(super) fn own(&self) -> Range<usize> {
        let begin = self.elements.start + self.shard * self.rank;
        begin..begin + self.shard
    }

    /// Elements that this rank updates besides its shard: what remains of the bucket, the same on all ranks, if every
    /// rank has a copy of the parameters.
    pub(super) fn rest(&self) -> Range<usize> {
        self.rest.clone()
    }

    /// Ranges of the optimizer's state: of this rank's shard, and of the rest.
    pub(super) fn states(&self) -> [Range<usize>; 2] {
        let between = self.state + self.shard;
        [self.state..between, between..between + self.rest.len()]
    }

    /// Whether each rank only updates a part of it.
    pub(super) fn is_sharded(&self) -> bool {
        self.shard > 0
    }
}

/// The buckets of a model.
#[derive(Debug)]
pub(super) struct DeviceBuckets {
    /// In the expected order of completion.
    pub(super) all: Vec<DeviceBucket>,
    /// Number of elements whose optimizer state this rank holds.
    pub(super) states: usize,
    /// What the optimizer updates on this rank, bucket by bucket.
    pub(super) chunks: Vec<Chunk>,
    /// What is checked of this rank's own gradients, bucket by bucket.
    pub(super) parts: Vec<Part>,
    /// What is checked of the reduced gradients: all elements that this rank updates.
    pub(super) reduced: Vec<Part>,
}

impl DeviceBuckets {
    /// Creates the buckets `plans` for rank `rank` of `ranks`.
    pub(super) fn split(
        device: &Arc<Device>,
        layout: &Layout,
        plans: &[BucketPlan],
        config: &DataParallelConfig,
        (rank, ranks): (u32, u32),
    ) -> Result<Self> {
        // From the beginning of the arena, so that states have its order. Sorted by tensors, because two buckets may
        // begin at the same element if one is empty.
        let mut order: Vec<usize> = (0..plans.len()).collect();
        order.sort_by_key(|index| plans[*index].tensors.start);
        let mut all: Vec<Option<DeviceBucket>> = plans.iter().map(|_| None).collect();
        let (mut states, mut chunk_table, mut part_table) = (0, Vec::new(), Vec::new());
        let mut reduced = Vec::new();
        for index in order {
            let plan = plans[index].clone();
            let elements = plan.elements.start..padded_end(layout, plan.tensors.end - 1);
            let sharded = ranks > 1
                && config.placement == Placement::Replicated
                && config
                    .shard_from
                    .bytes(None)
                    .is_some_and(|least| size_of::<f32>() * elements.len() >= least);
            let shard = if sharded { elements.len() / ranks as usize / VECTOR * VECTOR } else { 0 };
            let rest = match config.placement {
                Placement::Replicated => elements.start + shard * ranks as usize..elements.end,
                Placement::Shared if rank == 0 => elements.clone(),
                Placement::Shared | Placement::Host => elements.end..elements.end,
            };
            let mut bucket = DeviceBucket {
                shard,
                rank: rank as usize,
                rest,
                state: states,
                chunks: [0..0, 0..0],
                parts: 0..0,
                written: Event::new(device)?,
                exchanged: Event::new(device)?,
                elements,
                plan,
            };
            let regions = [bucket.own(), bucket.rest()];
            bucket.chunks = regions.map(|region| {
                let state = states;
                states += region.len();
                let tensors = bucket.plan.tensors.clone().map(|tensor| {
                    let Range { start, end } = layout.range(tensor);
                    (tensor, start.max(region.start)..end.min(region.end))
                });
                let within: Vec<_> = tensors.filter(|(_, within)| !within.is_empty()).collect();
                reduced.extend(whole_parts(within.iter().cloned()));
                let within = within
                    .into_iter()
                    .map(|(tensor, within)| (within, config.optimizer.factors(&layout.tensors()[tensor])));
                let from = mem::size_of_val(&chunk_table[..]);
                chunk_table.extend(chunks(within).into_iter().map(|chunk| {
                    let state = chunk.begin as usize - region.start + state;
                    Chunk { state: state as u32, ..chunk }
                }));
                from..mem::size_of_val(&chunk_table[..])
            });
            let from = mem::size_of_val(&part_table[..]);
            let tensors = bucket.plan.tensors.clone().map(|tensor| (tensor, layout.range(tensor)));
            // A single rank has no reduction after which everything would be checked.
            part_table.extend(if ranks == 1 { whole_parts(tensors) } else { parts(tensors) });
            bucket.parts = from..mem::size_of_val(&part_table[..]);
            all[index] = Some(bucket);
        }
        let all = all.into_iter().flatten().collect();
        Ok(DeviceBuckets { all, states, chunks: chunk_table, parts: part_table, reduced })
    }
}

/// First element after tensor `tensor` and the padding that follows it.
fn padded_end(layout: &Layout, tensor: usize) -> usize {
    if tensor + 1 == layout.tensors().len() { padded(layout) } else { layout.padded_end(tensor) }
}

/// Length of the arenas: the last tensor is padded as well.
pub(super) fn padded(layout: &Layout) -> usize {
    layout.len().next_multiple_of(ALIGNMENT)
}
