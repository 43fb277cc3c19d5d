//! Optimizers on a GPU: one launch for all parameters, with what follows from their new values in the same pass.
//!
//! What depends on the step is worked out on the GPU once a step ([`begin`]), in f64 as on the CPU, and each operation of
//! the pass is rounded by itself: parameters are those that a CPU computes from the same gradients, to the bit, as long
//! as the power functions of both agree.

use super::Optimizer;
use super::chunk::Chunk;
use crate::DType;
use crate::cuda::elements::{THREADS, blocks, check, count, run};
use crate::cuda::{Arg, Grid, Result, Source, StepState, Stream, View};
use crate::schedule::{Decay, Schedule};

/// The kernels.
pub static SOURCE: Source = Source { name: "optimizer", text: include_str!("optimizer.cu") };

/// What a step's index says about the training.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan {
    /// Steps of an epoch, after which the position is 0 again.
    pub steps_per_epoch: u64,
    /// How the learning rate changes from the optimizer's.
    pub schedule: Schedule,
}

/// `struct Plan` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Parameters {
    steps_per_epoch: u64,
    warm_up: u64,
    decay_steps: u64,
    decay_to: f64,
    learning_rate: f64,
    decays: [f64; 2],
    epsilon: f64,
    weight_decay: f64,
    rule: u32,
    nesterov: u32,
    decay: u32,
    unused: u32,
}

impl Parameters {
    fn new(optimizer: &Optimizer, plan: Plan) -> Self {
        let (rule, decays, epsilon, nesterov) = match *optimizer {
            Optimizer::Adam(o) => (0, [o.beta1, o.beta2], o.eps, false),
            Optimizer::AdamW(o) => (1, [o.beta1, o.beta2], o.eps, false),
            Optimizer::RmsProp(o) => (2, [o.rho, o.momentum], o.eps, false),
            Optimizer::Sgd(o) => (3, [o.momentum, o.dampening], 0.0, o.nesterov),
        };
        let Schedule { warm_up, decay: kind } = plan.schedule;
        let (decay, decay_to) = match kind {
            Decay::Constant => (0, 0.0),
            Decay::Linear { .. } => (1, 0.0),
            Decay::Cosine { floor, .. } => (2, floor),
            Decay::Step { factor, .. } => (3, factor),
        };
        Parameters {
            steps_per_epoch: plan.steps_per_epoch,
            warm_up,
            decay_steps: kind.steps(),
            decay_to,
            learning_rate: optimizer.lr(),
            decays,
            epsilon,
            weight_decay: optimizer.weight_decay(),
            rule,
            nesterov: u32::from(nesterov),
            decay,
            unused: 0,
        }
    }
}

/// Advances `state` to the step that begins: its index, position, learning rate and the optimizer's numbers.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If `state` is not the memory of a [`StepState`], or an epoch has no steps, or the learning rate none to fall over.
pub fn begin(stream: &Stream, optimizer: &Optimizer, plan: Plan, state: View<'_>) -> Result<()> {
    StepState::check(state);
    assert!(plan.steps_per_epoch > 0 && plan.schedule.decay.steps() > 0, "{plan:?}");
    let arguments = [state.into(), Arg::of(&Parameters::new(optimizer, plan))];
    // SAFETY: the kernel writes the state.
    unsafe { run(stream, &SOURCE, "step_begin", Grid::new(1, 32), &arguments) }
}

/// Matching arenas: element i of each belongs to parameter i. All begin at multiples of 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Arenas<'a> {
    /// Gradients, f32.
    pub gradients: View<'a>,
    /// What gradients are multiplied with: 1 if they are averaged over ranks, 1/n if they are sums.
    pub scale: f32,
    /// Parameters, f32.
    pub params: View<'a>,
    /// First state, f32, where the optimizer has one.
    pub first: Option<View<'a>>,
    /// Second state, f32, where the optimizer has one.
    pub second: Option<View<'a>>,
    /// Moving average of the parameters, f32, and its decay.
    pub average: Option<(View<'a>, f64)>,
    /// Copy of the parameters in bf16.
    pub copy: Option<View<'a>>,
}

/// `struct Arenas` of the kernels.
#[derive(Clone, Copy, bytemuck::NoUninit)]
#[repr(C)]
struct Addresses {
    gradients: u64,
    params: u64,
    first: u64,
    second: u64,
    average: u64,
    copy: u64,
    len: u32,
    scale: f32,
    towards: f32,
    unused: u32,
}

impl Arenas<'_> {
    #[track_caller]
    fn addresses(&self, states: usize) -> Addresses {
        let len = self.params.len();
        let address = |what: &str, view: View<'_>, dtype: DType| {
            check(what, view, dtype, len);
            assert!(view.address().is_multiple_of(16), "{what} at an address that is no multiple of 16");
            view.address()
        };
        let state = |what: &str, view: Option<View<'_>>, used: bool| {
            assert_eq!(view.is_some(), used, "{what}");
            view.map_or(0, |view| address(what, view, DType::F32))
        };
        Addresses {
            gradients: address("gradients", self.gradients, DType::F32),
            params: address("parameters", self.params, DType::F32),
            first: state("first state", self.first, states > 0),
            second: state("second state", self.second, states > 1),
            average: self.average.map_or(0, |(view, _)| address("a moving average", view, DType::F32)),
            copy: self.copy.map_or(0, |view| address("a copy of parameters", view, DType::Bf16)),
            len: count(len),
            scale: self.scale,
            towards: self.average.map_or(0.0, |(_, decay)| (1.0 - decay) as f32),
            unused: 0,
        }
    }
}

/// Applies one step to the parameters in `chunks` (a table of [`Chunk`], as bytes, or a part of one), whose weight decay
/// is the chunks'. [`begin`] has begun the step, with the same optimizer.
///
/// A chunk that lies outside of the arenas is passed over.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit, or a state that the optimizer needs is missing.
pub fn update(
    stream: &Stream,
    optimizer: &Optimizer,
    state: View<'_>,
    chunks: View<'_>,
    arenas: &Arenas<'_>,
) -> Result<()> {
    StepState::check(state);
    let table = chunks.len() / size_of::<Chunk>();
    check("a table of chunks", chunks, DType::U8, table * size_of::<Chunk>());
    assert!(chunks.address().is_multiple_of(4), "a table of chunks at an address that is no multiple of 4");
    let momentum = optimizer.states() == 2 || matches!(optimizer, Optimizer::Sgd(o) if o.momentum != 0.0);
    let name = match optimizer {
        Optimizer::Adam(_) => "optimizer_update_adam",
        Optimizer::AdamW(_) => "optimizer_update_adamw",
        Optimizer::RmsProp(_) if momentum => "optimizer_update_rmsprop_momentum",
        Optimizer::RmsProp(_) => "optimizer_update_rmsprop",
        Optimizer::Sgd(_) if momentum => "optimizer_update_sgd_momentum",
        Optimizer::Sgd(_) => "optimizer_update_sgd",
    };
    let addresses = arenas.addresses(optimizer.states());
    if table == 0 {
        return Ok(());
    }
    let arguments = [state.into(), chunks.into(), count(table).into(), Arg::of(&addresses)];
    let grid = Grid::new(count(table).min(blocks(stream)), THREADS);
    // SAFETY: the arenas have equal lengths, and the kernel passes over what is outside of them.
    unsafe { run(stream, &SOURCE, name, grid, &arguments) }
}
