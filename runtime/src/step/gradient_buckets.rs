//! All buckets of a model: how its arenas are cut into them, and put together again.

use std::ops::Range;

use super::gradient_bucket::{Averaged, Gradient, GradientBucket};
use crate::bucket::BucketPlan;
use crate::comm::{Buffer, Communicator, shard};
use crate::{Layout, Result};

/// Who has what part of the sharded buckets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharding {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Bytes from which on a bucket is sharded, if any is.
    pub(super) from: Option<usize>,
}

/// The buckets of a model.
#[derive(Debug, Default)]
pub(super) struct GradientBuckets {
    /// In the order in which they are expected to be complete.
    pub(super) all: Vec<GradientBucket>,
    /// Elements of the sharded ones, in the order of the arena.
    pub(super) segments: Vec<Range<usize>>,
    /// The bucket of each segment.
    pub(super) of_segment: Vec<usize>,
    /// Elements that this rank has the optimizer's state of.
    pub(super) states: usize,
    /// Parts of the arenas with the gradients of frozen tensors, which nobody writes, and where they begin.
    frozen: Vec<(usize, Buffer, Option<Buffer>)>,
}

impl GradientBuckets {
    /// Cuts the arena of gradients, and that of their rounded copies, into `buckets`.
    pub(super) fn cut(
        layout: &Layout,
        plans: Vec<BucketPlan>,
        arenas: (Buffer, Option<Buffer>),
        sharding: Sharding,
    ) -> Self {
        // From the end of the arena. What lies between two tensors goes with the one before. Tensors tell the order: of two
        // buckets that begin at one element, one has none.
        let mut places: Vec<usize> = (0..plans.len()).collect();
        places.sort_by_key(|place| std::cmp::Reverse(plans[*place].tensors.start));
        let mut all: Vec<Option<GradientBucket>> = plans.iter().map(|_| None).collect();
        let mut frozen = Vec::new();
        let mut rest = arenas;
        for place in &places {
            let plan = &plans[*place];
            let end = layout.padded_end(plan.tensors.end - 1);
            let (before, (gradient, compressed)) = split_at(rest, end);
            frozen.push((end, gradient, compressed));
            let (before, (gradient, compressed)) = split_at(before, plan.elements.start);
            all[*place] = Some(GradientBucket::new(plan.clone(), gradient, compressed, sharding));
            rest = before;
        }
        frozen.push((0, rest.0, rest.1));
        frozen.retain(|(_, gradient, _)| !gradient.is_empty());
        let mut all: Vec<GradientBucket> = all.into_iter().flatten().collect();
        let mut states = 0;
        for bucket in &mut all {
            bucket.state = states;
            states += bucket.own.len();
        }
        places.retain(|place| all[*place].sharded);
        places.reverse();
        let segments = places.iter().map(|place| all[*place].elements.clone()).collect();
        GradientBuckets { all, segments, of_segment: places, states, frozen }
    }

    /// Puts the arenas together again.
    ///
    /// # Errors
    /// If gradients were lost.
    pub(super) fn into_arenas(self) -> Result<(Buffer, Option<Buffer>)> {
        let mut all = self.all;
        all.sort_by_key(|bucket| bucket.plan.tensors.start);
        let mut frozen = self.frozen;
        let buckets =
            all.into_iter().map(|mut bucket| Ok((bucket.elements.start, bucket.take()?, bucket.compressed)));
        let mut parts = buckets.collect::<Result<Vec<_>>>()?;
        parts.append(&mut frozen);
        // Stable: of parts that begin at one element, those of buckets without elements come first.
        parts.sort_by_key(|(begin, ..)| *begin);
        let mut arenas: Option<(Buffer, Option<Buffer>)> = None;
        for (_, gradient, compressed) in parts {
            arenas = Some(match arenas {
                None => (gradient, compressed),
                Some((gradients, all_compressed)) => (
                    gradients.join(gradient),
                    all_compressed.zip(compressed).map(|(before, behind)| before.join(behind)),
                ),
            });
        }
        Ok(arenas.unwrap_or_else(|| (Buffer::zeroed::<f32>(0), None)))
    }

    /// Gathers a state arena of which this rank has the elements `local`. Collective, if a bucket is sharded. Leaves the
    /// whole in `into`, unless that is empty.
    pub(super) fn gather(&self, comm: &mut Communicator, local: &[f32], into: &mut [f32]) -> Result<()> {
        for bucket in &self.all {
            let mine = &local[bucket.states()];
            let gathered = if bucket.sharded {
                let mut buffer = Buffer::zeroed::<f32>(bucket.elements.len());
                buffer.as_mut_slice()[bucket.own_within()].copy_from_slice(mine);
                Some(comm.all_gather(buffer)?.wait()?)
            } else {
                None
            };
            if !into.is_empty() {
                into[bucket.elements.clone()]
                    .copy_from_slice(gathered.as_ref().map_or(mine, Buffer::as_slice));
            }
        }
        Ok(())
    }

    /// Keeps those elements of a whole arena that this rank has the state of.
    pub(super) fn copy_own(&self, whole: &[f32], local: &mut [f32]) {
        for bucket in &self.all {
            local[bucket.states()].copy_from_slice(&whole[bucket.own.clone()]);
        }
    }
}

/// A part of the arena of gradients, and of that of their rounded copies.
type ArenaPart = (Buffer, Option<Buffer>);

/// The first `middle` elements of both arenas, and the rest.
fn split_at((gradients, compressed): ArenaPart, middle: usize) -> (ArenaPart, ArenaPart) {
    let (before, behind) = gradients.split_at(middle);
    let (compressed_before, compressed_behind) =
        compressed.map(|compressed| compressed.split_at(middle)).unzip();
    ((before, compressed_before), (behind, compressed_behind))
}

impl GradientBucket {
    fn new(plan: BucketPlan, gradient: Buffer, compressed: Option<Buffer>, sharding: Sharding) -> Self {
        let Sharding { rank, ranks, from } = sharding;
        let sharded = from.is_some_and(|least| gradient.bytes() >= least);
        let own = if sharded { shard(gradient.len(), ranks, rank) } else { 0..gradient.len() };
        let begin = plan.elements.start;
        GradientBucket {
            elements: begin..begin + gradient.len(),
            sharded,
            own: begin + own.start..begin + own.end,
            state: 0,
            gradient: Gradient::Local(gradient),
            compressed,
            averaged: Averaged::None,
            plan,
        }
    }
}
