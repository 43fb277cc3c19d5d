//! A stage on a GPU.
//!
//! Activations and their gradients are sent from GPU memory, by operations of NCCL in the stream of the step. Each step is
//! launched kernel by kernel and waited for, so that a lost neighbour is noticed at once. What ranks exchange besides
//! (arenas, losses) goes through host memory.

use std::sync::Arc;

use mgpu::device::{DeviceConfig, DeviceDataParallel};
use mgpu::replicate::replicate;
use mgpu::timeline::Timeline;
use mgpu::{Communicator, DeviceCommunicator, Layout};
use mgpu_kernels::Precision;
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::cuda::{AutotuneOptions, Stream};

use super::cuts;
use super::place::{Arena, Place};
use crate::nets::{DeviceData, DeviceDropout, DeviceNet, LossReport, Neighbours, Spec};
use crate::parallel::Grid;

/// What waits are for, in error texts.
const STEP: &str = "training step";

/// A stage on this rank's GPU.
pub(crate) struct DeviceStage {
    pub(crate) place: Place,
    /// On the column.
    model: DeviceDataParallel,
    net: DeviceNet,
    /// Connects the GPUs of the row.
    row: DeviceCommunicator,
}

/// How a network is trained as a pipeline of GPUs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeviceStageConfig<'a> {
    pub(crate) grid: Grid,
    /// The layers before which the network is cut; empty if rank 0 is to measure the layers on its CPU.
    pub(crate) cuts: &'a [usize],
    /// Images of a micro-batch.
    pub(crate) micro_batch: usize,
    pub(crate) precision: Precision,
    pub(crate) kernels: AutotuneOptions,
    /// The configuration of each stage, on its column.
    pub(crate) stage: DeviceConfig,
    pub(crate) seed: u64,
}

impl DeviceStage {
    /// Cuts `spec` over the ranks of `device` and `host`, which connect the same ranks. Collective.
    pub(crate) fn new(
        (device, host): (&DeviceCommunicator, &mut Communicator),
        spec: &Spec,
        config: DeviceStageConfig<'_>,
        timeline: &Timeline,
    ) -> mgpu::Result<Self> {
        let DeviceStageConfig { grid, cuts, micro_batch, precision, kernels, stage: column_config, seed } =
            config;
        let (rank, parallel) = (device.rank(), column_config.parallel);
        let measured = (micro_batch, parallel.threads, ConvPolicy::Auto);
        let ends = cuts::ends::<f32>(host, spec, (cuts, grid.stages as usize), measured)?;
        let micro_batches = parallel.reducer.micro_batches;
        let (place, host_column) = Place::new(host, spec, grid, ends, micro_batches, timeline)?;
        let own_group = "a rank with a colour has a group";
        let row = device.split(Some(grid.replica(rank)), 0)?.expect(own_group);
        let column = Arc::new(device.split(Some(grid.stage(rank)), 0)?.expect(own_group));

        let (set_up, batches) = (Stream::new(device.device())?, (micro_batch, place.schedule.in_flight()));
        let net = DeviceNet::part(spec, place.layers(), batches, precision, kernels, &set_up)?;
        let parameters = net.to_device(&net.initial_parameters(seed));
        let layout = net.layout().clone();
        let model = DeviceDataParallel::new(column, host_column, layout, parameters, column_config)?;
        let model = model.with_buffers(&net.initial_buffers())?;
        Ok(DeviceStage { place, model, net, row })
    }

    /// As [`DeviceNet::divide_loss_by`].
    pub(crate) fn divide_loss_by(&mut self, images: f64) {
        self.net.divide_loss_by(images);
    }

    /// Makes one step. `data` is on the GPU, with the order of this step's samples. Returns the losses on the last stage
    /// and on the first; no losses on others.
    ///
    /// # Errors
    /// As [`DeviceDataParallel::read_status`] and [`DeviceCommunicator::wait`].
    pub(crate) fn step(&mut self, data: &DeviceData, dropout: DeviceDropout) -> mgpu::Result<LossReport> {
        let DeviceStage { place, model, net, row } = self;
        net.clear_score(model.stream())?;
        net.pipeline_step(model, data, Some(dropout), &neighbours(row, place))?;
        row.wait(model.stream(), STEP)?;
        model.check()?;
        place.row.report_to_first(net.read_score(model.stream())?)
    }

    /// Evaluates the first `images` samples of the order of `data`, and returns the losses on the last stage. There
    /// `see_logits` gets the network after each batch, and the number of its images. All ranks of a row call it together.
    ///
    /// # Errors
    /// As [`DeviceCommunicator::wait`].
    pub(crate) fn predict(
        &mut self,
        data: &DeviceData,
        images: usize,
        mut see_logits: impl FnMut(&DeviceNet, &Stream, usize) -> mgpu::Result<()>,
    ) -> mgpu::Result<LossReport> {
        let DeviceStage { place, model, net, row } = self;
        net.clear_score(model.stream())?;
        for first in (0..images).step_by(net.max_batch()) {
            let count = (images - first).min(net.max_batch());
            net.pipeline_evaluate(model, data, (first, count), &neighbours(row, place))?;
            row.wait(model.stream(), "evaluation")?;
            if place.is_last() {
                see_logits(net, model.stream(), count)?;
            }
        }
        net.read_score(model.stream())
    }

    /// This stage's tensors in training.
    pub(crate) fn model(&mut self) -> &mut DeviceDataParallel {
        &mut self.model
    }

    /// This stage's stream.
    pub(crate) fn stream(&self) -> &Stream {
        self.model.stream()
    }

    /// This stage's part of the network.
    pub(crate) fn net(&self) -> &DeviceNet {
        &self.net
    }

    /// Number of steps made.
    pub(crate) fn steps(&self) -> u64 {
        self.model.steps()
    }

    /// This stage's parameters, in the order of the host. Collective.
    ///
    /// # Errors
    /// As [`DeviceDataParallel::parameters`].
    pub(crate) fn parameters(&mut self) -> mgpu::Result<Vec<f32>> {
        let values = self.model.parameters()?;
        Ok(self.net.to_host(&values))
    }

    /// As [`Stage::gather_arenas`](super::Stage::gather_arenas).
    ///
    /// # Errors
    /// As [`DeviceDataParallel::arenas`], and errors of the communicator.
    pub(crate) fn gather_arenas(&mut self, keep: impl FnMut(&str, &Layout, Vec<f32>)) -> mgpu::Result<()> {
        let DeviceStage { place, model, net, .. } = self;
        let arenas = model.arenas()?;
        let buffers = model.buffers().to_vec::<f32>(model.stream())?;
        // Lazy: only the first rank of a column has the arenas, and others are not asked for them.
        let on_host = arenas.into_iter().map(|(name, values)| (name, net.to_host(&values).into()));
        place.gather(on_host, &buffers, keep)
    }

    /// As [`Stage::scatter_arenas`](super::Stage::scatter_arenas).
    ///
    /// # Errors
    /// As `read`, and [`DeviceDataParallel::restore`].
    pub(crate) fn scatter_arenas(
        &mut self,
        steps: u64,
        read: impl Fn(&str, &Layout) -> mgpu::Result<Vec<f32>>,
    ) -> mgpu::Result<()> {
        let DeviceStage { place, model, net, .. } = self;
        model
            .restore(steps, |name, _| Ok(net.to_device(&place.scatter(name, Arena::Parameters, &read)?)))?;
        let mut buffers = place.scatter("buffers", Arena::Buffers, &read)?;
        replicate(model.comm(), net.buffers_layout(), &mut buffers)?;
        Ok(model.stream().upload(&buffers, model.buffers())?)
    }
}

impl Drop for DeviceStage {
    /// The model knows only its column.
    fn drop(&mut self) {
        self.row.drain(self.model.stream());
    }
}

/// The stages before and behind this one.
fn neighbours<'a>(comm: &'a DeviceCommunicator, place: &Place) -> Neighbours<'a> {
    let stage = place.schedule.stage as u32;
    let behind = (!place.is_last()).then_some(stage + 1);
    Neighbours { comm, before: stage.checked_sub(1), behind }
}
