//! Small models for a [`DataParallel`] with gradients from formulas, and all optimizer configurations.

use mgpu::optimizer::{Adam, AdamW, OptimizerConfig, RmsProp, Rule, Sgd};
use mgpu::{DataParallel, DataParallelConfig, Layout, Result, World};

/// Tensors of these shapes, named by index.
pub fn layout(shapes: &[&[usize]]) -> Layout {
    let mut layout = Layout::new();
    for (index, shape) in shapes.iter().enumerate() {
        layout.push(format!("{index}"), *shape);
    }
    layout
}

/// Every update rule with and without its options.
pub fn optimizers() -> Vec<OptimizerConfig> {
    let sgd = Sgd { lr: 0.1, weight_decay: 0.1, ..Sgd::default() };
    let momentum = Sgd { momentum: 0.9, nesterov: true, ..sgd };
    let adam = Adam { lr: 0.01, weight_decay: 0.1, ..Adam::default() };
    let adam_w = AdamW { lr: 0.01, weight_decay: 0.3, ..AdamW::default() };
    let rms_prop = RmsProp { lr: 0.01, ..RmsProp::default() };
    let with_buffer = RmsProp { momentum: 0.5, weight_decay: 0.1, ..rms_prop };
    let averaged = |rule| OptimizerConfig::new(rule).with_average(0.9);
    vec![
        OptimizerConfig::new(Rule::Sgd(sgd)),
        averaged(Rule::Sgd(momentum)).with_decay_weights_only(),
        averaged(Rule::Adam(adam)),
        averaged(Rule::AdamW(adam_w)).with_decay_weights_only(),
        OptimizerConfig::new(Rule::RmsProp(rms_prop)),
        averaged(Rule::RmsProp(with_buffer)).with_decay_weights_only(),
    ]
}

/// A model with the tensors of `layout`, equal on all ranks.
///
/// # Errors
/// As [`DataParallel::with_config`].
pub fn model(world: &mut World, layout: &Layout, config: DataParallelConfig) -> Result<DataParallel> {
    let parameters = (0..layout.len()).map(|index| (index % 17) as f32 / 8.0 - 1.0).collect();
    DataParallel::with_config(world.communicator()?, layout.clone(), parameters, config)
}

/// The results of a training, equal on all ranks.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    /// The parameters.
    pub weights: Vec<f32>,
    /// Their moving average, if there is one.
    pub average: Option<Vec<f32>>,
    /// The gradient of each tensor in the last step.
    pub gradients: Vec<Vec<f32>>,
}

/// The results of a training. Collective.
///
/// # Errors
/// If the ranks' weights differ; errors of the communicator.
pub fn outcome(model: &mut DataParallel) -> Result<Outcome> {
    model.verify()?;
    let average = model.averaged_parameters()?;
    let tensors = 0..model.layout().tensors().len();
    let gradients: Result<_> = tensors.map(|tensor| Ok(model.gradient(tensor)?.to_vec())).collect();
    Ok(Outcome { weights: model.parameters().to_vec(), average, gradients: gradients? })
}
