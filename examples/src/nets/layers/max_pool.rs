//! Max pooling. A preceding convolution fuses it.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::cuda::{Memory, View};
use mgpu_kernels::pool::{self, Rounding};
use mgpu_kernels::{DType, Storage};

use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass, DeviceStageTensors,
    DeviceStep, Epilogue, ForwardPass, LayerContext, OnCpu, OnGpu, Operation, PassState, SetUp, StageTensors,
    Step,
};
use crate::nets::tensors::Tensors;

/// Maximum over windows of 2×2, stride 2.
pub(super) struct MaxPool {
    pub(super) rounding: Rounding,
}

impl MaxPool {
    fn shape(&self, [_, height, width]: [usize; 3]) -> pool::PoolShape {
        pool::PoolShape { height, width, rounding: self.rounding }
    }
}

impl Definition for MaxPool {
    fn output(&self, extents: [usize; 3]) -> [usize; 3] {
        let shape = self.shape(extents);
        [extents[0], shape.out_height(), shape.out_width()]
    }

    fn plan(&self, _: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        Some(Box::new(PoolOp { shape: self.shape(context.extents), channels: context.extents[0] }))
    }
}

/// A pooling layer in its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nets) struct PoolOp {
    pub(super) shape: pool::PoolShape,
    pub(super) channels: usize,
}

impl PoolOp {
    /// Output elements of one image. For each, a byte stores the index of the maximum in its window.
    pub(super) fn outputs(&self) -> usize {
        self.channels * self.shape.out_height() * self.shape.out_width()
    }
}

impl Operation for PoolOp {
    fn describe(&self) -> String {
        let PoolOp { shape, channels } = self;
        format!("pool of {channels}x{}x{}", shape.height, shape.width)
    }

    fn as_epilogue(&self) -> Option<Epilogue> {
        Some(Epilogue::MaxPool(*self))
    }

    fn on_cpu(&self, _: CpuKernels) -> CpuLayer {
        CpuLayer::MaxPool(*self)
    }

    fn pass_state(&self, max_batch: usize) -> PassState {
        PassState { chosen: vec![0; self.outputs() * max_batch], ..PassState::default() }
    }

    fn on_gpu(&self, _: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        Ok(Box::new(Gpu { pool: *self }))
    }
}

impl<T: Storage> OnCpu<T> for PoolOp {
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], _: &mut ForwardPass<'_>) -> Result<()> {
        let PoolOp { shape, channels } = self;
        pool::cpu::forward(step.threads, shape, *channels, x, y, &mut step.state.chosen[..y.len()]);
        Ok(())
    }

    fn backward(&mut self, step: Step<'_>, tensors: StageTensors<'_, T>, _: BackwardPass<'_>) -> Result<()> {
        let (PoolOp { shape, channels }, chosen) = (self, &step.state.chosen[..tensors.y.len()]);
        let dx = tensors.dx.expect("pooling has no parameters");
        pool::cpu::backward(step.threads, shape, *channels, tensors.dy, chosen, dx);
        Ok(())
    }
}

/// On a GPU.
struct Gpu {
    pool: PoolOp,
}

impl OnGpu for Gpu {
    /// The maximum indices.
    fn pass_state(&self, set_up: &SetUp<'_>) -> Result<Option<Memory>> {
        Ok(Some(set_up.zeroed(DType::U8, self.pool.outputs())?))
    }

    fn forward(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        _: DevicePass,
    ) -> Result<()> {
        let PoolOp { shape, channels } = &self.pool;
        let chosen = step.state().slice(0..y.len());
        Ok(pool::cuda::forward(model.stream(), shape, *channels, x, y, chosen)?)
    }

    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        let PoolOp { shape, channels } = &self.pool;
        let chosen = step.state().slice(0..tensors.y.len());
        let dx = tensors.dx.expect("pooling has no parameters");
        Ok(pool::cuda::backward(model.stream(), shape, *channels, tensors.dy, chosen, dx)?)
    }
}
