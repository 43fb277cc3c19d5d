//! Dropout, in place. The mask is recomputed in the backward pass, so nothing is stored.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::View;
use mgpu_kernels::{Storage, dropout};

use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, DevicePass, DeviceStageTensors, DeviceStep, ForwardPass,
    Image, InPlace, LayerContext, OnCpu, OnGpu, Operation, SetUp, StageTensors, Step,
};
use crate::nets::tensors::Tensors;

/// The inputs of the dropout masks, apart from layer and element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutKey {
    /// The run's seed, the same on all ranks.
    pub seed: u64,
    /// The training step.
    pub step: u64,
    /// Index of this rank's first sample in the global batch. A batch split over ranks then drops exactly the
    /// elements that one rank with the whole batch would drop.
    pub first_sample: u64,
}

/// The inputs of the dropout masks on a GPU, apart from step, layer and element. The GPU counts the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceDropout {
    /// The run's seed, the same on all ranks.
    pub seed: u64,
    /// Index of this rank's first sample in the global batch.
    pub first_sample: u64,
}

/// Zeroes each value with this probability.
pub(super) struct Dropout {
    pub(super) probability: f32,
}

impl Definition for Dropout {
    fn plan(&self, _: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        Some(Box::new(DropoutOp {
            probability: self.probability,
            layer: context.layer,
            image: context.image,
        }))
    }
}

/// A dropout layer in its network.
#[derive(Debug, Clone, Copy)]
pub(in crate::nets) struct DropoutOp {
    probability: f32,
    /// Index in the spec; it distinguishes the masks of layers.
    layer: usize,
    /// The shape of a sample. Mask elements are numbered in \[C, H, W\] order.
    image: Image,
}

impl DropoutOp {
    fn mask(&self, seed: u64, first_sample: u64) -> dropout::Mask {
        let Image { channels, plane } = self.image;
        // The top bit separates these streams from those of initial values.
        dropout::Mask { seed, stream: 1 << 63 | self.layer as u64, first_sample, channels, plane }
    }

    fn apply<T: Storage>(&self, step: &Step<'_>, key: DropoutKey, values: &mut [T]) {
        let mask = self.mask(key.seed, key.first_sample);
        dropout::cpu::apply(step.threads, self.probability, &mask, key.step, values);
    }

    /// The layer in the current step on a GPU.
    pub(super) fn on_step<'a>(
        &self,
        model: &'a DeviceDataParallel,
        key: DeviceDropout,
    ) -> dropout::cuda::Dropout<'a> {
        let mask = self.mask(key.seed, key.first_sample);
        dropout::cuda::Dropout { probability: self.probability, mask, state: model.state() }
    }

    fn apply_on_gpu(&self, model: &DeviceDataParallel, key: DeviceDropout, values: View<'_>) -> Result<()> {
        Ok(dropout::cuda::apply(model.stream(), &self.on_step(model, key), values)?)
    }
}

impl Operation for DropoutOp {
    fn describe(&self) -> String {
        format!("dropout {}", self.probability)
    }

    fn in_place(&self) -> InPlace {
        InPlace::Both
    }

    fn on_cpu(&self, _: CpuKernels) -> CpuLayer {
        CpuLayer::Dropout(*self)
    }

    fn on_gpu(&self, _: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        Ok(Box::new(*self))
    }
}

impl<T: Storage> OnCpu<T> for DropoutOp {
    fn forward(&mut self, step: Step<'_>, _: &[T], y: &mut [T], pass: &mut ForwardPass<'_>) -> Result<()> {
        if let ForwardPass::Train { dropout: Some(key), .. } = pass {
            self.apply(&step, *key, y);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        step: Step<'_>,
        tensors: StageTensors<'_, T>,
        pass: BackwardPass<'_>,
    ) -> Result<()> {
        if let Some(key) = pass.dropout {
            self.apply(&step, key, tensors.dy);
        }
        Ok(())
    }
}

impl OnGpu for DropoutOp {
    fn as_dropout(&self) -> Option<DropoutOp> {
        Some(*self)
    }

    fn forward(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        _: View<'_>,
        y: View<'_>,
        pass: DevicePass,
    ) -> Result<()> {
        match pass {
            DevicePass::Train(Some(key)) if !step.neighbours.is_included[0] => {
                self.apply_on_gpu(model, key, y)
            }
            DevicePass::Train(_) | DevicePass::Eval => Ok(()),
        }
    }

    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        dropout: Option<DeviceDropout>,
    ) -> Result<()> {
        match dropout {
            Some(key) if !step.neighbours.is_included[1] => self.apply_on_gpu(model, key, tensors.dy),
            _ => Ok(()),
        }
    }
}
