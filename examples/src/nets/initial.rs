//! Initial values of parameters and running statistics.
//!
//! Every element is a function of the seed, its tensor's index in the whole network and its own index, so each rank could
//! compute its own copy. They are broadcast from rank 0 anyway.

use mgpu_kernels::rng::{Stream, splitmix64};

use super::tensors::{Role, Tensors};

/// Weights are uniform in ±√(6/fan-in) before a rectifier or similar function (He et al., "Delving deep into
/// rectifiers", ICCV 2015), which keeps the variance of activations from layer to layer, and in ±1/√fan-in elsewhere.
/// Biases and shifts are 0, scales 1.
pub(super) fn parameters(tensors: &Tensors, seed: u64) -> Vec<f32> {
    fill(tensors, |tensor, role, values| match role {
        Role::Weight { fan_in, rectified } => {
            let gain: f64 = if rectified { 6.0 } else { 1.0 };
            let bound = (gain / fan_in as f64).sqrt() as f32;
            let stream = Stream::new(seed, tensor as u64);
            for (value, i) in values.iter_mut().zip(0..) {
                *value = (2.0 * stream.uniform(i) - 1.0) * bound;
            }
        }
        Role::Bias | Role::Shift => values.fill(0.0),
        Role::Scale => values.fill(1.0),
    })
}

/// The initial values of golden runs: element i of tensor t is `(u/2²³ − 1) · bound`, with u the upper 24 bits of
/// `splitmix64(seed·2⁴⁰ + t·2³² + i)` and bound √(3/fan-in) for weights, 0.05 for biases.
pub(super) fn golden_parameters(tensors: &Tensors, seed: u64) -> Vec<f32> {
    fill(tensors, |tensor, role, values| {
        let bound = match role {
            Role::Weight { fan_in, .. } => (3.0 / fan_in as f64).sqrt(),
            Role::Bias => 0.05,
            Role::Scale => return values.fill(1.0),
            Role::Shift => return values.fill(0.0),
        };
        let base = (seed << 40).wrapping_add((tensor as u64) << 32);
        for (value, i) in values.iter_mut().zip(0..) {
            let u = splitmix64(base.wrapping_add(i)) >> 40;
            *value = ((u as f64 / f64::from(1 << 23) - 1.0) * bound) as f32;
        }
    })
}

/// Running means 0, running variances 1.
pub(super) fn buffers(tensors: &Tensors) -> Vec<f32> {
    let mut values = vec![0.0; tensors.buffers.len()];
    for tensor in tensors.buffers.tensors() {
        if tensor.name.ends_with("running_var") {
            values[tensor.range()].fill(1.0);
        }
    }
    values
}

fn fill(tensors: &Tensors, mut tensor: impl FnMut(usize, Role, &mut [f32])) -> Vec<f32> {
    let mut values = vec![0.0; tensors.parameters.len()];
    for (index, &role) in tensors.roles.iter().enumerate() {
        tensor(tensors.before + index, role, &mut values[tensors.parameters.range(index)]);
    }
    values
}
