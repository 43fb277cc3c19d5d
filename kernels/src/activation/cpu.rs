//! Activations on the CPU: one pass over memory each.

use crate::Storage;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Fewer elements are not worth another thread.
const GRAIN: usize = 1 << 15;

/// Replaces every `x` by `max(x, slope · x)`.
pub fn forward<E: Storage>(threads: &Threads, slope: f32, values: &mut [E]) {
    E::activation_forward(threads, slope, values);
}

pub(crate) fn forward_as<E: Storage>(threads: &Threads, slope: f32, values: &mut [E]) {
    threads.divide(values.len(), GRAIN, Rows::new(values, 1), |_, part| {
        dispatch(Forward { slope, values: part.values });
    });
}

struct Forward<'a, E> {
    slope: f32,
    values: &'a mut [E],
}

impl<E: Storage> Task for Forward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for value in self.values {
            let x = value.widen();
            let scaled = x * self.slope;
            *value = E::narrow(if x > 0.0 { x } else { scaled });
        }
    }
}

/// Replaces the gradient of the output in place by that of the input, given the output.
///
/// # Panics
/// If the lengths differ.
pub fn backward<E: Storage>(threads: &Threads, slope: f32, y: &[E], gradient: &mut [E]) {
    E::activation_backward(threads, slope, y, gradient);
}

pub(crate) fn backward_as<E: Storage>(threads: &Threads, slope: f32, y: &[E], gradient: &mut [E]) {
    assert_eq!(y.len(), gradient.len());
    threads.divide(y.len(), GRAIN, Rows::new(gradient, 1), |range, part| {
        dispatch(Backward { slope, y: &y[range], gradient: part.values });
    });
}

struct Backward<'a, E> {
    slope: f32,
    y: &'a [E],
    gradient: &'a mut [E],
}

impl<E: Storage> Task for Backward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (gradient, y) in self.gradient.iter_mut().zip(self.y) {
            let dy = gradient.widen();
            let scaled = dy * self.slope;
            *gradient = E::narrow(if y.widen() > 0.0 { dy } else { scaled });
        }
    }
}
