//! What keeps a training on a GPU from going wrong unseen, and how the host learns of it without a wait in each step.
//!
//! - *Non-finite gradients*: a rank checks its own before they are reduced, and marks itself and the tensor in the
//!   [`StepState`]. The largest mark of all ranks travels with the last bucket. Then it checks the reduced ones that it updates,
//!   every element: finite gradients may have an infinite sum. So all ranks know before any parameter changes: the update is not
//!   made then, and none after it.
//! - *Weights that differ*: every now and then each rank's are hashed where they lie, and the hashes gathered.
//!
//! Marks and hashes are copied to the host in the order of the stream ([`StatusReadback`]), which looks at them when it looks at losses
//! anyway.

use std::ops::Range;

use mgpu_kernels::cuda::{Event, Memory, Pinned, StepState, Stream, View};
use mgpu_kernels::digest::cuda as digest;
use mgpu_kernels::optimizer::Factors;
use mgpu_kernels::optimizer::chunk::chunks;
use mgpu_kernels::optimizer::cuda as optimizer;

use super::super::config::DataParallelConfig;
use super::device_bucket::{DeviceBucket, DeviceBuckets};
use super::{CHUNK, DeviceDataParallel, STEP};
use crate::comm::{DType, ReduceOp};
use crate::{Error, Layout, Result};

/// What the guards need of a GPU's memory.
#[derive(Debug)]
pub(super) struct Guard {
    /// Table of what is checked of this rank's own gradients.
    parts: Memory,
    /// Table of what is checked of the reduced ones.
    reduced: Memory,
    /// Where gradients are clipped.
    squares: Option<Squares>,
    /// A hash of each rank's weights.
    hashes: Memory,
    /// How often the training has gone back: what is known of before says nothing.
    pub(super) generation: u64,
}

/// Sums of the gradients' squares, chunk by chunk.
#[derive(Debug)]
struct Squares {
    /// The chunks of all gradients, in the order of the arena, so that neither ranks nor buckets show in the sum; `None` where a
    /// rank has its shards of them only.
    whole: Option<Memory>,
    /// The sum of each chunk.
    sums: Memory,
}

impl Squares {
    fn new(
        stream: &Stream,
        buckets: &DeviceBuckets,
        layout: &Layout,
        config: &DataParallelConfig,
    ) -> Result<Self> {
        let sharded =
            buckets.all.iter().any(DeviceBucket::is_sharded) && !config.reducer.world_size_invariant;
        let all = || chunks(layout.trained().map(|tensor| (layout.range(tensor), Factors::ONE)));
        let whole = (!sharded).then(all);
        let len = whole.as_ref().map_or(buckets.chunks.len(), Vec::len);
        let whole = whole.map(|table| Memory::from_slice(stream, bytemuck::cast_slice::<_, u8>(&table)));
        let sums = Memory::zeroed(stream.device(), DType::F64, len)?;
        Ok(Squares { whole: whole.transpose()?, sums })
    }
}

impl Guard {
    pub(super) fn new(
        stream: &Stream,
        buckets: &DeviceBuckets,
        layout: &Layout,
        config: &DataParallelConfig,
        ranks: u32,
    ) -> Result<Self> {
        let squares = config.reducer.clip_norm.map(|_| Squares::new(stream, buckets, layout, config));
        Ok(Guard {
            parts: Memory::from_slice(stream, bytemuck::cast_slice::<_, u8>(&buckets.parts))?,
            reduced: Memory::from_slice(stream, bytemuck::cast_slice::<_, u8>(&buckets.reduced))?,
            squares: squares.transpose()?,
            hashes: Memory::zeroed(stream.device(), DType::I64, ranks as usize)?,
            generation: 0,
        })
    }
}

/// How the steps up to a place of the stream went, on the way to the host.
#[derive(Debug)]
pub struct StatusReadback {
    bytes: Pinned,
    done: Event,
    generation: u64,
}

impl StatusReadback {
    /// Room for what there is to know of `model`.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(model: &DeviceDataParallel) -> Result<Self> {
        let device = model.compute.device();
        let bytes = Pinned::zeroed(device, StepState::BYTES + model.guard.hashes.view().bytes())?;
        Ok(StatusReadback { bytes, done: Event::new(device)?, generation: 0 })
    }
}

/// The mark of gradients of `rank` that are no numbers, less the index of the tensor: of several ranks' the lowest one's is the
/// largest, and there is no mark 0.
fn mark(rank: u32, ranks: u32) -> u64 {
    u64::from(ranks - rank) << 32 | 1
}

/// The mark of reduced gradients, less the index of the tensor: below those of all ranks, which say more.
const REDUCED: u64 = 1;

/// The rank and the tensor of a mark; behind the last rank for that of reduced gradients.
fn marked(mark: u64, ranks: u32, layout: &Layout) -> (u32, String) {
    let tensor = (mark & u64::from(u32::MAX)).saturating_sub(1) as usize;
    let name =
        layout.tensors().get(tensor).map_or_else(|| "unknown".to_owned(), |tensor| tensor.name.clone());
    (ranks.saturating_sub((mark >> 32) as u32), name)
}

impl DeviceDataParallel {
    /// The bytes of the state that ranks exchange, as one number.
    fn number(&self, bytes: Range<usize>, dtype: DType) -> View<'_> {
        self.state.slice(bytes).cast(dtype)
    }

    /// The mark of gradients that are no numbers.
    pub(super) fn not_finite(&self) -> View<'_> {
        self.number(StepState::NOT_FINITE, DType::I64)
    }

    /// Looks through this rank's gradients of a bucket.
    pub(super) fn find_not_finite(&self, place: usize) -> Result<()> {
        let (parts, mark) =
            (self.guard.parts.slice(self.buckets[place].parts.clone()), mark(self.rank(), self.ranks()));
        let gradients = self.gradients.view();
        Ok(digest::find_not_finite(
            &self.compute,
            gradients,
            parts,
            self.state.view(),
            mark,
            self.not_finite(),
        )?)
    }

    /// Checks the reduced gradients that this rank updates. Collective where buckets are sharded.
    pub(super) fn check_reduced(&self) -> Result<()> {
        if self.ranks() == 1 || !self.config.parallel.reducer.check_finite {
            return Ok(());
        }
        let (stream, gradients, parts) = (&self.compute, self.gradients.view(), self.guard.reduced.view());
        digest::find_not_finite(stream, gradients, parts, self.state.view(), REDUCED, self.not_finite())?;
        // What a rank has of a sharded bucket, the others have not seen.
        if self.is_sharded() {
            self.comm.all_reduce(stream, self.not_finite(), ReduceOp::Max)?;
        }
        Ok(())
    }

    /// Clips the reduced gradients, if that is asked for. Collective where buckets are sharded.
    pub(super) fn clip(&self) -> Result<()> {
        let (Some(most), Some(squares)) = (self.config.parallel.reducer.clip_norm, &self.guard.squares)
        else {
            return Ok(());
        };
        let (stream, gradients) = (&self.compute, self.gradients.view());
        if let Some(whole) = &squares.whole {
            optimizer::squares(stream, gradients, whole.view(), squares.sums.view())?;
            optimizer::total_squares(stream, squares.sums.view(), self.state.view())?;
        } else {
            let sum = |chunks: Range<usize>| {
                let sums = squares.sums.slice(chunks.start / CHUNK..chunks.end / CHUNK);
                optimizer::squares(stream, gradients, self.chunks.slice(chunks), sums)
            };
            // What all ranks have, one counts.
            for bucket in &self.buckets {
                let [own, rest] = bucket.chunks.clone();
                sum(own)?;
                if self.rank() == 0 {
                    sum(rest)?;
                }
            }
            optimizer::total_squares(stream, squares.sums.view(), self.state.view())?;
            self.comm.all_reduce(stream, self.number(StepState::SQUARES, DType::F64), ReduceOp::Sum)?;
        }
        Ok(optimizer::clip(stream, self.state.view(), most)?)
    }

    /// Hashes the weights for comparison, if it is time, where `before` steps had been made before the last ones. Collective.
    pub(super) fn compare_if_due(&self, before: u64) -> Result<()> {
        let is_due =
            self.config.parallel.verify_every.is_some_and(|every| self.steps / every > before / every);
        if !is_due || self.capturing || self.ranks() == 1 {
            return Ok(());
        }
        let hashes = &self.guard.hashes;
        let mine = hashes.slice(self.rank() as usize..self.rank() as usize + 1);
        digest::hash(&self.compute, self.parameters.view(), mine)?;
        self.comm.all_gather(&self.compute, mine, hashes.view())
    }

    /// Begins to copy to the host how the steps so far went.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If `to` was made for a model on another number of ranks.
    pub fn enqueue_status_readback(&self, to: &mut StatusReadback) -> Result<()> {
        self.compute.download_part_later(self.state.view(), &mut to.bytes, 0)?;
        self.compute.download_part_later(self.guard.hashes.view(), &mut to.bytes, StepState::BYTES)?;
        to.generation = self.guard.generation;
        Ok(self.compute.record(&to.done)?)
    }

    /// Waits for the copy that was begun last, as far as the other ranks come along, and says whether all is well; nothing of
    /// steps that the training has gone back from since. Collective where all is not well: ranks look at the same places.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if a rank had non-finite gradients, [`Error::ReducedNotFinite`] if only those of all ranks together
    /// are: parameters, optimizer and [`steps`](Self::steps) are as before that step, and another one may be made, but buffers
    /// are as the model has left them. [`Error::Diverged`] if weights differ between ranks. As [`wait`](Self::wait).
    pub fn read_status(&mut self, status: &mut StatusReadback) -> Result<()> {
        self.comm.wait(&status.done, STEP)?;
        // SAFETY: the event lies behind the copies, and none is begun while the bytes are lent.
        let (state, hashes) = unsafe { status.bytes.bytes() }.split_at(StepState::BYTES);
        if status.generation != self.guard.generation {
            return Ok(());
        }
        let state: StepState = bytemuck::pod_read_unaligned(state);
        let hashes: Vec<i64> = bytemuck::pod_collect_to_vec(hashes);
        self.check_status(&state, &hashes)
    }

    /// Says whether all is well, by a state and hashes of this generation.
    fn check_status(&mut self, state: &StepState, hashes: &[i64]) -> Result<()> {
        if state.not_finite != 0 {
            self.reset_to_step(state.step)?;
            let ((rank, tensor), step) =
                (marked(state.not_finite, self.ranks(), &self.layout), state.step + 1);
            return Err(match rank < self.ranks() {
                true => Error::NotFinite { rank, tensor, step },
                false => Error::ReducedNotFinite { tensor, step },
            });
        }
        if hashes.iter().any(|hash| *hash != hashes[0]) {
            self.compare_all()?;
        }
        Ok(())
    }

    /// Waits for all steps so far, and says whether all is well. A step that broke off is given up. Collective.
    ///
    /// # Errors
    /// As [`read_status`](Self::read_status).
    pub fn check(&mut self) -> Result<()> {
        if self.open {
            self.abandon_step()?;
        }
        self.wait(STEP)?;
        let state = StepState::download(self.state.view(), &self.compute)?;
        let hashes = self.guard.hashes.to_vec::<i64>(&self.compute)?;
        self.check_status(&state, &hashes)
    }

    /// Makes the step after `steps` steps the next one. What was found until now is forgotten.
    pub(super) fn reset_to_step(&mut self, steps: u64) -> Result<()> {
        self.wait(STEP)?;
        self.compute.upload(bytemuck::bytes_of(&StepState::after(steps)), self.state.view())?;
        self.compute.zero(self.guard.hashes.view())?;
        self.guard.generation += 1;
        (self.steps, self.open) = (steps, false);
        Ok(())
    }

    /// Gets a step out of the way that broke off: its collectives, its number, and what was found in its gradients.
    pub(super) fn abandon_step(&mut self) -> Result<()> {
        // Not by their events, which may have been recorded in a capture.
        self.comm.wait(&self.exchange, STEP)?;
        self.wait(STEP)?;
        let state = StepState::download(self.state.view(), &self.compute)?;
        self.open = false;
        // An earlier one that was to be the last still is, and the host has yet to see it.
        if state.halted != 0 {
            return Ok(());
        }
        self.guard.generation += 1;
        Ok(self.compute.upload(bytemuck::bytes_of(&StepState::after(self.steps)), self.state.view())?)
    }

    /// The Euclidean norm of the last step's reduced gradients, before they were clipped; `None` where they are not, or there was
    /// none yet.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn gradient_norm(&self) -> Result<Option<f64>> {
        self.wait(STEP)?;
        let state = StepState::download(self.state.view(), &self.compute)?;
        Ok(self.config.parallel.reducer.clip_norm.and(Some(state.norm).filter(|norm| !norm.is_nan())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_marks_the_lowest_ranks_is_the_largest() {
        let mut layout = Layout::new();
        layout.push("a", [1]);
        layout.push("b", [1]);
        let marks = [mark(0, 3), mark(0, 3) + 1, mark(2, 3) + 1];
        assert_eq!(marked(marks.into_iter().max().unwrap(), 3, &layout), (0, "b".into()));
        assert_eq!(marked(marks[0], 3, &layout), (0, "a".into()));
        assert_eq!(marked(marks[2], 3, &layout), (2, "b".into()));
        assert!(marks.iter().all(|mark| *mark > REDUCED + 1));
        assert_eq!(marked(REDUCED + 1, 3, &layout), (3, "b".into()));
        assert!(marks.iter().all(|mark| *mark > 0 && i64::try_from(*mark).is_ok()));
        // Memory that was harmed is no reason to panic.
        assert_eq!(marked(u64::MAX, 3, &layout), (0, "unknown".into()));
    }
}
