//! All buckets of a model: splitting its arenas into buckets, and joining them again.

use std::ops::Range;

use super::gradient_bucket::{Averaged, Gradient, GradientBucket, Owner};
use crate::bucket::BucketPlan;
use crate::comm::{Buffer, Communicator, shard};
use crate::{Layout, Result};

/// Who owns which buckets.
#[derive(Debug, Clone, Copy)]
pub(super) enum Ownership {
    /// Every rank, or shards of the buckets of at least so many bytes.
    Ranks { shard_from: Option<usize> },
    /// Rank 0.
    RankZero,
}

impl Ownership {
    /// The owner of a bucket of `bytes` bytes.
    fn of(self, bytes: usize) -> Owner {
        match self {
            Ownership::Ranks { shard_from: Some(least) } if bytes >= least => Owner::Shards,
            Ownership::Ranks { .. } => Owner::EveryRank,
            Ownership::RankZero => Owner::RankZero,
        }
    }
}

/// The buckets of a model.
#[derive(Debug, Default)]
pub(super) struct GradientBuckets {
    /// In the expected order of completion.
    pub(super) all: Vec<GradientBucket>,
    /// Elements of the buckets of which the other ranks need the updated parameters, in the order of the arena.
    pub(super) segments: Vec<Range<usize>>,
    /// The bucket of each segment.
    pub(super) of_segment: Vec<usize>,
    /// Number of elements whose optimizer state this rank holds.
    pub(super) states: usize,
    /// Unused parts of the arenas (gradients of frozen tensors), and where they begin.
    frozen: Vec<(usize, Buffer, Option<Buffer>)>,
}

impl GradientBuckets {
    /// Splits the arenas of gradients and of compressed gradients into the buckets `plans`.
    pub(super) fn split(
        layout: &Layout,
        plans: Vec<BucketPlan>,
        arenas: (Buffer, Option<Buffer>),
        (ownership, rank, ranks): (Ownership, u32, u32),
    ) -> Self {
        // From the end of the arena. Padding belongs to the tensor before it. Sorted by tensors, because two buckets
        // may begin at the same element if one is empty.
        let mut order: Vec<usize> = (0..plans.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(plans[*index].tensors.start));
        let mut all: Vec<Option<GradientBucket>> = plans.iter().map(|_| None).collect();
        let mut frozen = Vec::new();
        let mut rest = arenas;
        for index in &order {
            let plan = &plans[*index];
            let end = layout.padded_end(plan.tensors.end - 1);
            let (before, (gradient, compressed)) = split_at(rest, end);
            frozen.push((end, gradient, compressed));
            let (before, (gradient, compressed)) = split_at(before, plan.elements.start);
            all[*index] =
                Some(GradientBucket::new(plan.clone(), (gradient, compressed), ownership, (rank, ranks)));
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
        order.retain(|index| all[*index].owner != Owner::EveryRank);
        order.reverse();
        let segments = order.iter().map(|index| all[*index].elements.clone()).collect();
        GradientBuckets { all, segments, of_segment: order, states, frozen }
    }

    /// Joins the arenas again.
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
        // Stable sort: of parts that begin at the same element, empty buckets come first.
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

    /// Gathers a state arena, of which `local` is this rank's part, into `into`, unless that is empty: on rank 0, and on
    /// every other rank that updates elements. Collective if a bucket is sharded.
    pub(super) fn gather(&self, comm: &mut Communicator, local: &[f32], into: &mut [f32]) -> Result<()> {
        for bucket in &self.all {
            let mine = &local[bucket.states()];
            let gathered = if bucket.owner == Owner::Shards {
                let mut buffer = Buffer::zeroed::<f32>(bucket.elements.len());
                buffer.as_mut_slice()[bucket.own_within()].copy_from_slice(mine);
                Some(comm.all_gather(buffer)?.wait()?)
            } else {
                None
            };
            match gathered {
                _ if into.is_empty() => {}
                Some(whole) => into[bucket.elements.clone()].copy_from_slice(whole.as_slice()),
                None => into[bucket.own.clone()].copy_from_slice(mine),
            }
        }
        Ok(())
    }

    /// Copies the elements of a whole arena whose state this rank holds.
    pub(super) fn copy_own(&self, whole: &[f32], local: &mut [f32]) {
        for bucket in &self.all {
            local[bucket.states()].copy_from_slice(&whole[bucket.own.clone()]);
        }
    }
}

/// A part of the arena of gradients, and of that of compressed gradients.
type ArenaPart = (Buffer, Option<Buffer>);

/// Splits both arenas after `middle` elements.
fn split_at((gradients, compressed): ArenaPart, middle: usize) -> (ArenaPart, ArenaPart) {
    let (before, behind) = gradients.split_at(middle);
    let (compressed_before, compressed_behind) =
        compressed.map(|compressed| compressed.split_at(middle)).unzip();
    ((before, compressed_before), (behind, compressed_behind))
}

impl GradientBucket {
    fn new(
        plan: BucketPlan,
        (gradient, compressed): ArenaPart,
        ownership: Ownership,
        (rank, ranks): (u32, u32),
    ) -> Self {
        let owner = ownership.of(gradient.bytes());
        let own = match owner {
            Owner::Shards => shard(gradient.len(), ranks, rank),
            Owner::RankZero if rank > 0 => 0..0,
            Owner::EveryRank | Owner::RankZero => 0..gradient.len(),
        };
        let begin = plan.elements.start;
        GradientBucket {
            elements: begin..begin + gradient.len(),
            owner,
            own: begin + own.start..begin + own.end,
            state: 0,
            gradient: Gradient::Local(gradient),
            compressed,
            averaged: Averaged::None,
            plan,
        }
    }
}
