//! Batch normalisation, with the statistics of the global batch.

use std::ops::Range;

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::conv::cuda::LINEAR;
use mgpu_kernels::cuda::{Counters, Memory, View};
use mgpu_kernels::norm::cuda::BatchStatistics;
use mgpu_kernels::norm::{self, Statistics, Sums};
use mgpu_kernels::{DType, Storage};

use super::{
    BackwardEnd, BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass,
    DeviceStageTensors, DeviceStep, ForwardPass, InPlace, LayerContext, Neighbourhood, OnCpu, OnGpu,
    Operation, PassState, SetUp, StageTensors, Step, WorkspaceNeeds,
};
use crate::nets::profile::{Lap, lap};
use crate::nets::tensors::{Role, Tensors};

/// Normalisation of each channel, with a learned scale and shift.
pub(super) struct BatchNorm;

impl Definition for BatchNorm {
    fn plan(&self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        let channels = context.extents[0];
        let weight = tensors.add_pair(context.layer, &[channels], Role::Scale, Role::Shift);
        let mean = tensors.add_buffer(context.layer, "running_mean", channels);
        let var = tensors.add_buffer(context.layer, "running_var", channels);
        Some(Box::new(NormOp { channels, weight, mean, var }))
    }
}

/// A normalisation in its network. Tensor `weight` is the scale, the next one the shift; `mean` and `var` are the
/// ranges of the running statistics in the buffers.
#[derive(Debug, Clone)]
struct NormOp {
    channels: usize,
    weight: usize,
    mean: Range<usize>,
    var: Range<usize>,
}

impl Operation for NormOp {
    fn describe(&self) -> String {
        "batch norm".to_owned()
    }

    fn weight(&self) -> Option<usize> {
        Some(self.weight)
    }

    fn in_place(&self) -> InPlace {
        InPlace::Backward
    }

    fn on_cpu(&self, _: CpuKernels) -> CpuLayer {
        CpuLayer::BatchNorm(Cpu { norm: self.clone(), sums: Sums::new(self.channels) })
    }

    fn pass_state(&self, _: usize) -> PassState {
        PassState { statistics: Some(Statistics::new(self.channels)), ..PassState::default() }
    }

    fn on_gpu(&self, set_up: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        let device = set_up.stream.device();
        Ok(Box::new(Gpu {
            sums: Memory::zeroed(device, DType::F64, 2 * self.channels + 1)?,
            workspace: norm::cuda::workspace_len(device.multiprocessors(), self.channels),
            counters: Counters::new(device)?,
            norm: self.clone(),
        }))
    }
}

/// On the CPU. The batch statistics are kept from the forward to the backward pass.
#[derive(Debug)]
pub(in crate::nets) struct Cpu {
    norm: NormOp,
    sums: Sums,
}

/// The statistics of the batch in `state`.
fn statistics_of(state: &mut PassState) -> &mut Statistics {
    state.statistics.as_mut().expect("a batch normalisation keeps its statistics")
}

impl<T: Storage> OnCpu<T> for Cpu {
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], pass: &mut ForwardPass<'_>) -> Result<()> {
        let Cpu { norm: NormOp { weight, mean, var, .. }, sums } = self;
        let (gamma, beta) = (step.tensor(*weight), step.tensor(*weight + 1));
        let statistics = statistics_of(step.state);
        match pass {
            ForwardPass::Train { buffers, ranks, .. } => {
                norm::cpu::sum_inputs(step.threads, x, sums);
                lap(step.profile, Lap::Forward(step.stage));
                ranks.sum_over_ranks(sums.values_mut())?;
                lap(step.profile, Lap::Communication);
                let (running_mean, running_var) = buffers.split_at_mut(var.start);
                let running_var = &mut running_var[..var.len()];
                statistics.of_batch(sums, &mut running_mean[mean.clone()], running_var);
            }
            ForwardPass::Eval { buffers } => {
                statistics.of_running(&buffers[mean.clone()], &buffers[var.clone()]);
            }
        }
        norm::cpu::normalise(step.threads, statistics, gamma, beta, x, y);
        Ok(())
    }

    fn backward(
        &mut self,
        mut step: Step<'_>,
        tensors: StageTensors<'_, T>,
        pass: BackwardPass<'_>,
    ) -> Result<()> {
        let Cpu { norm: NormOp { weight, .. }, sums } = self;
        let (StageTensors { x, dy, .. }, BackwardPass { input_gradient, sink, bias, .. }) = (tensors, pass);
        let gamma = step.tensor(*weight);
        norm::cpu::sum_gradients(step.threads, statistics_of(step.state), x, dy, sums);
        norm::cpu::scale_gradient(sums, sink.gradient(*weight));
        let db = &mut bias[..gamma.len()];
        norm::cpu::shift_gradient(sums, db);
        step.announce(sink, *weight, db)?;
        if input_gradient {
            sink.sum_over_ranks(sums.values_mut())?;
            lap(step.profile, Lap::Communication);
            norm::cpu::backward_input(step.threads, statistics_of(step.state), sums, gamma, x, dy);
        }
        Ok(())
    }
}

/// On a GPU, with the batch statistics kept from the forward to the backward pass.
struct Gpu {
    norm: NormOp,
    sums: Memory,
    counters: Counters,
    /// Size of the memory for partial sums, in elements.
    workspace: usize,
}

impl Gpu {
    /// The part of the shared memory for partial sums that this layer has asked for. There may be more, for other layers,
    /// but the order of sums must not depend on which layers those are.
    fn workspace_of<'a>(&self, step: DeviceStep<'a>) -> View<'a> {
        step.shared.sums.slice(0..self.workspace)
    }
}

impl OnGpu for Gpu {
    fn includes_end(&self, end: &BackwardEnd, dropout: bool) -> bool {
        end.pool.is_none() && !dropout
    }

    fn workspace_needs(&self, _: &Neighbourhood) -> WorkspaceNeeds {
        WorkspaceNeeds { sums: self.workspace, ..WorkspaceNeeds::default() }
    }

    /// The statistics of the batch.
    fn pass_state(&self, set_up: &SetUp<'_>) -> Result<Option<Memory>> {
        Ok(Some(Memory::zeroed(set_up.stream.device(), DType::F32, 2 * self.norm.channels)?))
    }

    fn forward(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        pass: DevicePass,
    ) -> Result<()> {
        let (NormOp { weight, mean, var, .. }, stream) = (&self.norm, model.stream());
        let (statistics, sums, workspace) = (step.state().view(), self.sums.view(), self.workspace_of(step));
        let (mean, var) = (model.buffers().slice(mean.clone()), model.buffers().slice(var.clone()));
        let (gamma, beta) = (model.parameter(*weight), model.parameter(weight + 1));
        match pass {
            DevicePass::Train(_) => {
                norm::cuda::sum_inputs(stream, x, workspace, self.counters.view(), sums)?;
                model.sum_over_ranks(sums)?;
                let batch = BatchStatistics { sums, statistics, running_mean: mean, running_var: var };
                Ok(norm::cuda::normalise_batch(stream, &batch, gamma, beta, x, y)?)
            }
            DevicePass::Eval => {
                norm::cuda::running_statistics(stream, mean, var, statistics)?;
                Ok(norm::cuda::normalise(stream, statistics, gamma, beta, x, y)?)
            }
        }
    }

    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        let DeviceStageTensors { x, dy, dx, .. } = tensors;
        let weight = self.norm.weight;
        let (statistics, sums) = (step.state().view(), self.sums.view());
        let (dgamma, dbeta) = (model.gradient(weight), model.gradient(weight + 1));
        let (workspace, counters) = (self.workspace_of(step), self.counters.view());
        let stream = model.stream();
        norm::cuda::sum_gradients(stream, statistics, x, dy, workspace, counters, sums, dgamma, dbeta)?;
        model.ready(weight + 1)?;
        model.ready(weight)?;
        if dx.is_some() {
            model.sum_over_ranks(sums)?;
            let gamma = model.parameter(weight);
            let slope = step.neighbours.end_before.map_or(LINEAR, |(_, end)| end.slope);
            norm::cuda::backward_input(model.stream(), statistics, sums, gamma, x, dy, slope)?;
        }
        Ok(())
    }
}
