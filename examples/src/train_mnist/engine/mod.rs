//! How a rank trains: on the CPU or on a GPU, with one contract.
//!
//! A trainer decides what happens when; an engine has the model and does it. Both engines train the same networks from
//! the same initial values on the same batches, and write the same checkpoints: a run may go on with the other one.

mod cpu;
mod gpu;

pub(super) use cpu::Cpu;
pub(super) use gpu::{Gpu, Options};
use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::optimizer::{OptimizerConfig, Schedule};
use mgpu::{Communicator, Layout, Sampler};
use mgpu_kernels::cuda::Device;

use super::profile::StepProfile;
use crate::data::Dataset;
use crate::nets::{LossReport, Spec};

/// What an engine has to know of the run.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainingConfig {
    pub(super) seed: u64,
    /// Images a step on this rank.
    pub(super) batch: usize,
    /// Parts that those are cut into.
    pub(super) micro_batches: usize,
    /// Index in the batch of all ranks of this rank's first image.
    pub(super) first_sample: u64,
    /// Learning rate at the beginning.
    pub(super) lr: f64,
    /// What becomes of it.
    pub(super) schedule: Schedule,
    pub(super) steps_per_epoch: u64,
}

impl TrainingConfig {
    /// How parameters of `net` follow their gradients in this run.
    fn optimizer(&self, net: &Spec) -> OptimizerConfig {
        let mut optimizer = net.optimizer.with_schedule(self.schedule);
        optimizer.rule = optimizer.rule.with_lr(self.lr);
        optimizer
    }
}

/// Told after steps how many have been made in all, and the loss of the last one whose loss is known.
pub(super) type StepObserver<'a> = dyn FnMut(u64, f64) + 'a;

/// A model in training. What is said to be collective is called by all ranks alike.
pub(super) trait Engine {
    /// For collectives of the program's own between steps.
    fn comm(&mut self) -> &mut Communicator;

    /// Parameters of the network.
    fn parameters(&self) -> usize;

    /// Steps made.
    fn steps(&self) -> u64;

    /// Makes steps until `until` have been made, all of one epoch, on the batches of `sampler`, and returns this rank's
    /// losses. Collective.
    ///
    /// # Errors
    /// As the communicator's, and the GPU's.
    fn train(
        &mut self,
        data: &Dataset,
        sampler: &mut Sampler,
        until: u64,
        seen: &mut StepObserver<'_>,
    ) -> mgpu::Result<LossReport>;

    /// Evaluates the samples `shard`, and once more with the moving average of the weights where one is kept. Collective.
    ///
    /// # Errors
    /// As the communicator's, and the GPU's.
    fn evaluate(&mut self, data: &Dataset, shard: &[u32]) -> mgpu::Result<(LossReport, Option<LossReport>)>;

    /// Checks that all ranks hold the same weights, and finite ones, and returns their checksum. Collective.
    ///
    /// # Errors
    /// If they do not.
    fn verify(&mut self) -> mgpu::Result<u64>;

    /// A copy of everything there is to save, on rank 0. Collective.
    ///
    /// # Errors
    /// As the communicator's, and the GPU's.
    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>>;

    /// Goes back to the state after `step` steps, which rank 0 has a checkpoint of. Collective.
    ///
    /// # Errors
    /// If it cannot be read, or does not fit.
    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()>;

    /// The logits of the first `count` images of `data`, \[count, classes\], in evaluation mode.
    ///
    /// # Errors
    /// As the GPU's.
    fn logits(&mut self, data: &Dataset, count: usize) -> mgpu::Result<Vec<f32>>;

    /// The GPU; `None` on the CPU.
    fn gpu(&self) -> Option<&Device>;

    /// What a rank has to compute with, in words.
    fn describe_device(&self) -> String;

    /// One line for each layer that there is a choice of kernels for: which was chosen.
    fn kernels(&self) -> Vec<String>;

    /// Where the time of the steps so far went, if that was asked for and is known.
    fn profile(&self) -> Option<StepProfile>;
}

/// The values of an arena: of the checkpoint on rank 0, elsewhere any, to be replaced by rank 0's.
fn read(checkpoint: Option<&Checkpoint>, name: &str, layout: &Layout) -> mgpu::Result<Vec<f32>> {
    match checkpoint {
        Some(checkpoint) => checkpoint.load(name, layout),
        None => Ok(vec![0.0; layout.len()]),
    }
}

/// An error that names the tensor, if a weight is not finite.
fn check_finite(layout: &Layout, weights: &[f32]) -> mgpu::Result<()> {
    let is_finite = |values: &[f32]| values.iter().all(|value| value.is_finite());
    match layout.tensors().iter().find(|tensor| !is_finite(&weights[tensor.range()])) {
        None => Ok(()),
        Some(tensor) => {
            let problem = format!(
                "the training has diverged: tensor `{}` of the weights is not finite; try a lower --lr",
                tensor.name
            );
            Err(mgpu::Error::program(problem))
        }
    }
}
