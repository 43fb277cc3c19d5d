//! The training set on the GPU, with the sample orders of two epochs.
//!
//! A step finds its samples by its position in a ring of two epochs: even epochs read the first half of the order, odd
//! ones the second. While an epoch runs, the order of the next one is uploaded to the other half, in stream order, so
//! after the last step that has read it. The position is in GPU memory, so a captured step serves both halves.

use mgpu::device::{DeviceDataParallel, Upload};
use mgpu::{Result, Sampler};

use super::super::TrainingConfig;
use super::upload;
use crate::data::Samples;
use crate::nets::DeviceData;

/// Epochs whose orders are on the GPU at the same time.
pub(in super::super) const EPOCHS: u64 = 2;

/// The training set and its orders.
pub(in super::super) struct TrainingSet {
    data: DeviceData,
    upload: Upload,
    /// Steps of an epoch, and samples of this rank in it.
    steps: usize,
    places: usize,
    /// The epoch in each part of the ring.
    epochs: [Option<u64>; EPOCHS as usize],
}

impl TrainingSet {
    /// Copies the images and labels to the GPU.
    pub(in super::super) fn new(
        model: &DeviceDataParallel,
        data: &Samples,
        config: &TrainingConfig,
    ) -> Result<Self> {
        let (stream, steps) = (model.stream(), config.steps_per_epoch as usize);
        let places = steps * config.division.images().len();
        Ok(TrainingSet {
            data: upload(stream, data, places * EPOCHS as usize)?,
            upload: Upload::new(stream.device(), places * size_of::<u32>())?,
            steps,
            places,
            epochs: [None; EPOCHS as usize],
        })
    }

    /// Enqueues the upload of this rank's order of `epoch`, unless it is there. It replaces an older epoch, whose steps
    /// must all be enqueued.
    pub(in super::super) fn prepare(
        &mut self,
        model: &DeviceDataParallel,
        sampler: &mut Sampler,
        epoch: u64,
    ) -> Result<()> {
        let part = (epoch % EPOCHS) as usize;
        if self.epochs[part] == Some(epoch) {
            return Ok(());
        }
        let order: Vec<u32> = (0..self.steps).flat_map(|step| sampler.batch(epoch, step).to_vec()).collect();
        let half = self.data.order(part * self.places..(part + 1) * self.places);
        // Until it succeeds, this part of the ring belongs to no epoch.
        self.epochs[part] = None;
        model.enqueue_upload(&order, half, &mut self.upload)?;
        self.epochs[part] = Some(epoch);
        Ok(())
    }

    /// The data that steps read.
    pub(in super::super) fn data(&self) -> &DeviceData {
        &self.data
    }
}
