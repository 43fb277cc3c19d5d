//! Checks during training on a GPU, without a wait in each step.
//!
//! - *Non-finite gradients*: before the reduction, a rank checks its own gradients, and stores a mark with its rank
//!   and the tensor in the [`StepState`]. The largest mark of all ranks is reduced together with the last bucket.
//!   Then each rank checks every element of the reduced gradients that it updates, because finite gradients may have
//!   an infinite sum. So all ranks know the result before any parameter changes: that update and all later ones are
//!   skipped. With a loss scale only that update is, and the next step begins with a smaller scale.
//! - *Diverged weights*: every `verify_every` steps each rank hashes its weights on the GPU, and the hashes are
//!   gathered.
//!
//! Marks and hashes are copied to the host in stream order ([`StatusReadback`]), and read together with the losses.

use std::ops::Range;

use mgpu_kernels::cuda::{Event, Memory, Pinned, StepState, Stream, View};
use mgpu_kernels::digest::cuda as digest;
use mgpu_kernels::optimizer::Factors;
use mgpu_kernels::optimizer::chunk::chunks;
use mgpu_kernels::optimizer::cuda as optimizer;

use super::super::DataParallel;
use super::super::config::DataParallelConfig;
use super::super::state::loss_scale_of_rank_0;
use super::device_bucket::{DeviceBucket, DeviceBuckets};
use super::{CHUNK, DeviceDataParallel, STEP};
use crate::comm::{DType, ReduceOp};
use crate::optimizer::LossScale;
use crate::{Error, Layout, Result};

/// GPU memory of the checks.
#[derive(Debug)]
pub(super) struct Guard {
    /// Table of what is checked of this rank's own gradients.
    parts: Memory,
    /// Table of what is checked of the reduced gradients.
    reduced: Memory,
    /// `None` without clipping.
    squares: Option<Squares>,
    /// A hash of each rank's weights.
    hashes: Memory,
    /// Incremented when the training goes back to an earlier step: older read-backs are then outdated.
    pub(super) generation: u64,
}

/// Sums of squares of the gradients, chunk by chunk.
#[derive(Debug)]
struct Squares {
    /// The chunks of all gradients in arena order, so that the sum depends neither on ranks nor on buckets; `None` if
    /// this rank only holds its shards.
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

/// A read-back of the status of the steps up to a point of the stream.
#[derive(Debug)]
pub struct StatusReadback {
    bytes: Pinned,
    done: Event,
    generation: u64,
}

impl StatusReadback {
    /// Allocates pinned memory for the status of `model`.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(model: &DeviceDataParallel) -> Result<Self> {
        let device = model.compute.device();
        let bytes = Pinned::zeroed(device, StepState::BYTES + model.guard.hashes.view().bytes())?;
        Ok(StatusReadback { bytes, done: Event::new(device)?, generation: 0 })
    }
}

/// The mark of non-finite gradients of `rank`, without the tensor's index: lower ranks have larger marks, and no mark
/// is 0.
fn mark(rank: u32, ranks: u32) -> u64 {
    u64::from(ranks - rank) << 32 | 1
}

/// The mark of non-finite reduced gradients, without the tensor's index: smaller than those of ranks, which say more.
const REDUCED: u64 = 1;

/// The rank and the tensor of a mark; a rank of `ranks` or more means reduced gradients.
fn marked(mark: u64, ranks: u32, layout: &Layout) -> (u32, String) {
    let tensor = (mark & u64::from(u32::MAX)).saturating_sub(1) as usize;
    let name =
        layout.tensors().get(tensor).map_or_else(|| "unknown".to_owned(), |tensor| tensor.name.clone());
    (ranks.saturating_sub((mark >> 32) as u32), name)
}

impl DeviceDataParallel {
    /// A part of the state that ranks reduce, as one number.
    fn number(&self, bytes: Range<usize>, dtype: DType) -> View<'_> {
        self.state.slice(bytes).cast(dtype)
    }

    /// The mark of non-finite gradients.
    pub(super) fn non_finite(&self) -> View<'_> {
        self.number(StepState::NON_FINITE, DType::I64)
    }

    /// The range of all buckets in the table of what is checked.
    pub(super) fn all_parts(&self) -> Range<usize> {
        0..self.guard.parts.len()
    }

    /// Checks this rank's own gradients of a range of the table of what is checked.
    pub(super) fn find_non_finite(&self, parts: Range<usize>) -> Result<()> {
        let (parts, mark) = (self.guard.parts.slice(parts), mark(self.rank(), self.ranks()));
        let gradients = self.gradients.view();
        Ok(digest::find_non_finite(
            &self.compute,
            gradients,
            parts,
            self.state.view(),
            mark,
            self.non_finite(),
        )?)
    }

    /// Checks the reduced gradients that this rank updates. Collective unless all ranks have all of them.
    pub(super) fn check_reduced(&self) -> Result<()> {
        if self.ranks() == 1 || !self.config.parallel.reducer.check_finite {
            return Ok(());
        }
        let (stream, gradients, parts) = (&self.compute, self.gradients.view(), self.guard.reduced.view());
        digest::find_non_finite(stream, gradients, parts, self.state.view(), REDUCED, self.non_finite())?;
        // The other ranks have not checked what this rank updates.
        if self.is_divided() {
            self.all_reduce_in_order(self.non_finite(), ReduceOp::Max)?;
        }
        Ok(())
    }

    /// Clips the reduced gradients, if the configuration says so. Collective unless all ranks have all of them.
    pub(super) fn clip(&self) -> Result<()> {
        let (Some(most), Some(squares)) = (self.config.parallel.reducer.clip_norm, &self.guard.squares)
        else {
            return Ok(());
        };
        let (stream, gradients) = (&self.compute, self.gradients.view());
        if let Some(whole) = &squares.whole {
            let is_reduced = !self.is_shared() || self.rank() == 0;
            if is_reduced {
                optimizer::squares(stream, gradients, whole.view(), squares.sums.view())?;
                optimizer::total_squares(stream, squares.sums.view(), self.state.view())?;
            }
            if self.is_shared() {
                self.comm.broadcast(stream, self.number(StepState::SQUARES, DType::F64), 0)?;
            }
        } else {
            let sum = |chunks: Range<usize>| {
                let sums = squares.sums.slice(chunks.start / CHUNK..chunks.end / CHUNK);
                optimizer::squares(stream, gradients, self.chunks.slice(chunks), sums)
            };
            // The rest is the same on all ranks: only one rank counts it.
            for bucket in &self.buckets {
                let [own, rest] = bucket.chunks.clone();
                sum(own)?;
                if self.rank() == 0 {
                    sum(rest)?;
                }
            }
            optimizer::total_squares(stream, squares.sums.view(), self.state.view())?;
            self.all_reduce_in_order(self.number(StepState::SQUARES, DType::F64), ReduceOp::Sum)?;
        }
        Ok(optimizer::clip(stream, self.state.view(), most)?)
    }

    /// Hashes the weights for a comparison if one is due. `before` is the number of steps before the last ones.
    /// Collective.
    pub(super) fn compare_if_due(&self, before: u64) -> Result<()> {
        let is_due =
            self.config.parallel.verify_every.is_some_and(|every| self.steps / every > before / every);
        // The host compares its own parameters, which are uploaded in every step.
        if !is_due || self.capturing || self.ranks() == 1 || self.is_updated_on_host() {
            return Ok(());
        }
        let hashes = &self.guard.hashes;
        let mine = hashes.slice(self.rank() as usize..self.rank() as usize + 1);
        digest::hash(&self.compute, self.parameters.view(), mine)?;
        self.comm.all_gather(&self.compute, mine, hashes.view())
    }

    /// Enqueues a read-back of the status of the steps so far.
    ///
    /// # Errors
    /// If the driver returns an error.
    ///
    /// # Panics
    /// If `to` was created for a model with another number of ranks.
    pub fn enqueue_status_readback(&self, to: &mut StatusReadback) -> Result<()> {
        self.compute.enqueue_download_part(self.state.view(), &mut to.bytes, 0)?;
        self.compute.enqueue_download_part(self.guard.hashes.view(), &mut to.bytes, StepState::BYTES)?;
        to.generation = self.guard.generation;
        Ok(self.compute.record(&to.done)?)
    }

    /// Waits for the last read-back that was enqueued, and returns the error that it shows, if any. Ignores
    /// read-backs from before the training went back to an earlier step. Collective after an error: all ranks must
    /// read the status at the same points.
    ///
    /// # Errors
    /// Without a loss scaler, [`Error::NotFinite`] if a rank had non-finite gradients, [`Error::ReducedNotFinite`] if only the reduced
    /// gradients are non-finite: parameters, optimizer and [`steps`](Self::steps) are as before that step, and
    /// another one may be made, but buffers are as the model has left them. [`Error::Diverged`] if weights differ
    /// between ranks. As [`wait`](Self::wait).
    pub fn read_status(&mut self, status: &mut StatusReadback) -> Result<()> {
        self.comm.wait(&status.done, STEP)?;
        // SAFETY: the event follows the copies, and no copy is enqueued while the bytes are borrowed.
        let (state, hashes) = unsafe { status.bytes.bytes() }.split_at(StepState::BYTES);
        if status.generation != self.guard.generation {
            return Ok(());
        }
        let state: StepState = bytemuck::pod_read_unaligned(state);
        let hashes: Vec<i64> = bytemuck::pod_collect_to_vec(hashes);
        self.check_status(&state, &hashes)
    }

    /// Returns the error that a state and hashes of this generation show, if any.
    fn check_status(&mut self, state: &StepState, hashes: &[i64]) -> Result<()> {
        let scaler = self.config.plan().loss_scaler;
        if let Some(scaler) = scaler {
            self.loss_scale = Some(state.next_loss_scale(&scaler));
        }
        if state.non_finite != 0 && !(scaler.is_some() && state.is_skipped()) {
            self.reset_to_step(state.step)?;
            let ((rank, tensor), step) =
                (marked(state.non_finite, self.ranks(), &self.layout), state.step + 1);
            return Err(match rank < self.ranks() {
                true => Error::NotFinite { rank: self.comm().world_rank(rank), tensor, step },
                false => Error::ReducedNotFinite { tensor, step },
            });
        }
        if hashes.iter().any(|hash| *hash != hashes[0]) {
            self.compare_all()?;
        }
        Ok(())
    }

    /// Waits for all steps so far, and returns the error of their status, if any. Gives up a step that broke off.
    /// Collective.
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

    /// Continues after `steps` steps with the current loss scale, and discards the status until now.
    pub(super) fn reset_to_step(&mut self, steps: u64) -> Result<()> {
        self.wait(STEP)?;
        let state = StepState::after(steps);
        let state = self.loss_scale().map_or(state, |scale| state.with_loss_scale(scale));
        self.compute.upload(bytemuck::bytes_of(&state), self.state.view())?;
        self.compute.zero(self.guard.hashes.view())?;
        self.guard.generation += 1;
        (self.steps, self.open) = (steps, false);
        Ok(())
    }

    /// Discards a step that broke off: its collectives, its number, and its status.
    pub(super) fn abandon_step(&mut self) -> Result<()> {
        // Not by the buckets' events, which may have been recorded in a capture.
        self.comm.wait(&self.exchange, STEP)?;
        self.wait(STEP)?;
        let state = StepState::download(self.state.view(), &self.compute)?;
        self.open = false;
        // An earlier step has halted the training, and the host has yet to read that status.
        if state.halted != 0 {
            return Ok(());
        }
        self.guard.generation += 1;
        // If the step has not even begun, the scale has yet to follow the step before.
        let scaler = self.config.plan().loss_scaler.filter(|_| state.step != self.steps);
        let scale = scaler.map_or(state.loss_scale(), |scaler| state.next_loss_scale(&scaler));
        let state = StepState::after(self.steps).with_loss_scale(scale);
        Ok(self.compute.upload(bytemuck::bytes_of(&state), self.state.view())?)
    }

    /// The scale of the next step's loss, and what it depends on, after the steps whose status was read last
    /// ([`read_status`](Self::read_status), [`check`](Self::check)); `None` without a
    /// [loss scaler](crate::DataParallelConfig::loss_scaler). Kernels read the scale of the current step from the
    /// [`state`](Self::state).
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.host.model().map_or(self.loss_scale, DataParallel::loss_scale)
    }

    /// As [`DataParallel::restore_loss_scale`]. Collective.
    ///
    /// # Errors
    /// As [`DataParallel::restore_loss_scale`], and as [`wait`](Self::wait).
    pub fn restore_loss_scale(&mut self, saved: Option<LossScale>) -> Result<()> {
        if let Some(host) = self.host.model_mut() {
            host.restore_loss_scale(saved)?;
        } else if self.loss_scale.is_some() {
            let saved = loss_scale_of_rank_0(self.host.comm(), saved, self.steps)?;
            self.loss_scale = saved.or(self.loss_scale);
        }
        self.reset_to_step(self.steps)
    }

    /// The Euclidean norm of the last step's reduced gradients before clipping; `None` without clipping, or before
    /// the first step.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn gradient_norm(&self) -> Result<Option<f64>> {
        if let Some(host) = self.host.model() {
            return Ok(host.gradient_norm());
        }
        self.wait(STEP)?;
        let state = StepState::download(self.state.view(), &self.compute)?;
        Ok(self.config.parallel.reducer.clip_norm.and(Some(state.norm).filter(|norm| !norm.is_nan())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_rank_has_the_largest_mark() {
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
        // Corrupted memory must not cause a panic.
        assert_eq!(marked(u64::MAX, 3, &layout), (0, "unknown".into()));
    }
}
