//! Batch normalisation on the CPU: threads own pixels, vectors are channels.
//!
//! Every pass reads the batch once and is limited by memory bandwidth: sums in `f64` are as fast as sums in `f32`.

use super::{Statistics, Sums};
use crate::Storage;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{PerPart, Rows, Threads};

/// Fewer elements are not worth another thread.
const GRAIN: usize = 1 << 14;

fn pixels(len: usize, channels: usize) -> usize {
    assert_eq!(len % channels, 0, "{len} elements are not a whole number of pixels of {channels} channels");
    len / channels
}

/// Overwrites `sums` with two sums over the pixels for every channel: those of the two terms that `term(x, dy, mean)`
/// returns. Without means, `mean` is 0.
fn sum_pixels<E, F>(threads: &Threads, x: &[E], dy: &[E], mean: Option<&[f32]>, sums: &mut Sums, term: F)
where
    E: Storage,
    F: Fn(f64, f64, f64) -> [f64; 2] + Copy + Sync,
{
    let channels = sums.channels();
    let pixels = pixels(x.len(), channels);
    assert_eq!(dy.len(), x.len());
    assert!(mean.is_none_or(|mean| mean.len() == channels));
    let grain = GRAIN / channels + 1;
    let Sums { values, partial } = sums;
    // Allocated in the first step and reused in all others.
    partial.resize_with(threads.count(), Vec::new);
    threads.divide(pixels, grain, PerPart::new(partial), |range, partial| {
        let partial = partial.own();
        partial.clear();
        partial.resize(2 * channels, 0.0);
        let part = range.start * channels..range.end * channels;
        dispatch(Sum { x: &x[part.clone()], dy: &dy[part], mean, sums: partial, term });
    });
    values.fill(0.0);
    for partial in &partial[..threads.parts(pixels, grain)] {
        values.iter_mut().zip(partial).for_each(|(sum, partial)| *sum += partial);
    }
    values[2 * channels] = pixels as f64;
}

struct Sum<'a, E, F> {
    x: &'a [E],
    dy: &'a [E],
    mean: Option<&'a [f32]>,
    /// The first sums of all channels, followed by the second ones.
    sums: &'a mut [f64],
    term: F,
}

impl<E: Storage, F: Fn(f64, f64, f64) -> [f64; 2]> Task for Sum<'_, E, F> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Sum { x, dy, mean, sums, term } = self;
        let channels = sums.len() / 2;
        let (first, second) = sums.split_at_mut(channels);
        let mean = mean.map(|mean| &mean[..channels]);
        // Memory is read strictly in order: several pixels in one turn would save accesses to the sums, but processors fetch
        // several sequences of memory in advance less well than one.
        for (x, dy) in x.chunks_exact(channels).zip(dy.chunks_exact(channels)) {
            for channel in 0..channels {
                let mean = mean.map_or(0.0, |mean| mean[channel]);
                let [p, q] = term(x[channel].widen().into(), dy[channel].widen().into(), mean.into());
                first[channel] += p;
                second[channel] += q;
            }
        }
    }
}

/// Overwrites `sums` with this rank's sums of `x` and `x²` and the number of pixels.
///
/// # Panics
/// If `x` is not a whole number of pixels.
pub fn sum_inputs<E: Storage>(threads: &Threads, x: &[E], sums: &mut Sums) {
    E::norm_sum_inputs(threads, x, sums);
}

pub(crate) fn sum_inputs_as<E: Storage>(threads: &Threads, x: &[E], sums: &mut Sums) {
    // `x` is passed as the gradient too, and ignored.
    sum_pixels(threads, x, x, None, sums, |x, _, _| [x, x * x]);
}

/// Overwrites `y` with `x` normalised by `statistics`, scaled by `gamma` and shifted by `beta`.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn normalise<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    gamma: &[f32],
    beta: &[f32],
    x: &[E],
    y: &mut [E],
) {
    E::norm_normalise(threads, statistics, gamma, beta, x, y);
}

pub(crate) fn normalise_as<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    gamma: &[f32],
    beta: &[f32],
    x: &[E],
    y: &mut [E],
) {
    let Statistics { mean, inv_std } = statistics;
    let channels = mean.len();
    let pixels = pixels(x.len(), channels);
    assert_eq!([gamma.len(), beta.len()], [channels; 2]);
    assert_eq!(y.len(), x.len());
    let coefficients = |c: usize| [mean[c], gamma[c] * inv_std[c], beta[c]];
    threads.divide(pixels, GRAIN / channels + 1, Rows::new(y, channels), |range, y| {
        let x = &x[range.start * channels..range.end * channels];
        dispatch(Scale {
            channels,
            x,
            y: y.values,
            coefficients,
            value: |x: f32, _, [mean, scale, shift]: [f32; 3]| (x - mean) * scale + shift,
        });
    });
}

/// Overwrites `sums` with this rank's sums of `dy` and `dy·xhat` and the number of pixels.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn sum_gradients<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    x: &[E],
    dy: &[E],
    sums: &mut Sums,
) {
    E::norm_sum_gradients(threads, statistics, x, dy, sums);
}

pub(crate) fn sum_gradients_as<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    x: &[E],
    dy: &[E],
    sums: &mut Sums,
) {
    let Statistics { mean, inv_std } = statistics;
    assert_eq!(mean.len(), sums.channels());
    sum_pixels(threads, x, dy, Some(mean), sums, |x, dy, mean| [dy, (x - mean) * dy]);
    let channels = mean.len();
    for (sum, &inv_std) in sums.values[channels..2 * channels].iter_mut().zip(inv_std) {
        *sum *= f64::from(inv_std);
    }
}

/// Writes the gradient of `gamma`, from the sums of [`sum_gradients`] *before* they are summed over ranks: the
/// gradients of parameters are averaged over ranks later.
///
/// # Panics
/// If the numbers of channels differ.
pub fn scale_gradient(sums: &Sums, dgamma: &mut [f32]) {
    narrow(sums.second(), dgamma);
}

/// Writes the gradient of `beta`, like [`scale_gradient`].
///
/// # Panics
/// If the numbers of channels differ.
pub fn shift_gradient(sums: &Sums, dbeta: &mut [f32]) {
    narrow(sums.first(), dbeta);
}

fn narrow(sums: &[f64], target: &mut [f32]) {
    assert_eq!(sums.len(), target.len());
    for (target, &sum) in target.iter_mut().zip(sums) {
        *target = sum as f32;
    }
}

/// Replaces the gradient of the output in place by that of the input, given [`sum_gradients`] summed over all ranks.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn backward_input<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    sums: &Sums,
    gamma: &[f32],
    x: &[E],
    gradient: &mut [E],
) {
    E::norm_backward_input(threads, statistics, sums, gamma, x, gradient);
}

pub(crate) fn backward_input_as<E: Storage>(
    threads: &Threads,
    statistics: &Statistics,
    sums: &Sums,
    gamma: &[f32],
    x: &[E],
    gradient: &mut [E],
) {
    let Statistics { mean, inv_std } = statistics;
    let channels = mean.len();
    let pixels = pixels(x.len(), channels);
    assert_eq!([gamma.len(), sums.channels()], [channels; 2]);
    assert_eq!(gradient.len(), x.len());
    let coefficients = |c: usize| {
        let shift = (sums.first()[c] / sums.count()) as f32;
        let slope = (sums.second()[c] / sums.count() * f64::from(inv_std[c])) as f32;
        [mean[c], gamma[c] * inv_std[c], shift, slope]
    };
    threads.divide(pixels, GRAIN / channels + 1, Rows::new(gradient, channels), |range, gradient| {
        let x = &x[range.start * channels..range.end * channels];
        let value = |x: f32, dy: f32, [mean, scale, shift, slope]: [f32; 4]| {
            scale * (dy - shift - (x - mean) * slope)
        };
        dispatch(Scale { channels, x, y: gradient.values, coefficients, value });
    });
}

/// Replaces every `y` by `value(x, y, coefficients(channel))`.
struct Scale<'a, E, C, V> {
    channels: usize,
    x: &'a [E],
    y: &'a mut [E],
    coefficients: C,
    value: V,
}

impl<const N: usize, E, C, V> Task for Scale<'_, E, C, V>
where
    E: Storage,
    C: Fn(usize) -> [f32; N],
    V: Fn(f32, f32, [f32; N]) -> f32,
{
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        /// Channels and pixels for which coefficients are computed at a time. They stay in the L1 cache.
        const TILE: (usize, usize) = (256, 64);
        let Scale { channels, x, y, coefficients, value } = self;
        for (x, y) in x.chunks(TILE.1 * channels).zip(y.chunks_mut(TILE.1 * channels)) {
            for begin in (0..channels).step_by(TILE.0) {
                let width = TILE.0.min(channels - begin);
                let mut at = [[0.0; TILE.0]; N];
                for lane in 0..width {
                    let all = coefficients(begin + lane);
                    at.iter_mut().zip(all).for_each(|(at, one)| at[lane] = one);
                }
                let at = at.each_ref().map(|at| &at[..width]);
                for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
                    let (x, y) = (&x[begin..][..width], &mut y[begin..][..width]);
                    for lane in 0..width {
                        let coefficients = at.map(|at| at[lane]);
                        y[lane] = E::narrow(value(x[lane].widen(), y[lane].widen(), coefficients));
                    }
                }
            }
        }
    }
}
