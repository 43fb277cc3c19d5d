//! A network on a GPU: the same layers as on the CPU, one launch after the other on one stream.
//!
//! Nothing here waits, and nothing is allocated after [`DeviceNet::new`]: a training step is a fixed sequence of launches
//! on fixed memory, so that it can be captured and replayed. What differs from step to step, kernels read from the GPU's
//! memory (which step it is, and so which samples and which dropout masks).

mod order;

use mgpu::step::device::DeviceDataParallel;
use mgpu::{DType, Layout, Result};
use mgpu_kernels::Precision;
use mgpu_kernels::conv::cuda::LINEAR;
use mgpu_kernels::conv::gpu::Conv;
use mgpu_kernels::cuda::{Memory, Options, Stream, View};
use mgpu_kernels::{activation, conv, dense, dropout, gather, loss, norm, pool};
use order::Order;

use super::net::mask_stream;
use super::plan::{Op, Plan, Pool, Stage};
use super::spec::Spec;
use super::{LossReport, initial};

/// What the masks of a training depend on, besides step, layer and element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceDropout {
    /// The run's seed, the same on all ranks.
    pub seed: u64,
    /// Index in the batch of all ranks of this rank's first sample.
    pub first_sample: u64,
}

/// Images and labels on a GPU, and the order in which batches take them.
#[derive(Debug)]
pub struct DeviceData {
    images: Memory,
    labels: Memory,
    order: Memory,
}

impl DeviceData {
    /// Copies `images` (u8, one after the other) and `labels` to the GPU of `stream`, with room for an order of `places`
    /// samples.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(stream: &Stream, images: &[u8], labels: &[u8], places: usize) -> Result<Self> {
        Ok(DeviceData {
            images: Memory::from_slice(stream, images)?,
            labels: Memory::from_slice(stream, labels)?,
            order: Memory::zeroed(stream.device(), DType::I32, places)?,
        })
    }

    /// Sets the first places of the order.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is no room for so many.
    pub fn set_order(&self, stream: &Stream, order: &[u32]) -> Result<()> {
        Ok(stream.upload(order, self.order.slice(0..order.len()))?)
    }

    fn samples(&self) -> gather::cuda::Samples<'_> {
        let order = Some(self.order.view());
        gather::cuda::Samples { images: self.images.view(), labels: self.labels.view(), order }
    }
}

/// Batch statistics of one normalisation.
#[derive(Debug)]
struct Norm {
    statistics: Memory,
    sums: Memory,
}

/// A network with all the memory that batches of up to a given size need on a GPU.
pub struct DeviceNet {
    plan: Plan,
    order: Order,
    precision: Precision,
    max_batch: usize,
    /// For each stage, what computes it if it is a convolution or a dense layer.
    products: Vec<Option<Product>>,
    /// Activations; the last slot holds the logits.
    slots: Vec<Memory>,
    /// Output of the product being pooled, and its gradient.
    unpooled: Memory,
    /// Gradients of the activations of the layer being worked on: of its output, and of its input.
    gradients: [Memory; 2],
    /// For every output of each pooling layer, which of its window was the largest.
    chosen: Vec<Memory>,
    norms: Vec<Norm>,
    /// For what products need besides, and for sums of normalisations.
    workspace: Memory,
    sums: Memory,
    labels: Memory,
    scratch: Memory,
    score: Memory,
}

/// A convolution, or a dense layer, which is one of 1×1 on images of 1×1.
struct Product {
    conv: Conv,
    shape: conv::Shape,
    weight: usize,
    /// Of the activation function behind it; [`LINEAR`] for none.
    slope: f32,
    /// The pooling layer behind that.
    pool: Option<Pool>,
}

impl Product {
    /// None for other operations. `make` is given shape and slope.
    fn of(op: Op, make: impl FnOnce(conv::Shape, f32) -> Result<Conv>) -> Result<Option<Self>> {
        let (shape, weight, slope, pool) = match op {
            Op::Conv { shape, weight, slope, pool } => (shape, weight, slope, pool),
            Op::Dense { shape, weight, slope } => (dense::cuda::convolution(&shape), weight, slope, None),
            _ => return Ok(None),
        };
        let slope = slope.unwrap_or(LINEAR);
        Ok(Some(Product { conv: make(shape, slope)?, shape, weight, slope, pool }))
    }
}

/// What a forward pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pass {
    Train(Option<DeviceDropout>),
    Eval,
}

impl DeviceNet {
    /// Allocates everything for batches of up to `max_batch` images. Where there is a choice of kernels for a layer they
    /// are timed here, on `stream`.
    ///
    /// # Errors
    /// If memory is short, or kernels do not compile.
    ///
    /// # Panics
    /// If the layers of `spec` do not fit each other.
    pub fn new(
        spec: &Spec,
        max_batch: usize,
        precision: Precision,
        options: Options,
        stream: &Stream,
    ) -> Result<DeviceNet> {
        let plan = Plan::new(spec);
        let device = stream.device();
        let zeroed = |dtype, len| Memory::zeroed(device, dtype, len);
        let dtype = precision.storage();
        let first = plan.first_with_parameters();
        let mut products = Vec::new();
        for (place, stage) in plan.stages.iter().enumerate() {
            let reordered = matches!(stage.op, Op::Dense { .. }) || stage.flattened.is_none();
            assert!(reordered, "layer {}: on a GPU only dense layers follow a flattened image", stage.layer);
            products.push(Product::of(stage.op, |shape, slope| {
                Ok(Conv::new(stream, shape, max_batch, precision, slope, place > first, options)?)
            })?);
        }
        let convs = || products.iter().flatten().map(|product| &product.conv);
        let workspace = convs().map(Conv::workspace_bytes).max().unwrap_or(0);
        let unpooled = plan.stages.iter().filter_map(|stage| match stage.op {
            Op::Conv { shape, pool: Some(_), .. } => Some(shape.output_len()),
            _ => None,
        });
        let unpooled = unpooled.max().unwrap_or(0);
        let widest = plan.norms.iter().max().copied().unwrap_or(0);
        let largest = plan.slots[1..].iter().max().copied().unwrap_or(0) * max_batch;
        let norm = |&channels: &usize| -> Result<Norm> {
            let statistics = zeroed(DType::F32, 2 * channels)?;
            Ok(Norm { statistics, sums: zeroed(DType::F64, 2 * channels + 1)? })
        };
        Ok(DeviceNet {
            order: Order::of_parameters(&plan),
            slots: plan.slots.iter().map(|len| zeroed(dtype, len * max_batch)).collect::<Result<_, _>>()?,
            unpooled: zeroed(dtype, unpooled * max_batch)?,
            gradients: [zeroed(dtype, largest)?, zeroed(dtype, largest)?],
            chosen: plan
                .pools
                .iter()
                .map(|len| zeroed(DType::U8, len * max_batch))
                .collect::<Result<_, _>>()?,
            norms: plan.norms.iter().map(norm).collect::<Result<_>>()?,
            workspace: zeroed(DType::F32, workspace.div_ceil(size_of::<f32>()))?,
            sums: zeroed(DType::F64, norm::cuda::workspace_len(device.multiprocessors(), widest))?,
            labels: zeroed(DType::U8, max_batch)?,
            scratch: zeroed(DType::U8, loss::cuda::SCRATCH_BYTES)?,
            score: zeroed(DType::U8, loss::cuda::Score::BYTES)?,
            products,
            plan,
            precision,
            max_batch,
        })
    }

    /// Names and shapes of the parameters as on the CPU, offsets as on the GPU.
    pub fn layout(&self) -> &Layout {
        self.order.layout()
    }

    /// Names, shapes and offsets of the parameters on the CPU, and in checkpoints.
    pub fn host_layout(&self) -> &Layout {
        &self.plan.parameters
    }

    /// Names, shapes and offsets of the running statistics of batch normalisation. Often empty.
    pub fn buffers_layout(&self) -> &Layout {
        &self.plan.buffers
    }

    /// An arena in the order of [`host_layout`](Self::host_layout), in that of [`layout`](Self::layout).
    ///
    /// # Panics
    /// If it is shorter than its layout.
    pub fn to_device(&self, values: &[f32]) -> Vec<f32> {
        self.order.to_device(values)
    }

    /// The other way.
    ///
    /// # Panics
    /// If it is shorter than its layout.
    pub fn to_host(&self, values: &[f32]) -> Vec<f32> {
        self.order.to_host(values)
    }

    /// As [`to_host`](Self::to_host), for another thread.
    ///
    /// # Panics
    /// When called: if the arena is shorter than its layout.
    pub fn host_order(&self) -> impl Fn(&[f32]) -> Vec<f32> + Send + 'static {
        let order = self.order.clone();
        move |values| order.to_host(values)
    }

    /// The parameters to start training from, in the order of [`host_layout`](Self::host_layout): those of the CPU.
    pub fn initial_parameters(&self, seed: u64) -> Vec<f32> {
        initial::parameters(&self.plan, seed)
    }

    /// The parameters that the recorded reference runs start from.
    pub fn golden_parameters(&self, seed: u64) -> Vec<f32> {
        initial::golden_parameters(&self.plan, seed)
    }

    /// The running statistics before any training, in the order of [`buffers_layout`](Self::buffers_layout).
    pub fn initial_buffers(&self) -> Vec<f32> {
        initial::buffers(&self.plan)
    }

    /// Losses and hits of all batches since [`clear_score`](Self::clear_score): bytes of a [`loss::cuda::Score`].
    pub fn score(&self) -> View<'_> {
        self.score.view()
    }

    /// Forgets losses and hits, in the order of the stream.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear_score(&self, stream: &Stream) -> Result<()> {
        Ok(stream.zero(self.score.view())?)
    }

    /// The score on the host, once the work on `stream` so far is over.
    ///
    /// # Errors
    /// If that work failed.
    pub fn read_score(&self, stream: &Stream) -> Result<LossReport> {
        let bytes = self.score.to_vec::<u8>(stream)?;
        Ok(loss::cuda::Score::from_bytes(&bytes).into())
    }

    /// Number of classes: logits of one image.
    pub fn classes(&self) -> usize {
        self.plan.slots[self.plan.slots.len() - 1]
    }

    /// The largest batch there is memory for.
    pub fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// The logits of the last batch of `images` images, in f32 on the host.
    ///
    /// # Errors
    /// If work on the stream failed.
    pub fn logits(&self, stream: &Stream, images: usize) -> Result<Vec<f32>> {
        let logits = self.output(self.plan.slots.len() - 1, images);
        if logits.dtype() == DType::F32 {
            return Ok(logits.to_vec(stream)?);
        }
        let wide = Memory::zeroed(stream.device(), DType::F32, logits.len())?;
        mgpu_kernels::arena::cuda::widen(stream, logits, wide.view())?;
        Ok(wide.to_vec(stream)?)
    }

    /// One line for each convolution and dense layer: what computes it.
    pub fn describe(&self) -> Vec<String> {
        self.products.iter().flatten().map(|product| product.conv.describe()).collect()
    }

    /// Puts one training step on the model's stream: for each micro-batch a part of the batch that is the step's turn, with its
    /// labels, forward and backward; and the update. Adds to the [`score`](Self::score).
    ///
    /// # Errors
    /// If a kernel cannot be launched, and as the communicator's.
    pub fn step(
        &mut self,
        model: &mut DeviceDataParallel,
        data: &DeviceData,
        dropout: Option<DeviceDropout>,
    ) -> Result<()> {
        let n = self.max_batch;
        let (x, labels) = (self.output(0, n), self.labels.view());
        let micro_batches = model.micro_batches();
        for index in 0..micro_batches {
            if index == 0 { model.begin_step() } else { model.next_micro_batch() }?;
            let part = (index, micro_batches);
            gather::cuda::batch(model.stream(), &data.samples(), model.state(), x, labels, part)?;
            let first = (index * n) as u64;
            let dropout = dropout.map(|key| DeviceDropout { first_sample: key.first_sample + first, ..key });
            self.forward(model, n, Pass::Train(dropout))?;
            self.backward(model, dropout)?;
        }
        model.finish_step()
    }

    /// Puts the evaluation of places `first..first + images` of the order on the model's stream, with running statistics
    /// and without dropout. Adds to the [`score`](Self::score).
    ///
    /// # Errors
    /// If a kernel cannot be launched.
    ///
    /// # Panics
    /// If there is no memory for so many.
    pub fn evaluate(
        &mut self,
        model: &mut DeviceDataParallel,
        data: &DeviceData,
        first: usize,
        images: usize,
    ) -> Result<()> {
        let labels = self.labels.slice(0..images);
        let x = self.output(0, images);
        gather::cuda::range(model.stream(), &data.samples(), first as u64, x, labels)?;
        self.forward(model, images, Pass::Eval)?;
        let logits = self.output(self.slots.len() - 1, images);
        let (scratch, score) = (self.scratch.view(), self.score.view());
        Ok(loss::cuda::score(model.stream(), logits, self.labels.slice(0..images), scratch, score)?)
    }

    /// The elements of slot `slot` for `images` images.
    fn output(&self, slot: usize, images: usize) -> View<'_> {
        self.slots[slot].slice(0..self.plan.slots[slot] * images)
    }

    fn forward(&self, model: &DeviceDataParallel, n: usize, pass: Pass) -> Result<()> {
        for (&Stage { op, input, output, .. }, product) in self.plan.stages.iter().zip(&self.products) {
            let (x, y) = (self.output(input, n), self.output(output, n));
            if let Some(product) = product {
                self.forward_product(model, n, product, x, y)?;
                continue;
            }
            match op {
                Op::Conv { .. } | Op::Dense { .. } => unreachable!("a product"),
                Op::Norm { index, weight, mean } => {
                    let Norm { statistics, sums } = &self.norms[index];
                    let (statistics, sums) = (statistics.view(), sums.view());
                    let running = |tensor| model.buffers().slice(self.plan.buffers.range(tensor));
                    let (running_mean, running_var) = (running(mean), running(mean + 1));
                    if pass == Pass::Eval {
                        norm::cuda::running_statistics(
                            model.stream(),
                            running_mean,
                            running_var,
                            statistics,
                        )?;
                    } else {
                        norm::cuda::sum_inputs(model.stream(), x, self.sums.view(), sums)?;
                        model.sum_over_ranks(sums)?;
                        let stream = model.stream();
                        norm::cuda::batch_statistics(stream, sums, statistics, running_mean, running_var)?;
                    }
                    let (gamma, beta) = (model.parameter(weight), model.parameter(weight + 1));
                    norm::cuda::normalise(model.stream(), statistics, gamma, beta, x, y)?;
                }
                Op::Activation { slope } => activation::cuda::forward(model.stream(), slope, y)?,
                Op::Pool(Pool { index, shape, channels }) => {
                    let chosen = self.chosen[index].slice(0..y.len());
                    pool::cuda::forward(model.stream(), &shape, channels, x, y, chosen)?;
                }
                Op::Dropout { .. } => {
                    if let Pass::Train(Some(key)) = pass {
                        self.drop(model, key, op, y)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn forward_product(
        &self,
        model: &DeviceDataParallel,
        n: usize,
        product: &Product,
        x: View<'_>,
        y: View<'_>,
    ) -> Result<()> {
        let &Product { ref conv, shape, weight, pool, .. } = product;
        let w = model.parameter_as(weight, self.precision.storage());
        let b = model.parameter(weight + 1);
        let workspace = self.workspace.view();
        let Some(Pool { index, shape: window, .. }) = pool else {
            return Ok(conv.forward(model.stream(), n, x, w, b, y, workspace)?);
        };
        let raw = self.unpooled.slice(0..shape.output_len() * n);
        let chosen = self.chosen[index].slice(0..y.len());
        Ok(conv.forward_pooled(model.stream(), n, x, w, b, raw, &window, y, chosen, workspace)?)
    }

    /// Zeroes what the mask of the operation says, in values or their gradients.
    fn drop(&self, model: &DeviceDataParallel, key: DeviceDropout, op: Op, values: View<'_>) -> Result<()> {
        let Op::Dropout { probability, layer, image } = op else { return Ok(()) };
        let mask = dropout::cuda::Mask {
            seed: key.seed,
            stream: mask_stream(layer),
            first_sample: key.first_sample,
            channels: image.channels,
            plane: image.plane,
        };
        Ok(dropout::cuda::apply(model.stream(), probability, &mask, model.state(), values)?)
    }

    fn backward(&self, model: &mut DeviceDataParallel, key: Option<DeviceDropout>) -> Result<()> {
        let n = self.max_batch;
        let [mut current, mut other] = [&self.gradients[0], &self.gradients[1]];
        let logits = self.output(self.slots.len() - 1, n);
        let (scratch, score) = (self.scratch.view(), self.score.view());
        let gradient = current.slice(0..logits.len());
        loss::cuda::gradient(model.stream(), logits, self.labels.view(), gradient, scratch, score)?;
        let first = self.plan.first_with_parameters();
        let stages = self.plan.stages.iter().zip(&self.products).enumerate();
        for (place, (&Stage { op, input, output, .. }, product)) in stages.skip(first).rev() {
            let (x, y) = (self.output(input, n), self.output(output, n));
            let dy = current.slice(0..y.len());
            let dx = other.slice(0..if place == first { 0 } else { x.len() });
            match op {
                Op::Conv { .. } | Op::Dense { .. } => {
                    let product = product.as_ref().expect("a product");
                    self.backward_product(model, n, product, x, y, dy, Some(dx).filter(|_| place > first))?;
                }
                Op::Norm { index, weight, .. } => {
                    let Norm { statistics, sums } = &self.norms[index];
                    let (statistics, sums) = (statistics.view(), sums.view());
                    let (dgamma, dbeta) = (model.gradient(weight), model.gradient(weight + 1));
                    let (stream, workspace) = (model.stream(), self.sums.view());
                    norm::cuda::sum_gradients(stream, statistics, x, dy, workspace, sums, dgamma, dbeta)?;
                    model.ready(weight + 1)?;
                    model.ready(weight)?;
                    if place > first {
                        model.sum_over_ranks(sums)?;
                        let gamma = model.parameter(weight);
                        norm::cuda::backward_input(model.stream(), statistics, sums, gamma, x, dy)?;
                    }
                }
                Op::Activation { slope } => activation::cuda::backward(model.stream(), slope, y, dy)?,
                Op::Pool(Pool { index, shape, channels }) => {
                    let chosen = self.chosen[index].slice(0..y.len());
                    pool::cuda::backward(model.stream(), &shape, channels, dy, chosen, dx)?;
                }
                Op::Dropout { .. } => {
                    if let Some(key) = key {
                        self.drop(model, key, op, dy)?;
                    }
                }
            }
            if !op.backward_in_place() {
                std::mem::swap(&mut current, &mut other);
            }
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "a pass's operands, one by one")]
    fn backward_product(
        &self,
        model: &mut DeviceDataParallel,
        n: usize,
        product: &Product,
        x: View<'_>,
        y: View<'_>,
        dy: View<'_>,
        dx: Option<View<'_>>,
    ) -> Result<()> {
        let &Product { ref conv, shape, weight, slope, pool } = product;
        let (workspace, db) = (self.workspace.view(), model.gradient(weight + 1));
        let raw = match pool {
            Some(Pool { index, shape: window, channels }) => {
                let raw = self.unpooled.slice(0..shape.output_len() * n);
                let chosen = self.chosen[index].slice(0..y.len());
                let stream = model.stream();
                pool::cuda::backward_fused(stream, &window, channels, slope, dy, y, chosen, raw)?;
                raw
            }
            None => dy,
        };
        if pool.is_none() && slope != LINEAR {
            conv.backward_activation(model.stream(), n, y, dy, db, workspace)?;
        } else {
            conv.backward_bias(model.stream(), n, raw, db, workspace)?;
        }
        model.ready(weight + 1)?;
        conv.backward_weights(model.stream(), n, x, raw, model.gradient(weight), workspace)?;
        model.ready(weight)?;
        if let Some(dx) = dx {
            let w = model.parameter_as(weight, self.precision.storage());
            conv.backward_input(model.stream(), n, w, raw, dx, workspace)?;
        }
        Ok(())
    }
}
