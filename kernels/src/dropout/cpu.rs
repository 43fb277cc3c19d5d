//! Dropout on the CPU: the mask is computed element by element where it is applied.

use super::{Mask, dropped, scale};
use crate::rng::Stream;
use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay; each costs about a nanosecond of mixing.
const GRAIN: usize = 1 << 14;

/// Zeroes or scales every element: values in the forward pass, gradients in the backward pass.
///
/// # Panics
/// Unless `probability` is in [0, 1).
pub fn apply(threads: &Threads, probability: f32, mask: Mask, values: &mut [f32]) {
    let threshold = dropped(probability);
    if probability == 0.0 {
        return;
    }
    let stream = Stream::new(mask.seed, mask.stream);
    let scale = scale(probability);
    threads.divide(values.len(), GRAIN, Rows::new(values, 1), |range, part| {
        for (value, i) in part.values.iter_mut().zip(mask.first + range.start as u64..) {
            let kept = stream.bits24(i) >= threshold;
            *value = if kept { *value * scale } else { 0.0 };
        }
    });
}
