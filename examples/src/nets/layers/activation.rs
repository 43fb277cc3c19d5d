//! The rectified linear unit (ReLU) and leaky ReLU. A preceding convolution or dense layer fuses it.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::Storage;
use mgpu_kernels::activation;
use mgpu_kernels::cuda::View;

use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass, DeviceStageTensors,
    DeviceStep, Epilogue, ForwardPass, InPlace, LayerContext, OnCpu, OnGpu, Operation, SetUp, StageTensors,
    Step,
};
use crate::nets::tensors::Tensors;

/// `max(x, slope · x)`.
#[derive(Debug, Clone, Copy)]
pub(in crate::nets) struct Rectifier {
    pub(super) slope: f32,
}

impl Rectifier {
    /// Its name.
    pub(super) fn name(self) -> &'static str {
        if self.slope == 0.0 { "relu" } else { "leaky relu" }
    }
}

impl Definition for Rectifier {
    fn rectifies(&self) -> bool {
        true
    }

    fn plan(&self, _: &mut Tensors, _: &LayerContext) -> Option<Box<dyn Operation>> {
        Some(Box::new(*self))
    }
}

impl Operation for Rectifier {
    fn describe(&self) -> String {
        self.name().to_owned()
    }

    fn in_place(&self) -> InPlace {
        InPlace::Both
    }

    fn as_epilogue(&self) -> Option<Epilogue> {
        Some(Epilogue::Rectifier { slope: self.slope })
    }

    fn on_cpu(&self, _: CpuKernels) -> CpuLayer {
        CpuLayer::Rectifier(*self)
    }

    fn on_gpu(&self, _: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        Ok(Box::new(*self))
    }
}

impl<T: Storage> OnCpu<T> for Rectifier {
    fn forward(&mut self, step: Step<'_>, _: &[T], y: &mut [T], _: &mut ForwardPass<'_>) -> Result<()> {
        activation::cpu::forward(step.threads, self.slope, y);
        Ok(())
    }

    fn backward(&mut self, step: Step<'_>, tensors: StageTensors<'_, T>, _: BackwardPass<'_>) -> Result<()> {
        activation::cpu::backward(step.threads, self.slope, tensors.y, tensors.dy);
        Ok(())
    }
}

impl OnGpu for Rectifier {
    fn forward(
        &self,
        _: DeviceStep<'_>,
        model: &DeviceDataParallel,
        _: View<'_>,
        y: View<'_>,
        _: DevicePass,
    ) -> Result<()> {
        Ok(activation::cuda::forward(model.stream(), self.slope, y)?)
    }

    fn backward(
        &self,
        _: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        Ok(activation::cuda::backward(model.stream(), self.slope, tensors.y, tensors.dy)?)
    }
}
