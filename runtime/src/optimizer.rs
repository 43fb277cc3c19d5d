//! The optimizer's state, in arenas with the parameters' order.
//!
//! If the state is sharded over ranks, an arena only holds this rank's elements, bucket after bucket. All update
//! rules and the moving average work element by element, so the bits of an element do not depend on the rank that
//! updates it.

use mgpu_kernels::Threads;
use mgpu_kernels::digest::cpu::sum_of_squares;
pub use mgpu_kernels::loss_scale::{LossScale, LossScaler};
pub use mgpu_kernels::optimizer::{Adam, AdamW, Optimizer as Rule, RmsProp, Sgd};
use mgpu_kernels::optimizer::{Factors, State, cpu};
pub use mgpu_kernels::schedule::{Decay, Schedule};

use crate::comm::Buffer;
use crate::{Layout, ParameterGroup, TensorSpec};

/// Name of the moving average's arena in a checkpoint.
pub(crate) const AVERAGE: &str = "average";

/// Configuration of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct OptimizerConfig {
    /// The update and its hyper-parameters.
    pub rule: Rule,
    /// Apply weight decay only to tensors of two or more dimensions, not to biases and normalisation parameters.
    pub decay_weights_only: bool,
    /// Decay of the moving average of all parameters, which is updated after each step; `None` keeps no average.
    pub average: Option<f64>,
    /// Factor of the learning rate, by step.
    pub schedule: Schedule,
}

impl OptimizerConfig {
    /// `rule` for all tensors alike, at a constant learning rate, without a moving average.
    pub fn new(rule: Rule) -> Self {
        OptimizerConfig { rule, decay_weights_only: false, average: None, schedule: Schedule::CONSTANT }
    }

    /// Applies weight decay only to tensors of two or more dimensions.
    #[must_use]
    pub fn with_decay_weights_only(self) -> Self {
        OptimizerConfig { decay_weights_only: true, ..self }
    }

    /// Keeps a moving average of all parameters with this decay.
    #[must_use]
    pub fn with_average(self, decay: f64) -> Self {
        OptimizerConfig { average: Some(decay), ..self }
    }

    /// Multiplies the learning rate by `schedule`.
    #[must_use]
    pub fn with_schedule(self, schedule: Schedule) -> Self {
        OptimizerConfig { schedule, ..self }
    }

    /// The L2 penalty of `parameters`, an arena with this layout: the part of the loss, Σ λ/2·p², whose gradient the
    /// weight decay λ is. `None` if the rule has no such penalty: without weight decay, and for AdamW, whose decay is
    /// not a gradient.
    ///
    /// ```
    /// use mgpu::Layout;
    /// use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
    /// let mut layout = Layout::new();
    /// layout.push("weight", [1, 2]);
    /// layout.push("bias", [1]);
    /// let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { weight_decay: 0.5, ..Sgd::default() }));
    /// assert_eq!(sgd.l2_penalty(&layout, &[1.0, 2.0, 4.0]), Some(0.25 * (1.0 + 4.0 + 16.0)));
    /// assert_eq!(sgd.with_decay_weights_only().l2_penalty(&layout, &[1.0, 2.0, 4.0]), Some(0.25 * (1.0 + 4.0)));
    /// assert_eq!(OptimizerConfig::new(Rule::Sgd(Sgd::default())).l2_penalty(&layout, &[1.0, 2.0, 4.0]), None);
    /// ```
    ///
    /// # Panics
    /// If `parameters` is shorter than the layout.
    pub fn l2_penalty(&self, layout: &Layout, parameters: &[f32]) -> Option<f64> {
        let decay = self.rule.l2();
        let trained = layout.tensors().iter().filter(|tensor| !tensor.group.frozen);
        let squares = trained.map(|tensor| {
            let factor = f64::from(self.factors(tensor).weight_decay);
            if factor == 0.0 { 0.0 } else { factor * sum_of_squares(&parameters[tensor.range()]) }
        });
        (decay != 0.0).then(|| decay / 2.0 * squares.sum::<f64>())
    }

    /// Factors of learning rate and weight decay for `tensor`.
    pub(crate) fn factors(&self, tensor: &TensorSpec) -> Factors {
        let ParameterGroup { learning_rate, weight_decay, .. } = tensor.group;
        let decays = !self.decay_weights_only || tensor.shape.len() > 1;
        Factors { learning_rate, weight_decay: if decays { weight_decay } else { 0.0 } }
    }
}

/// State of the optimizer on one rank.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    step: u64,
    /// Those among them that were skipped.
    skipped: u64,
    /// Runs of adjacent tensors with the same factors: the end of the run, and the factors.
    runs: Vec<(usize, Factors)>,
    first: Buffer,
    second: Buffer,
    average: Buffer,
}

impl Optimizer {
    /// For the elements of `layout`. This rank holds the state of `len` elements. The caller must initialise the
    /// moving average.
    pub(crate) fn new(config: OptimizerConfig, layout: &Layout, len: usize) -> Self {
        let arena = |used: bool| Buffer::zeroed::<f32>(if used { len } else { 0 });
        Optimizer {
            config,
            step: 0,
            skipped: 0,
            runs: runs(&config, layout),
            first: arena(config.rule.states() > 0),
            second: arena(config.rule.states() > 1),
            average: arena(config.average.is_some()),
        }
    }

    /// Elements of the state on this rank, in all arenas together.
    pub(crate) fn state_len(&self) -> usize {
        self.first.len() + self.second.len() + self.average.len()
    }

    /// The configuration, with the learning rate that was set last.
    pub(crate) fn config(&self) -> OptimizerConfig {
        self.config
    }

    /// The learning rate that was set last, without the schedule's factor.
    pub(crate) fn base_learning_rate(&self) -> f64 {
        self.config.rule.lr()
    }

    /// The learning rate of the next step.
    pub(crate) fn learning_rate(&self) -> f64 {
        self.learning_rate_of(self.step)
    }

    /// The learning rate of step `step`, from 0.
    fn learning_rate_of(&self, step: u64) -> f64 {
        self.config.rule.lr() * self.config.schedule.factor(step)
    }

    pub(crate) fn steps(&self) -> u64 {
        self.step
    }

    pub(crate) fn skipped_steps(&self) -> u64 {
        self.skipped
    }

    /// Continues after `steps` steps, of which `skipped` were skipped.
    pub(crate) fn set_steps(&mut self, steps: u64, skipped: u64) {
        (self.step, self.skipped) = (steps, skipped);
    }

    pub(crate) fn set_learning_rate(&mut self, lr: f64) {
        self.config.rule = self.config.rule.with_lr(lr);
    }

    pub(crate) fn begin_step(&mut self) {
        self.step += 1;
    }

    /// Makes a step without an update.
    pub(crate) fn skip_step(&mut self) {
        self.step += 1;
        self.skipped += 1;
    }

    /// Updates the parameters that begin at element `begin` of the arena. Their state begins at `state`.
    pub(crate) fn update(
        &mut self,
        threads: &Threads,
        begin: usize,
        state: usize,
        parameters: &mut [f32],
        gradients: &[f32],
    ) {
        let rule = self.config.rule.with_lr(self.learning_rate_of(self.step - 1));
        let (mut at, len) = (0, parameters.len());
        let mut run = self.runs.partition_point(|(end, _)| *end <= begin);
        while at < len {
            let (end, factors) = self.runs[run];
            let end = len.min(end - begin);
            let elements = state + at..state + end;
            let state = State {
                first: self.first.as_mut_slice().get_mut(elements.clone()).unwrap_or_default(),
                second: self.second.as_mut_slice().get_mut(elements).unwrap_or_default(),
            };
            cpu::update(
                threads,
                &rule,
                factors,
                self.step - self.skipped,
                &mut parameters[at..end],
                &gradients[at..end],
                state,
            );
            (at, run) = (end, run + 1);
        }
        if let Some(decay) = self.config.average {
            let average = &mut self.average.as_mut_slice()[state..state + len];
            cpu::average(threads, decay, parameters, average);
        }
    }

    /// The moving average of the elements whose state this rank holds, if an average is kept.
    pub(crate) fn average(&self) -> Option<&[f32]> {
        self.config.average.map(|_| self.average.as_slice())
    }

    /// As [`average`](Self::average), mutable.
    pub(crate) fn average_mut(&mut self) -> Option<&mut [f32]> {
        self.config.average.map(|_| self.average.as_mut_slice())
    }

    /// Names and values of all state arenas that are in use.
    pub(crate) fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        let names = self.config.rule.state_names().iter().copied();
        let rules = names.zip([self.first.as_slice(), self.second.as_slice()]);
        rules.chain(self.average().map(|values| (AVERAGE, values)))
    }

    /// As [`state`](Self::state), mutable.
    pub(crate) fn state_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut [f32])> {
        let names = self.config.rule.state_names().iter().copied();
        let average = self.config.average.map(|_| (AVERAGE, self.average.as_mut_slice()));
        names.zip([self.first.as_mut_slice(), self.second.as_mut_slice()]).chain(average)
    }
}

/// Runs of adjacent tensors with the same factors: the end of each run, and the factors. Padding belongs to the
/// tensor before it.
fn runs(config: &OptimizerConfig, layout: &Layout) -> Vec<(usize, Factors)> {
    let mut runs: Vec<(usize, Factors)> = Vec::new();
    for (index, tensor) in layout.tensors().iter().enumerate() {
        let (end, factors) = (layout.padded_end(index), config.factors(tensor));
        match runs.last_mut() {
            Some(last) if last.1 == factors => last.0 = end,
            _ => runs.push((end, factors)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let mut layout = Layout::new();
        layout.push("weight", [2, 3]);
        layout.push("scale", [5]);
        layout.push("none", [0]);
        layout.push("bias", [2]);
        layout.push_aligned("other", [2, 2], 16);
        layout
    }

    #[test]
    fn adjacent_tensors_with_equal_factors_form_a_run() {
        let mut config = OptimizerConfig::new(Rule::AdamW(AdamW::default()));
        let (all, rate_only) = (Factors::ONE, Factors::NO_DECAY);
        assert_eq!(runs(&config, &layout()), [(20, all)]);
        config.decay_weights_only = true;
        assert_eq!(runs(&config, &layout()), [(6, all), (16, rate_only), (20, all)]);
        assert_eq!(runs(&config, &Layout::new()), []);
        let mut grouped = layout();
        grouped.assign([0, 1], ParameterGroup::new().with_learning_rate(0.5).with_weight_decay(3.0));
        let (half, slow) = (
            Factors { learning_rate: 0.5, weight_decay: 3.0 },
            Factors { learning_rate: 0.5, weight_decay: 0.0 },
        );
        assert_eq!(runs(&config, &grouped), [(6, half), (11, slow), (16, rate_only), (20, all)]);
    }

    #[test]
    fn updating_an_arena_in_pieces_equals_updating_it_whole() {
        let rule = Rule::AdamW(AdamW { weight_decay: 0.5, ..AdamW::default() });
        let config = OptimizerConfig::new(rule).with_decay_weights_only().with_average(0.5);
        let layout = layout();
        let gradients: Vec<f32> = (0..layout.len()).map(|i| i as f32 - 7.5).collect();
        let threads = Threads::new(1);
        let update = |piece: usize| {
            let mut optimizer = Optimizer::new(config, &layout, layout.len());
            let mut parameters = vec![1.0f32; layout.len()];
            optimizer.begin_step();
            let pieces = parameters.chunks_mut(piece).zip(gradients.chunks(piece));
            for (index, (parameters, gradients)) in pieces.enumerate() {
                optimizer.update(&threads, index * piece, index * piece, parameters, gradients);
            }
            let state: Vec<Vec<f32>> = optimizer.state().map(|(_, values)| values.to_vec()).collect();
            (parameters, state)
        };
        let whole = update(layout.len());
        assert!((1..layout.len()).all(|piece| update(piece) == whole));
        // Elements 1 and 9 differ in their weight decay: element 1 decays by 1 − 0.001 · 0.5 before Adam's first step
        // of 0.001.
        assert!((whole.0[1] - 1.0005).abs() < 1e-6 && (whole.0[9] - 0.999).abs() < 1e-6, "{:?}", whole.0);
    }
}
