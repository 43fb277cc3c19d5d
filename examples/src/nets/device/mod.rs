//! A network on a GPU: the same layers as on the CPU, as launches on one stream.
//!
//! Nothing here blocks, and nothing is allocated after [`DeviceNet::new`]: a training step is a fixed sequence of
//! launches on fixed memory, so it can be captured and replayed. Kernels read everything that changes from step to
//! step from GPU memory (the step number, and with it samples and dropout masks).

mod order;
mod part;

use std::ops::Range;

use mgpu::device::{DeviceDataParallel, DeviceSpan, TracePoint};
use mgpu::timeline::{Name, Timeline};
use mgpu::{DType, Layout, Result};
use mgpu_kernels::cuda::{AutotuneOptions, Memory, Stream, View};
use mgpu_kernels::{Precision, gather, loss};
use order::ElementOrder;
pub use part::Neighbours;

use super::layers::{
    BatchPlace, DataBatch, DeviceDropout, DevicePass, DeviceStageTensors, DeviceStep, Neighbourhood, OnGpu,
    SetUp, SharedWorkspace,
};
use super::plan::{Plan, Stage};
use super::profile::{DeviceTimes, Profile, StageTimes, TimelineSpans};
use super::spec::Spec;
use super::{LossReport, initial};

/// Images and labels on a GPU, and the order in which batches use them.
#[derive(Debug)]
pub struct DeviceData {
    images: Memory,
    labels: Memory,
    order: Memory,
}

impl DeviceData {
    /// Copies `images` (u8, one after the other) and `labels` to the GPU of `stream`, with capacity for an order of
    /// `places` samples.
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

    /// Memory for `samples` samples of `sample_len` bytes each, in the order of the data set.
    ///
    /// # Errors
    /// If memory is short.
    pub fn zeroed(stream: &Stream, samples: usize, sample_len: usize) -> Result<Self> {
        let data = Self::with_capacity(stream, samples, sample_len, samples)?;
        data.set_order(stream, &(0..samples as u32).collect::<Vec<_>>())?;
        Ok(data)
    }

    /// Memory for `samples` samples of `sample_len` bytes each and an order of `places` samples, which is to be set.
    ///
    /// # Errors
    /// If memory is short.
    pub fn with_capacity(stream: &Stream, samples: usize, sample_len: usize, places: usize) -> Result<Self> {
        let zeroed = |dtype, len| Memory::zeroed(stream.device(), dtype, len);
        Ok(DeviceData {
            images: zeroed(DType::U8, samples * sample_len)?,
            labels: zeroed(DType::U8, samples)?,
            order: zeroed(DType::I32, places)?,
        })
    }

    /// The images and the labels of some samples, of type u8.
    ///
    /// # Panics
    /// If there is no such sample.
    pub fn part(&self, samples: Range<usize>) -> (View<'_>, View<'_>) {
        let len = self.images.len() / self.labels.len();
        (self.images.slice(samples.start * len..samples.end * len), self.labels.slice(samples))
    }

    /// Sets the beginning of the order.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If `order` exceeds the capacity.
    pub fn set_order(&self, stream: &Stream, order: &[u32]) -> Result<()> {
        Ok(stream.upload(order, self.order.slice(0..order.len()))?)
    }

    /// Entries of the order, of type i32.
    ///
    /// # Panics
    /// If they exceed the capacity.
    pub fn order(&self, places: Range<usize>) -> View<'_> {
        self.order.slice(places)
    }

    fn samples(&self) -> gather::cuda::Samples<'_> {
        let order = Some(self.order.view());
        gather::cuda::Samples { images: self.images.view(), labels: self.labels.view(), order }
    }
}

/// A network, or a part of one, with all the memory that batches of up to a given size need on a GPU.
pub struct DeviceNet {
    plan: Plan,
    order: ElementOrder,
    max_batch: usize,
    /// What the sum of a batch's losses is divided by, if it is not the number of its images.
    loss_divisor: Option<f64>,
    /// The kernels of each stage.
    gpu_layers: Vec<Box<dyn OnGpu>>,
    /// What each stage's passes include of others.
    neighbours: Vec<Neighbourhood>,
    shared: SharedWorkspace,
    /// The batches between their forward and their backward pass, of which `current` is the one in work.
    batches: Vec<BatchInFlight>,
    current: usize,
    /// Gradients of the current stage's activations: of its output, and of its input. A backward pass begins with the
    /// gradient of the last slot in the first of them.
    gradients: [Memory; 2],
    /// Receives the images of a batch of which a part needs only the labels.
    unused_images: Option<Memory>,
    labels: Memory,
    scratch: Memory,
    score: Memory,
    /// Names of the spans of stages, and their times, if steps may be traced.
    traced: Option<(TimelineSpans, Profile)>,
}

/// What exists once for each batch between its forward and its backward pass.
struct BatchInFlight {
    /// Activations; the last slot holds the logits.
    slots: Vec<Memory>,
    /// What else each stage keeps.
    states: Vec<Option<Memory>>,
}

impl DeviceNet {
    /// Allocates everything for batches of up to `max_batch` images. Where several kernels are available for a layer,
    /// they are benchmarked here, on `stream`.
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
        options: AutotuneOptions,
        stream: &Stream,
    ) -> Result<DeviceNet> {
        Self::of_plan(Plan::new(spec), (max_batch, 1), precision, options, stream)
    }

    /// Allocates everything for `in_flight` batches of up to `max_batch` images.
    fn of_plan(
        plan: Plan,
        (max_batch, in_flight): (usize, usize),
        precision: Precision,
        options: AutotuneOptions,
        stream: &Stream,
    ) -> Result<DeviceNet> {
        let set_up = SetUp { stream, max_batch, precision, options, input_gradient: false };
        let mut gpu_layers = Vec::new();
        for (index, stage) in plan.stages.iter().enumerate() {
            let reordered = stage.op.takes_vectors() || stage.flattened.is_none();
            assert!(reordered, "layer {}: on a GPU only dense layers follow a flattened image", stage.layer);
            gpu_layers.push(
                stage.op.on_gpu(&SetUp { input_gradient: plan.needs_input_gradient(index), ..set_up })?,
            );
        }
        let with_gradient = (0..plan.stages.len()).find(|index| plan.needs_input_gradient(*index));
        let neighbours = Neighbourhood::of_stages(&gpu_layers, with_gradient.unwrap_or(plan.stages.len()));
        let needs = gpu_layers.iter().zip(&neighbours).map(|(layer, around)| layer.workspace_needs(around));
        let shared = SharedWorkspace::new(&set_up, needs)?;
        let activations = |len: &usize| set_up.zeroed(precision.storage(), *len);
        let slots = plan.slots[usize::from(plan.tensors.before == 0)..].iter().copied();
        let unpooled = neighbours.iter().filter_map(|around| around.end_before.map(|(_, end)| end.len));
        let largest = &slots.chain(unpooled).max().unwrap_or(0);
        let bytes = |len| Memory::zeroed(stream.device(), DType::U8, len);
        let batch = || {
            let states = gpu_layers.iter().map(|gpu_layer| gpu_layer.pass_state(&set_up));
            Ok(BatchInFlight {
                slots: plan.slots.iter().map(activations).collect::<Result<_>>()?,
                states: states.collect::<Result<_>>()?,
            })
        };
        Ok(DeviceNet {
            order: ElementOrder::of_parameters(&plan),
            batches: (0..in_flight).map(|_| batch()).collect::<Result<_>>()?,
            current: 0,
            unused_images: None,
            gradients: [activations(largest)?, activations(largest)?],
            labels: bytes(max_batch)?,
            scratch: bytes(loss::cuda::SCRATCH_BYTES)?,
            score: bytes(loss::cuda::Score::BYTES)?,
            gpu_layers,
            neighbours,
            shared,
            plan,
            max_batch,
            loss_divisor: None,
            traced: None,
        })
    }

    /// As [`Net::divide_loss_by`](crate::nets::Net::divide_loss_by). To be called before steps are captured.
    pub fn divide_loss_by(&mut self, images: f64) {
        self.loss_divisor = Some(images);
    }

    /// Names the spans of the stages in traces, for `timeline`, and profiles the traced steps.
    pub fn record_on(&mut self, timeline: &Timeline) {
        let stages: Vec<String> = self.plan.stages.iter().map(Stage::name).collect();
        self.traced = Some((TimelineSpans::new(timeline, &stages), Profile::new(stages.len(), None)));
    }

    /// Adds the spans of a traced step of `micro_batches` micro-batches to the profile, and to `times` what is not part
    /// of the network.
    pub fn profile_step(&mut self, spans: &[DeviceSpan], micro_batches: usize, times: &mut DeviceTimes) {
        let images = self.max_batch * micro_batches;
        if let Some((names, profile)) = &mut self.traced {
            profile.add_step(spans, names, images, times);
        }
    }

    /// The times of the stages in the profiled steps, and of the rest of the passes.
    pub fn profile(&self) -> Option<(&Profile, Vec<StageTimes>)> {
        let (_, profile) = self.traced.as_ref()?;
        let kernels = self.gpu_layers.iter().map(|gpu_layer| {
            // The shape is in the name of the stage.
            let text = gpu_layer.describe().unwrap_or_default();
            text.split_once(": ").map_or(String::new(), |(_, kernels)| kernels.to_owned())
        });
        Some((profile, self.plan.stage_times(profile, kernels)))
    }

    /// Names and shapes of the parameters as on the CPU, offsets as on the GPU.
    pub fn layout(&self) -> &Layout {
        self.order.layout()
    }

    /// Names, shapes and offsets of the parameters on the CPU, and in checkpoints.
    pub fn host_layout(&self) -> &Layout {
        &self.plan.tensors.parameters
    }

    /// Names, shapes and offsets of the running statistics of batch normalisation. Often empty.
    pub fn buffers_layout(&self) -> &Layout {
        &self.plan.tensors.buffers
    }

    /// Converts an arena from the order of [`host_layout`](Self::host_layout) to that of [`layout`](Self::layout).
    ///
    /// # Panics
    /// If it is shorter than its layout.
    pub fn to_device(&self, values: &[f32]) -> Vec<f32> {
        self.order.to_device(values)
    }

    /// Converts an arena from device order to host order.
    ///
    /// # Panics
    /// If it is shorter than its layout.
    pub fn to_host(&self, values: &[f32]) -> Vec<f32> {
        self.order.to_host(values)
    }

    /// As [`to_host`](Self::to_host), as a function that another thread can call.
    ///
    /// # Panics
    /// When it is called: if the arena is shorter than its layout.
    pub fn host_order(&self) -> impl Fn(&[f32]) -> Vec<f32> + Send + 'static {
        let order = self.order.clone();
        move |values| order.to_host(values)
    }

    /// The initial parameters, in the order of [`host_layout`](Self::host_layout), equal to those of the CPU.
    pub fn initial_parameters(&self, seed: u64) -> Vec<f32> {
        initial::parameters(&self.plan.tensors, seed)
    }

    /// The initial parameters of golden runs.
    pub fn golden_parameters(&self, seed: u64) -> Vec<f32> {
        initial::golden_parameters(&self.plan.tensors, seed)
    }

    /// The initial running statistics, in the order of [`buffers_layout`](Self::buffers_layout).
    pub fn initial_buffers(&self) -> Vec<f32> {
        initial::buffers(&self.plan.tensors)
    }

    /// Loss and correct predictions of all batches since [`clear_score`](Self::clear_score), as the bytes of a
    /// [`loss::cuda::Score`].
    pub fn score(&self) -> View<'_> {
        self.score.view()
    }

    /// Resets the score, in stream order.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn clear_score(&self, stream: &Stream) -> Result<()> {
        Ok(stream.zero(self.score.view())?)
    }

    /// The score on the host, after the work on `stream` so far.
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

    /// One line for each convolution and dense layer: its kernels.
    pub fn describe(&self) -> Vec<String> {
        self.gpu_layers.iter().filter_map(|gpu_layer| gpu_layer.describe()).collect()
    }

    /// Enqueues one training step on the model's stream: for each micro-batch the gather of its images and labels, unless
    /// the first layer reads these from the data set, forward and backward; then the update. Adds to the
    /// [`score`](Self::score).
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
        let micro_batches = model.micro_batches();
        for index in 0..micro_batches {
            if index == 0 { model.begin_step() } else { model.next_micro_batch() }?;
            let batch = self.batch(data, n, BatchPlace::OfStep(index, micro_batches));
            let at = self.gather(model, &batch, self.output(0, n), model.begin_span()?)?;
            let first = (index * n) as u64;
            let dropout = dropout.map(|key| DeviceDropout { first_sample: key.first_sample + first, ..key });
            let at = self.forward(model, &batch, DevicePass::Train(dropout), at)?;
            let at = self.loss_gradient(model, at)?;
            self.backward(model, &batch, dropout, at)?;
        }
        model.finish_step()
    }

    /// Enqueues the evaluation of entries `first..first + images` of the order, with running statistics and without
    /// dropout. Adds to the [`score`](Self::score).
    ///
    /// # Errors
    /// If a kernel cannot be launched.
    ///
    /// # Panics
    /// If `images` exceeds the maximum batch.
    pub fn evaluate(
        &mut self,
        model: &mut DeviceDataParallel,
        data: &DeviceData,
        first: usize,
        images: usize,
    ) -> Result<()> {
        let batch = self.batch(data, images, BatchPlace::Index(first));
        let at = self.gather(model, &batch, self.output(0, images), model.begin_span()?)?;
        let _ = self.forward(model, &batch, DevicePass::Eval, at)?;
        let logits = self.output(self.plan.slots.len() - 1, images);
        let (scratch, score) = (self.scratch.view(), self.score.view());
        Ok(loss::cuda::score(model.stream(), logits, batch.labels, scratch, score)?)
    }

    /// A batch of `images` images.
    fn batch<'a>(&'a self, data: &'a DeviceData, images: usize, place: BatchPlace) -> DataBatch<'a> {
        DataBatch { samples: data.samples(), place, labels: self.labels.slice(0..images) }
    }

    /// Whether the first stage reads the images from the data set, and its forward pass writes their labels.
    fn reads_data_set(&self) -> bool {
        self.plan.tensors.before == 0 && self.gpu_layers.first().is_some_and(|first| first.reads_data_set())
    }

    /// Enqueues the gather of a batch to `x`, unless the first stage reads it from the data set. A trace of it begins at
    /// `begin`; returns its end.
    fn gather(
        &self,
        model: &DeviceDataParallel,
        batch: &DataBatch<'_>,
        x: View<'_>,
        begin: TracePoint,
    ) -> Result<TracePoint> {
        if self.reads_data_set() {
            return Ok(begin);
        }
        gather::cuda::gather(model.stream(), &batch.on_step(model), x, batch.labels)?;
        model.end_span(begin, TimelineSpans::GATHER)
    }

    /// The elements of slot `slot` for `images` images.
    fn output(&self, slot: usize, images: usize) -> View<'_> {
        self.batches[self.current].slots[slot].slice(0..self.plan.slots[slot] * images)
    }

    /// The context of the passes of stage `index`.
    fn context<'a>(&'a self, index: usize, batch: &'a DataBatch<'a>) -> DeviceStep<'a> {
        let states = &self.batches[self.current].states;
        let neighbours = &self.neighbours[index];
        DeviceStep {
            images: batch.labels.len(),
            shared: &self.shared,
            state: states[index].as_ref(),
            neighbours,
            state_before: neighbours.end_before.and_then(|(before, _)| states[before].as_ref()),
            batch: (index == 0 && self.reads_data_set()).then_some(batch),
        }
    }

    /// Ends the span of a pass of a stage.
    fn end_stage(
        &self,
        model: &DeviceDataParallel,
        from: TracePoint,
        name: impl Fn(&TimelineSpans) -> Name,
    ) -> Result<TracePoint> {
        self.traced.as_ref().map_or(Ok(from), |(names, _)| model.end_span(from, name(names)))
    }

    /// Enqueues the forward pass of a batch that has been [gathered](Self::gather). A trace of it begins at `begin`; returns
    /// its end.
    fn forward(
        &self,
        model: &DeviceDataParallel,
        batch: &DataBatch<'_>,
        pass: DevicePass,
        begin: TracePoint,
    ) -> Result<TracePoint> {
        let (images, mut at) = (batch.labels.len(), begin);
        for (index, (stage, gpu_layer)) in self.plan.stages.iter().zip(&self.gpu_layers).enumerate() {
            let (x, y) = (self.output(stage.input, images), self.output(stage.output, images));
            gpu_layer.forward(self.context(index, batch), model, x, y, pass)?;
            at = self.end_stage(model, at, |names| names.forward[index])?;
        }
        model.add_span(begin, at, TimelineSpans::FORWARD);
        Ok(at)
    }

    /// Enqueues the gradient of the loss, and adds to the [`score`](Self::score). A trace of it begins at `begin`;
    /// returns its end.
    fn loss_gradient(&self, model: &DeviceDataParallel, begin: TracePoint) -> Result<TracePoint> {
        let logits = self.output(self.plan.slots.len() - 1, self.max_batch);
        let (scratch, score) = (self.scratch.view(), self.score.view());
        let gradient = self.gradients[0].slice(0..logits.len());
        let (labels, divisor) = (self.labels.view(), self.loss_divisor.unwrap_or(self.max_batch as f64));
        let scaled = (divisor, Some(model.state()));
        loss::cuda::gradient_scaled(model.stream(), logits, labels, scaled, gradient, scratch, score)?;
        model.end_span(begin, TimelineSpans::LOSS)
    }

    /// Enqueues the backward pass of a whole batch, from the gradient of the last slot. Returns that of the first slot,
    /// which is empty unless this is a later part. A trace of it begins at `begin`.
    fn backward(
        &self,
        model: &mut DeviceDataParallel,
        batch: &DataBatch<'_>,
        dropout: Option<DeviceDropout>,
        begin: TracePoint,
    ) -> Result<View<'_>> {
        let images = self.max_batch;
        let [mut current, mut other] = [&self.gradients[0], &self.gradients[1]];
        let mut at = begin;
        // Elements of the current gradient, if they are not those of the stage's output.
        let mut len_of_gradient = None;
        let first = self.plan.first_with_parameters();
        let stages = self.plan.stages.iter().zip(&self.gpu_layers).enumerate();
        for (index, (stage, gpu_layer)) in stages.skip(first).rev() {
            let (x, y) = (self.output(stage.input, images), self.output(stage.output, images));
            // Elements before the activation and pooling of a stage, if this stage's pass includes these.
            let end = self.neighbours[index].end_before.map(|(_, end)| end.len * images);
            let dx_len = end.unwrap_or(x.len());
            let dx = self.plan.needs_input_gradient(index).then(|| other.slice(0..dx_len));
            let dy_len = len_of_gradient.unwrap_or(y.len());
            let tensors = DeviceStageTensors { x, y, dy: current.slice(0..dy_len), dx };
            gpu_layer.backward(self.context(index, batch), model, tensors, dropout)?;
            at = self.end_stage(model, at, |names| names.backward[index])?;
            if end.is_some() {
                len_of_gradient = end;
            } else if stage.input != stage.output {
                len_of_gradient = None;
            }
            if !stage.backward_in_place() {
                std::mem::swap(&mut current, &mut other);
            }
        }
        model.add_span(begin, at, TimelineSpans::BACKWARD);
        let len = if self.plan.needs_input_gradient(0) { self.plan.slots[0] * images } else { 0 };
        Ok(current.slice(0..len))
    }
}
