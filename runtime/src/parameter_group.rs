//! How the tensors of a model differ in their training.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// Differences between the training of a group of tensors and the optimizer's settings. Assigned by
/// [`Layout::assign`](crate::Layout::assign).
///
/// Like PyTorch's parameter groups, but as factors of the optimizer's learning rate and weight decay, so that a
/// schedule applies to all groups.
///
/// ```
/// use mgpu::{Layout, ParameterGroup};
/// let mut layout = Layout::new();
/// let embedding = layout.push("embedding", [1000, 64]);
/// let weight = layout.push("head.weight", [10, 64]);
/// let bias = layout.push("head.bias", [10]);
/// layout.assign([embedding], ParameterGroup::FROZEN);
/// layout.assign([weight, bias], ParameterGroup::new().with_learning_rate(10.0));
/// layout.assign([bias], ParameterGroup::new().with_learning_rate(10.0).with_weight_decay(0.0));
/// assert!(layout.tensors()[embedding].group.frozen);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParameterGroup {
    /// Factor of the learning rate, at least 0.
    pub learning_rate: f32,
    /// Factor of the weight decay, at least 0. It has no effect on tensors without weight decay
    /// ([`decay_weights_only`](crate::optimizer::OptimizerConfig::decay_weights_only)).
    pub weight_decay: f32,
    /// The tensors are not trained: they have no gradients, no communication and no optimizer state.
    pub frozen: bool,
}

impl ParameterGroup {
    /// Tensors that are not trained.
    pub const FROZEN: ParameterGroup = ParameterGroup { frozen: true, ..ParameterGroup::new() };

    /// The optimizer's own settings.
    pub const fn new() -> Self {
        ParameterGroup { learning_rate: 1.0, weight_decay: 1.0, frozen: false }
    }

    /// With `factor` times the learning rate.
    #[must_use]
    pub const fn with_learning_rate(self, factor: f32) -> Self {
        ParameterGroup { learning_rate: factor, ..self }
    }

    /// With `factor` times the weight decay.
    #[must_use]
    pub const fn with_weight_decay(self, factor: f32) -> Self {
        ParameterGroup { weight_decay: factor, ..self }
    }

    /// Describes the first invalid factor, if there is one.
    pub(crate) fn problem(&self) -> Option<String> {
        let factors = [("learning rate", self.learning_rate), ("weight decay", self.weight_decay)];
        let bad = factors.into_iter().find(|(_, factor)| !(0.0..=f32::MAX).contains(factor));
        bad.map(|(what, factor)| format!("a factor of the {what} is a finite number from 0, not {factor}"))
    }
}

impl Display for ParameterGroup {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let ParameterGroup { learning_rate, weight_decay, frozen } = self;
        if *frozen {
            return f.write_str("frozen");
        }
        write!(f, "learning rate × {learning_rate}, weight decay × {weight_decay}")
    }
}

impl Default for ParameterGroup {
    fn default() -> Self {
        Self::new()
    }
}
