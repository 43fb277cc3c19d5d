//! A network on the CPU, with its memory: forward and backward pass.

use mgpu::timeline::Timeline;
use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::conv::cpu::ConvPolicy;
use mgpu_kernels::{Scratch, Storage, Threads, loss, transpose};

use super::LossReport;
use super::initial;
use super::layers::{BackwardPass, CpuLayer, DropoutKey, ForwardPass, Image, Step};
use super::memory::ActivationMemory;
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
/// Images between its layers and their gradients are stored as `E`: `f32`, or `bf16` in half the memory, with
/// rounding. Arithmetic, parameters and their gradients, and everything from the first dense layer on are f32.
#[derive(Debug)]
pub struct Net<E = f32> {
    plan: Plan,
    threads: Threads,
    max_batch: usize,
    /// The operation of each stage.
    cpu_layers: Vec<CpuLayer>,
    images: ActivationMemory<E>,
    /// The last slot holds the logits.
    vectors: ActivationMemory<f32>,
    /// Temporary memory for the gradient of a bias.
    bias: Vec<f32>,
    scratch: Scratch,
    /// Images in the current batch.
    batch: usize,
    /// The mode of the current batch; `None` before the first.
    mode: Option<Mode>,
    profile: Option<Profile>,
    spans: Option<TimelineSpans>,
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
        let plan = Plan::new(spec);
        let threads = Threads::new(threads);
        let tensors = plan.tensors.parameters.tensors();
        let biases =
            plan.stages.iter().filter_map(|stage| stage.op.weight()).map(|weight| tensors[weight + 1].len());
        Net {
            cpu_layers: plan.stages.iter().map(|stage| stage.op.on_cpu(max_batch, choice)).collect(),
            images: ActivationMemory::images(&plan, max_batch),
            vectors: ActivationMemory::vectors(&plan, max_batch),
            bias: vec![0.0; biases.max().unwrap_or(0)],
            scratch: Scratch::new(&threads),
            batch: 0,
            mode: None,
            profile: None,
            spans: None,
            plan,
            threads,
            max_batch,
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

    /// One line for each convolution: its algorithm.
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

    /// Computes the logits \[batch, classes\] of a batch of images \[batch, channels, height, width\].
    ///
    /// In training mode, batch normalisation sums its statistics over `ranks` and updates the running statistics in
    /// `buffers`; all ranks must have the same batch size.
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
        let pass = match mode {
            Mode::Train { dropout } => ForwardPass::Train { buffers, dropout, ranks },
            Mode::Eval => ForwardPass::Eval { buffers },
        };
        self.run(params, images, pass)?;
        profile::end(&self.profile, "forward");
        Ok(self.logits())
    }

    /// [`Net::forward`] in evaluation mode, which needs no other rank.
    ///
    /// # Panics
    /// As [`Net::forward`].
    pub fn predict(&mut self, params: &[f32], buffers: &[f32], images: &[f32]) -> &[f32] {
        // Only training is profiled.
        let profile = self.profile.take();
        self.run(params, images, ForwardPass::Eval { buffers })
            .expect("evaluation asks nothing of other ranks");
        self.profile = profile;
        self.logits()
    }

    /// The logits of the current batch.
    pub fn logits(&self) -> &[f32] {
        self.vectors.slot(self.plan.slots.len() - 1, self.batch)
    }

    /// Loss and accuracy of the current batch.
    ///
    /// # Panics
    /// If there is not one label for each image, or a label is not a class.
    pub fn score(&self, labels: &[u8]) -> LossReport {
        assert_eq!(labels.len(), self.batch, "labels for a batch of {}", self.batch);
        loss::cpu::score(self.logits(), labels)
    }

    fn run(&mut self, params: &[f32], batch: &[f32], mut pass: ForwardPass<'_>) -> Result<()> {
        let Net { plan, threads, images, vectors, cpu_layers, scratch, profile, .. } = self;
        let n = batch.len() / plan.slots[0];
        assert_eq!(batch.len(), n * plan.slots[0], "a whole number of images");
        assert!((1..=self.max_batch).contains(&n), "a batch of {n} images, memory for {}", self.max_batch);
        assert_eq!(params.len(), plan.tensors.parameters.len(), "parameters");
        let buffers_len = match &pass {
            ForwardPass::Train { buffers, .. } => buffers.len(),
            ForwardPass::Eval { buffers } => buffers.len(),
        };
        assert_eq!(buffers_len, plan.tensors.buffers.len(), "running statistics");
        self.batch = n;
        self.mode = Some(match &pass {
            ForwardPass::Train { dropout, .. } => Mode::Train { dropout: *dropout },
            ForwardPass::Eval { .. } => Mode::Eval,
        });

        profile::start(profile);
        let Image { channels, plane } = plan.image;
        transpose::matrices(threads, scratch, (channels, plane), batch, images.slot_mut(0, n));
        lap(profile, Lap::Input);
        for (index, (stage, cpu_layer)) in plan.stages.iter().zip(cpu_layers).enumerate() {
            let vector = stage.output >= plan.vectors;
            if vector && stage.input < plan.vectors {
                let Image { channels, plane } = plan.flattened();
                let (image, flat) = (images.slot(stage.input, n), vectors.slot_mut(stage.input, n));
                transpose::matrices(threads, scratch, (plane, channels), image, flat);
            }
            let layout = &plan.tensors.parameters;
            let step = Step { stage: index, threads, scratch, layout, params, profile };
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

    /// Computes the gradient of the mean loss of the current batch for every parameter, after a forward pass in
    /// training mode with the same `params`. Writes each gradient to `sink` and announces it, last tensor first, so
    /// that its reduction can overlap the computation of the following ones.
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
        let Some(Mode::Train { dropout }) = self.mode else {
            panic!("a backward pass follows a forward pass in training mode");
        };
        let n = self.batch;
        assert_eq!(labels.len(), n, "labels for a batch of {n}");
        assert_eq!(params.len(), self.plan.tensors.parameters.len(), "parameters");
        let Net { plan, threads, images, vectors, cpu_layers, bias, scratch, profile, .. } = self;

        profile::start(profile);
        let (logits, gradient) = vectors.start_backward(n);
        let report = loss::cpu::gradient(logits, labels, gradient);
        lap(profile, Lap::Loss);

        let first = plan.first_with_parameters();
        let stages = plan.stages.iter().zip(cpu_layers).enumerate();
        for (index, (stage, cpu_layer)) in stages.skip(first).rev() {
            let input_gradient = index > first;
            let layout = &plan.tensors.parameters;
            let step = Step { stage: index, threads, scratch: &mut *scratch, layout, params, profile };
            let pass = BackwardPass { input_gradient, dropout, sink: &mut *sink, bias };
            if stage.output < plan.vectors {
                images.backward(stage, n, input_gradient, |tensors| {
                    cpu_layer.on_images::<E>().backward(step, tensors, pass)
                })?;
            } else {
                vectors.backward(stage, n, input_gradient, |tensors| {
                    cpu_layer.on_vectors().backward(step, tensors, pass)
                })?;
                if input_gradient && stage.input < plan.vectors {
                    let Image { channels, plane } = plan.flattened();
                    let flat = vectors.gradient(stage.input, n);
                    let (_, image) = images.start_backward(n);
                    transpose::matrices(threads, scratch, (channels, plane), flat, image);
                }
            }
            lap(profile, Lap::Backward(index));
        }
        profile::end(profile, "backward");
        if let Some(profile) = profile {
            profile.steps += 1;
            profile.images += n;
        }
        Ok(report)
    }
}
