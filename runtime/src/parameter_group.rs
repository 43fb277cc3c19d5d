//! How the tensors of a model differ in their training.

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

/// How the tensors of a group are trained, where that is not as the optimizer says: [`Layout::assign`](crate::Layout::assign).
///
/// The factors of PyTorch's parameter groups, as multiples of the optimizer's learning rate and weight decay, so that a
/// schedule moves all groups together.
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
    /// Multiplies the learning rate; from 0.
    pub learning_rate: f32,
    /// Multiplies the weight decay; from 0. Tensors that the optimizer spares weight decay
    /// ([`decay_weights_only`](crate::optimizer::OptimizerConfig::decay_weights_only)) have none whatever this is.
    pub weight_decay: f32,
    /// The tensors keep their values: no gradient of them is taken or sent, and the optimizer has no state for them.
    pub frozen: bool,
}

impl ParameterGroup {
    /// Tensors that keep their values.
    pub const FROZEN: ParameterGroup = ParameterGroup { frozen: true, ..ParameterGroup::new() };

    /// As the optimizer says.
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

    /// What is wrong with it, if anything.
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
