//! Training on the CPU, on a GPU, or as a pipeline of either, behind one interface.
//!
//! The trainer decides what happens when; an engine owns the model and does it. All engines train the same networks
//! from the same initial values on the same batches and write the same checkpoints, so a run can be resumed with
//! another engine.

mod cpu;
mod device_pipeline;
mod gpu;
mod pipeline;
mod stop_checks;

pub(super) use cpu::Cpu;
pub(super) use device_pipeline::DevicePipeline;
pub(super) use gpu::{Gpu, Options, resident_bytes};
use mgpu::checkpoint::{Checkpoint, Snapshot};
use mgpu::optimizer::{LossScale, OptimizerConfig, Schedule};
use mgpu::{Communicator, Layout, ReduceOp, Sampler};
use mgpu_kernels::cuda::Device;
pub(super) use pipeline::{Pipeline, PipelineReport};
pub(super) use stop_checks::StopCheck;
use stop_checks::evaluate_in_parts;

use super::division::Division;
use super::profile::StepProfile;
use crate::data::{Dataset, Samples};
use crate::nets::{LossReport, Spec};

/// The parameters of a run that an engine needs.
#[derive(Debug, Clone, Copy)]
pub(super) struct TrainingConfig {
    pub(super) seed: u64,
    /// The images of a step on this rank, and their micro-batches.
    pub(super) division: Division,
    /// Initial learning rate.
    pub(super) lr: f64,
    /// Schedule of the learning rate.
    pub(super) schedule: Schedule,
    pub(super) steps_per_epoch: u64,
    /// Steps of the whole training.
    pub(super) steps: u64,
    /// Bytes of the training set on a GPU, if all of it is there.
    pub(super) resident_bytes: u64,
}

impl TrainingConfig {
    /// Index of this rank's first image in the global batch.
    fn first_sample(&self) -> u64 {
        self.division.images().start as u64
    }

    /// The optimizer of `net` in this run.
    fn optimizer(&self, net: &Spec) -> OptimizerConfig {
        let mut optimizer = net.optimizer.with_schedule(self.schedule);
        optimizer.rule = optimizer.rule.with_lr(self.lr);
        optimizer
    }
}

/// How far to train.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stretch {
    /// Return when so many steps are done, all in one epoch.
    pub(super) until: u64,
    /// Steps up to here may be enqueued meanwhile, because nothing happens between them: no evaluation, no
    /// checkpoint.
    pub(super) stop: u64,
}

/// Called after steps, with the number of steps done and the latest known loss.
pub(super) type StepObserver<'a> = dyn FnMut(u64, f64) + 'a;

/// Images that an evaluation reads at once, if they are not in memory.
const PIECE: usize = 8192;

/// The losses of an evaluation, and those with the moving average of the weights if there is one.
pub(super) type Evaluated = (LossReport, Option<LossReport>);

/// A model in training. All ranks must call collective methods together.
pub(super) trait Engine {
    /// For the program's own collectives between steps.
    fn comm(&mut self) -> &mut Communicator;

    /// The number of this rank's replica of the network, and the number of replicas. Each replica trains on images of its
    /// own. It is on one rank, unless the layers are cut over ranks.
    fn replica(&mut self) -> (u32, u32) {
        (self.comm().rank(), self.comm().size())
    }

    /// Bytes that this rank has moved between ranks so far ([`Communicator::traffic`]), if the backend counts them.
    fn traffic(&mut self) -> Option<u64> {
        self.comm().traffic()
    }

    /// Number of parameters of the network.
    fn parameters(&self) -> usize;

    /// Number of steps done.
    fn steps(&self) -> u64;

    /// Trains until `until` steps are done, all in one epoch, on the batches of `sampler`. Asks `should_stop` before each
    /// step or launch of steps, and returns early, between two steps, if it says so. Collective.
    ///
    /// # Errors
    /// Errors of the communicator and of the GPU.
    fn train(
        &mut self,
        data: &Samples,
        sampler: &mut Sampler,
        stretch: Stretch,
        observer: &mut StepObserver<'_>,
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<()>;

    /// The losses of all ranks in this epoch so far, since the engine was created or restored. To be called where a
    /// stretch has stopped. Collective.
    ///
    /// # Errors
    /// Errors of the communicator.
    fn score_so_far(&mut self) -> mgpu::Result<LossReport>;

    /// As [`score_so_far`](Self::score_so_far), and ends the epoch. To be called once, when the last step of an epoch or
    /// of the training is done. Collective.
    ///
    /// # Errors
    /// Errors of the communicator.
    fn take_score(&mut self) -> mgpu::Result<LossReport>;

    /// The L2 penalty of the weights after the steps so far, if the optimizer has one. To be called where a stretch has
    /// stopped. Collective.
    ///
    /// # Errors
    /// Errors of the communicator and of the GPU.
    fn l2_loss(&mut self) -> mgpu::Result<Option<f64>>;

    /// The loss scale after the steps so far, if gradients are scaled. The same on all ranks.
    fn loss_scale(&self) -> Option<LossScale> {
        None
    }

    /// Evaluates the samples `shard`, the same on all ranks of a [replica](Self::replica), and again with the moving
    /// average of the weights if there is one. `None` if `should_stop` said so on the way. Collective.
    ///
    /// # Errors
    /// Errors of the communicator and of the GPU.
    fn evaluate(
        &mut self,
        data: &Samples,
        shard: &[u32],
        should_stop: &mut StopCheck<'_>,
    ) -> mgpu::Result<Option<Evaluated>>;

    /// Checks that all ranks hold the same, finite weights. Returns their checksum. Collective.
    ///
    /// # Errors
    /// If the weights differ or are not finite.
    fn verify(&mut self) -> mgpu::Result<u64>;

    /// A copy of the state to save, on rank 0. Collective.
    ///
    /// # Errors
    /// Errors of the communicator and of the GPU.
    fn snapshot(&mut self) -> mgpu::Result<Option<Snapshot>>;

    /// Restores the state after `step` steps from rank 0's checkpoint. Collective.
    ///
    /// # Errors
    /// If the checkpoint cannot be read or does not fit.
    fn restore(&mut self, step: u64, checkpoint: Option<&Checkpoint>) -> mgpu::Result<()>;

    /// The logits of all images of `data`, \[images, classes\], in evaluation mode. All ranks of a
    /// [replica](Self::replica) of the network call it together.
    ///
    /// # Errors
    /// Errors of the communicator and of the GPU.
    fn logits(&mut self, data: &Dataset) -> mgpu::Result<Vec<f32>>;

    /// The GPU; `None` on the CPU.
    fn gpu(&self) -> Option<&Device>;

    /// The device of a rank, in words.
    fn describe_device(&self) -> String;

    /// One line for each layer with a choice of kernels: the kernel chosen.
    fn kernels(&self) -> Vec<String>;

    /// The profile of the steps so far, if requested and available.
    fn profile(&self) -> Option<StepProfile>;

    /// Which layers each part of the network has, in words, if the layers are cut over ranks.
    fn describe_parts(&self) -> Option<String> {
        None
    }

    /// How the layers are cut over ranks, if they are. Collective.
    ///
    /// # Errors
    /// Errors of the communicator.
    fn pipeline(&mut self) -> mgpu::Result<Option<PipelineReport>> {
        Ok(None)
    }
}

/// Sums a report over all ranks. Counts stay exact: they are far below 2^53.
pub(super) fn over_ranks(report: LossReport, comm: &mut Communicator) -> mgpu::Result<LossReport> {
    let mut sums = [report.loss_sum, report.correct as f64, report.samples as f64];
    comm.all_reduce_slice(&mut sums, ReduceOp::Sum)?;
    Ok(LossReport { loss_sum: sums[0], correct: sums[1] as u64, samples: sums[2] as u64 })
}

/// The values of an arena: from the checkpoint on rank 0; placeholders elsewhere, which rank 0's values replace.
fn read(checkpoint: Option<&Checkpoint>, name: &str, layout: &Layout) -> mgpu::Result<Vec<f32>> {
    match checkpoint {
        Some(checkpoint) => checkpoint.load(name, layout),
        None => Ok(vec![0.0; layout.len()]),
    }
}

/// The loss scale in the checkpoint on rank 0, if it has one.
fn saved_loss_scale(checkpoint: Option<&Checkpoint>) -> Option<LossScale> {
    checkpoint.and_then(|checkpoint| checkpoint.manifest().loss_scale())
}

/// Returns an error that names the tensor if a weight is not finite.
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
