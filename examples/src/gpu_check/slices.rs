//! Layers with few results, whose depth is cut into slices: the bits of an image do not depend on the size of its batch,
//! and values that are not finite reach the results of their image, whichever slice they are in, and no other. The sums
//! themselves are checked with all others (`conv`).

use mgpu_kernels::Precision;
use mgpu_kernels::conv::cuda::{self, LINEAR, Workspace};
use mgpu_kernels::cuda::{Counters, Result};

use super::conv::workspace;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::Conv;
use super::values::stored;

/// Channels and filters of a layer whose passes both have slices in all precisions.
const LONG: usize = 600;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    for (images, inputs, outputs) in [(5, LONG, 10), (3, LONG, LONG), (70, 10, LONG)] {
        let conv = Conv::dense(images, inputs, outputs);
        for precision in Precision::ALL {
            harness.check("slices of a batch", conv, precision.name(), |harness, verdict| {
                smaller_batches(harness, verdict, &conv, precision)
            })?;
            harness.check("slices not finite", conv, precision.name(), |harness, verdict| {
                not_finite(harness, verdict, &conv, precision)
            })?;
        }
    }
    Ok(())
}

/// Runs forward pass and gradient of the input on the first `images` images of a batch.
fn passes(
    harness: &Harness,
    verdict: &mut Verdict,
    conv: &Conv,
    precision: Precision,
    images: usize,
    [x, w, dy]: [&[f32]; 3],
) -> Result<[Vec<f32>; 2]> {
    let (shape, dtype) = (&conv.shape, precision.storage());
    let [x_len, y_len] = [images * shape.input_len(), images * shape.output_len()];
    let x = harness.activations(dtype, &x[..x_len])?;
    let (w, dy) = (harness.activations(dtype, w)?, harness.activations(dtype, &dy[..y_len])?);
    let bias = harness.input(&vec![0.25f32; shape.filters])?;
    let (sums, counters) = (workspace(harness, conv, precision)?, Counters::new(harness.stream.device())?);
    let space = &Workspace { sums: sums.view(), counters: counters.view(), batch: conv.images };
    let outputs = [Output::of(dtype, y_len), Output::of(dtype, x_len)];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let &[y, dx] = outputs else { unreachable!("two outputs") };
        let (x, w, dy, bias) = (x.view(), w.view(), dy.view(), bias.view());
        cuda::forward(stream, shape, images, precision, x, w, bias, LINEAR, y, space)?;
        cuda::backward_input(stream, shape, images, precision, w, dy, dx, space)
    })?;
    Ok([found.floats(0), found.floats(1)])
}

fn smaller_batches(
    harness: &mut Harness,
    verdict: &mut Verdict,
    conv: &Conv,
    precision: Precision,
) -> Result<()> {
    let operands = operands(harness, conv, precision);
    let operands = operands.each_ref().map(Vec::as_slice);
    let all = passes(harness, verdict, conv, precision, conv.images, operands)?;
    for images in [1, conv.images - 1] {
        let fewer = passes(harness, verdict, conv, precision, images, operands)?;
        for (what, (all, fewer)) in ["output", "gradient"].into_iter().zip(all.iter().zip(&fewer)) {
            verdict.same(what, fewer, &all[..fewer.len()]);
        }
    }
    Ok(())
}

fn not_finite(harness: &mut Harness, verdict: &mut Verdict, conv: &Conv, precision: Precision) -> Result<()> {
    let [mut x, w, mut dy] = operands(harness, conv, precision);
    let finite = passes(harness, verdict, conv, precision, conv.images, [&x, &w, &dy])?;
    let image = conv.images / 2;
    for value in [f32::NAN, f32::INFINITY] {
        for values in [&mut x, &mut dy] {
            let len = values.len() / conv.images;
            let at = image * len + [0, len - 1, harness.random.below(len)][harness.random.below(3)];
            values[at] = value;
        }
        let found = passes(harness, verdict, conv, precision, conv.images, [&x, &w, &dy])?;
        for (what, (found, finite)) in ["output", "gradient"].into_iter().zip(found.iter().zip(&finite)) {
            let len = found.len() / conv.images;
            let own = image * len..(image + 1) * len;
            if let Some(at) = own.clone().find(|at| found[*at].is_finite()) {
                verdict.problem(format!("{what} {at} is {:e} in spite of {value}", found[at]));
            }
            verdict.same(what, &found[..own.start], &finite[..own.start]);
            verdict.same(what, &found[own.end..], &finite[own.end..]);
        }
    }
    Ok(())
}

/// Input, weights, of which none is zero, and the gradient of the output.
fn operands(harness: &mut Harness, conv: &Conv, precision: Precision) -> [Vec<f32>; 3] {
    let &Conv { ref shape, images } = conv;
    let lens = [images * shape.input_len(), shape.weights_len(), images * shape.output_len()];
    let [x, mut w, dy] = lens.map(|len| stored(precision, harness.random.floats(len)));
    w.iter_mut().filter(|value| **value == 0.0).for_each(|value| *value = 1.0);
    [x, w, dy]
}
