//! Activations on the CPU: one pass over memory each.

use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay.
const GRAIN: usize = 1 << 15;

/// Replaces every `x` by `max(x, slope · x)`.
pub fn forward(threads: &Threads, slope: f32, values: &mut [f32]) {
    threads.divide(values.len(), GRAIN, Rows::new(values, 1), |_, part| {
        for value in part.values {
            let scaled = *value * slope;
            *value = if *value > 0.0 { *value } else { scaled };
        }
    });
}

/// Turns the gradient of the output into that of the input, given the output.
///
/// # Panics
/// If the lengths differ.
pub fn backward(threads: &Threads, slope: f32, y: &[f32], gradient: &mut [f32]) {
    assert_eq!(y.len(), gradient.len());
    threads.divide(y.len(), GRAIN, Rows::new(gradient, 1), |range, part| {
        for (gradient, &y) in part.values.iter_mut().zip(&y[range]) {
            let scaled = *gradient * slope;
            *gradient = if y > 0.0 { *gradient } else { scaled };
        }
    });
}
