//! Max pooling, alone and fused with bias and activation.

use mgpu_kernels::activation::{self, LEAKY_SLOPE};
use mgpu_kernels::cuda::{Counters, Result};
use mgpu_kernels::pool::{PoolShape, Rounding, cpu, cuda};
use mgpu_kernels::{DType, activation::cpu as activate};

use super::bound;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::{Images, Shapes, awkward_images};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut shapes = Vec::new();
    if !harness.quick {
        shapes = Shapes::of_networks(3).pools;
    }
    for _ in 0..if harness.quick { 2 } else { 8 } {
        let images = awkward_images(&mut harness.random);
        shapes.extend([Rounding::Floor, Rounding::Ceil].map(|rounding| (images, rounding)));
    }
    shapes.push((Images { images: 2, channels: 16, height: 7, width: 7 }, Rounding::Ceil));
    shapes.iter().try_for_each(|(images, rounding)| each(harness, images, *rounding))?;
    harness.skew = 1;
    let images = Images { images: 2, channels: 8, height: 5, width: 6 };
    let outcome = each(harness, &images, Rounding::Ceil);
    harness.skew = 0;
    outcome
}

fn each(harness: &mut Harness, images: &Images, rounding: Rounding) -> Outcome {
    let shape = PoolShape { height: images.height, width: images.width, rounding };
    let text = format!("{images} {}", if rounding == Rounding::Ceil { "ceil" } else { "floor" });
    let slope = [activation_slope(), 0.0, LEAKY_SLOPE][harness.random.below(3)];
    for (dtype, precision) in Harness::types() {
        harness.check("pool forward", &text, precision, |harness, verdict| {
            forward(harness, verdict, images, &shape, dtype, None)
        })?;
        harness.check("pool forward_fused", &text, precision, |harness, verdict| {
            forward(harness, verdict, images, &shape, dtype, Some(slope))
        })?;
        harness.check("pool backward", &text, precision, |harness, verdict| {
            backward(harness, verdict, images, &shape, dtype, None)
        })?;
        harness.check("pool backward_fused", &text, precision, |harness, verdict| {
            backward(harness, verdict, images, &shape, dtype, Some(slope))
        })?;
    }
    Ok(())
}

/// The slope of the identity.
fn activation_slope() -> f32 {
    1.0
}

fn values(harness: &mut Harness, dtype: DType, len: usize) -> Vec<f32> {
    // Few different numbers, so that windows have ties.
    let values = (0..len).map(|_| harness.random.below(64) as f32 / 16.0 - 2.0);
    values.map(|value| round_to(dtype, value)).collect()
}

fn forward(
    harness: &mut Harness,
    verdict: &mut Verdict,
    images: &Images,
    shape: &PoolShape,
    dtype: DType,
    fused: Option<f32>,
) -> Result<()> {
    let channels = images.channels;
    let outputs_len = images.images * channels * shape.out_height() * shape.out_width();
    let x = values(harness, dtype, images.len());
    let bias = harness.random.floats(channels);
    let (x_memory, bias_memory) = (harness.activations(dtype, &x)?, harness.input(&bias)?);
    let outputs = [Output::of(dtype, outputs_len), Output::of(DType::U8, outputs_len)];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let (x, y, chosen) = (x_memory.view(), outputs[0], outputs[1]);
        match fused {
            None => cuda::forward(stream, shape, channels, x, y, chosen),
            Some(slope) => cuda::forward_fused(stream, shape, slope, bias_memory.view(), x, y, chosen),
        }
    })?;
    let mut x = x;
    if let Some(slope) = fused {
        x.iter_mut().zip(bias.iter().cycle()).for_each(|(x, bias)| *x += bias);
        if slope != activation_slope() {
            activate::forward(&harness.threads, slope, &mut x);
        }
        x.iter_mut().for_each(|x| *x = round_to(dtype, *x));
    }
    let (mut y, mut chosen) = (vec![0.0; outputs_len], vec![0; outputs_len]);
    cpu::forward(&harness.threads, shape, channels, &x, &mut y, &mut chosen);
    verdict.same("maximum", &found.floats(0), &y);
    verdict.equal("place", found.bytes(1), &chosen);
    Ok(())
}

fn backward(
    harness: &mut Harness,
    verdict: &mut Verdict,
    images: &Images,
    shape: &PoolShape,
    dtype: DType,
    fused: Option<f32>,
) -> Result<()> {
    let channels = images.channels;
    let outputs_len = images.images * channels * shape.out_height() * shape.out_width();
    // Positions as a forward pass returns them: inside the images.
    let x = harness.random.floats(images.len());
    let (mut y, mut chosen) = (vec![0.0; outputs_len], vec![0; outputs_len]);
    cpu::forward(&harness.threads, shape, channels, &x, &mut y, &mut chosen);
    y.iter_mut().for_each(|y| *y = round_to(dtype, *y));
    let dy = values(harness, dtype, outputs_len);
    let (y_memory, dy_memory) = (harness.activations(dtype, &y)?, harness.activations(dtype, &dy)?);
    let chosen_memory = harness.input(&chosen)?;
    let counters = Counters::new(harness.stream.device())?;
    let len = cuda::workspace_len(harness.stream.device().multiprocessors(), channels);
    let workspace = harness.input(&vec![f32::NAN; len])?;
    let outputs = [Output::of(dtype, images.len()), Output::holding(&vec![0.0f32; channels])];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let (dy, chosen, dx) = (dy_memory.view(), chosen_memory.view(), outputs[0]);
        match fused {
            None => cuda::backward(stream, shape, channels, dy, chosen, dx),
            Some(slope) => {
                let (workspace, counters) = (workspace.view(), counters.view());
                let bias = cuda::BiasGradient { total: outputs[1], workspace, counters };
                let y = y_memory.view();
                cuda::backward_fused(stream, shape, channels, slope, dy, y, chosen, dx, Some(&bias))
            }
        }
    })?;
    let mut dy = dy;
    if let Some(slope) = fused {
        activation::cpu::backward(&harness.threads, slope, &y, &mut dy);
        dy.iter_mut().for_each(|dy| *dy = round_to(dtype, *dy));
    }
    if fused.is_some() {
        let (mut sums, mut squares) = (vec![0.0; channels], vec![0.0; channels]);
        for (i, dy) in dy.iter().map(|dy| f64::from(*dy)).enumerate() {
            sums[i % channels] += dy;
            squares[i % channels] += dy * dy;
        }
        let scale = |i: usize| f64::max(squares[i].sqrt(), sums[i].abs());
        let bound = bound::sum(dy.len() / channels, DType::F32);
        verdict.close("bias's gradient", found.floats(1), &sums, scale, bound);
    }
    let mut dx = vec![0.0; images.len()];
    cpu::backward(&harness.threads, shape, channels, &dy, &chosen, &mut dx);
    // A product with slope 0 keeps the gradient's sign, so zeros are normalised.
    let plain = |values: Vec<f32>| values.into_iter().map(|value| value + 0.0).collect::<Vec<_>>();
    verdict.same("gradient", &plain(found.floats(0)), &plain(dx));
    Ok(())
}
