//! A network on the CPU, or a part of one, with its memory: forward and backward pass.

use mgpu::timeline::Timeline;
use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::{Scratch, Storage, Threads, loss, tile_engine, transpose};

use super::LossReport;
use super::initial;
use super::layers::{BackwardPass, CpuKernels, CpuLayer, DropoutKey, ForwardPass, Image, PassState, Step};
use super::memory::{ActivationGradients, ActivationMemory, image_slots, vector_slots};
use super::plan::{Plan, Stage};
use super::profile::{self, Lap, Profile, StageTimes, TimelineSpans, lap};
use super::spec::Spec;

/// The purpose of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Training: a backward pass follows. Uses batch statistics, and dropout if a key is given.
    Train {
        /// The key of the masks; `None` trains without dropout.
        dropout: Option<DropoutKey>,
    },
    /// Evaluation: running statistics, no dropout.
    Eval,
}

/// A network with memory for batches of up to a given size.
///
/// Images between its layers and their gradients are stored as `E`: `f32`, or `bf16` or `f16` in half the memory, with
/// rounding. Arithmetic, parameters and their gradients, and everything from the first dense layer on are f32.
#[derive(Debug)]
pub struct Net<E = f32> {
    pub(super) plan: Plan,
    threads: Threads,
    max_batch: usize,
    /// What the sum of a batch's losses is divided by, if it is not the number of its images.
    loss_divisor: Option<f64>,
    /// What the gradient of the loss is multiplied by.
    loss_scale: f32,
    /// The operation of each stage.
    cpu_layers: Vec<CpuLayer>,
    /// The batches in flight, and the index of the current one.
    pub(super) batches: Vec<BatchInFlight<E>>,
    pub(super) current: usize,
    pub(super) image_gradients: ActivationGradients<E>,
    pub(super) vector_gradients: ActivationGradients<f32>,
    /// Temporary memory for the gradient of a bias.
    bias: Vec<f32>,
    scratch: Scratch,
    profile: Option<Profile>,
    spans: Option<TimelineSpans>,
    /// The number that the spans of passes get on a timeline.
    pub(super) span_number: Option<u32>,
}

/// What a network keeps of a batch from its forward to its backward pass.
#[derive(Debug)]
pub(super) struct BatchInFlight<E> {
    pub(super) images: ActivationMemory<E>,
    /// The last slot of a whole network holds the logits.
    pub(super) vectors: ActivationMemory<f32>,
    /// What each stage keeps besides its activations.
    states: Vec<PassState>,
    /// Number of images.
    pub(super) len: usize,
    /// `None` before the first forward pass.
    mode: Option<Mode>,
}

impl<E: Storage> BatchInFlight<E> {
    fn new(plan: &Plan, max_batch: usize) -> Self {
        BatchInFlight {
            images: ActivationMemory::new(plan, image_slots(plan), max_batch),
            vectors: ActivationMemory::new(plan, vector_slots(plan), max_batch),
            states: plan.stages.iter().map(|stage| stage.op.pass_state(max_batch)).collect(),
            len: 0,
            mode: None,
        }
    }
}

impl Net {
    /// Allocates everything for batches of up to `max_batch` images, computed by `threads` threads.
    ///
    /// # Panics
    /// If the layers of `spec` do not fit each other, or `threads` is 0.
    pub fn new(spec: &Spec, max_batch: usize, threads: usize) -> Net {
        Self::with_conv_policy(spec, max_batch, threads, ConvPolicy::Auto)
    }
}

impl<E: Storage> Net<E> {
    /// As [`Net::new`], with the choice of convolution algorithms.
    ///
    /// # Panics
    /// As [`Net::new`].
    pub fn with_conv_policy(spec: &Spec, max_batch: usize, threads: usize, choice: ConvPolicy) -> Net<E> {
        Self::of_plan(Plan::new(spec), (max_batch, 1), threads, choice)
    }

    /// Allocates everything for `in_flight` batches of up to `max_batch` images.
    pub(super) fn of_plan(
        plan: Plan,
        (max_batch, in_flight): (usize, usize),
        threads: usize,
        choice: ConvPolicy,
    ) -> Net<E> {
        let threads = Threads::new(threads);
        let engine = tile_engine::of_storage::<E>();
        let kernels = |stage: &Stage| CpuKernels {
            conv: choice,
            engine: engine.filter(|_| !stage.stays_f32),
            storage: E::DTYPE,
        };
        let tensors = plan.tensors.parameters.tensors();
        let biases =
            plan.stages.iter().filter_map(|stage| stage.op.weight()).map(|weight| tensors[weight + 1].len());
        Net {
            cpu_layers: plan.stages.iter().map(|stage| stage.op.on_cpu(kernels(stage))).collect(),
            batches: (0..in_flight).map(|_| BatchInFlight::new(&plan, max_batch)).collect(),
            current: 0,
            image_gradients: ActivationGradients::new(&plan, image_slots(&plan), max_batch),
            vector_gradients: ActivationGradients::new(&plan, vector_slots(&plan), max_batch),
            bias: vec![0.0; biases.max().unwrap_or(0)],
            scratch: Scratch::new(&threads),
            profile: None,
            spans: None,
            span_number: None,
            plan,
            threads,
            max_batch,
            loss_divisor: None,
            loss_scale: 1.0,
        }
    }

    /// Starts profiling each stage, from zero.
    pub fn start_profile(&mut self) {
        self.profile = Some(Profile::new(self.plan.stages.len(), self.spans.clone()));
    }

    /// Records each training pass and each of its stages on `timeline` from now on.
    pub fn record_on(&mut self, timeline: &Timeline) {
        let stages: Vec<String> = self.plan.stages.iter().map(Stage::name).collect();
        self.spans = Some(TimelineSpans::new(timeline, &stages));
        self.start_profile();
    }

    /// The times of the stages since [`Net::start_profile`], and of the rest of the passes.
    pub fn profile(&self) -> Option<(&Profile, Vec<StageTimes>)> {
        let profile = self.profile.as_ref()?;
        let kernels = self.cpu_layers.iter().map(CpuLayer::kernel);
        Some((profile, self.plan.stage_times(profile, kernels)))
    }

    /// One line for each convolution, and for each dense layer with products of bf16: its algorithm.
    pub fn describe(&self) -> Vec<String> {
        let stages = self.plan.stages.iter().zip(&self.cpu_layers);
        let convolutions = stages.filter(|(_, cpu_layer)| cpu_layer.is_chosen());
        let line =
            |(stage, cpu_layer): (&Stage, &CpuLayer)| format!("{}: {}", stage.name(), cpu_layer.kernel());
        convolutions.map(line).collect()
    }

    /// The compute threads.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.plan.tensors.parameters
    }

    /// Names, shapes and offsets of the running statistics of batch normalisation. Often empty.
    pub fn buffers_layout(&self) -> &Layout {
        &self.plan.tensors.buffers
    }

    /// The initial parameters, in the order of [`Net::layout`].
    pub fn initial_parameters(&self, seed: u64) -> Vec<f32> {
        initial::parameters(&self.plan.tensors, seed)
    }

    /// The initial parameters of golden runs.
    pub fn golden_parameters(&self, seed: u64) -> Vec<f32> {
        initial::golden_parameters(&self.plan.tensors, seed)
    }

    /// The initial running statistics, in the order of [`Net::buffers_layout`].
    pub fn initial_buffers(&self) -> Vec<f32> {
        initial::buffers(&self.plan.tensors)
    }

    /// The maximum batch size.
    pub fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Elements of one image.
    pub fn image_len(&self) -> usize {
        self.plan.slots[0]
    }

    /// Number of classes: the logits of one image.
    pub fn classes(&self) -> usize {
        self.plan.slots[self.plan.slots.len() - 1]
    }

    /// Divides the sum of a batch's losses by `images` from now on, instead of by the number of its images: for steps
    /// whose micro-batches have unequal sizes, on all ranks by the mean size of all of them. Their mean gradient is then
    /// the mean over all images.
    ///
    /// ```
    /// # use mgpu_examples::nets::{Net, Spec};
    /// # let mut net = Net::new(&Spec::named("lenet5")?, 3, 1);
    /// // Three images here, and two on another rank.
    /// net.divide_loss_by(2.5);
    /// # Ok::<(), mgpu_examples::nets::UnknownNet>(())
    /// ```
    pub fn divide_loss_by(&mut self, images: f64) {
        self.loss_divisor = Some(images);
    }

    /// Multiplies the gradient of the loss by `scale` from now on, and so all gradients.
    pub fn scale_loss_by(&mut self, scale: f32) {
        self.loss_scale = scale;
    }

    /// Computes the logits \[batch, classes\] of a batch of images \[batch, channels, height, width\].
    ///
    /// In training mode, batch normalisation sums its statistics over `ranks` and updates the running statistics in
    /// `buffers`; if the ranks' batch sizes differ, see [`divide_loss_by`](Self::divide_loss_by).
    ///
    /// # Errors
    /// If the sum over ranks fails.
    ///
    /// # Panics
    /// If a slice does not have the length of its layout, or the batch is empty or larger than the maximum batch
    /// size.
    pub fn forward(
        &mut self,
        params: &[f32],
        buffers: &mut [f32],
        images: &[f32],
        mode: Mode,
        ranks: &mut dyn GradientSink,
    ) -> Result<&[f32]> {
        self.forward_part(params, buffers, Some(images), mode, ranks)?;
        Ok(self.logits())
    }

    /// As [`forward`](Self::forward), of a part of a network: of the `images` if it is the first one, else of the
    /// activations that were written to its [`input`](Self::input).
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn forward_part(
        &mut self,
        params: &[f32],
        buffers: &mut [f32],
        images: Option<&[f32]>,
        mode: Mode,
        ranks: &mut dyn GradientSink,
    ) -> Result<()> {
        let pass = match mode {
            Mode::Train { dropout } => ForwardPass::Train { buffers, dropout, ranks },
            Mode::Eval => ForwardPass::Eval { buffers },
        };
        let _range = mgpu::nvtx::range("forward", self.span_number.map(u64::from));
        self.run(params, images, pass)?;
        profile::end(&self.profile, ("forward", self.span_number));
        Ok(())
    }

    /// [`Net::forward`] in evaluation mode, which needs no other rank.
    ///
    /// # Panics
    /// As [`Net::forward`].
    pub fn predict(&mut self, params: &[f32], buffers: &[f32], images: &[f32]) -> &[f32] {
        self.predict_part(params, buffers, Some(images));
        self.logits()
    }

    /// [`Net::forward_part`] in evaluation mode.
    ///
    /// # Panics
    /// As [`Net::forward`].
    pub fn predict_part(&mut self, params: &[f32], buffers: &[f32], images: Option<&[f32]>) {
        // Only training is profiled.
        let profile = self.profile.take();
        self.run(params, images, ForwardPass::Eval { buffers })
            .expect("evaluation asks nothing of other ranks");
        self.profile = profile;
    }

    /// The logits of the current batch.
    pub fn logits(&self) -> &[f32] {
        let BatchInFlight { vectors, len, .. } = &self.batches[self.current];
        vectors.slot(self.plan.slots.len() - 1, *len)
    }

    /// Loss and accuracy of the current batch.
    ///
    /// # Panics
    /// If there is not one label for each image, or a label is not a class.
    pub fn score(&self, labels: &[u8]) -> LossReport {
        let len = self.batches[self.current].len;
        assert_eq!(labels.len(), len, "labels for a batch of {len}");
        loss::cpu::score(self.logits(), labels)
    }

    fn run(&mut self, params: &[f32], input: Option<&[f32]>, mut pass: ForwardPass<'_>) -> Result<()> {
        let Net { plan, threads, batches, cpu_layers, scratch, profile, .. } = self;
        let BatchInFlight { images, vectors, states, len, mode } = &mut batches[self.current];
        if let Some(input) = input {
            *len = input.len() / plan.slots[0];
            assert_eq!(input.len(), *len * plan.slots[0], "a whole number of images");
        }
        let n = *len;
        assert!((1..=self.max_batch).contains(&n), "a batch of {n} images, memory for {}", self.max_batch);
        assert_eq!(params.len(), plan.tensors.parameters.len(), "parameters");
        let buffers_len = match &pass {
            ForwardPass::Train { buffers, .. } => buffers.len(),
            ForwardPass::Eval { buffers } => buffers.len(),
        };
        assert_eq!(buffers_len, plan.tensors.buffers.len(), "running statistics");
        *mode = Some(match &pass {
            ForwardPass::Train { dropout, .. } => Mode::Train { dropout: *dropout },
            ForwardPass::Eval { .. } => Mode::Eval,
        });

        profile::start(profile);
        if let Some(input) = input {
            let Image { channels, plane } = plan.image;
            transpose::matrices(threads, scratch, (channels, plane), input, images.slot_mut(0, n));
            lap(profile, Lap::Input);
        }
        let stages = plan.stages.iter().zip(cpu_layers).zip(states).enumerate();
        for (index, ((stage, cpu_layer), state)) in stages {
            let vector = stage.output >= plan.vectors;
            if vector && stage.input < plan.vectors {
                let Image { channels, plane } = plan.flattened();
                let (image, flat) = (images.slot(stage.input, n), vectors.slot_mut(stage.input, n));
                transpose::matrices(threads, scratch, (plane, channels), image, flat);
            }
            let layout = &plan.tensors.parameters;
            let step = Step { stage: index, threads, scratch, layout, params, state, profile };
            if vector {
                let (x, y) = vectors.of_stage(stage, n);
                cpu_layer.on_vectors().forward(step, x, y, &mut pass)?;
            } else {
                let (x, y) = images.of_stage(stage, n);
                cpu_layer.on_images::<E>().forward(step, x, y, &mut pass)?;
            }
            lap(profile, Lap::Forward(index));
        }
        Ok(())
    }

    /// Computes the gradient of the mean loss of the current batch (see [`divide_loss_by`](Self::divide_loss_by) and
    /// [`scale_loss_by`](Self::scale_loss_by)) for
    /// every parameter, after a forward pass in training mode with the same `params`. Writes each gradient to `sink` and
    /// announces it, last tensor first, so that its reduction can overlap the computation of the following ones.
    ///
    /// # Errors
    /// Errors of the sink.
    ///
    /// # Panics
    /// If the last forward pass was not in training mode, the number of labels differs from the number of images, or
    /// a label is not a class.
    pub fn backward(
        &mut self,
        params: &[f32],
        labels: &[u8],
        sink: &mut dyn GradientSink,
    ) -> Result<LossReport> {
        let Net { plan, batches, vector_gradients, loss_divisor, loss_scale, profile, .. } = self;
        let BatchInFlight { vectors, len, .. } = &batches[self.current];
        assert_eq!(labels.len(), *len, "labels for a batch of {len}");

        profile::start(profile);
        let logits = vectors.slot(plan.slots.len() - 1, *len);
        let divisor = loss_divisor.unwrap_or(*len as f64);
        let gradient = vector_gradients.start(logits.len());
        let report = loss::cpu::gradient_scaled(logits, labels, (divisor, *loss_scale), gradient);
        lap(profile, Lap::Loss);
        self.propagate(params, sink)?;
        Ok(report)
    }

    /// As [`backward`](Self::backward), of a part of a network that is not the last one, after the gradient of its
    /// output was written to [`output_gradient`](Self::output_gradient). Afterwards
    /// [`input_gradient`](Self::input_gradient) has the gradient of its input, unless it is the first part.
    ///
    /// # Errors
    /// Errors of the sink.
    ///
    /// # Panics
    /// If the last forward pass was not in training mode.
    pub fn backward_part(&mut self, params: &[f32], sink: &mut dyn GradientSink) -> Result<()> {
        profile::start(&mut self.profile);
        self.propagate(params, sink)
    }

    /// The backward passes of all stages, after the gradient of the last slot was written.
    fn propagate(&mut self, params: &[f32], sink: &mut dyn GradientSink) -> Result<()> {
        let _range = mgpu::nvtx::range("backward", self.span_number.map(u64::from));
        let Net { plan, threads, batches, cpu_layers, bias, scratch, profile, .. } = self;
        let BatchInFlight { images, vectors, states, len: n, mode } = &mut batches[self.current];
        let (image_gradients, vector_gradients) = (&mut self.image_gradients, &mut self.vector_gradients);
        let &mut Some(Mode::Train { dropout }) = mode else {
            panic!("a backward pass follows a forward pass in training mode");
        };
        let n = *n;
        assert_eq!(params.len(), plan.tensors.parameters.len(), "parameters");
        let first = plan.first_with_parameters();
        let stages = plan.stages.iter().zip(cpu_layers).zip(states).enumerate();
        for (index, ((stage, cpu_layer), state)) in stages.skip(first).rev() {
            let input_gradient = plan.needs_input_gradient(index);
            let layout = &plan.tensors.parameters;
            let step = Step { stage: index, threads, scratch: &mut *scratch, layout, params, state, profile };
            let pass = BackwardPass { input_gradient, dropout, sink: &mut *sink, bias };
            if stage.output < plan.vectors {
                image_gradients.backward(stage, (images, n), input_gradient, |tensors| {
                    cpu_layer.on_images::<E>().backward(step, tensors, pass)
                })?;
            } else {
                vector_gradients.backward(stage, (vectors, n), input_gradient, |tensors| {
                    cpu_layer.on_vectors().backward(step, tensors, pass)
                })?;
                if input_gradient && stage.input < plan.vectors {
                    let (Image { channels, plane }, len) = (plan.flattened(), plan.slots[stage.input] * n);
                    let (flat, image) = (vector_gradients.latest(len), image_gradients.start(len));
                    transpose::matrices(threads, scratch, (channels, plane), flat, image);
                }
            }
            lap(profile, Lap::Backward(index));
        }
        profile::end(profile, ("backward", self.span_number));
        if let Some(profile) = profile {
            profile.steps += 1;
            profile.images += n;
        }
        Ok(())
    }
}
