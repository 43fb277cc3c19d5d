//! Dropout on the CPU: the mask is computed element by element where it is applied.

use super::{Mask, dropped, scale};
use crate::rng::Stream;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay; each costs up to a nanosecond of mixing.
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
        let first = mask.first.wrapping_add(range.start as u64);
        dispatch(Apply { stream, first, threshold, scale, values: part.values });
    });
}

/// A part of the elements, the first of which is number `first` of the mask.
struct Apply<'a> {
    stream: Stream,
    first: u64,
    threshold: u32,
    scale: f32,
    values: &'a mut [f32],
}

impl Task for Apply<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Apply { stream, first, threshold, scale, values } = self;
        for (i, value) in values.iter_mut().enumerate() {
            // Computed in any case, so that there is no branch: it would be mispredicted half the time.
            let scaled = *value * scale;
            let kept = stream.bits24(first.wrapping_add(i as u64)) >= threshold;
            *value = if kept { scaled } else { 0.0 };
        }
    }
}
