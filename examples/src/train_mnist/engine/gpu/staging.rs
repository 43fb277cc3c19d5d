//! A training set that is not on the GPU: the batches of the next steps are copied there while earlier steps run.
//!
//! ```text
//! memory or file of the host ── thread ──> batch ──> pinned memory ── copy stream ──> slot on the GPU ──> gather kernel
//! ```
//!
//! The GPU has a ring of [`SLOTS`] slots, one for each step. Step s reads slot s mod [`SLOTS`]: that is the position which
//! kernels read from GPU memory ([`DeviceConfig::steps_per_epoch`](mgpu::device::DeviceConfig)), so a graph that was
//! captured once serves every slot, and the gather kernel is the same as for a set on the GPU.
//!
//! A slot is overwritten once the host has read the mark of the launch that used it, so the ring has room for the
//! launches in flight and for one more. The steps of a launch wait for the copies of their batches by events.

use mgpu::device::{DeviceDataParallel, Upload};
use mgpu::{Result, Sampler};
use mgpu_kernels::cuda::Stream;

use super::super::super::step_images::StepImages;
use super::super::TrainingConfig;
use super::launches::{AHEAD, STEPS_A_LAUNCH};
use crate::data::{IMAGE_LEN, Samples};
use crate::nets::DeviceData;

/// Slots on the GPU: for the launches in flight, and the one after them.
pub(super) const SLOTS: u64 = (AHEAD as u64 + 1) * STEPS_A_LAUNCH;

/// The batches of the next steps.
pub(super) struct StagedSet {
    data: DeviceData,
    /// The set on the host.
    samples: Samples,
    images: StepImages,
    /// Images of this rank in a step.
    batch: usize,
    copies: Stream,
    slots: Vec<Slot>,
    /// The first step that was not copied yet.
    next: u64,
    /// Steps of the whole training.
    steps: u64,
}

/// Pinned memory for the batch of a step.
struct Slot {
    images: Upload,
    labels: Upload,
}

impl StagedSet {
    /// Allocates the ring. `threads` threads may read images.
    pub(super) fn new(
        model: &DeviceDataParallel,
        samples: &Samples,
        config: &TrainingConfig,
        threads: usize,
    ) -> Result<Self> {
        let (device, batch) = (model.stream().device(), config.division.images().len());
        let slot = |_| {
            let images = Upload::new(device, batch * IMAGE_LEN)?;
            Ok(Slot { images, labels: Upload::new(device, batch)? })
        };
        Ok(StagedSet {
            data: DeviceData::zeroed(model.stream(), SLOTS as usize * batch, IMAGE_LEN)?,
            samples: samples.clone(),
            // As many as may be copied while the GPU is busy with one launch.
            images: StepImages::with_copies(config, 2 * STEPS_A_LAUNCH, threads),
            batch,
            copies: Stream::new(device)?,
            slots: (0..SLOTS).map(slot).collect::<Result<_>>()?,
            next: model.steps(),
            steps: config.steps,
        })
    }

    /// Copies the batches of all steps before `end`, of which `done` have finished, and lets the steps that are enqueued
    /// next wait for them. `end` is at most [`SLOTS`] steps after `done`.
    pub(super) fn prepare(
        &mut self,
        model: &DeviceDataParallel,
        sampler: &mut Sampler,
        (done, end): (u64, u64),
    ) -> Result<()> {
        self.copy(model, sampler, (done, end))?;
        // Copies are made in the order of steps, so the last one is the last to arrive.
        let last = &self.slots[((end - 1) % SLOTS) as usize];
        model.wait_for_upload(&last.labels)
    }

    /// Copies the batches of as many steps as there is room for, but at most those of a launch.
    pub(super) fn prepare_next(
        &mut self,
        model: &DeviceDataParallel,
        sampler: &mut Sampler,
        done: u64,
    ) -> Result<()> {
        let end = next_end(done, model.steps(), self.steps);
        self.copy(model, sampler, (done, end))
    }

    /// The data that steps read.
    pub(super) fn data(&self) -> &DeviceData {
        &self.data
    }

    fn copy(
        &mut self,
        model: &DeviceDataParallel,
        sampler: &mut Sampler,
        (done, end): (u64, u64),
    ) -> Result<()> {
        assert!(end <= done + SLOTS, "the slot of step {end} is in use: {done} steps are done");
        while self.next < end {
            let (batch, _) = self.images.batch(&self.samples, sampler, self.next)?;
            let index = (self.next % SLOTS) as usize;
            let slot = &mut self.slots[index];
            let (images, labels) = self.data.part(index * self.batch..(index + 1) * self.batch);
            model.enqueue_upload_beside(&self.copies, &batch.images, images, &mut slot.images)?;
            model.enqueue_upload_beside(&self.copies, &batch.labels, labels, &mut slot.labels)?;
            self.next += 1;
        }
        Ok(())
    }
}

/// The end of the steps whose batches can be copied after `enqueued` steps were enqueued, of which `done` are done: a
/// launch more, but no more than the training of `steps` steps and the ring have.
fn next_end(done: u64, enqueued: u64, steps: u64) -> u64 {
    (enqueued + STEPS_A_LAUNCH).min(steps).min(done + SLOTS)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The host's order of work, with launches of any lengths: every step finds its batch in its slot.
        #[test]
        fn no_slot_is_overwritten_before_its_step_is_done(
            begin in 0u64..100, launches in prop::collection::vec((1..=STEPS_A_LAUNCH, 1..=AHEAD), 1..60)
        ) {
            let steps = begin + launches.iter().map(|(length, _)| length).sum::<u64>();
            let mut slots = vec![None; SLOTS as usize];
            let (mut next, mut done, mut enqueued) = (begin, begin, begin);
            let mut in_flight = VecDeque::new();
            let mut copy = |end: u64, done: u64| {
                prop_assert!(end <= done + SLOTS);
                for step in next..end {
                    let slot: &mut Option<u64> = &mut slots[(step % SLOTS) as usize];
                    prop_assert!(slot.is_none_or(|before| before < done), "step {step} overwrites {slot:?}");
                    *slot = Some(step);
                }
                next = next.max(end);
                Ok(slots.clone())
            };
            for (length, ahead) in launches {
                while in_flight.len() >= ahead {
                    done = in_flight.pop_front().unwrap();
                }
                let slots = copy(enqueued + length, done)?;
                for step in enqueued..enqueued + length {
                    prop_assert_eq!(slots[(step % SLOTS) as usize], Some(step));
                }
                enqueued += length;
                in_flight.push_back(enqueued);
                copy(next_end(done, enqueued, steps), done)?;
            }
            prop_assert_eq!(enqueued, steps);
        }
    }
}
