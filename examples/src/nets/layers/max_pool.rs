//! Max-pooling. A convolution before it takes it along.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::cuda::{Memory, View};
use mgpu_kernels::pool::{self, Rounding};
use mgpu_kernels::{DType, Storage};

use super::{
    BackwardPass, Definition, DeviceDropout, DevicePass, DeviceSides, DeviceStep, ForwardPass, Machine,
    OnCpu, OnGpu, Operation, Place, SetUp, Sides, Step, Tail,
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

    fn plan(&self, _: &mut Tensors, place: &Place) -> Option<Box<dyn Operation>> {
        Some(Box::new(Pool { shape: self.shape(place.extents), channels: place.extents[0] }))
    }
}

/// A pooling layer in its network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::nets) struct Pool {
    pub(super) shape: pool::PoolShape,
    pub(super) channels: usize,
}

impl Pool {
    /// Output elements of one image. For each there is a byte that says which of its window was the largest.
    pub(super) fn outputs(&self) -> usize {
        self.channels * self.shape.out_height() * self.shape.out_width()
    }
}

impl Operation for Pool {
    fn describe(&self) -> String {
        let Pool { shape, channels } = self;
        format!("pool of {channels}x{}x{}", shape.height, shape.width)
    }

    fn as_tail(&self) -> Option<Tail> {
        Some(Tail::MaxPool(*self))
    }

    fn on_cpu(&self, max_batch: usize, _: ConvPolicy) -> Machine {
        Machine::MaxPool(Cpu { pool: *self, chosen: vec![0; self.outputs() * max_batch] })
    }

    fn on_gpu(&self, set_up: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        Ok(Box::new(Gpu { pool: *self, chosen: set_up.zeroed(DType::U8, self.outputs())? }))
    }
}

/// On the CPU, with the choices of the forward pass.
#[derive(Debug)]
pub(in crate::nets) struct Cpu {
    pool: Pool,
    chosen: Vec<u8>,
}

impl<T: Storage> OnCpu<T> for Cpu {
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], _: &mut ForwardPass<'_>) -> Result<()> {
        let Cpu { pool: Pool { shape, channels }, chosen } = self;
        pool::cpu::forward(step.threads, shape, *channels, x, y, &mut chosen[..y.len()]);
        Ok(())
    }

    fn backward(&mut self, step: Step<'_>, on: Sides<'_, T>, _: BackwardPass<'_>) -> Result<()> {
        let Cpu { pool: Pool { shape, channels }, chosen } = self;
        let dx = on.dx.expect("pooling has no parameters");
        pool::cpu::backward(step.threads, shape, *channels, on.dy, &chosen[..on.y.len()], dx);
        Ok(())
    }
}

/// On a GPU, with the choices of the forward pass.
struct Gpu {
    pool: Pool,
    chosen: Memory,
}

impl OnGpu for Gpu {
    fn forward(
        &self,
        _: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        _: DevicePass,
    ) -> Result<()> {
        let Pool { shape, channels } = &self.pool;
        let chosen = self.chosen.slice(0..y.len());
        Ok(pool::cuda::forward(model.stream(), shape, *channels, x, y, chosen)?)
    }

    fn backward(
        &self,
        _: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        on: DeviceSides<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        let Pool { shape, channels } = &self.pool;
        let chosen = self.chosen.slice(0..on.y.len());
        let dx = on.dx.expect("pooling has no parameters");
        Ok(pool::cuda::backward(model.stream(), shape, *channels, on.dy, chosen, dx)?)
    }
}
