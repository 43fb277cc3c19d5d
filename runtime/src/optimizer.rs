//! The optimizer's state, kept like the parameters: flat arenas with the parameters' layout.

use mgpu_kernels::Threads;
pub use mgpu_kernels::optimizer::{Adam, AdamW, Optimizer as Rule, RmsProp, Sgd};
use mgpu_kernels::optimizer::{State, cpu};

use crate::bucket::Bucket;
use crate::{Layout, TensorSpec};

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

/// State of the optimizer of one replica.
#[derive(Debug)]
pub(crate) struct Optimizer {
    config: OptimizerConfig,
    threads: Threads,
    step: u64,
    first: Vec<f32>,
    second: Vec<f32>,
    average: Vec<f32>,
}

impl Optimizer {
    pub(crate) fn new(config: OptimizerConfig, layout: &Layout, parameters: &[f32], threads: usize) -> Self {
        let arena = |used: bool| if used { vec![0.0; layout.len()] } else { Vec::new() };
        Optimizer {
            config,
            threads: Threads::new(threads),
            step: 0,
            first: arena(config.rule.states() > 0),
            second: arena(config.rule.states() > 1),
            average: config.average.map_or_else(Vec::new, |_| parameters.to_vec()),
        }
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

    /// Updates the parameters of one bucket by its gradients.
    pub(crate) fn update(
        &mut self,
        layout: &Layout,
        bucket: &Bucket,
        parameters: &mut [f32],
        gradients: &[f32],
    ) {
        let decays = |tensor: usize| self.config.decays(&layout.tensors()[tensor]);
        let begin = bucket.elements.start;
        // Neighbouring tensors with the same decay are updated in one pass.
        let mut tensor = bucket.tensors.start;
        while tensor < bucket.tensors.end {
            let decay = decays(tensor);
            let end = (tensor..bucket.tensors.end)
                .find(|next| decays(*next) != decay)
                .unwrap_or(bucket.tensors.end);
            let range = layout.range(tensor).start..layout.range(end - 1).end;
            let rule = if decay { self.config.rule } else { self.config.rule.with_weight_decay(0.0) };
            let state = State {
                first: self.first.get_mut(range.clone()).unwrap_or_default(),
                second: self.second.get_mut(range.clone()).unwrap_or_default(),
            };
            let gradients = &gradients[range.start - begin..range.end - begin];
            cpu::update(&self.threads, &rule, self.step, &mut parameters[range], gradients, state);
            tensor = end;
        }
        if let Some(decay) = self.config.average {
            let range = bucket.elements.clone();
            cpu::average(&self.threads, decay, &parameters[range.clone()], &mut self.average[range]);
        }
    }

    /// The moving average, if one is kept.
    pub(crate) fn average(&self) -> Option<&[f32]> {
        self.config.average.map(|_| &self.average[..])
    }

    /// Names and values of all state arenas in use.
    pub(crate) fn state(&self) -> impl Iterator<Item = (&'static str, &[f32])> {
        let names = self.config.rule.state_names().iter().copied();
        names.zip([&self.first[..], &self.second[..]]).chain(self.average().map(|values| (AVERAGE, values)))
    }

    /// As [`state`](Self::state), to be replaced.
    pub(crate) fn state_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut Vec<f32>)> {
        let names = self.config.rule.state_names().iter().copied();
        let average = self.config.average.map(|_| (AVERAGE, &mut self.average));
        names.zip([&mut self.first, &mut self.second]).chain(average)
    }
}
