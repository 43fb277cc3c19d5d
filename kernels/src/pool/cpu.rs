//! Max-pooling on the CPU: threads own planes.

use super::Shape;
use crate::threads::{Rows, Threads};

/// Input elements below which another thread does not pay.
const GRAIN: usize = 1 << 14;

fn planes(shape: &Shape, input: usize, output: usize, choices: usize) -> usize {
    let planes = input / shape.input_len();
    assert_eq!(input, planes * shape.input_len(), "input of a pooling layer");
    assert_eq!(output, planes * shape.output_len(), "output of a pooling layer");
    assert_eq!(choices, output, "choices of a pooling layer");
    planes
}

/// Overwrites `y` with the maxima and `chosen` with their places in the windows.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn forward(threads: &Threads, shape: &Shape, x: &[f32], y: &mut [f32], chosen: &mut [u8]) {
    let planes = planes(shape, x.len(), y.len(), chosen.len());
    let (width, out) = (shape.width, shape.out_width());
    let outputs = (Rows::new(y, shape.output_len()), Rows::new(chosen, shape.output_len()));
    threads.divide(planes, GRAIN / shape.input_len() + 1, outputs, |range, (y, chosen)| {
        let x = &x[range.start * shape.input_len()..range.end * shape.input_len()];
        let y = y.values.chunks_exact_mut(shape.output_len());
        let chosen = chosen.values.chunks_exact_mut(shape.output_len());
        for ((x, y), chosen) in x.chunks_exact(shape.input_len()).zip(y).zip(chosen) {
            let rows = y.chunks_exact_mut(out).zip(chosen.chunks_exact_mut(out));
            for ((y, chosen), pair) in rows.zip(x.chunks(2 * width)) {
                // With one input row left, the window's lower half repeats the upper and is never chosen.
                let (upper, lower) = pair.split_at(width);
                pool_rows(upper, if lower.is_empty() { upper } else { lower }, y, chosen);
            }
        }
    });
}

/// One row of outputs from two rows of inputs.
fn pool_rows(upper: &[f32], lower: &[f32], y: &mut [f32], chosen: &mut [u8]) {
    let windows = upper.chunks_exact(2).zip(lower.chunks_exact(2));
    for (((y, chosen), upper), lower) in
        y.iter_mut().zip(chosen.iter_mut()).zip(upper.chunks(2)).zip(lower.chunks(2)).skip(windows.len())
    {
        // The half window of the last column under ceiling rounding.
        let below = lower[0] > upper[0];
        (*y, *chosen) = if below { (lower[0], 2) } else { (upper[0], 0) };
    }
    for ((y, chosen), (upper, lower)) in y.iter_mut().zip(chosen).zip(windows) {
        let (top, top_place) = if upper[1] > upper[0] { (upper[1], 1) } else { (upper[0], 0) };
        let (bottom, bottom_place) = if lower[1] > lower[0] { (lower[1], 3) } else { (lower[0], 2) };
        (*y, *chosen) = if bottom > top { (bottom, bottom_place) } else { (top, top_place) };
    }
}

/// Overwrites `dx` with the gradient of the input, given the places that the forward pass chose.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward(threads: &Threads, shape: &Shape, dy: &[f32], chosen: &[u8], dx: &mut [f32]) {
    let planes = planes(shape, dx.len(), dy.len(), chosen.len());
    let (width, out) = (shape.width, shape.out_width());
    let outputs = Rows::new(dx, shape.input_len());
    threads.divide(planes, GRAIN / shape.input_len() + 1, outputs, |range, dx| {
        dx.values.fill(0.0);
        let of_part = range.start * shape.output_len()..range.end * shape.output_len();
        let dy = dy[of_part.clone()].chunks_exact(shape.output_len());
        let chosen = chosen[of_part].chunks_exact(shape.output_len());
        for ((dx, dy), chosen) in dx.values.chunks_exact_mut(shape.input_len()).zip(dy).zip(chosen) {
            let rows = dy.chunks_exact(out).zip(chosen.chunks_exact(out));
            for ((dy, chosen), pair) in rows.zip(dx.chunks_mut(2 * width)) {
                for (j, (&gradient, &place)) in dy.iter().zip(chosen).enumerate() {
                    pair[usize::from(place / 2) * width + 2 * j + usize::from(place % 2)] = gradient;
                }
            }
        }
    });
}
