//! The eight networks for 28×28 digits.

use std::fmt;

use mgpu::optimizer::{Adam, OptimizerConfig, RmsProp, Rule};
use mgpu_kernels::conv::Padding;
use mgpu_kernels::pool::Rounding;

use super::layers::Layer;
use super::spec::Spec;
use Layer::{BatchNorm, Dense, Dropout, Flatten, Gelu, LeakyRelu, MaxPool, Relu};

const NAMES: [&str; 8] =
    ["lenet5", "deep", "keras", "ensemble2400", "ensemble4800", "layers", "conv6", "mlp-gelu"];

/// The names that [`Spec::named`] knows.
pub fn names() -> &'static [&'static str] {
    &NAMES
}

/// An unknown network name.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no network `{name}`; known are {}", NAMES.join(", "))]
pub struct UnknownNet {
    /// The name asked for.
    pub name: String,
}

/// As [`Display`](fmt::Display), because Rust prints errors returned from `main` with `Debug`.
impl fmt::Debug for UnknownNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Spec {
    /// The network called `name`, one of [`names`].
    ///
    /// # Errors
    /// If there is none; the error lists the known names.
    pub fn named(name: &str) -> Result<Spec, UnknownNet> {
        let (layers, optimizer, batch) = match name {
            "lenet5" => (lenet5(), adam(1e-3), 16),
            "deep" => (deep(), adam_with_decay_and_average(), 128),
            "keras" => (keras(), rmsprop(), 128),
            "ensemble2400" => (ensemble(2400), rmsprop(), 128),
            "ensemble4800" => (ensemble(4800), rmsprop(), 128),
            "layers" => (layers(), adam(1e-3), 1024),
            "conv6" => (conv6(), adam(1e-3), 128),
            "mlp-gelu" => (mlp_gelu(), adam(1e-3), 128),
            _ => return Err(UnknownNet { name: name.to_owned() }),
        };
        Ok(Spec { name: name.to_owned(), input: [1, 28, 28], layers, optimizer, batch })
    }
}

fn adam(lr: f64) -> OptimizerConfig {
    OptimizerConfig::new(Rule::Adam(Adam { lr, ..Adam::default() }))
}

/// The training settings of `deep`: an L2 penalty without biases, and a moving average of the weights for evaluation.
fn adam_with_decay_and_average() -> OptimizerConfig {
    let rule = Rule::Adam(Adam { lr: 1e-4, weight_decay: 5e-4, ..Adam::default() });
    OptimizerConfig::new(rule).with_decay_weights_only().with_average(0.9999)
}

fn rmsprop() -> OptimizerConfig {
    OptimizerConfig::new(Rule::RmsProp(RmsProp { lr: 1e-3, rho: 0.9, ..RmsProp::default() }))
}

fn same(filters: usize, kernel: usize) -> Layer {
    Layer::Conv { filters, kernel, padding: Padding::Same }
}

fn valid(filters: usize, kernel: usize) -> Layer {
    Layer::Conv { filters, kernel, padding: Padding::Valid }
}

const POOL: Layer = MaxPool(Rounding::Floor);

fn lenet5() -> Vec<Layer> {
    vec![
        same(6, 5),
        Relu,
        POOL,
        valid(16, 5),
        Relu,
        POOL,
        Flatten,
        Dense(120),
        Relu,
        Dense(84),
        Relu,
        Dense(10),
    ]
}

fn deep() -> Vec<Layer> {
    vec![
        same(64, 5),
        Relu,
        POOL,
        same(128, 5),
        LeakyRelu,
        POOL,
        Flatten,
        Dense(1024),
        Relu,
        Dropout(0.5),
        Dense(10),
    ]
}

fn keras() -> Vec<Layer> {
    vec![
        valid(32, 3),
        Relu,
        valid(256, 3),
        Relu,
        BatchNorm,
        valid(128, 3),
        Relu,
        POOL,
        Dropout(0.25),
        Flatten,
        Dense(128),
        Relu,
        Dropout(0.5),
        Dense(10),
    ]
}

fn ensemble(wide: usize) -> Vec<Layer> {
    let block = |filters| [same(filters, 3), Relu, MaxPool(Rounding::Ceil), Dropout(0.2)];
    let head = [Flatten, Dense(wide), Relu, Dropout(0.25), Dense(10)];
    [64, 64, 128].into_iter().flat_map(block).chain(head).collect()
}

/// The published network has no activation between the dense layers.
fn layers() -> Vec<Layer> {
    vec![
        valid(64, 5),
        Relu,
        POOL,
        valid(256, 3),
        Relu,
        valid(512, 3),
        Relu,
        POOL,
        Flatten,
        Dense(2048),
        Dropout(0.75),
        Dense(1024),
        Dropout(0.75),
        Dense(10),
    ]
}

fn conv6() -> Vec<Layer> {
    let block = |kernel| [same(128, kernel), Relu, same(128, kernel), Relu, POOL];
    [5, 3, 3].into_iter().flat_map(block).chain([Flatten, Dense(10)]).collect()
}

fn mlp_gelu() -> Vec<Layer> {
    vec![Flatten, Dense(256), Gelu, Dense(256), Gelu, Dense(10)]
}
