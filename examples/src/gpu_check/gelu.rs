//! GELU: what the CPU computes, within the bounds of both.

use mgpu_kernels::gelu::{cpu, cuda};

use super::bench::{Bench, Outcome, Output};
use super::bound;
use super::values::to_bf16;

pub(super) fn check(bench: &mut Bench) -> Outcome {
    // Whole packs, rests, and less than a pack.
    for len in [1, 7, 4096, if bench.quick { 5003 } else { 1_000_003 }] {
        each(bench, len)?;
    }
    bench.skew = 1;
    let outcome = each(bench, 1000);
    bench.skew = 0;
    outcome
}

/// Bounds of the contract, twice: Φ and φ are off by so much on either side.
const BOUND: f64 = 4e-7;

fn each(bench: &mut Bench, len: usize) -> Outcome {
    for (dtype, precision) in Bench::types() {
        let bf16 = dtype == mgpu_kernels::DType::Bf16;
        let values = |bench: &mut Bench, scale: f32| -> Vec<f32> {
            let values = bench.random.floats(len).into_iter().map(|value| scale * value);
            values.map(|value| if bf16 { to_bf16(value) } else { value }).collect()
        };
        bench.check("gelu forward", len, precision, |bench, judge| {
            let x = values(bench, 8.0);
            let memory = bench.activations(dtype, &x)?;
            let found = bench.twice(judge, &[Output::of(dtype, len)], |stream, outputs| {
                cuda::forward(stream, memory.view(), outputs[0])
            })?;
            let mut y = vec![0.0; len];
            cpu::forward(&bench.threads, &x, &mut y);
            let y: Vec<f64> = y.into_iter().map(f64::from).collect();
            let scale = |i: usize| f64::from(x[i].abs());
            judge.close("output", found.floats(0), &y, scale, BOUND + bound::kept(bf16));
            Ok(())
        })?;
        bench.check("gelu backward", len, precision, |bench, judge| {
            let (x, dy) = (values(bench, 8.0), values(bench, 1.0));
            let memory = bench.activations(dtype, &x)?;
            let outputs = [Output::activations(dtype, &dy)];
            let found = bench.twice(judge, &outputs, |stream, outputs| {
                cuda::backward(stream, memory.view(), outputs[0])
            })?;
            let mut dx = dy.clone();
            cpu::backward(&bench.threads, &x, &mut dx);
            let dx: Vec<f64> = dx.into_iter().map(f64::from).collect();
            // The slope is 1.13 at most, and the sum of an error of Φ and one of x · φ(x).
            let scale = |i: usize| 1.13 * f64::from(dy[i].abs());
            judge.close("gradient", found.floats(0), &dx, scale, 2.0 * BOUND + bound::kept(bf16));
            Ok(())
        })?;
    }
    Ok(())
}
