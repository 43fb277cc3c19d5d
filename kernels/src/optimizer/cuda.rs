//! Optimizers on a GPU: one launch updates all parameters, their moving average and their copy in bf16 or f16.
//!
//! Values that depend on the step are computed on the GPU once per step ([`begin_step`]), in f64 as on the CPU, and
//! each operation of the update is rounded separately: parameters are bitwise equal to those that a CPU computes from
//! the same gradients, provided that the power functions of both agree.

use super::Optimizer;
use super::chunk::Chunk;
use crate::DType;
use crate::cuda::elements::{THREADS, blocks, check, count, half_float, run};
use crate::cuda::{Arg, Grid, Result, Source, StepState, Stream, View};
use crate::loss_scale::LossScaler;
use crate::schedule::{Decay, Schedule};

/// The kernels.
pub static SOURCE: Source = Source { name: "optimizer", text: include_str!("optimizer.cu") };

/// Threads of a block that sums squares, `NORM_THREADS` of the kernels.
const NORM_THREADS: u32 = 256;

/// The parts of the training configuration that depend on the step's index.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdatePlan {
    /// Steps of an epoch, after which the position restarts at 0.
    pub steps_per_epoch: u64,
    /// The factor of the optimizer's learning rate in each step.
    pub schedule: Schedule,
    /// How the loss scale follows the gradients, if there is one.
    pub loss_scaler: Option<LossScaler>,
}

/// `struct UpdatePlan` of the kernels.
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
    growth: f64,
    backoff: f64,
    growth_interval: u32,
    rule: u32,
    nesterov: u32,
    decay: u32,
}

impl Parameters {
    fn new(optimizer: &Optimizer, plan: UpdatePlan) -> Self {
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
        let scaler = plan.loss_scaler;
        Parameters {
            steps_per_epoch: plan.steps_per_epoch,
            warm_up,
            decay_steps: kind.steps(),
            decay_to,
            learning_rate: optimizer.lr(),
            decays,
            epsilon,
            weight_decay: optimizer.weight_decay(),
            growth: scaler.map_or(0.0, |scaler| scaler.growth),
            backoff: scaler.map_or(0.0, |scaler| scaler.backoff),
            growth_interval: scaler.map_or(0, |scaler| scaler.growth_interval),
            rule,
            nesterov: u32::from(nesterov),
            decay,
        }
    }
}

/// Advances `state` to the next step: its index, position, learning rate and the optimizer's constants. With a loss
/// scaler, first its loss scale after the step before; steps that were skipped are none for the optimizer.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If `state` is not the memory of a [`StepState`], if an epoch has no steps, if the schedule's decay has no steps, or
/// if the loss scaler has a [problem](LossScaler::problem).
pub fn begin_step(stream: &Stream, optimizer: &Optimizer, plan: UpdatePlan, state: View<'_>) -> Result<()> {
    StepState::check(state);
    assert!(plan.steps_per_epoch > 0 && plan.schedule.decay.steps() > 0, "{plan:?}");
    assert_eq!(plan.loss_scaler.and_then(|scaler| scaler.problem()), None);
    let arguments = [state.into(), Arg::of(&Parameters::new(optimizer, plan))];
    // SAFETY: the kernel writes the state.
    unsafe { run(stream, &SOURCE, "step_begin", Grid::new(1, 32), &arguments) }
}

/// Matching arenas: element i of each belongs to parameter i. Only the arenas of state and moving average may hold
/// just some of the parameters. All are aligned to 16 bytes.
#[derive(Debug, Clone, Copy)]
pub struct Arenas<'a> {
    /// Gradients, f32.
    pub gradients: View<'a>,
    /// Parameters, f32.
    pub params: View<'a>,
    /// First state, f32, if the optimizer has one.
    pub first: Option<View<'a>>,
    /// Second state, f32, if the optimizer has one.
    pub second: Option<View<'a>>,
    /// Moving average of the parameters, f32, and its decay.
    pub average: Option<(View<'a>, f64)>,
    /// Copy of the parameters in bf16 or f16.
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
    state_len: u32,
    towards: f32,
    copies_f16: u32,
}

impl Arenas<'_> {
    /// Bytes that an update of all parameters reads and writes.
    fn bytes(&self, states: usize) -> usize {
        let changed = 1 + states + usize::from(self.average.is_some());
        let copy = self.copy.map_or(0, |copy| copy.bytes());
        self.gradients.bytes() + 2 * changed * self.params.bytes() + copy
    }

    #[track_caller]
    fn addresses(&self, states: usize) -> Addresses {
        let len = self.params.len();
        let average = self.average.map(|(view, _)| view);
        let state_len = self.first.or(average).map(|view| view.len());
        let address = |what: &str, view: View<'_>, dtype: DType, len: usize| {
            check(what, view, dtype, len);
            assert!(view.address().is_multiple_of(16), "{what} at an address that is not a multiple of 16");
            view.address()
        };
        let state = |what: &str, view: Option<View<'_>>, used: bool| {
            assert_eq!(view.is_some(), used, "{what}");
            view.map_or(0, |view| address(what, view, DType::F32, state_len.unwrap_or(0)))
        };
        Addresses {
            gradients: address("gradients", self.gradients, DType::F32, len),
            params: address("parameters", self.params, DType::F32, len),
            first: state("first state", self.first, states > 0),
            second: state("second state", self.second, states > 1),
            average: state("a moving average", average, average.is_some()),
            copy: self.copy.map_or(0, |view| address("a copy of parameters", view, half_float(view), len)),
            len: count(len),
            // Without state arenas, a chunk's index in them is not used.
            state_len: state_len.map_or(u32::MAX, count),
            towards: self.average.map_or(0.0, |(_, decay)| (1.0 - decay) as f32),
            copies_f16: u32::from(self.copy.is_some_and(|copy| copy.dtype() == DType::F16)),
        }
    }
}

/// Applies one step to the parameters in `chunks` (a table of [`Chunk`], as bytes, or a range of one), with the
/// factors of learning rate and weight decay in the chunks. [`begin_step`] must have been called for the step, with
/// the same optimizer; gradients are multiplied by the state's scale. If the state has a mark of non-finite
/// gradients, nothing changes.
///
/// A chunk that exceeds the arenas is skipped.
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
    let table = table_len(chunks);
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
    let arguments = [
        state.into(),
        chunks.into(),
        table.into(),
        Arg::of(&addresses).moving(arenas.bytes(optimizer.states())),
    ];
    let grid = Grid::new(table.min(blocks(stream)), THREADS);
    // SAFETY: the arenas have equal lengths, and the kernel skips chunks that exceed them.
    unsafe { run(stream, &SOURCE, name, grid, &arguments) }
}

/// Number of chunks in a table.
#[track_caller]
fn table_len(chunks: View<'_>) -> u32 {
    let table = chunks.len() / size_of::<Chunk>();
    check("a table of chunks", chunks, DType::U8, table * size_of::<Chunk>());
    assert!(
        chunks.address().is_multiple_of(4),
        "a table of chunks at an address that is not a multiple of 4"
    );
    count(table)
}

/// Overwrites `sums` (f64, one for each chunk of the table) with the sums of the squares of the chunks' elements of
/// `gradients` (f32). The sum of a chunk that exceeds the gradients is not written.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn squares(stream: &Stream, gradients: View<'_>, chunks: View<'_>, sums: View<'_>) -> Result<()> {
    let table = table_len(chunks);
    check("gradients", gradients, DType::F32, gradients.len());
    check("sums of squares", sums, DType::F64, table as usize);
    assert!(gradients.address().is_multiple_of(16), "gradients at an address that is not a multiple of 16");
    if table == 0 {
        return Ok(());
    }
    let arguments =
        [gradients.into(), count(gradients.len()).into(), chunks.into(), table.into(), sums.into()];
    let grid = Grid::new(table.min(blocks(stream)), NORM_THREADS);
    // SAFETY: the kernel skips chunks that exceed the gradients, and writes a number for each of the others.
    unsafe { run(stream, &SOURCE, "optimizer_squares", grid, &arguments) }
}

/// Adds up `sums` (f64) in a fixed order, to the state's sum of squares.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types do not fit.
pub fn total_squares(stream: &Stream, sums: View<'_>, state: View<'_>) -> Result<()> {
    StepState::check(state);
    check("sums of squares", sums, DType::F64, sums.len());
    let arguments = [sums.into(), count(sums.len()).into(), state.into()];
    // SAFETY: the kernel reads as many numbers as `sums` has, and writes to the state.
    unsafe { run(stream, &SOURCE, "optimizer_squares_total", Grid::new(1, NORM_THREADS), &arguments) }
}

/// Computes the norm from the state's sum of squares and its scale (the loss scale's inverse), and multiplies the scale
/// by `most / (norm + 10⁻⁶)` if that is below 1.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If `state` is not the memory of a [`StepState`].
pub fn clip(stream: &Stream, state: View<'_>, most: f64) -> Result<()> {
    StepState::check(state);
    // SAFETY: the kernel reads and writes the state.
    unsafe { run(stream, &SOURCE, "optimizer_clip", Grid::new(1, 32), &[state.into(), most.into()]) }
}
