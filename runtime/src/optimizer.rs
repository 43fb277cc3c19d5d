//! The optimizer's state, kept like the parameters: flat arenas in their order.
//!
//! Where the state is sharded over ranks, an arena holds this rank's elements only, one bucket's after another's. All
//! rules are element by element, and so is the moving average: who updates an element does not matter for its bits.

use mgpu_kernels::Threads;
pub use mgpu_kernels::optimizer::{Adam, AdamW, Optimizer as Rule, RmsProp, Sgd};
use mgpu_kernels::optimizer::{State, cpu};
pub use mgpu_kernels::schedule::{Decay, Schedule};

use crate::comm::Buffer;
use crate::{Error, Layout, Result, TensorSpec};

/// Name of the moving average's arena in a checkpoint.
pub(crate) const AVERAGE: &str = "average";

/// How parameters follow their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerConfig {
    /// The update and its hyper-parameters.
    pub rule: Rule,
    /// Spare tensors of fewer than two dimensions (biases, normalisation) the rule's weight decay.
    pub decay_weights_only: bool,
    /// Decay of a moving average of all parameters, taken after each step; `None` keeps none.
    pub average: Option<f64>,
}

impl OptimizerConfig {
    /// `rule` for all tensors alike, without a moving average.
    pub fn new(rule: Rule) -> Self {
        OptimizerConfig { rule, decay_weights_only: false, average: None }
    }

    /// Whether the rule's weight decay is for `tensor`.
    pub(crate) fn decays(&self, tensor: &TensorSpec) -> bool {
        !self.decay_weights_only || tensor.shape.len() > 1
    }
}

/// State of the optimizer on one rank.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    threads: Threads,
    step: u64,
    /// Where the rule's weight decay begins and ends to be for elements: first ones behind neighbouring tensors that are
    /// alike, and whether it is for those.
    runs: Vec<(usize, bool)>,
    first: Buffer,
    second: Buffer,
    average: Buffer,
}

impl Optimizer {
    /// For elements of `layout`, of which this rank has the state of `len`. The moving average is yet to be set.
    ///
    /// # Errors
    /// If there are no threads, or the system refuses to start them.
    pub(crate) fn new(config: OptimizerConfig, layout: &Layout, len: usize, threads: usize) -> Result<Self> {
        let arena = |used: bool| Buffer::zeroed::<f32>(if used { len } else { 0 });
        let threads = Threads::try_new(threads)
            .map_err(|problem| Error::InvalidArgument { operation: "data parallel", problem })?;
        Ok(Optimizer {
            config,
            threads,
            step: 0,
            runs: runs(&config, layout),
            first: arena(config.rule.states() > 0),
            second: arena(config.rule.states() > 1),
            average: arena(config.average.is_some()),
        })
    }

    /// Elements of the state on this rank, of all arenas together.
    pub(crate) fn state_len(&self) -> usize {
        self.first.len() + self.second.len() + self.average.len()
    }

    /// With the learning rate that was set last.
    pub(crate) fn config(&self) -> OptimizerConfig {
        self.config
    }

    pub(crate) fn learning_rate(&self) -> f64 {
        self.config.rule.lr()
    }

    pub(crate) fn steps(&self) -> u64 {
        self.step
    }

    pub(crate) fn set_steps(&mut self, steps: u64) {
        self.step = steps;
    }

    pub(crate) fn set_learning_rate(&mut self, lr: f64) {
        self.config.rule = self.config.rule.with_lr(lr);
    }

    pub(crate) fn begin_step(&mut self) {
        self.step += 1;
    }

    /// Updates the parameters of elements from `begin` on by their gradients. Their state is at `state`.
    pub(crate) fn update(&mut self, begin: usize, state: usize, parameters: &mut [f32], gradients: &[f32]) {
        let (mut at, len) = (0, parameters.len());
        let mut run = self.runs.partition_point(|(end, _)| *end <= begin);
        while at < len {
            let (end, decays) = self.runs[run];
            let end = len.min(end - begin);
            let rule = if decays { self.config.rule } else { self.config.rule.with_weight_decay(0.0) };
            let elements = state + at..state + end;
            let state = State {
                first: self.first.as_mut_slice().get_mut(elements.clone()).unwrap_or_default(),
                second: self.second.as_mut_slice().get_mut(elements).unwrap_or_default(),
            };
            cpu::update(
                &self.threads,
                &rule,
                self.step,
                &mut parameters[at..end],
                &gradients[at..end],
                state,
            );
            (at, run) = (end, run + 1);
        }
        if let Some(decay) = self.config.average {
            let average = &mut self.average.as_mut_slice()[state..state + len];
            cpu::average(&self.threads, decay, parameters, average);
        }
    }

    /// The moving average of the elements that this rank has the state of, if one is kept.
    pub(crate) fn average(&self) -> Option<&[f32]> {
        self.config.average.map(|_| self.average.as_slice())
    }

    /// As [`average`](Self::average), to be replaced.
    pub(crate) fn average_mut(&mut self) -> Option<&mut [f32]> {
        self.config.average.map(|_| self.average.as_mut_slice())
    }

    /// Names and values of all state arenas in use.
    pub(crate) fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        let names = self.config.rule.state_names().iter().copied();
        let rules = names.zip([self.first.as_slice(), self.second.as_slice()]);
        rules.chain(self.average().map(|values| (AVERAGE, values)))
    }

    /// As [`state`](Self::state), to be replaced.
    pub(crate) fn state_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut [f32])> {
        let names = self.config.rule.state_names().iter().copied();
        let average = self.config.average.map(|_| (AVERAGE, self.average.as_mut_slice()));
        names.zip([self.first.as_mut_slice(), self.second.as_mut_slice()]).chain(average)
    }
}

/// The ends of the elements of neighbouring tensors that are alike in weight decay, and whether they have it. What lies
/// between two tensors goes with the one before.
fn runs(config: &OptimizerConfig, layout: &Layout) -> Vec<(usize, bool)> {
    let tensors = layout.tensors();
    let ends = tensors.iter().skip(1).map(|next| next.offset).chain([layout.len()]);
    let mut runs: Vec<(usize, bool)> = Vec::new();
    for (tensor, end) in tensors.iter().zip(ends) {
        let decays = config.decays(tensor);
        match runs.last_mut() {
            Some(last) if last.1 == decays => last.0 = end,
            _ => runs.push((end, decays)),
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
    fn runs_are_of_tensors_alike() {
        let mut config = OptimizerConfig::new(Rule::AdamW(AdamW::default()));
        assert_eq!(runs(&config, &layout()), [(20, true)]);
        config.decay_weights_only = true;
        assert_eq!(runs(&config, &layout()), [(6, true), (16, false), (20, true)]);
        assert_eq!(runs(&config, &Layout::new()), []);
    }

    #[test]
    fn pieces_of_an_arena_are_updated_as_the_whole() {
        let rule = Rule::AdamW(AdamW { weight_decay: 0.5, ..AdamW::default() });
        let config = OptimizerConfig { rule, decay_weights_only: true, average: Some(0.5) };
        let layout = layout();
        let gradients: Vec<f32> = (0..layout.len()).map(|i| i as f32 - 7.5).collect();
        let update = |piece: usize| {
            let mut optimizer = Optimizer::new(config, &layout, layout.len(), 1).unwrap();
            let mut parameters = vec![1.0f32; layout.len()];
            optimizer.begin_step();
            let pieces = parameters.chunks_mut(piece).zip(gradients.chunks(piece));
            for (index, (parameters, gradients)) in pieces.enumerate() {
                optimizer.update(index * piece, index * piece, parameters, gradients);
            }
            let state: Vec<Vec<f32>> = optimizer.state().map(|(_, values)| values.to_vec()).collect();
            (parameters, state)
        };
        let whole = update(layout.len());
        assert!((1..layout.len()).all(|piece| update(piece) == whole));
        // Elements 1 and 9 differ in their weight decay: 1 − 0.001 · 0.5 before Adam's first step of 0.001.
        assert!((whole.0[1] - 1.0005).abs() < 1e-6 && (whole.0[9] - 0.999).abs() < 1e-6, "{:?}", whole.0);
    }
}
