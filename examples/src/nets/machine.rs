//! What computes a stage: its kernel with the memory that it alone needs, and its two passes.
//!
//! Passes are generic over what activations are kept as, but for dense layers: they are f32 throughout. See
//! [`memory`](super::memory) for which layers that leaves.

use mgpu::{GradientSink, Result};
use mgpu_kernels::conv::cpu::{Choice, Conv, Tail};
use mgpu_kernels::dense::cpu::Dense;
use mgpu_kernels::norm::{Statistics, Sums};
use mgpu_kernels::{Scratch, Storage, Threads, activation, conv, dense, dropout, norm, pool};

use super::memory::Sides;
use super::net::DropoutKey;
use super::plan::{Op, Plan, Pool, Stage};
use super::profile::{Lap, Profile, lap};

/// Batch statistics of one normalisation, kept from the forward to the backward pass.
#[derive(Debug)]
pub(super) struct Norm {
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
pub(super) struct Machine {
    kernel: Kernel,
    /// Of a convolution that is pooled, as in [`Kernel::Pool`].
    chosen: Vec<u8>,
}

/// What the passes of a stage have at hand.
pub(super) struct Step<'a> {
    pub(super) plan: &'a Plan,
    pub(super) stage: &'a Stage,
    /// The stage's place among all.
    pub(super) place: usize,
    pub(super) threads: &'a Threads,
    pub(super) scratch: &'a mut Scratch,
    /// All parameters.
    pub(super) params: &'a [f32],
    pub(super) profile: &'a mut Option<Profile>,
}

/// What a forward pass does about running statistics.
pub(super) enum Pass<'a> {
    Train { buffers: &'a mut [f32], dropout: Option<DropoutKey>, ranks: &'a mut dyn GradientSink },
    Eval { buffers: &'a [f32] },
}

/// What a backward pass does with gradients of parameters, and where they go.
pub(super) struct Back<'a> {
    /// Whether the gradient of the stage's input is asked for.
    pub(super) below: bool,
    pub(super) dropout: Option<DropoutKey>,
    pub(super) sink: &'a mut dyn GradientSink,
    /// Room for the gradient of a bias, on its way to the sink.
    pub(super) bias: &'a mut [f32],
}

impl<'a> Step<'a> {
    /// The values of parameter tensor `index`.
    fn tensor(&self, index: usize) -> &'a [f32] {
        &self.params[self.plan.parameters.range(index)]
    }

    /// Announces the gradients of a stage's weights and bias.
    fn hand_over(&mut self, sink: &mut dyn GradientSink, weight: usize, db: &[f32]) -> Result<()> {
        lap(self.profile, Lap::Backward(self.place));
        sink.gradient(weight + 1).copy_from_slice(db);
        sink.ready(weight + 1)?;
        sink.ready(weight)?;
        lap(self.profile, Lap::Communication);
        Ok(())
    }
}

impl Machine {
    pub(super) fn new(plan: &Plan, stage: &Stage, max_batch: usize, choice: Choice) -> Self {
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
        Machine { kernel, chosen }
    }

    /// What it is called.
    pub(super) fn kernel(&self) -> String {
        match &self.kernel {
            Kernel::Conv(conv) => conv.algorithm().to_string(),
            Kernel::Dense(_) => "product".to_owned(),
            Kernel::Norm(_) | Kernel::Pool(_) | Kernel::InPlace => "pass".to_owned(),
        }
    }

    /// True if its kernel is one of several that would do.
    pub(super) fn is_chosen(&self) -> bool {
        matches!(self.kernel, Kernel::Conv(_))
    }

    /// The forward pass of any stage on vectors.
    pub(super) fn forward_vectors(
        &mut self,
        step: Step<'_>,
        x: &[f32],
        y: &mut [f32],
        pass: &mut Pass<'_>,
    ) -> Result<()> {
        if let (Op::Dense { weight, .. }, Kernel::Dense(dense)) = (step.stage.op, &mut self.kernel) {
            let (weights, bias) = (step.tensor(weight), step.tensor(weight + 1));
            dense.forward(step.threads, step.scratch, x, weights, bias, y);
            return Ok(());
        }
        self.forward(step, x, y, pass)
    }

    /// The forward pass of a stage other than a dense layer.
    pub(super) fn forward<T: Storage>(
        &mut self,
        step: Step<'_>,
        x: &[T],
        y: &mut [T],
        pass: &mut Pass<'_>,
    ) -> Result<()> {
        let Machine { kernel, chosen } = self;
        let threads = step.threads;
        match (step.stage.op, kernel) {
            (Op::Conv { weight, .. }, Kernel::Conv(conv)) => {
                let chosen = if chosen.is_empty() { chosen } else { &mut chosen[..y.len()] };
                let (weights, bias) = (step.tensor(weight), step.tensor(weight + 1));
                conv.forward(threads, step.scratch, x, weights, bias, y, chosen);
            }
            (Op::Norm { weight, mean, .. }, Kernel::Norm(Norm { statistics, sums })) => {
                let buffers = &step.plan.buffers;
                let (mean, var) = (buffers.range(mean), buffers.range(mean + 1));
                match pass {
                    Pass::Train { buffers, ranks, .. } => {
                        norm::cpu::sum_inputs(threads, x, sums);
                        lap(step.profile, Lap::Forward(step.place));
                        ranks.sum_over_ranks(sums.values_mut())?;
                        lap(step.profile, Lap::Communication);
                        let (running_mean, running_var) = buffers.split_at_mut(var.start);
                        let running_var = &mut running_var[..var.len()];
                        statistics.of_batch(sums, &mut running_mean[mean], running_var);
                    }
                    Pass::Eval { buffers } => statistics.of_running(&buffers[mean], &buffers[var]),
                }
                let (gamma, beta) = (step.tensor(weight), step.tensor(weight + 1));
                norm::cpu::normalise(threads, statistics, gamma, beta, x, y);
            }
            (Op::Activation { slope }, _) => activation::cpu::forward(threads, slope, y),
            (Op::Pool(Pool { shape, channels, .. }), Kernel::Pool(chosen)) => {
                pool::cpu::forward(threads, &shape, channels, x, y, &mut chosen[..y.len()]);
            }
            (Op::Dropout { probability, layer, image }, _) => {
                if let Pass::Train { dropout: Some(key), .. } = pass {
                    dropout::cpu::apply(threads, probability, &key.mask(layer, image), y);
                }
            }
            (op, kernel) => unreachable!("{op:?} by {kernel:?}"),
        }
        Ok(())
    }

    /// The backward pass of any stage on vectors.
    pub(super) fn backward_vectors(
        &mut self,
        mut step: Step<'_>,
        on: Sides<'_, f32>,
        back: Back<'_>,
    ) -> Result<()> {
        if let (Op::Dense { shape, weight, .. }, Kernel::Dense(dense)) = (step.stage.op, &mut self.kernel) {
            let (Sides { x, y, dy, dx }, Back { sink, bias, .. }) = (on, back);
            let from = dense::cpu::Backward { x, weights: step.tensor(weight), y, dy };
            let db = &mut bias[..shape.outputs];
            dense.backward(step.threads, step.scratch, from, sink.gradient(weight), db, dx);
            return step.hand_over(sink, weight, db);
        }
        self.backward(step, on, back)
    }

    /// The backward pass of a stage other than a dense layer.
    pub(super) fn backward<T: Storage>(
        &mut self,
        mut step: Step<'_>,
        on: Sides<'_, T>,
        back: Back<'_>,
    ) -> Result<()> {
        let Machine { kernel, chosen } = self;
        let (Sides { x, y, dy, dx }, Back { below, dropout, sink, bias }) = (on, back);
        let threads = step.threads;
        match (step.stage.op, kernel) {
            (Op::Conv { shape, weight, .. }, Kernel::Conv(conv)) => {
                let chosen = if chosen.is_empty() { &[][..] } else { &chosen[..y.len()] };
                let from = conv::cpu::Backward { x, weights: step.tensor(weight), y, chosen, dy };
                let db = &mut bias[..shape.filters];
                conv.backward(threads, step.scratch, from, sink.gradient(weight), db, dx);
                step.hand_over(sink, weight, db)?;
            }
            (Op::Norm { weight, .. }, Kernel::Norm(Norm { statistics, sums })) => {
                let gamma = step.tensor(weight);
                norm::cpu::sum_gradients(threads, statistics, x, dy, sums);
                norm::cpu::scale_gradient(sums, sink.gradient(weight));
                let db = &mut bias[..gamma.len()];
                norm::cpu::shift_gradient(sums, db);
                step.hand_over(sink, weight, db)?;
                if below {
                    sink.sum_over_ranks(sums.values_mut())?;
                    lap(step.profile, Lap::Communication);
                    norm::cpu::backward_input(threads, statistics, sums, gamma, x, dy);
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
        Ok(())
    }
}
