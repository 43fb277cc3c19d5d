//! Activations on the CPU: one pass over memory each.

use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay.
const GRAIN: usize = 1 << 15;

/// Replaces every `x` by `max(x, slope · x)`.
pub fn forward(threads: &Threads, slope: f32, values: &mut [f32]) {
    threads.divide(values.len(), GRAIN, Rows::new(values, 1), |_, part| {
        dispatch(Forward { slope, values: part.values });
    });
}

struct Forward<'a> {
    slope: f32,
    values: &'a mut [f32],
}

impl Task for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for value in self.values {
            let scaled = *value * self.slope;
            *value = if *value > 0.0 { *value } else { scaled };
        }
    }
}

/// Turns the gradient of the output into that of the input, given the output.
///
/// # Panics
/// If the lengths differ.
pub fn backward(threads: &Threads, slope: f32, y: &[f32], gradient: &mut [f32]) {
    assert_eq!(y.len(), gradient.len());
    threads.divide(y.len(), GRAIN, Rows::new(gradient, 1), |range, part| {
        dispatch(Backward { slope, y: &y[range], gradient: part.values });
    });
}

struct Backward<'a> {
    slope: f32,
    y: &'a [f32],
    gradient: &'a mut [f32],
}

impl Task for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gradient, &y) in self.gradient.iter_mut().zip(self.y) {
            let scaled = *gradient * self.slope;
            *gradient = if y > 0.0 { *gradient } else { scaled };
        }
    }
}
