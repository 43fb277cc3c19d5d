//! The Gaussian error linear unit, PyTorch's `nn.GELU()`. Not in place, because its backward pass needs its input.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::View;
use mgpu_kernels::{Storage, gelu};

use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass, DeviceStageTensors,
    DeviceStep, ForwardPass, InPlace, LayerContext, OnCpu, OnGpu, Operation, SetUp, StageTensors, Step,
};
use crate::nets::tensors::Tensors;

/// `x · Φ(x)`.
#[derive(Debug, Clone, Copy)]
pub(in crate::nets) struct Gelu;

impl Definition for Gelu {
    fn rectifies(&self) -> bool {
        true
    }

    fn plan(&self, _: &mut Tensors, _: &LayerContext) -> Option<Box<dyn Operation>> {
        Some(Box::new(Gelu))
    }
}

impl Operation for Gelu {
    fn describe(&self) -> String {
        "gelu".to_owned()
    }

    fn in_place(&self) -> InPlace {
        InPlace::Backward
    }

    fn on_cpu(&self, _: CpuKernels) -> CpuLayer {
        CpuLayer::Gelu(Gelu)
    }

    fn on_gpu(&self, _: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        Ok(Box::new(Gelu))
    }
}

impl<T: Storage> OnCpu<T> for Gelu {
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], _: &mut ForwardPass<'_>) -> Result<()> {
        gelu::cpu::forward(step.threads, x, y);
        Ok(())
    }

    fn backward(&mut self, step: Step<'_>, tensors: StageTensors<'_, T>, _: BackwardPass<'_>) -> Result<()> {
        gelu::cpu::backward(step.threads, tensors.x, tensors.dy);
        Ok(())
    }
}

impl OnGpu for Gelu {
    fn forward(
        &self,
        _: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        _: DevicePass,
    ) -> Result<()> {
        Ok(gelu::cuda::forward(model.stream(), x, y)?)
    }

    fn backward(
        &self,
        _: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        Ok(gelu::cuda::backward(model.stream(), tensors.x, tensors.dy)?)
    }
}
