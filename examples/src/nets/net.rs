//! A network with the memory to run: forward, backward.

use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::conv::cpu::{Choice, Conv, Tail};
use mgpu_kernels::dense::cpu::Dense;
use mgpu_kernels::norm::{Statistics, Sums};
use mgpu_kernels::{
    AlignedVec, Scratch, Threads, activation, conv, dense, dropout, loss, norm, pool, transpose,
};

use super::LossReport;
use super::initial;
use super::memory::{self, Slots};
use super::plan::{Image, Op, Plan, Pool, Stage};
use super::profile::{self, Profile, StageTimes, lap};
use super::spec::Spec;

/// What a forward pass is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// A backward pass follows: statistics of the batch, and dropout where a key is given.
    Train {
        /// The masks to draw; `None` trains without dropout.
        dropout: Option<DropoutKey>,
    },
    /// Running statistics, no dropout.
    Eval,
}

/// What dropout masks depend on, besides layer and element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DropoutKey {
    /// The run's seed, the same on all ranks.
    pub seed: u64,
    /// The training step.
    pub step: u64,
    /// Index in the batch of all ranks of this rank's first sample. A batch split over ranks then drops exactly
    /// what one rank with the whole batch would drop.
    pub first_sample: u64,
}

impl DropoutKey {
    /// The mask of spec layer `layer`, whose samples are `image`s.
    fn mask(&self, layer: usize, image: Image) -> dropout::Mask {
        let stream = mask_stream(layer) | self.step << 16;
        let Image { channels, plane } = image;
        dropout::Mask { seed: self.seed, stream, first_sample: self.first_sample, channels, plane }
    }
}

/// The random numbers of spec layer `layer`'s masks, to which the step is added 16 bits higher. The top bit keeps clear of
/// the streams of initial values.
pub(super) fn mask_stream(layer: usize) -> u64 {
    1 << 63 | layer as u64
}

/// Batch statistics of one normalisation, kept from the forward to the backward pass.
#[derive(Debug)]
struct Norm {
    statistics: Statistics,
    sums: Sums,
}

/// What a stage has of its own.
#[derive(Debug)]
enum Kernel {
    Conv(Box<Conv>),
    Dense(Dense),
    Norm(Norm),
    /// For every output of a pooling layer, which of its window was the largest.
    Pool(Vec<u8>),
    /// Nothing.
    InPlace,
}

/// A stage's kernel, with memory for what it alone needs.
#[derive(Debug)]
struct Machine {
    kernel: Kernel,
    /// Of a convolution that is pooled, as in [`Kernel::Pool`].
    chosen: Vec<u8>,
    /// The input, flattened.
    flat: AlignedVec,
}

/// A network with all the memory that batches of up to a given size need.
#[derive(Debug)]
pub struct Net {
    plan: Plan,
    threads: Threads,
    max_batch: usize,
    /// For each stage, what computes it.
    machines: Vec<Machine>,
    /// Activations; the last slot holds the logits.
    slots: Slots,
    /// Gradients of the activations of the layer being worked on: of its output, and of its input.
    gradients: [AlignedVec; 2],
    /// The gradient of a bias, on its way to the sink.
    bias: Vec<f32>,
    scratch: Scratch,
    /// Images in the current batch.
    batch: usize,
    /// How the current batch was run; `None` before the first.
    mode: Option<Mode>,
    profile: Option<Profile>,
}

/// What a forward pass does about running statistics.
enum Pass<'a> {
    Train { buffers: &'a mut [f32], dropout: Option<DropoutKey>, ranks: &'a mut dyn GradientSink },
    Eval { buffers: &'a [f32] },
}

impl Net {
    /// Allocates everything for batches of up to `max_batch` images, to be computed by `threads` threads.
    ///
    /// # Panics
    /// If the layers of `spec` do not fit each other, or `threads` is 0.
    pub fn new(spec: &Spec, max_batch: usize, threads: usize) -> Net {
        Self::with_choice(spec, max_batch, threads, Choice::Auto)
    }

    /// As [`Net::new`], with convolutions computed by what `choice` allows.
    ///
    /// # Panics
    /// As [`Net::new`].
    pub fn with_choice(spec: &Spec, max_batch: usize, threads: usize, choice: Choice) -> Net {
        let plan = Plan::new(spec);
        let threads = Threads::new(threads);
        let tensors = plan.parameters.tensors();
        let biases =
            plan.stages.iter().filter_map(|stage| stage.op.weight()).map(|weight| tensors[weight + 1].len());
        Net {
            machines: plan.stages.iter().map(|stage| Machine::new(&plan, stage, max_batch, choice)).collect(),
            slots: Slots::new(&plan, max_batch),
            gradients: memory::gradients(&plan).map(|len| AlignedVec::zeroed(len * max_batch)),
            bias: vec![0.0; biases.max().unwrap_or(0)],
            scratch: Scratch::new(&threads),
            batch: 0,
            mode: None,
            profile: None,
            plan,
            threads,
            max_batch,
        }
    }

    /// Measures from now on what each stage takes, from zero.
    pub fn start_profile(&mut self) {
        self.profile = Some(Profile::new(self.plan.stages.len()));
    }

    /// What the stages took since [`Net::start_profile`], and the rest of the passes.
    pub fn profile(&self) -> Option<(&Profile, Vec<StageTimes>)> {
        let profile = self.profile.as_ref()?;
        Some((profile, profile.stages(&self.plan, self.machines.iter().map(Machine::kernel))))
    }

    /// One line for each convolution: what computes it.
    pub fn describe(&self) -> Vec<String> {
        let stages = self.plan.stages.iter().zip(&self.machines);
        let convolutions = stages.filter(|(_, machine)| matches!(machine.kernel, Kernel::Conv(_)));
        let line = |(stage, machine): (&Stage, &Machine)| {
            format!("{} {}: {}", stage.layer, profile::describe(stage), machine.kernel())
        };
        convolutions.map(line).collect()
    }

    /// The threads that compute.
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Names, shapes and offsets of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.plan.parameters
    }

    /// Names, shapes and offsets of the running statistics of batch normalisation. Often empty.
    pub fn buffers_layout(&self) -> &Layout {
        &self.plan.buffers
    }

    /// The parameters to start training from, in the order of [`Net::layout`].
    pub fn initial_parameters(&self, seed: u64) -> Vec<f32> {
        initial::parameters(&self.plan, seed)
    }

    /// The parameters that the recorded reference runs start from.
    pub fn golden_parameters(&self, seed: u64) -> Vec<f32> {
        initial::golden_parameters(&self.plan, seed)
    }

    /// The running statistics to start training from, in the order of [`Net::buffers_layout`].
    pub fn initial_buffers(&self) -> Vec<f32> {
        initial::buffers(&self.plan)
    }

    /// The largest batch there is memory for.
    pub fn max_batch(&self) -> usize {
        self.max_batch
    }

    /// Elements of one image.
    pub fn image_len(&self) -> usize {
        self.plan.slots[0]
    }

    /// Number of classes: logits of one image.
    pub fn classes(&self) -> usize {
        self.plan.slots[self.plan.slots.len() - 1]
    }

    /// Computes the logits \[batch, classes\] of a batch of images \[batch, channels, height, width\].
    ///
    /// In training mode, batch normalisation sums its statistics over `ranks` and moves those in `buffers`; all
    /// ranks must have batches of one size.
    ///
    /// # Errors
    /// If the ranks cannot be summed over.
    ///
    /// # Panics
    /// If a slice does not have the length its layout says, or the batch is empty or larger than there is memory
    /// for.
    pub fn forward(
        &mut self,
        params: &[f32],
        buffers: &mut [f32],
        images: &[f32],
        mode: Mode,
        ranks: &mut dyn GradientSink,
    ) -> Result<&[f32]> {
        let pass = match mode {
            Mode::Train { dropout } => Pass::Train { buffers, dropout, ranks },
            Mode::Eval => Pass::Eval { buffers },
        };
        self.run(params, images, pass)?;
        Ok(self.logits())
    }

    /// [`Net::forward`] in evaluation mode, which needs no other rank.
    ///
    /// # Panics
    /// As [`Net::forward`].
    pub fn predict(&mut self, params: &[f32], buffers: &[f32], images: &[f32]) -> &[f32] {
        self.run(params, images, Pass::Eval { buffers }).expect("evaluation asks nothing of other ranks");
        self.logits()
    }

    /// The logits of the current batch.
    pub fn logits(&self) -> &[f32] {
        self.slots.slot(self.plan.slots.len() - 1, self.batch)
    }

    /// Loss and accuracy of the current batch.
    ///
    /// # Panics
    /// If there is not one label for each image, or a label is not a class.
    pub fn score(&self, labels: &[u8]) -> LossReport {
        assert_eq!(labels.len(), self.batch, "labels for a batch of {}", self.batch);
        loss::cpu::score(self.logits(), labels)
    }

    fn run(&mut self, params: &[f32], images: &[f32], mut pass: Pass<'_>) -> Result<()> {
        let Net { plan, threads, slots, machines, scratch, profile, .. } = self;
        let n = images.len() / plan.slots[0];
        assert_eq!(images.len(), n * plan.slots[0], "a whole number of images");
        assert!((1..=self.max_batch).contains(&n), "a batch of {n} images, memory for {}", self.max_batch);
        assert_eq!(params.len(), plan.parameters.len(), "parameters");
        let buffers_len = match &pass {
            Pass::Train { buffers, .. } => buffers.len(),
            Pass::Eval { buffers } => buffers.len(),
        };
        assert_eq!(buffers_len, plan.buffers.len(), "running statistics");
        self.batch = n;
        self.mode = Some(match &pass {
            Pass::Train { dropout, .. } => Mode::Train { dropout: *dropout },
            Pass::Eval { .. } => Mode::Eval,
        });

        profile::start(profile);
        let tensor = |index: usize| &params[plan.parameters.range(index)];
        let Image { channels, plane } = plan.image;
        transpose::matrices(threads, channels, plane, images, slots.slot_mut(0, n));
        lap(profile, |profile| &mut profile.other);
        for (place, (stage, machine)) in plan.stages.iter().zip(machines).enumerate() {
            let Machine { kernel, chosen, flat } = machine;
            let (x, y) = slots.of_stage(stage, n);
            let x = flatten(threads, stage.flattened, x, flat);
            match (stage.op, kernel) {
                (Op::Conv { weight, .. }, Kernel::Conv(conv)) => {
                    let chosen = if chosen.is_empty() { chosen } else { &mut chosen[..y.len()] };
                    conv.forward(threads, scratch, x, tensor(weight), tensor(weight + 1), y, chosen);
                }
                (Op::Dense { weight, .. }, Kernel::Dense(dense)) => {
                    dense.forward(threads, scratch, x, tensor(weight), tensor(weight + 1), y);
                }
                (Op::Norm { weight, mean, .. }, Kernel::Norm(Norm { statistics, sums })) => {
                    let (mean, var) = (plan.buffers.range(mean), plan.buffers.range(mean + 1));
                    match &mut pass {
                        Pass::Train { buffers, ranks, .. } => {
                            norm::cpu::sum_inputs(threads, x, sums);
                            lap(profile, |profile| &mut profile.forward[place]);
                            ranks.sum_over_ranks(sums.values_mut())?;
                            lap(profile, |profile| &mut profile.communication);
                            let (running_mean, running_var) = buffers.split_at_mut(var.start);
                            let running_var = &mut running_var[..var.len()];
                            statistics.of_batch(sums, &mut running_mean[mean], running_var);
                        }
                        Pass::Eval { buffers } => statistics.of_running(&buffers[mean], &buffers[var]),
                    }
                    let (gamma, beta) = (tensor(weight), tensor(weight + 1));
                    norm::cpu::normalise(threads, statistics, gamma, beta, x, y);
                }
                (Op::Activation { slope }, _) => activation::cpu::forward(threads, slope, y),
                (Op::Pool(Pool { shape, channels, .. }), Kernel::Pool(chosen)) => {
                    pool::cpu::forward(threads, &shape, channels, x, y, &mut chosen[..y.len()]);
                }
                (Op::Dropout { probability, layer, image }, _) => {
                    if let Pass::Train { dropout: Some(key), .. } = &pass {
                        dropout::cpu::apply(threads, probability, &key.mask(layer, image), y);
                    }
                }
                (op, kernel) => unreachable!("{op:?} by {kernel:?}"),
            }
            lap(profile, |profile| &mut profile.forward[place]);
        }
        Ok(())
    }

    /// Computes the gradient of the mean loss of the current batch for every parameter, after a forward pass in
    /// training mode with the same `params`. Each gradient is written to `sink` and announced, last tensor
    /// first, and may travel while those of the layers below are computed.
    ///
    /// # Errors
    /// As the sink's.
    ///
    /// # Panics
    /// If the last forward pass was not for training, there is not one label for each image, or a label is not
    /// a class.
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
        assert_eq!(params.len(), self.plan.parameters.len(), "parameters");
        let Net { plan, threads, slots, machines, gradients, bias, scratch, profile, .. } = self;
        let [mut current, mut other] = gradients.each_mut();

        profile::start(profile);
        let logits = slots.slot(plan.slots.len() - 1, n);
        let report = loss::cpu::gradient(logits, labels, &mut current[..logits.len()]);
        lap(profile, |profile| &mut profile.other);

        let tensor = |index: usize| &params[plan.parameters.range(index)];
        let first = plan.first_with_parameters();
        let stages = plan.stages.iter().zip(machines).enumerate();
        for (place, (stage, machine)) in stages.skip(first).rev() {
            let Machine { kernel, chosen, flat } = machine;
            let (x, y) = (slots.slot(stage.input, n), slots.slot(stage.output, n));
            let x = if stage.flattened.is_some() { &flat[..x.len()] } else { x };
            let dy = &mut current[..y.len()];
            let below = place > first;
            let dx = (below && !stage.op.backward_in_place()).then(|| &mut other[..x.len()]);
            match (stage.op, kernel) {
                (Op::Conv { shape, weight, .. }, Kernel::Conv(conv)) => {
                    let chosen = if chosen.is_empty() { &[][..] } else { &chosen[..y.len()] };
                    let from = conv::cpu::Backward { x, weights: tensor(weight), y, chosen, dy };
                    let db = &mut bias[..shape.filters];
                    conv.backward(threads, scratch, from, sink.gradient(weight), db, dx);
                    lap(profile, |profile| &mut profile.backward[place]);
                    hand_over(sink, weight, db)?;
                    lap(profile, |profile| &mut profile.communication);
                }
                (Op::Dense { shape, weight, .. }, Kernel::Dense(dense)) => {
                    let from = dense::cpu::Backward { x, weights: tensor(weight), y, dy };
                    let db = &mut bias[..shape.outputs];
                    dense.backward(threads, scratch, from, sink.gradient(weight), db, dx);
                    lap(profile, |profile| &mut profile.backward[place]);
                    hand_over(sink, weight, db)?;
                    lap(profile, |profile| &mut profile.communication);
                }
                (Op::Norm { weight, .. }, Kernel::Norm(Norm { statistics, sums })) => {
                    norm::cpu::sum_gradients(threads, statistics, x, dy, sums);
                    norm::cpu::scale_gradient(sums, sink.gradient(weight));
                    let db = &mut bias[..tensor(weight).len()];
                    norm::cpu::shift_gradient(sums, db);
                    lap(profile, |profile| &mut profile.backward[place]);
                    hand_over(sink, weight, db)?;
                    if below {
                        sink.sum_over_ranks(sums.values_mut())?;
                    }
                    lap(profile, |profile| &mut profile.communication);
                    if below {
                        norm::cpu::backward_input(threads, statistics, sums, tensor(weight), x, dy);
                    }
                }
                (Op::Activation { slope }, _) => activation::cpu::backward(threads, slope, y, dy),
                (Op::Pool(Pool { shape, channels, .. }), Kernel::Pool(chosen)) => {
                    let dx = dx.expect("pooling has no parameters");
                    pool::cpu::backward(threads, &shape, channels, dy, &chosen[..y.len()], dx);
                }
                (Op::Dropout { probability, layer, image }, _) => {
                    if let Some(key) = dropout {
                        dropout::cpu::apply(threads, probability, &key.mask(layer, image), dy);
                    }
                }
                (op, kernel) => unreachable!("{op:?} by {kernel:?}"),
            }
            if !stage.op.backward_in_place() {
                std::mem::swap(&mut current, &mut other);
            }
            if let Some(Image { channels, plane }) = stage.flattened.filter(|_| below) {
                let len = x.len();
                transpose::matrices(threads, channels, plane, &current[..len], &mut other[..len]);
                std::mem::swap(&mut current, &mut other);
            }
            lap(profile, |profile| &mut profile.backward[place]);
        }
        if let Some(profile) = profile {
            profile.steps += 1;
            profile.images += n;
        }
        Ok(report)
    }
}

impl Machine {
    fn new(plan: &Plan, stage: &Stage, max_batch: usize, choice: Choice) -> Self {
        let choices = |pool: Pool| vec![0; plan.pools[pool.index] * max_batch];
        let mut chosen = Vec::new();
        let kernel = match stage.op {
            Op::Conv { shape, slope, pool, .. } => {
                chosen = pool.map_or_else(Vec::new, choices);
                let pool = pool.map(|pool| pool.shape.rounding);
                Kernel::Conv(Box::new(Conv::new(shape, Tail { slope, pool }, choice)))
            }
            Op::Dense { shape, slope, .. } => Kernel::Dense(Dense::new(shape, slope)),
            Op::Norm { index, .. } => {
                let channels = plan.norms[index];
                Kernel::Norm(Norm { statistics: Statistics::new(channels), sums: Sums::new(channels) })
            }
            Op::Pool(pool) => Kernel::Pool(choices(pool)),
            Op::Activation { .. } | Op::Dropout { .. } => Kernel::InPlace,
        };
        let flat = stage.flattened.map_or(0, |image| image.channels * image.plane * max_batch);
        Machine { kernel, chosen, flat: AlignedVec::zeroed(flat) }
    }

    /// What it is called.
    fn kernel(&self) -> String {
        match &self.kernel {
            Kernel::Conv(conv) => conv.algorithm().to_string(),
            Kernel::Dense(_) => "product".to_owned(),
            Kernel::Norm(_) | Kernel::Pool(_) | Kernel::InPlace => "pass".to_owned(),
        }
    }
}

/// A stage's input as it is, or flattened in `flat`.
fn flatten<'a>(threads: &Threads, image: Option<Image>, x: &'a [f32], flat: &'a mut AlignedVec) -> &'a [f32] {
    let Some(Image { channels, plane }) = image else { return x };
    let flat = &mut flat[..x.len()];
    transpose::matrices(threads, plane, channels, x, flat);
    flat
}

/// Announces the gradients of a stage's weights and bias.
fn hand_over(sink: &mut dyn GradientSink, weight: usize, db: &[f32]) -> Result<()> {
    sink.gradient(weight + 1).copy_from_slice(db);
    sink.ready(weight + 1)?;
    sink.ready(weight)
}
