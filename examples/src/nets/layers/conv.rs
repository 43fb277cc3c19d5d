//! Convolution, fused with a following activation function and pooling layer: its own output is only needed briefly,
//! and only the pooled output is stored.

use mgpu::Result;
use mgpu::device::DeviceDataParallel;
use mgpu_kernels::conv::cpu::Epilogue as ConvEpilogue;
use mgpu_kernels::conv::cuda::{After, Before, LINEAR};
use mgpu_kernels::conv::first::{Images, OutputGradient};
use mgpu_kernels::conv::{self, ConvShape, Padding};
use mgpu_kernels::cuda::{Memory, Pass, Stream, View};
use mgpu_kernels::{DType, Precision, Storage, activation, pool};

use super::activation::Rectifier;
use super::{
    BackwardEnd, BackwardPass, CpuKernels, CpuLayer, Definition, DeviceDropout, DevicePass,
    DeviceStageTensors, DeviceStep, Epilogue, ForwardPass, Image, LayerContext, Neighbourhood, OnCpu, OnGpu,
    Operation, PassState, PoolOp, SetUp, StageTensors, Step, Transposed, WorkspaceNeeds,
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
        let CpuKernels { conv: policy, engine, storage } = kernels;
        let options = conv::cpu::ConvOptions { policy, engine, storage };
        CpuLayer::Conv(Box::new(Cpu {
            filters: self.shape.filters,
            weight: self.weight,
            kernel: conv::cpu::Conv::new(self.shape, epilogue, options),
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
///
/// Where this project's kernels compute a pass, it is one launch: the forward pass with activation, pooling and dropout,
/// that of the gradients of weights and bias, and that of the gradient of the input, which includes the backward passes of
/// what precedes the layer ([`Neighbourhood`]). Where a library does, the others are launches of their own.
pub(super) struct Gpu {
    conv: conv::gpu::Conv,
    shape: ConvShape,
    weight: usize,
    precision: Precision,
    /// [`LINEAR`] without an activation function.
    slope: f32,
    /// A fused pooling layer.
    pool: Option<PoolOp>,
    input_gradient: bool,
    /// Elements of f32 workspace for the gradient of the bias in a pooling layer's backward pass.
    pool_workspace: usize,
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
        let multiprocessors = stream.device().multiprocessors();
        Ok(Gpu {
            conv: conv::gpu::Conv::new(stream, shape, max_batch, precision, slope, input_gradient, options)?,
            shape,
            weight,
            precision,
            slope,
            pool,
            input_gradient,
            pool_workspace: pool.map_or(0, |_| pool::cuda::workspace_len(multiprocessors, shape.filters)),
        })
    }

    /// Whether one launch is the whole backward pass, from the gradient of the output.
    fn is_first(&self) -> bool {
        !self.input_gradient && self.conv.is_first(self.pool.as_ref().map(|pool| &pool.shape))
    }

    /// The images that a first layer reads.
    fn images<'a>(step: &DeviceStep<'a>, model: &'a DeviceDataParallel, x: View<'a>) -> Images<'a> {
        step.batch.map_or(Images::Stored(x), |batch| Images::Gathered(batch.on_step(model), batch.labels))
    }

    /// Whether the gradient of the bias is computed with that of the weights, at no cost. Otherwise it is computed with
    /// the backward pass of pooling, if there is pooling, or else in a launch that sums columns, perhaps with the backward
    /// pass of the activation. Each has its own order of sums, so the layer alone decides which one is used, and not its
    /// neighbours: at a cut they are on another rank.
    fn has_bias_with_weights(&self) -> bool {
        self.precision != Precision::Tf32 && self.conv.is_own(Pass::BackwardWeights)
    }

    /// Enqueues the gradients of weights and bias on `stream`. With `bias_is_done`, that of the bias has been computed.
    fn backward_parameters(
        &self,
        stream: &Stream,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        (x, dy): (View<'_>, View<'_>),
        bias_is_done: bool,
    ) -> Result<()> {
        let &Gpu { ref conv, weight, .. } = self;
        let (images, workspace) = (step.images, step.shared.workspace.view());
        let (dw, db) = (model.gradient(weight), model.gradient(weight + 1));
        let enqueued = match bias_is_done {
            true => conv.backward_weights(stream, images, x, dy, dw, workspace),
            false => conv.backward_parameters(stream, images, x, dy, dw, db, workspace),
        };
        Ok(enqueued?)
    }

    /// Enqueues the gradient of the input, with what the pass includes of the stages before.
    fn backward_input(
        &self,
        step: DeviceStep<'_>,
        model: &DeviceDataParallel,
        [x, dy, dx]: [View<'_>; 3],
        dropout: Option<DeviceDropout>,
    ) -> Result<()> {
        let DeviceStep { images, shared, neighbours, .. } = step;
        let &Gpu { ref conv, weight, precision, .. } = self;
        let w = model.parameter_as(weight, precision.storage());
        let dropout =
            dropout.zip(neighbours.dropout_before).map(|(key, dropout)| dropout.on_step(model, key));
        let end = neighbours.end_before.as_ref().map(|(_, end)| end);
        if dropout.is_none() && end.is_none() {
            let workspace = shared.workspace.view();
            return Ok(conv.backward_input(model.stream(), images, w, dy, dx, workspace)?);
        }
        let chosen = |outputs: usize| step.state_before().slice(0..outputs * images);
        let pool = end.and_then(|end| end.pool.as_ref());
        let before = Before {
            activated: end.map(|end| (x, end.slope)).filter(|(_, slope)| *slope != LINEAR),
            pool: pool.map(|pool| (&pool.shape, chosen(pool.outputs()))),
            dropout,
        };
        let workspace = shared.workspace.view();
        Ok(conv.backward_input_fused(model.stream(), images, [w, dy, dx], &before, workspace)?)
    }

    /// Whether the gradients of the input and of the parameters are computed beside each other: if the former leaves a
    /// part of the GPU idle, and shares no workspace.
    fn is_forked(&self, model: &DeviceDataParallel) -> bool {
        let multiprocessors = model.stream().device().multiprocessors();
        self.conv.is_own(Pass::BackwardInput) && !self.conv.backward_input_fills(multiprocessors)
    }
}

impl OnGpu for Gpu {
    fn workspace_needs(&self, neighbours: &Neighbourhood) -> WorkspaceNeeds {
        let is_stored = !self.conv.is_own(Pass::Forward) || !(neighbours.is_ended || self.is_first());
        let unpooled = if self.pool.is_some() && is_stored { self.shape.output_len() } else { 0 };
        let workspace = self.conv.workspace_bytes().div_ceil(size_of::<f32>()).max(self.pool_workspace);
        WorkspaceNeeds { workspace, unpooled, ..WorkspaceNeeds::default() }
    }

    /// None for a layer whose backward pass is one launch, and if the gradient of the bias is computed with the backward
    /// pass of pooling.
    fn backward_end(&self) -> Option<BackwardEnd> {
        let end = BackwardEnd { slope: self.slope, pool: self.pool, len: self.shape.output_len() };
        let pools_bias = self.pool.is_some() && !self.has_bias_with_weights();
        (!self.is_first() && !pools_bias).then_some(end)
    }

    fn includes_end(&self, _: &BackwardEnd, _: bool) -> bool {
        self.conv.is_own(Pass::BackwardInput)
    }

    fn includes_dropout(&self) -> [bool; 2] {
        [self.conv.is_own(Pass::BackwardInput), true]
    }

    fn reads_data_set(&self) -> bool {
        self.is_first() && self.conv.is_own(Pass::Forward)
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
        pass: DevicePass,
    ) -> Result<()> {
        let DeviceStep { images, shared, neighbours, .. } = step;
        let &Gpu { ref conv, shape, weight, precision, ref pool, .. } = self;
        let (w, b) = (model.parameter_as(weight, precision.storage()), model.parameter(weight + 1));
        let (stream, workspace) = (model.stream(), shared.workspace.view());
        let chosen = pool.map(|_| step.state().slice(0..y.len()));
        let dropout = match pass {
            DevicePass::Train(Some(key)) => {
                neighbours.dropout_behind.map(|dropout| dropout.on_step(model, key))
            }
            DevicePass::Train(None) | DevicePass::Eval => None,
        };
        let after = After { pool: pool.as_ref().map(|pool| &pool.shape).zip(chosen), dropout };
        if self.reads_data_set() {
            return Ok(conv.forward_first(
                stream,
                images,
                &Self::images(&step, model, x),
                [w, b, y],
                &after,
            )?);
        }
        let len = shape.output_len() * images;
        let raw = pool.filter(|_| !conv.is_own(Pass::Forward)).map(|_| shared.unpooled.slice(0..len));
        Ok(conv.forward_fused(stream, images, x, w, b, y, &after, raw, workspace)?)
    }

    fn backward(
        &self,
        step: DeviceStep<'_>,
        model: &mut DeviceDataParallel,
        tensors: DeviceStageTensors<'_>,
        dropout: Option<DeviceDropout>,
    ) -> Result<()> {
        let (DeviceStageTensors { x, y, dy, dx }, DeviceStep { images, shared, neighbours, .. }) =
            (tensors, step);
        let &Gpu { ref conv, shape, weight, slope, ref pool, .. } = self;
        let workspace = shared.workspace.view();
        let activated = (slope != LINEAR).then_some((y, slope));
        if self.is_first() {
            let pool = pool.as_ref().map(|pool| (&pool.shape, step.state().slice(0..y.len())));
            let gradient = OutputGradient { dy, activated, pool };
            let (dw, db) = (model.gradient(weight), model.gradient(weight + 1));
            let x = Self::images(&step, model, x);
            conv.backward_first(model.stream(), images, &x, &gradient, dw, db, workspace)?;
            model.ready(weight + 1)?;
            return model.ready(weight);
        }
        let with_weights = self.has_bias_with_weights();
        let db = model.gradient(weight + 1);
        // The gradient before activation and pooling.
        let raw = match pool {
            _ if neighbours.is_ended => dy,
            Some(PoolOp { shape: window, .. }) => {
                let raw = shared.unpooled.slice(0..shape.output_len() * images);
                let chosen = step.state().slice(0..y.len());
                let db = (!with_weights).then_some(db);
                conv.backward_pooled(model.stream(), window, y, dy, chosen, raw, db, workspace)?;
                raw
            }
            None if slope != LINEAR && with_weights => {
                activation::cuda::backward(model.stream(), slope, y, dy)?;
                dy
            }
            None if slope != LINEAR => {
                conv.backward_activation(model.stream(), images, y, dy, db, workspace)?;
                dy
            }
            None => dy,
        };
        let is_done = !with_weights && !neighbours.is_ended && (pool.is_some() || slope != LINEAR);
        match dx {
            Some(dx) if self.is_forked(model) => {
                let side = &shared.side;
                self.backward_parameters(side.fork(model.stream())?, step, model, (x, raw), is_done)?;
                self.backward_input(step, model, [x, raw, dx], dropout)?;
                side.join(model.stream())?;
                model.ready(weight + 1)?;
                model.ready(weight)
            }
            _ => {
                self.backward_parameters(model.stream(), step, model, (x, raw), is_done)?;
                // Before the gradient of the input, so that the exchange overlaps it.
                model.ready(weight + 1)?;
                model.ready(weight)?;
                dx.map_or(Ok(()), |dx| self.backward_input(step, model, [x, raw, dx], dropout))
            }
        }
    }
}
