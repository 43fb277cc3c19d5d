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
    /// Elements of the sharded ones, in the order of the arena.
    pub(super) segments: Vec<Range<usize>>,
    /// The slot of each segment.
    pub(super) of_segment: Vec<usize>,
    /// Elements that this rank has the optimizer's state of.
    pub(super) states: usize,
    /// Parts of the arenas with the gradients of frozen tensors, which nobody writes, and where they begin.
    frozen: Vec<(usize, Buffer, Option<Buffer>)>,
}

impl Slots {
    /// Cuts the arena of gradients, and that of their rounded copies, into `buckets`.
    pub(super) fn cut(
        layout: &Layout,
        buckets: Vec<Bucket>,
        arenas: (Buffer, Option<Buffer>),
        sharding: Sharding,
    ) -> Self {
        // From the end of the arena. What lies between two tensors goes with the one before. Tensors tell the order: of two
        // buckets that begin at one element, one has none.
        let mut places: Vec<usize> = (0..buckets.len()).collect();
        places.sort_by_key(|place| std::cmp::Reverse(buckets[*place].tensors.start));
        let mut all: Vec<Option<Slot>> = buckets.iter().map(|_| None).collect();
        let mut frozen = Vec::new();
        let mut rest = arenas;
        for place in &places {
            let bucket = &buckets[*place];
            let end = layout.padded_end(bucket.tensors.end - 1);
            let (before, (gradient, narrow)) = split_at(rest, end);
            frozen.push((end, gradient, narrow));
            let (before, (gradient, narrow)) = split_at(before, bucket.elements.start);
            all[*place] = Some(Slot::new(bucket.clone(), gradient, narrow, sharding));
            rest = before;
        }
        frozen.push((0, rest.0, rest.1));
        frozen.retain(|(_, gradient, _)| !gradient.is_empty());
        let mut all: Vec<Slot> = all.into_iter().flatten().collect();
        let mut states = 0;
        for slot in &mut all {
            slot.state = states;
            states += slot.own.len();
        }
        places.retain(|place| all[*place].sharded);
        places.reverse();
        let segments = places.iter().map(|place| all[*place].elements.clone()).collect();
        Slots { all, segments, of_segment: places, states, frozen }
    }

    /// Puts the arenas together again.
    ///
    /// # Errors
    /// If gradients were lost.
    pub(super) fn uncut(self) -> Result<(Buffer, Option<Buffer>)> {
        let mut all = self.all;
        all.sort_by_key(|slot| slot.bucket.tensors.start);
        let mut frozen = self.frozen;
        let slots = all.into_iter().map(|mut slot| Ok((slot.elements.start, slot.take()?, slot.narrow)));
        let mut parts = slots.collect::<Result<Vec<_>>>()?;
        parts.append(&mut frozen);
        // Stable: of parts that begin at one element, those of slots without elements come first.
        parts.sort_by_key(|(begin, ..)| *begin);
        let mut arenas: Option<(Buffer, Option<Buffer>)> = None;
        for (_, gradient, narrow) in parts {
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
    pub(super) fn gather(&self, comm: &mut dyn Communicator, local: &[f32], into: &mut [f32]) -> Result<()> {
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

/// A part of the arena of gradients, and of that of their rounded copies.
type Part = (Buffer, Option<Buffer>);

/// The first `middle` elements of both arenas, and the rest.
fn split_at((gradients, narrow): Part, middle: usize) -> (Part, Part) {
    let (before, behind) = gradients.split_at(middle);
    let (narrow_before, narrow_behind) = narrow.map(|narrow| narrow.split_at(middle)).unzip();
    ((before, narrow_before), (behind, narrow_behind))
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
            bucket,
        }
    }
}
