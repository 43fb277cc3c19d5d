//! All buckets of a model: how its arenas are cut into them, and put together again.

use std::ops::Range;

use super::slot::{Averaged, Gradient, Slot};
use crate::bucket::Bucket;
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
pub(super) struct Slots {
    /// In the order in which they are expected to be complete.
    pub(super) all: Vec<Slot>,
    /// The slot of each tensor.
    pub(super) of: Vec<usize>,
    /// Elements of the sharded ones, in the order of the arena.
    pub(super) segments: Vec<Range<usize>>,
    /// The slot of each segment.
    pub(super) of_segment: Vec<usize>,
    /// Elements that this rank has the optimizer's state of.
    pub(super) states: usize,
}

impl Slots {
    /// Cuts the arena of gradients, and that of their rounded copies, into `buckets`.
    pub(super) fn cut(
        layout: &Layout,
        buckets: Vec<Bucket>,
        (mut gradients, mut narrow): (Buffer, Option<Buffer>),
        sharding: Sharding,
    ) -> Self {
        let mut of = vec![0; layout.tensors().len()];
        for (place, bucket) in buckets.iter().enumerate() {
            of[bucket.tensors.clone()].fill(place);
        }
        // From the end of the arena, so that what lies between two buckets goes with the one before. Tensors tell the
        // order: of two buckets that begin at one element, one has none.
        let mut places: Vec<usize> = (0..buckets.len()).collect();
        places.sort_by_key(|place| std::cmp::Reverse(buckets[*place].tensors.start));
        let mut all: Vec<Option<Slot>> = buckets.iter().map(|_| None).collect();
        for place in &places {
            let begin = buckets[*place].elements.start;
            let (rest, gradient) = gradients.split_at(begin);
            gradients = rest;
            let (rest, narrowed) = narrow.map(|narrow| narrow.split_at(begin)).unzip();
            narrow = rest;
            all[*place] = Some(Slot::new(buckets[*place].clone(), gradient, narrowed, sharding));
        }
        let mut all: Vec<Slot> = all.into_iter().flatten().collect();
        let mut states = 0;
        for slot in &mut all {
            slot.state = states;
            states += slot.own.len();
        }
        places.retain(|place| all[*place].sharded);
        places.reverse();
        let segments = places.iter().map(|place| all[*place].elements.clone()).collect();
        Slots { all, of, segments, of_segment: places, states }
    }

    /// Puts the arenas together again.
    ///
    /// # Errors
    /// If gradients were lost.
    pub(super) fn uncut(self) -> Result<(Buffer, Option<Buffer>)> {
        let mut all = self.all;
        all.sort_by_key(|slot| slot.bucket.tensors.start);
        let mut arenas: Option<(Buffer, Option<Buffer>)> = None;
        for slot in all {
            let (gradient, narrow) = slot.into_buffers()?;
            arenas = Some(match arenas {
                None => (gradient, narrow),
                Some((gradients, narrows)) => (
                    gradients.join(gradient),
                    narrows.zip(narrow).map(|(before, behind)| before.join(behind)),
                ),
            });
        }
        Ok(arenas.unwrap_or_else(|| (Buffer::zeroed::<f32>(0), None)))
    }

    /// Gathers a state arena of which this rank has the elements `local`. Collective, if a bucket is sharded. Leaves the
    /// whole in `into`, unless that is empty.
    pub(super) fn gather(&self, comm: &mut Communicator, local: &[f32], into: &mut [f32]) -> Result<()> {
        for slot in &self.all {
            let mine = &local[slot.states()];
            let gathered = if slot.sharded {
                let mut buffer = Buffer::zeroed::<f32>(slot.elements.len());
                buffer.as_mut_slice()[slot.own_within()].copy_from_slice(mine);
                Some(comm.all_gather(buffer)?.wait()?)
            } else {
                None
            };
            if !into.is_empty() {
                into[slot.elements.clone()].copy_from_slice(gathered.as_ref().map_or(mine, Buffer::as_slice));
            }
        }
        Ok(())
    }

    /// Keeps those elements of a whole arena that this rank has the state of.
    pub(super) fn keep_own(&self, whole: &[f32], local: &mut [f32]) {
        for slot in &self.all {
            local[slot.states()].copy_from_slice(&whole[slot.own.clone()]);
        }
    }
}

impl Slot {
    fn new(bucket: Bucket, gradient: Buffer, narrow: Option<Buffer>, sharding: Sharding) -> Self {
        let Sharding { rank, ranks, from } = sharding;
        let sharded = from.is_some_and(|least| gradient.bytes() >= least);
        let own = if sharded { shard(gradient.len(), ranks, rank) } else { 0..gradient.len() };
        let begin = bucket.elements.start;
        Slot {
            elements: begin..begin + gradient.len(),
            sharded,
            own: begin + own.start..begin + own.end,
            state: 0,
            gradient: Gradient::Here(gradient),
            narrow,
            averaged: Averaged::None,
            open: vec![true; bucket.tensors.len()],
            bucket,
        }
    }

    fn into_buffers(mut self) -> Result<(Buffer, Option<Buffer>)> {
        Ok((self.take()?, self.narrow))
    }
}
