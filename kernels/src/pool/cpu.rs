//! Max-pooling on the CPU: threads own images, vectors are channels.
//!
//! For pooling layers that do not follow a convolution. After a convolution, [`crate::conv::cpu`] pools its outputs
//! while they are in the cache.

use super::PoolShape;
use crate::Storage;
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Fewer input elements are not worth another thread.
const GRAIN: usize = 1 << 14;

fn images(shape: &PoolShape, channels: usize, input: usize, output: usize, chosen: usize) -> usize {
    let image = shape.input_len() * channels;
    let images = input / image;
    assert_eq!(input, images * image, "input of a pooling layer");
    assert_eq!(output, images * shape.output_len() * channels, "output of a pooling layer");
    assert_eq!(chosen, output, "chosen positions of a pooling layer");
    images
}

/// Overwrites `y` with the maxima and `chosen` with their positions in the windows.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn forward<E: Storage>(
    threads: &Threads,
    shape: &PoolShape,
    channels: usize,
    x: &[E],
    y: &mut [E],
    chosen: &mut [u8],
) {
    E::pool_forward(threads, shape, channels, x, y, chosen);
}

pub(crate) fn forward_as<E: Storage>(
    threads: &Threads,
    shape: &PoolShape,
    channels: usize,
    x: &[E],
    y: &mut [E],
    chosen: &mut [u8],
) {
    let images = images(shape, channels, x.len(), y.len(), chosen.len());
    let (input, output) = (shape.input_len() * channels, shape.output_len() * channels);
    let outputs = (Rows::new(y, output), Rows::new(chosen, output));
    threads.divide(images, GRAIN / input.max(1) + 1, outputs, |range, (y, chosen)| {
        let x = &x[range.start * input..range.end * input];
        dispatch(Forward { shape, channels, x, y: y.values, chosen: chosen.values });
    });
}

struct Forward<'a, E> {
    shape: &'a PoolShape,
    channels: usize,
    x: &'a [E],
    y: &'a mut [E],
    chosen: &'a mut [u8],
}

impl<E: Storage> Task for Forward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Forward { shape, channels, x, y, chosen } = self;
        let pixels = y.chunks_exact_mut(channels).zip(chosen.chunks_exact_mut(channels));
        for (at, (y, chosen)) in pixels.enumerate() {
            let pixel = |place: usize| &x[shape.pixel(at, place) * channels..][..channels];
            // Positions beyond the edge repeat another one, and are not larger than it.
            let window = [pixel(0), pixel(1), pixel(2), pixel(3)];
            for c in 0..channels {
                let (mut best, mut place) = (window[0][c], 0);
                for (value, number) in [(window[1][c], 1), (window[2][c], 2), (window[3][c], 3)] {
                    (best, place) =
                        if value.widen() > best.widen() { (value, number) } else { (best, place) };
                }
                (y[c], chosen[c]) = (best, place);
            }
        }
    }
}

/// Overwrites `dx` with the gradient of the input, given the positions that the forward pass chose.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward<E: Storage>(
    threads: &Threads,
    shape: &PoolShape,
    channels: usize,
    dy: &[E],
    chosen: &[u8],
    dx: &mut [E],
) {
    E::pool_backward(threads, shape, channels, dy, chosen, dx);
}

pub(crate) fn backward_as<E: Storage>(
    threads: &Threads,
    shape: &PoolShape,
    channels: usize,
    dy: &[E],
    chosen: &[u8],
    dx: &mut [E],
) {
    let images = images(shape, channels, dx.len(), dy.len(), chosen.len());
    let (input, output) = (shape.input_len() * channels, shape.output_len() * channels);
    threads.divide(images, GRAIN / input.max(1) + 1, Rows::new(dx, input), |range, dx| {
        let part = range.start * output..range.end * output;
        dispatch(Backward { shape, channels, dy: &dy[part.clone()], chosen: &chosen[part], dx: dx.values });
    });
}

struct Backward<'a, E> {
    shape: &'a PoolShape,
    channels: usize,
    dy: &'a [E],
    chosen: &'a [u8],
    dx: &'a mut [E],
}

impl<E: Storage> Task for Backward<'_, E> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Backward { shape, channels, dy, chosen, dx } = self;
        dx.fill(E::default());
        let pixels = dy.chunks_exact(channels).zip(chosen.chunks_exact(channels));
        for (at, (dy, chosen)) in pixels.enumerate() {
            let own = shape.pixel(at, 0);
            for place in 0..4u8 {
                let pixel = shape.pixel(at, place.into());
                // A position beyond the edge is never chosen, and the pixel used instead belongs to another position.
                if place > 0 && pixel == own {
                    continue;
                }
                for ((dx, dy), chosen) in dx[pixel * channels..][..channels].iter_mut().zip(dy).zip(chosen) {
                    *dx = if *chosen == place { *dy } else { *dx };
                }
            }
        }
    }
}
