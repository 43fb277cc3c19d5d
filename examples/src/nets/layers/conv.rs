//! Convolution, fused with a following activation function and pooling layer: its own output is only needed briefly,
//! and only the pooled output is stored.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::conv::cpu::Epilogue as ConvEpilogue;
use mgpu_kernels::conv::cuda::LINEAR;
use mgpu_kernels::conv::{self, ConvShape, Padding};
use mgpu_kernels::cuda::{Memory, View};
use mgpu_kernels::{DType, Storage, pool};

use super::activation::Rectifier;
use super::{
    BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass, DeviceStageTensors,
    DeviceStep, Epilogue, ForwardPass, Image, LayerContext, OnCpu, OnGpu, Operation, PassState, PoolOp,
    SetUp, StageTensors, Step, Transposed, WorkspaceNeeds,
};
use crate::nets::tensors::{Role, Tensors};

/// Convolution of stride 1 with a square kernel, and a bias for each filter.
pub(super) struct Conv {
    pub(super) filters: usize,
    pub(super) kernel: usize,
    pub(super) padding: Padding,
}

impl Conv {
    fn shape(&self, [channels, height, width]: [usize; 3]) -> ConvShape {
        let &Conv { filters, kernel, padding } = self;
        ConvShape { channels, height, width, filters, kernel, padding }
    }
}

impl Definition for Conv {
    fn output(&self, extents: [usize; 3]) -> [usize; 3] {
        let shape = self.shape(extents);
        [self.filters, shape.out_height(), shape.out_width()]
    }

    fn plan(&self, tensors: &mut Tensors, context: &LayerContext) -> Option<Box<dyn Operation>> {
        let shape = self.shape(context.extents);
        let role = Role::Weight { fan_in: shape.filter_len(), rectified: context.rectified };
        let weights = [shape.filters, shape.channels, shape.kernel, shape.kernel];
        let weight = tensors.add_pair(context.layer, &weights, role, Role::Bias);
        Some(Box::new(ConvOp { shape, weight, slope: None, pool: None }))
    }
}

/// A convolution in its network, with the `slope` of the fused rectifier and the fused pooling layer.
#[derive(Debug, Clone, Copy)]
struct ConvOp {
    shape: ConvShape,
    weight: usize,
    slope: Option<f32>,
    pool: Option<PoolOp>,
}

impl Operation for ConvOp {
    fn describe(&self) -> String {
        let ConvShape { channels, height, width, filters, kernel, padding } = self.shape;
        let padding = if padding == Padding::Same { "same" } else { "valid" };
        let slope = self.slope.map_or(String::new(), |slope| format!(", {}", Rectifier { slope }.name()));
        let pool = if self.pool.is_some() { ", pool" } else { "" };
        format!("conv {filters} {kernel}x{kernel} {padding} of {channels}x{height}x{width}{slope}{pool}")
    }

    fn multiply_adds(&self) -> usize {
        self.shape.output_len() * self.shape.filter_len()
    }

    fn weight(&self) -> Option<usize> {
        Some(self.weight)
    }

    fn fuse(&mut self, epilogue: Epilogue) -> bool {
        match (epilogue, self.slope, self.pool) {
            (Epilogue::Rectifier { slope }, None, None) => self.slope = Some(slope),
            (Epilogue::MaxPool(pool), _, None) => self.pool = Some(pool),
            _ => return false,
        }
        true
    }

    fn transposed(&self, _: Option<Image>) -> Option<Transposed> {
        let ConvShape { filters, channels, kernel, .. } = self.shape;
        Some(Transposed { outer: filters, channels, plane: kernel * kernel })
    }

    fn on_cpu(&self, kernels: CpuKernels) -> CpuLayer {
        let epilogue = ConvEpilogue { slope: self.slope, pool: self.pool.map(|pool| pool.shape.rounding) };
        CpuLayer::Conv(Box::new(Cpu {
            filters: self.shape.filters,
            weight: self.weight,
            kernel: conv::cpu::Conv::with_engine(self.shape, epilogue, kernels.conv, kernels.engine),
        }))
    }

    fn pass_state(&self, max_batch: usize) -> PassState {
        let outputs = self.pool.map_or(0, |pool| pool.outputs());
        PassState { chosen: vec![0; outputs * max_batch], ..PassState::default() }
    }

    fn on_gpu(&self, set_up: &SetUp<'_>) -> Result<Box<dyn OnGpu>> {
        let &ConvOp { shape, weight, slope, pool } = self;
        Ok(Box::new(Gpu::new(set_up, shape, weight, slope, pool)?))
    }
}

/// On the CPU.
#[derive(Debug)]
pub(in crate::nets) struct Cpu {
    filters: usize,
    weight: usize,
    kernel: conv::cpu::Conv,
}

impl Cpu {
    /// The name of its kernel.
    pub(super) fn algorithm(&self) -> String {
        self.kernel.algorithm().to_string()
    }
}

impl<T: Storage> OnCpu<T> for Cpu {
    fn forward(&mut self, step: Step<'_>, x: &[T], y: &mut [T], _: &mut ForwardPass<'_>) -> Result<()> {
        let Cpu { weight, kernel, .. } = self;
        let (weights, bias) = (step.tensor(*weight), step.tensor(*weight + 1));
        let chosen = &mut step.state.chosen[..];
        let chosen = if chosen.is_empty() { chosen } else { &mut chosen[..y.len()] };
        kernel.forward(step.threads, step.scratch, x, weights, bias, y, chosen);
        Ok(())
    }

    fn backward(
        &mut self,
        mut step: Step<'_>,
        tensors: StageTensors<'_, T>,
        pass: BackwardPass<'_>,
    ) -> Result<()> {
        let Cpu { filters, weight, kernel } = self;
        let (StageTensors { x, y, dy, dx }, BackwardPass { sink, bias, .. }) = (tensors, pass);
        let chosen = &step.state.chosen;
        let chosen = if chosen.is_empty() { &[][..] } else { &chosen[..y.len()] };
        let from = conv::cpu::Backward { x, weights: step.tensor(*weight), y, chosen, dy };
        let db = &mut bias[..*filters];
        kernel.backward(step.threads, step.scratch, from, sink.gradient(*weight), db, dx);
        step.announce(sink, *weight, db)
    }
}

/// On a GPU. Dense layers use it as a 1×1 convolution of 1×1 images.
pub(super) struct Gpu {
    conv: conv::gpu::Conv,
    shape: ConvShape,
    weight: usize,
    /// The dtype of the weights.
    dtype: DType,
    /// [`LINEAR`] without an activation function.
    slope: f32,
    /// A fused pooling layer.
    pool: Option<PoolOp>,
}

impl Gpu {
    pub(super) fn new(
        set_up: &SetUp<'_>,
        shape: ConvShape,
        weight: usize,
        slope: Option<f32>,
        pool: Option<PoolOp>,
    ) -> Result<Self> {
        let &SetUp { stream, max_batch, precision, options, input_gradient } = set_up;
        let slope = slope.unwrap_or(LINEAR);
        Ok(Gpu {
            conv: conv::gpu::Conv::new(stream, shape, max_batch, precision, slope, input_gradient, options)?,
            shape,
            weight,
            dtype: precision.storage(),
            slope,
            pool,
        })
    }
}

impl OnGpu for Gpu {
    fn workspace_needs(&self) -> WorkspaceNeeds {
        let unpooled = self.pool.as_ref().map_or(0, |_| self.shape.output_len());
        let workspace = self.conv.workspace_bytes().div_ceil(size_of::<f32>());
        WorkspaceNeeds { workspace, unpooled, ..WorkspaceNeeds::default() }
    }

    fn describe(&self) -> Option<String> {
        Some(self.conv.describe())
    }

    /// The maximum indices of a fused pooling layer.
    fn pass_state(&self, set_up: &SetUp<'_>) -> Result<Option<Memory>> {
        self.pool.map(|pool| set_up.zeroed(DType::U8, pool.outputs())).transpose()
    }

    fn forward(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        x: View<'_>,
        y: View<'_>,
        _: DevicePass,
    ) -> Result<()> {
        let DeviceStep { images, shared, .. } = step;
        let &Gpu { ref conv, shape, weight, dtype, ref pool, .. } = self;
        let (w, b) = (model.parameter_as(weight, dtype), model.parameter(weight + 1));
        let (stream, workspace) = (model.stream(), shared.workspace.view());
        let Some(PoolOp { shape: window, .. }) = pool else {
            return Ok(conv.forward(stream, images, x, w, b, y, workspace)?);
        };
        let raw = shared.unpooled.slice(0..shape.output_len() * images);
        let chosen = step.state().slice(0..y.len());
        Ok(conv.forward_pooled(stream, images, x, w, b, raw, window, y, chosen, workspace)?)
    }

    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        _: Option<DeviceDropout>,
    ) -> Result<()> {
        let (DeviceStageTensors { x, y, dy, dx }, DeviceStep { images, shared, .. }) = (tensors, step);
        let &Gpu { ref conv, shape, weight, dtype, slope, ref pool } = self;
        let (workspace, db) = (shared.workspace.view(), model.gradient(weight + 1));
        let raw = match pool {
            Some(PoolOp { shape: window, channels }) => {
                let raw = shared.unpooled.slice(0..shape.output_len() * images);
                let (stream, chosen) = (model.stream(), step.state().slice(0..y.len()));
                pool::cuda::backward_fused(stream, window, *channels, slope, dy, y, chosen, raw)?;
                raw
            }
            None => dy,
        };
        if pool.is_none() && slope != LINEAR {
            conv.backward_activation(model.stream(), images, y, dy, db, workspace)?;
        } else {
            conv.backward_bias(model.stream(), images, raw, db, workspace)?;
        }
        model.ready(weight + 1)?;
        conv.backward_weights(model.stream(), images, x, raw, model.gradient(weight), workspace)?;
        model.ready(weight)?;
        if let Some(dx) = dx {
            let w = model.parameter_as(weight, dtype);
            conv.backward_input(model.stream(), images, w, raw, dx, workspace)?;
        }
        Ok(())
    }
}
