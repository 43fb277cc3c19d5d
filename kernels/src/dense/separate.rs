//! The passes of a dense layer one by one, by the `gemm` crate: what networks use until they use [`Dense`](super::cpu::Dense).
//!
//! Threads share the longer side of the result.

use super::Shape;
use crate::gemm::{Existing, Matrix, multiply_parallel};
use crate::threads::{Rows, Threads};

fn samples(len: usize, features: usize) -> usize {
    assert_eq!(len % features, 0, "{len} elements are no whole number of samples of {features}");
    len / features
}

/// Overwrites `y` with `x · Wᵀ + b`.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn forward(threads: &Threads, shape: &Shape, x: &[f32], weights: &[f32], bias: &[f32], y: &mut [f32]) {
    let samples = samples(x.len(), shape.inputs);
    assert_eq!(weights.len(), shape.outputs * shape.inputs);
    assert_eq!(bias.len(), shape.outputs);
    assert_eq!(y.len(), samples * shape.outputs);
    let x = Matrix::new(x, samples, shape.inputs);
    let weights = Matrix::new(weights, shape.outputs, shape.inputs);
    multiply_parallel(threads, y, x, weights.transposed(), Existing::Replace);
    for row in y.chunks_exact_mut(shape.outputs) {
        for (y, &bias) in row.iter_mut().zip(bias) {
            *y += bias;
        }
    }
}

/// Overwrites `dw` with the gradient of the weights, summed over all samples.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_weights(threads: &Threads, shape: &Shape, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    let samples = samples(x.len(), shape.inputs);
    assert_eq!(dy.len(), samples * shape.outputs);
    assert_eq!(dw.len(), shape.outputs * shape.inputs);
    let dy = Matrix::new(dy, samples, shape.outputs);
    let x = Matrix::new(x, samples, shape.inputs);
    multiply_parallel(threads, dw, dy.transposed(), x, Existing::Replace);
}

/// Overwrites `db` with the gradient of the bias, summed over all samples.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_bias(threads: &Threads, shape: &Shape, dy: &[f32], db: &mut [f32]) {
    /// Columns summed together, so that each visit of a row of `dy` uses a whole run of it.
    const COLUMNS: usize = 16;
    let samples = samples(dy.len(), shape.outputs);
    assert_eq!(db.len(), shape.outputs);
    let grain = (1 << 15) / samples.max(1) + 1;
    threads.divide(shape.outputs, grain, Rows::new(db, 1), |range, db| {
        for (start, db) in range.step_by(COLUMNS).zip(db.values.chunks_mut(COLUMNS)) {
            let mut sums = [0.0f64; COLUMNS];
            for row in dy.chunks_exact(shape.outputs) {
                for (sum, &value) in sums.iter_mut().zip(&row[start..start + db.len()]) {
                    *sum += f64::from(value);
                }
            }
            for (db, sum) in db.iter_mut().zip(sums) {
                *db = sum as f32;
            }
        }
    });
}

/// Overwrites `dx` with the gradient of the input.
///
/// # Panics
/// If the lengths do not fit `shape`.
pub fn backward_input(threads: &Threads, shape: &Shape, weights: &[f32], dy: &[f32], dx: &mut [f32]) {
    let samples = samples(dy.len(), shape.outputs);
    assert_eq!(weights.len(), shape.outputs * shape.inputs);
    assert_eq!(dx.len(), samples * shape.inputs);
    let dy = Matrix::new(dy, samples, shape.outputs);
    let weights = Matrix::new(weights, shape.outputs, shape.inputs);
    multiply_parallel(threads, dx, dy, weights, Existing::Replace);
}
