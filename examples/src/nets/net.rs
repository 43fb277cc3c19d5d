//! A network with the memory to run: forward, backward.

use mgpu::{GradientSink, Layout, Result};
use mgpu_kernels::norm::{Statistics, Sums};
use mgpu_kernels::{Threads, activation, conv, dense, dropout, loss, norm, pool};

use super::LossReport;
use super::initial;
use super::plan::{Op, Plan, Stage};
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
    /// The mask of spec layer `layer`, whose samples hold `len` elements.
    fn mask(&self, layer: usize, len: usize) -> dropout::Mask {
        let stream = mask_stream(layer) | self.step << 16;
        dropout::Mask { seed: self.seed, stream, first: self.first_sample * len as u64 }
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

/// A network with all the memory that batches of up to a given size need.
#[derive(Debug)]
pub struct Net {
    plan: Plan,
    threads: Threads,
    max_batch: usize,
    /// Activations; the last slot holds the logits.
    slots: Vec<Vec<f32>>,
    /// Gradients of the activations of the layer being worked on: of its output, and of its input.
    gradients: [Vec<f32>; 2],
    /// For every output of each pooling layer, which of its window was the largest.
    chosen: Vec<Vec<u8>>,
    norms: Vec<Norm>,
    scratch: conv::columns::Scratch,
    /// Images in the current batch.
    batch: usize,
    /// How the current batch was run; `None` before the first.
    mode: Option<Mode>,
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
        let plan = Plan::new(spec);
        let threads = Threads::new(threads);
        let largest = plan.slots[1..].iter().max().copied().unwrap_or(0);
        let norm = |&channels| Norm { statistics: Statistics::new(channels), sums: Sums::new(channels) };
        Net {
            slots: plan.slots.iter().map(|len| vec![0.0; len * max_batch]).collect(),
            gradients: [vec![0.0; largest * max_batch], vec![0.0; largest * max_batch]],
            chosen: plan.pools.iter().map(|len| vec![0; len * max_batch]).collect(),
            norms: plan.norms.iter().map(norm).collect(),
            scratch: conv::columns::Scratch::new(&threads),
            batch: 0,
            mode: None,
            plan,
            threads,
            max_batch,
        }
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
        let last = self.slots.last().expect("a network has slots");
        &last[..self.batch * self.classes()]
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
        let Net { plan, threads, slots, chosen, norms, scratch, .. } = self;
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

        let tensor = |index: usize| &params[plan.parameters.range(index)];
        slots[0][..images.len()].copy_from_slice(images);
        for &Stage { op, input, output } in &plan.stages {
            let (before, from_output) = slots.split_at_mut(output);
            let y = &mut from_output[0][..n * plan.slots[output]];
            // In place, there is no input but the output.
            let x = before.get(input).map_or(&[][..], |x| &x[..n * plan.slots[input]]);
            match op {
                Op::Conv { shape, weight } => {
                    conv::columns::forward(
                        threads,
                        scratch,
                        &shape,
                        x,
                        tensor(weight),
                        tensor(weight + 1),
                        y,
                    );
                }
                Op::Dense { shape, weight, .. } => {
                    dense::cpu::forward(threads, &shape, x, tensor(weight), tensor(weight + 1), y);
                }
                Op::Norm { index, plane, weight, mean } => {
                    let Norm { statistics, sums } = &mut norms[index];
                    let (mean, var) = (plan.buffers.range(mean), plan.buffers.range(mean + 1));
                    match &mut pass {
                        Pass::Train { buffers, ranks, .. } => {
                            norm::cpu::sum_inputs(threads, x, plane, sums);
                            ranks.sum_over_ranks(sums.values_mut())?;
                            let (running_mean, running_var) = buffers.split_at_mut(var.start);
                            let running_var = &mut running_var[..var.len()];
                            statistics.of_batch(sums, &mut running_mean[mean], running_var);
                        }
                        Pass::Eval { buffers } => statistics.of_running(&buffers[mean], &buffers[var]),
                    }
                    let (gamma, beta) = (tensor(weight), tensor(weight + 1));
                    norm::cpu::normalise(threads, statistics, gamma, beta, x, plane, y);
                }
                Op::Activation { slope } => activation::cpu::forward(threads, slope, y),
                Op::Pool { index, shape, .. } => {
                    pool::cpu::forward(threads, &shape, x, y, &mut chosen[index][..y.len()]);
                }
                Op::Dropout { probability, layer, .. } => {
                    if let Pass::Train { dropout: Some(key), .. } = &pass {
                        let mask = key.mask(layer, plan.slots[output]);
                        dropout::cpu::apply(threads, probability, mask, y);
                    }
                }
            }
        }
        Ok(())
    }

    /// Computes the gradient of the mean loss of the current batch for every parameter, after a forward pass in
    /// training mode with the same `params`. Each gradient is written to `sink` and announced, last tensor
    /// first; the gradient of a layer's input is computed after that, while its parameters' may already travel.
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
        let Net { plan, threads, slots, gradients: [current, other], chosen, norms, scratch, .. } = self;
        let logits = slots.last().expect("a network has slots");
        let len = n * plan.slots[plan.slots.len() - 1];
        let report = loss::cpu::gradient(&logits[..len], labels, &mut current[..len]);

        let tensor = |index: usize| &params[plan.parameters.range(index)];
        // Below the first layer with parameters nobody asks for gradients.
        let first = plan.stages.iter().position(|stage| stage.op.has_parameters());
        let first = first.unwrap_or(plan.stages.len());
        for (place, &Stage { op, input, output }) in plan.stages.iter().enumerate().skip(first).rev() {
            let x = &slots[input][..n * plan.slots[input]];
            let y = &slots[output][..n * plan.slots[output]];
            let dy = &mut current[..y.len()];
            // The images' own gradient has no memory, and nobody to ask for it.
            let dx = if place == first { &mut [][..] } else { &mut other[..x.len()] };
            match op {
                Op::Conv { shape, weight } => {
                    conv::columns::backward_bias(threads, &shape, dy, sink.gradient(weight + 1));
                    sink.ready(weight + 1)?;
                    conv::columns::backward_weights(threads, scratch, &shape, x, dy, sink.gradient(weight));
                    sink.ready(weight)?;
                    if place > first {
                        conv::columns::backward_input(threads, scratch, &shape, tensor(weight), dy, dx);
                    }
                }
                Op::Dense { shape, weight, .. } => {
                    dense::cpu::backward_bias(threads, &shape, dy, sink.gradient(weight + 1));
                    sink.ready(weight + 1)?;
                    dense::cpu::backward_weights(threads, &shape, x, dy, sink.gradient(weight));
                    sink.ready(weight)?;
                    if place > first {
                        dense::cpu::backward_input(threads, &shape, tensor(weight), dy, dx);
                    }
                }
                Op::Norm { index, plane, weight, .. } => {
                    let Norm { statistics, sums } = &mut norms[index];
                    norm::cpu::sum_gradients(threads, statistics, x, dy, plane, sums);
                    norm::cpu::shift_gradient(sums, sink.gradient(weight + 1));
                    sink.ready(weight + 1)?;
                    norm::cpu::scale_gradient(sums, sink.gradient(weight));
                    sink.ready(weight)?;
                    if place > first {
                        sink.sum_over_ranks(sums.values_mut())?;
                        norm::cpu::backward_input(threads, statistics, sums, tensor(weight), x, plane, dy);
                    }
                }
                Op::Activation { slope } => activation::cpu::backward(threads, slope, y, dy),
                Op::Pool { index, shape, .. } => {
                    pool::cpu::backward(threads, &shape, dy, &chosen[index][..y.len()], dx);
                }
                Op::Dropout { probability, layer, .. } => {
                    if let Some(key) = dropout {
                        let mask = key.mask(layer, plan.slots[output]);
                        dropout::cpu::apply(threads, probability, mask, dy);
                    }
                }
            }
            if matches!(op, Op::Conv { .. } | Op::Dense { .. } | Op::Pool { .. }) {
                std::mem::swap(current, other);
            }
        }
        Ok(report)
    }
}
