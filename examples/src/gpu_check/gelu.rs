//! GELU: the results of the CPU, within the bounds of both.

use mgpu_kernels::gelu::{cpu, cuda};

use super::bound;
use super::harness::{Harness, Outcome, Output};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    // Whole packs, remainders, and less than a pack.
    for len in [1, 7, 4096, if harness.quick { 5003 } else { 1_000_003 }] {
        each(harness, len)?;
    }
    harness.skew = 1;
    let outcome = each(harness, 1000);
    harness.skew = 0;
    outcome
}

/// Twice the documented bounds, because Φ and φ have errors on both sides.
const BOUND: f64 = 4e-7;

fn each(harness: &mut Harness, len: usize) -> Outcome {
    for (dtype, precision) in Harness::types() {
        let values = |harness: &mut Harness, scale: f32| -> Vec<f32> {
            let values = harness.random.floats(len).into_iter().map(|value| scale * value);
            values.map(|value| round_to(dtype, value)).collect()
        };
        harness.check("gelu forward", len, precision, |harness, verdict| {
            let x = values(harness, 8.0);
            let memory = harness.activations(dtype, &x)?;
            let found = harness.twice(verdict, &[Output::of(dtype, len)], |stream, outputs| {
                cuda::forward(stream, memory.view(), outputs[0])
            })?;
            let mut y = vec![0.0; len];
            cpu::forward(&harness.threads, &x, &mut y);
            let y: Vec<f64> = y.into_iter().map(f64::from).collect();
            let scale = |i: usize| f64::from(x[i].abs());
            verdict.close("output", found.floats(0), &y, scale, BOUND + bound::kept(dtype));
            Ok(())
        })?;
        harness.check("gelu backward", len, precision, |harness, verdict| {
            let (x, dy) = (values(harness, 8.0), values(harness, 1.0));
            let memory = harness.activations(dtype, &x)?;
            let outputs = [Output::activations(dtype, &dy)];
            let found = harness.twice(verdict, &outputs, |stream, outputs| {
                cuda::backward(stream, memory.view(), outputs[0])
            })?;
            let mut dx = dy.clone();
            cpu::backward(&harness.threads, &x, &mut dx);
            let dx: Vec<f64> = dx.into_iter().map(f64::from).collect();
            // The derivative is at most 1.13, and it is the sum of an error of Φ and one of x · φ(x).
            let scale = |i: usize| 1.13 * f64::from(dy[i].abs());
            verdict.close("gradient", found.floats(0), &dx, scale, 2.0 * BOUND + bound::kept(dtype));
            Ok(())
        })?;
    }
    Ok(())
}
