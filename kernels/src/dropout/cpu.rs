//! Dropout on the CPU: the mask is computed for each element where it is applied.

use super::{Mask, dropped, scale};
use crate::Storage;
use crate::rng::Stream;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Fewer elements are not worth another thread; each costs about a third of a nanosecond of hashing.
const GRAIN: usize = 1 << 14;

/// Zeroes or scales every element by the mask of training step `step`: values in the forward pass, gradients in the
/// backward pass.
///
/// # Panics
/// Unless `probability` is in [0, 1) and `values` is a whole number of samples.
pub fn apply<E: Storage>(threads: &Threads, probability: f32, mask: &Mask, step: u64, values: &mut [E]) {
    E::dropout(threads, probability, mask, step, values);
}

pub(crate) fn apply_as<E: Storage>(
    threads: &Threads,
    probability: f32,
    mask: &Mask,
    step: u64,
    values: &mut [E],
) {
    let threshold = dropped(probability);
    let &Mask { channels, plane, .. } = mask;
    assert!(values.len().is_multiple_of(channels * plane), "{} elements for {mask:?}", values.len());
    if probability == 0.0 {
        return;
    }
    let (stream, scale) = (Stream::new(mask.seed, mask.stream_of_step(step)), scale(probability));
    let pixels = values.len() / channels;
    threads.divide(pixels, GRAIN / channels + 1, Rows::new(values, channels), |range, values| {
        dispatch(Apply { stream, threshold, scale, mask, first: range.start, values: values.values });
    });
}

struct Apply<'a, E> {
    stream: Stream,
    threshold: u32,
    scale: f32,
    mask: &'a Mask,
    /// Index of the first pixel of `values`, counted from that of the first sample.
    first: usize,
    values: &'a mut [E],
}

impl<E: Storage> Task for Apply<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Apply { stream, threshold, scale, mask, first, values } = self;
        let &Mask { first_sample, channels, plane, .. } = mask;
        for (pixel, values) in (first..).zip(values.chunks_exact_mut(channels)) {
            let sample = first_sample + (pixel / plane) as u64;
            let element = sample * (channels * plane) as u64 + (pixel % plane) as u64;
            for (value, bits) in values.iter_mut().zip(stream.bits24_of_every(element, plane as u64)) {
                // Computed for every element, to avoid a branch that would be mispredicted half the time.
                let scaled = value.widen() * scale;
                *value = E::narrow(if bits >= threshold { scaled } else { 0.0 });
            }
        }
    }
}
