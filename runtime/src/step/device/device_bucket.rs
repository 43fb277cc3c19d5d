//! A bucket on a GPU: which of its elements this rank updates, and where they lie.
//!
//! A sharded bucket is cut into n equal shards, one for each rank, of whole vectors; what is left over, fewer than 8·n elements,
//! every rank updates for itself. So is all of a replicated bucket, which has no shards. (On the CPU, where ranks share memory,
//! shards may differ in length; NCCL's may not.)

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use mgpu_kernels::cuda::{Device, Event};
use mgpu_kernels::digest::cuda::{Part, parts, whole_parts};
use mgpu_kernels::optimizer::chunk::{Chunk, chunks};

use super::super::config::DataParallelConfig;
use super::ALIGNMENT;
use crate::bucket::BucketPlan;
use crate::{Layout, Result};

/// Elements that a shard is a multiple of: 16 bytes of bf16.
const VECTOR: usize = 8;

/// A bucket, and where its gradients are on their way.
#[derive(Debug)]
pub(super) struct DeviceBucket {
    pub(super) plan: BucketPlan,
    /// Elements of the arena: the bucket's, and what lies between them and the next one's.
    pub(super) elements: Range<usize>,
    /// Elements of the shard of each rank, and whose this rank's is.
    shard: usize,
    rank: usize,
    /// Where the state of the elements that this rank updates begins: its shard's, then that of the rest.
    state: usize,
    /// Bytes of the table of chunks: of this rank's shard, and of the rest.
    pub(super) chunks: [Range<usize>; 2],
    /// Bytes of the table of what is looked through for gradients that are no numbers.
    pub(super) parts: Range<usize>,
    /// The compute stream has written all gradients of the bucket, or updated this rank's shard of the parameters.
    pub(super) written: Event,
    /// The exchange stream has reduced the gradients, or gathered the parameters.
    pub(super) exchanged: Event,
}

impl DeviceBucket {
    /// Elements of all ranks' shards.
    pub(super) fn shards(&self, ranks: u32) -> Range<usize> {
        self.elements.start..self.elements.start + self.shard * ranks as usize
    }

    /// Elements of this rank's shard; none of a replicated bucket.
    pub(super) fn own(&self) -> Range<usize> {
        let begin = self.elements.start + self.shard * self.rank;
        begin..begin + self.shard
    }

    /// Elements that every rank updates.
    pub(super) fn rest(&self, ranks: u32) -> Range<usize> {
        self.shards(ranks).end..self.elements.end
    }

    /// The state of this rank's shard, and that of the rest.
    pub(super) fn states(&self, ranks: u32) -> [Range<usize>; 2] {
        let between = self.state + self.shard;
        [self.state..between, between..between + self.rest(ranks).len()]
    }

    /// Whether each rank updates a part of it only.
    pub(super) fn is_sharded(&self) -> bool {
        self.shard > 0
    }
}

/// The buckets of a model.
#[derive(Debug)]
pub(super) struct DeviceBuckets {
    /// In the order in which they are expected to be complete.
    pub(super) all: Vec<DeviceBucket>,
    /// Elements that this rank has the optimizer's state of.
    pub(super) states: usize,
    /// What the optimizer updates here, bucket by bucket.
    pub(super) chunks: Vec<Chunk>,
    /// What is checked to be finite of this rank's own gradients, bucket by bucket.
    pub(super) parts: Vec<Part>,
    /// What is checked of the reduced gradients: all that this rank updates.
    pub(super) reduced: Vec<Part>,
}

impl DeviceBuckets {
    /// Cuts the model into `buckets` for rank `rank` of `ranks`.
    pub(super) fn cut(
        device: &Arc<Device>,
        layout: &Layout,
        plans: &[BucketPlan],
        config: &DataParallelConfig,
        (rank, ranks): (u32, u32),
    ) -> Result<Self> {
        // From the beginning of the arena, so that states lie in its order. Tensors tell that: of two buckets that begin at one
        // element, one has none.
        let mut places: Vec<usize> = (0..plans.len()).collect();
        places.sort_by_key(|place| plans[*place].tensors.start);
        let mut all: Vec<Option<DeviceBucket>> = plans.iter().map(|_| None).collect();
        let (mut states, mut chunk_table, mut part_table) = (0, Vec::new(), Vec::new());
        let mut reduced = Vec::new();
        for place in places {
            let plan = plans[place].clone();
            let elements = plan.elements.start..padded_end(layout, plan.tensors.end - 1);
            let sharded =
                config.shard_from.bytes(None).is_some_and(|least| size_of::<f32>() * elements.len() >= least);
            let shard = elements.len() / ranks as usize / VECTOR * VECTOR;
            let mut bucket = DeviceBucket {
                shard: if sharded && ranks > 1 { shard } else { 0 },
                rank: rank as usize,
                state: states,
                chunks: [0..0, 0..0],
                parts: 0..0,
                written: Event::new(device)?,
                exchanged: Event::new(device)?,
                elements,
                plan,
            };
            let regions = [bucket.own(), bucket.rest(ranks)];
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
            // Alone, there is no reduction after which all would be checked.
            part_table.extend(if ranks == 1 { whole_parts(tensors) } else { parts(tensors) });
            bucket.parts = from..mem::size_of_val(&part_table[..]);
            all[place] = Some(bucket);
        }
        let all = all.into_iter().flatten().collect();
        Ok(DeviceBuckets { all, states, chunks: chunk_table, parts: part_table, reduced })
    }
}

/// The first element behind tensor `tensor` and what lies between it and the next one.
fn padded_end(layout: &Layout, tensor: usize) -> usize {
    if tensor + 1 == layout.tensors().len() { padded(layout) } else { layout.padded_end(tensor) }
}

/// Elements of the arenas: as many as end where the next tensor would begin.
pub(super) fn padded(layout: &Layout) -> usize {
    layout.len().next_multiple_of(ALIGNMENT)
}
