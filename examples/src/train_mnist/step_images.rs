//! The images of one training step after another.
//!
//! The sampler shuffles the whole set at the beginning of an epoch, so it is asked for the batches of steps in their
//! order and never for an earlier one. Images in memory are taken from there. Those in a file are requested some steps
//! ahead, also across the end of an epoch, and read by a thread.

use mgpu::Sampler;

use super::engine::TrainingConfig;
use crate::data::{Dataset, ReadAhead, Samples};

/// Steps whose images are read while a step is computed.
const STEPS_AHEAD: u64 = 2;

/// Finds this rank's images of each step.
#[derive(Debug)]
pub(super) struct StepImages {
    steps_per_epoch: u64,
    /// Steps of the whole training.
    steps: u64,
    /// Steps that are read ahead, and threads that read.
    ahead: u64,
    threads: usize,
    /// Whether a thread also copies images that are in memory.
    copies: bool,
    /// Whether only labels are needed, and those of the last batch.
    labels_only: bool,
    labels: Dataset,
    reader: Option<ReadAhead>,
    /// The step whose batch the reader returns next, and the one after the last that was requested.
    next: u64,
    requested: u64,
    /// `0..n` for batches of n images.
    indices: Vec<u32>,
}

impl StepImages {
    /// Reads images that are not in memory.
    pub(super) fn new(config: &TrainingConfig) -> Self {
        StepImages {
            steps_per_epoch: config.steps_per_epoch,
            steps: config.steps,
            ahead: STEPS_AHEAD,
            threads: 1,
            copies: false,
            labels_only: false,
            labels: Dataset::default(),
            reader: None,
            next: 0,
            requested: 0,
            indices: Vec::new(),
        }
    }

    /// Reads no images that are in a file, if only labels are needed.
    pub(super) fn with_labels_only(self, labels_only: bool) -> Self {
        StepImages { labels_only, ..self }
    }

    /// Reads the images of `ahead` steps ahead, with up to `threads` threads, and also copies those that are in memory.
    pub(super) fn with_copies(config: &TrainingConfig, ahead: u64, threads: usize) -> Self {
        StepImages { ahead, threads, copies: true, ..Self::new(config) }
    }

    /// This rank's images of step `step`, counted from 0: a set, and their indices in it. The step after it is cheapest to
    /// ask for next.
    ///
    /// # Errors
    /// If a file cannot be read, or no thread can be started.
    pub(super) fn batch<'a>(
        &'a mut self,
        data: &'a Samples,
        sampler: &'a mut Sampler,
        step: u64,
    ) -> mgpu::Result<(&'a Dataset, &'a [u32])> {
        if let Samples::InMemory(data) = data
            && !self.copies
        {
            return Ok((&**data, samples(sampler, self.steps_per_epoch, step)));
        }
        if self.labels_only {
            let (labels, samples) = (data.labels(), samples(sampler, self.steps_per_epoch, step));
            self.labels.labels.clear();
            self.labels.labels.extend(samples.iter().map(|sample| labels[*sample as usize]));
            self.indices.extend(self.indices.len() as u32..samples.len() as u32);
            return Ok((&self.labels, &self.indices[..samples.len()]));
        }
        if self.reader.is_none() || self.next != step {
            let reader = ReadAhead::new(data.clone(), self.threads);
            let problem = |error| format!("no thread can be started to read images: {error}");
            self.reader = Some(reader.map_err(problem).map_err(mgpu::Error::program)?);
            (self.next, self.requested) = (step, step);
        }
        let reader = self.reader.as_mut().expect("it was created");
        while self.requested <= step || self.requested < self.steps.min(step + 1 + self.ahead) {
            reader.request(samples(sampler, self.steps_per_epoch, self.requested).to_vec());
            self.requested += 1;
        }
        self.next = step + 1;
        let batch = reader.next_batch()?;
        self.indices.extend(self.indices.len() as u32..batch.len() as u32);
        Ok((batch, &self.indices[..batch.len()]))
    }
}

/// This rank's samples of step `step`.
fn samples(sampler: &mut Sampler, steps_per_epoch: u64, step: u64) -> &[u32] {
    sampler.batch(step / steps_per_epoch, (step % steps_per_epoch) as usize)
}
