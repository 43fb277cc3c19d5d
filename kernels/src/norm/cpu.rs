//! Batch normalisation on the CPU: threads own channels for the sums, images for the rest.

use super::{Statistics, Sums};
use crate::sum::{sum, sum_pairs, sum_squares};
use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay.
const GRAIN: usize = 1 << 14;

fn images(len: usize, channels: usize, plane: usize) -> usize {
    let image = channels * plane;
    assert_eq!(len % image, 0, "{len} elements are no whole number of images of {channels}x{plane}");
    len / image
}

/// Overwrites `sums` by `terms(image and channel)`, a pair for every plane, added up over images.
fn sum_planes(
    threads: &Threads,
    images: usize,
    plane: usize,
    sums: &mut Sums,
    terms: impl Fn(usize) -> (f64, f64) + Sync,
) {
    let channels = sums.channels();
    let (first, rest) = sums.values.split_at_mut(channels);
    let (second, count) = rest.split_at_mut(channels);
    count[0] = (images * plane) as f64;
    let grain = GRAIN / (images * plane).max(1) + 1;
    threads.divide(channels, grain, (Rows::new(first, 1), Rows::new(second, 1)), |range, (first, second)| {
        for ((channel, first), second) in range.zip(first.values).zip(second.values) {
            (*first, *second) = (0..images)
                .map(|image| terms(image * channels + channel))
                .fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
        }
    });
}

/// Overwrites `sums` with this rank's sums of `x` and `x²` and their number. `plane` is H·W.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn sum_inputs(threads: &Threads, x: &[f32], plane: usize, sums: &mut Sums) {
    let images = images(x.len(), sums.channels(), plane);
    sum_planes(threads, images, plane, sums, |at| {
        let x = &x[at * plane..][..plane];
        (sum(x), sum_squares(x))
    });
}

/// Overwrites `y` with `x` normalised by `statistics`, scaled by `gamma` and shifted by `beta`.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn normalise(
    threads: &Threads,
    statistics: &Statistics,
    gamma: &[f32],
    beta: &[f32],
    x: &[f32],
    plane: usize,
    y: &mut [f32],
) {
    let Statistics { mean, inv_std } = statistics;
    let channels = mean.len();
    let images = images(x.len(), channels, plane);
    assert_eq!([gamma.len(), beta.len()], [channels; 2]);
    assert_eq!(y.len(), x.len());
    threads.divide(images * channels, GRAIN / plane + 1, Rows::new(y, plane), |range, y| {
        for (at, y) in range.zip(y.values.chunks_exact_mut(plane)) {
            let c = at % channels;
            let (mean, scale, shift) = (mean[c], gamma[c] * inv_std[c], beta[c]);
            for (y, &x) in y.iter_mut().zip(&x[at * plane..]) {
                *y = (x - mean) * scale + shift;
            }
        }
    });
}

/// Overwrites `sums` with this rank's sums of `dy` and `dy·xhat` and their number.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn sum_gradients(
    threads: &Threads,
    statistics: &Statistics,
    x: &[f32],
    dy: &[f32],
    plane: usize,
    sums: &mut Sums,
) {
    let Statistics { mean, inv_std } = statistics;
    let channels = mean.len();
    let images = images(x.len(), channels, plane);
    assert_eq!(sums.channels(), channels);
    assert_eq!(dy.len(), x.len());
    sum_planes(threads, images, plane, sums, |at| {
        let (x, dy) = (&x[at * plane..][..plane], &dy[at * plane..][..plane]);
        let (mean, inv_std) = (f64::from(mean[at % channels]), f64::from(inv_std[at % channels]));
        (sum(dy), sum_pairs(x, dy, |x, dy| (x - mean) * dy) * inv_std)
    });
}

/// Writes the gradient of `gamma`, from the sums of [`sum_gradients`] *before* they are added up over ranks: the
/// gradients of parameters are averaged later.
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

/// Turns the gradient of the output into that of the input, in place, given [`sum_gradients`] of all ranks.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn backward_input(
    threads: &Threads,
    statistics: &Statistics,
    sums: &Sums,
    gamma: &[f32],
    x: &[f32],
    plane: usize,
    gradient: &mut [f32],
) {
    let Statistics { mean, inv_std } = statistics;
    let channels = mean.len();
    let images = images(x.len(), channels, plane);
    assert_eq!([gamma.len(), sums.channels()], [channels; 2]);
    assert_eq!(gradient.len(), x.len());
    threads.divide(images * channels, GRAIN / plane + 1, Rows::new(gradient, plane), |range, gradient| {
        for (at, gradient) in range.zip(gradient.values.chunks_exact_mut(plane)) {
            let c = at % channels;
            let (mean, scale) = (mean[c], gamma[c] * inv_std[c]);
            let shift = (sums.first()[c] / sums.count()) as f32;
            let slope = (sums.second()[c] / sums.count() * f64::from(inv_std[c])) as f32;
            for (gradient, &x) in gradient.iter_mut().zip(&x[at * plane..]) {
                *gradient = scale * (*gradient - shift - (x - mean) * slope);
            }
        }
    });
}
