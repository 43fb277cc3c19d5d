//! The values that parameters and running statistics start from.
//!
//! Every element is a function of the seed, its tensor's index and its own index, so ranks could compute their
//! copies each for itself; they are broadcast from rank 0 all the same.

use mgpu_kernels::rng::{Stream, splitmix64};

use super::plan::{Plan, Role};

/// Weights uniform in ±√(6/fan-in) where a rectifier follows (He et al., "Delving deep into rectifiers", ICCV
/// 2015), which keeps the variance of activations from layer to layer, and in ±1/√fan-in elsewhere; biases and
/// shifts 0, scales 1.
pub(super) fn parameters(plan: &Plan, seed: u64) -> Vec<f32> {
    fill(plan, |tensor, role, values| match role {
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

/// The values of the recorded reference runs: element i of tensor t is `(u/2²³ − 1) · bound` with u the upper 24
/// bits of `splitmix64(seed·2⁴⁰ + t·2³² + i)` and bound √(3/fan-in) for weights, 0.05 for biases.
pub(super) fn golden_parameters(plan: &Plan, seed: u64) -> Vec<f32> {
    fill(plan, |tensor, role, values| {
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
pub(super) fn buffers(plan: &Plan) -> Vec<f32> {
    let mut values = vec![0.0; plan.buffers.len()];
    for tensor in plan.buffers.tensors() {
        if tensor.name.ends_with("running_var") {
            values[tensor.range()].fill(1.0);
        }
    }
    values
}

fn fill(plan: &Plan, mut tensor: impl FnMut(usize, Role, &mut [f32])) -> Vec<f32> {
    let mut values = vec![0.0; plan.parameters.len()];
    for (index, &role) in plan.roles.iter().enumerate() {
        tensor(index, role, &mut values[plan.parameters.range(index)]);
    }
    values
}
