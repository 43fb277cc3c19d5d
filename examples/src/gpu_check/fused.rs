//! Layers with their neighbours in one launch: the bits are those of the operations one by one, which other checks
//! compare with the CPU. Only the sums of gradients of images with one channel have another order.

use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::cuda::{self, After, Before, LINEAR, Workspace};
use mgpu_kernels::conv::first::{self, Images, OutputGradient};
use mgpu_kernels::conv::{ConvShape, Padding};
use mgpu_kernels::cuda::{Counters, Memory, Result, StepState, Stream, View};
use mgpu_kernels::dropout::Mask;
use mgpu_kernels::dropout::cuda::Dropout;
use mgpu_kernels::pool::{PoolShape, Rounding};
use mgpu_kernels::{DType, Precision, activation, dropout, pool};

use super::conv::workspace;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::Conv;
use super::values::{multiplied, stored};
use super::{bound, reference};

pub(super) fn check(harness: &mut Harness) -> Outcome {
    for conv in &convs(harness) {
        each(harness, conv)?;
    }
    // Addresses that rule out 16-byte accesses.
    harness.skew = 1;
    let outcome = [Conv::new(2, 8, 6, 16, 3, Padding::Same), Conv::new(2, 1, 6, 32, 3, Padding::Same)]
        .iter()
        .try_for_each(|conv| each(harness, conv));
    harness.skew = 0;
    outcome
}

fn convs(harness: &Harness) -> Vec<Conv> {
    let mut all = vec![
        Conv::new(2, 1, 9, 6, 5, Padding::Same),
        Conv::new(2, 1, 8, 20, 3, Padding::Valid),
        Conv::new(1, 1, 10, 40, 3, Padding::Same),
        Conv::new(2, 8, 7, 16, 3, Padding::Same),
        Conv::new(3, 6, 9, 16, 5, Padding::Valid),
        Conv::new(2, 4, 7, 8, 3, Padding::Same),
        Conv::new(3, 3, 6, 5, 3, Padding::Valid),
        Conv::new(1, 1, 8, 8, 3, Padding::Same),
        Conv::new(1, 1, 11, 33, 5, Padding::Valid),
        Conv::new(1, 1, 9, 20, 5, Padding::Same),
        // More images than blocks.
        Conv::new(270, 1, 5, 32, 3, Padding::Same),
        Conv::dense(5, 72, 16),
        Conv::dense(9, 24, 10),
        // With slices of the depth.
        Conv::new(1, 64, 4, 10, 3, Padding::Same),
        Conv::new(1, 8, 4, 64, 3, Padding::Same),
        Conv::dense(3, 72, 600),
        Conv::dense(3, 600, 10),
    ];
    if !harness.quick {
        all.extend([
            Conv::new(3, 64, 14, 128, 5, Padding::Same),
            Conv::new(3, 128, 7, 128, 3, Padding::Same),
            Conv::new(3, 6, 14, 16, 5, Padding::Valid),
            Conv::new(5, 1, 27, 64, 5, Padding::Same),
            Conv::new(600, 1, 9, 72, 5, Padding::Same),
            Conv::dense(40, 400, 120),
        ]);
    }
    all
}

fn each(harness: &mut Harness, conv: &Conv) -> Outcome {
    for precision in Precision::ALL {
        harness.check("fused forward", conv, precision.name(), |harness, verdict| {
            forward(harness, verdict, conv, precision)
        })?;
        // The many images of one channel are for the passes of first layers only.
        if conv.images < 100 {
            harness.check("fused backward_input", conv, precision.name(), |harness, verdict| {
                backward_input(harness, verdict, conv, precision)
            })?;
        }
        if first::is_supported(&conv.shape, None) {
            harness.check("fused backward_first", conv, precision.name(), |harness, verdict| {
                [false, true]
                    .into_iter()
                    .try_for_each(|pooled| backward_first(harness, verdict, conv, precision, pooled))
            })?;
        }
    }
    Ok(())
}

fn rounding(harness: &mut Harness) -> Rounding {
    [Rounding::Floor, Rounding::Ceil][harness.random.below(2)]
}

fn slope(harness: &mut Harness) -> f32 {
    [LINEAR, 0.0, LEAKY_SLOPE][harness.random.below(3)]
}

/// Dropout of images of `channels` channels and `plane` positions.
fn mask(harness: &mut Harness, channels: usize, plane: usize) -> Mask {
    let [seed, stream, first_sample] = [(); 3].map(|()| harness.random.below(1 << 20) as u64);
    Mask { seed, stream, first_sample, channels, plane }
}

fn state(harness: &mut Harness) -> Result<Memory> {
    let step = harness.random.below(10_000) as u64;
    StepState { step, ..StepState::after(0) }.upload(&harness.stream)
}

fn forward(harness: &mut Harness, verdict: &mut Verdict, conv: &Conv, precision: Precision) -> Result<()> {
    let &Conv { shape, images } = conv;
    let dtype = precision.storage();
    let values = |harness: &mut Harness, len| stored(precision, harness.random.floats(len));
    let (x, w) = (values(harness, images * shape.input_len()), values(harness, shape.weights_len()));
    let b = harness.random.floats(shape.filters);
    let (x, w, b) = (harness.activations(dtype, &x)?, harness.activations(dtype, &w)?, harness.input(&b)?);
    let window =
        PoolShape { height: shape.out_height(), width: shape.out_width(), rounding: rounding(harness) };
    let (slope, state) = (slope(harness), state(harness)?);
    let (sums, counters) = (workspace(harness, conv, precision)?, Counters::new(harness.stream.device())?);
    let space = &Workspace { sums: sums.view(), counters: counters.view(), batch: images };
    for (pooled, drops) in [(false, true), (true, false), (true, true)] {
        if pooled && window.height < 2 {
            continue;
        }
        let plane =
            if pooled { window.out_height() * window.out_width() } else { window.height * window.width };
        let len = images * plane * shape.filters;
        let mask = mask(harness, shape.filters, plane);
        let dropout = drops.then_some(Dropout { probability: 0.25, mask, state: state.view() });
        let raw = images * shape.output_len();
        let outputs = [
            Output::of(dtype, len),
            Output::holding(&vec![0u8; len]),
            Output::of(dtype, len),
            Output::holding(&vec![0u8; len]),
            Output::of(dtype, raw),
        ];
        let found = harness.twice(verdict, &outputs, |stream, outputs| {
            let &[y, chosen, y_apart, chosen_apart, raw] = outputs else { unreachable!("five outputs") };
            let (x, w, b) = (x.view(), w.view(), b.view());
            let after = After { pool: pooled.then_some((&window, chosen)), dropout };
            cuda::forward_fused(stream, &shape, images, precision, [x, w, b, y], slope, &after, space)?;
            cuda::forward(stream, &shape, images, precision, x, w, b, slope, raw, space)?;
            match pooled {
                true => pool::cuda::forward(stream, &window, shape.filters, raw, y_apart, chosen_apart)?,
                false => stream.copy(raw, y_apart)?,
            }
            dropout.map_or(Ok(()), |dropout| dropout::cuda::apply(stream, &dropout, y_apart))
        })?;
        verdict.same("output", &found.floats(0), &found.floats(2));
        verdict.equal("place", found.bytes(1), found.bytes(3));
    }
    Ok(())
}

/// The extents before pooling whose pooled images are the input of a layer: those of a dense layer are flattened, if
/// they have that many features.
fn unpooled(harness: &mut Harness, shape: &ConvShape) -> Option<(PoolShape, usize)> {
    let rounding = rounding(harness);
    let [height, width, channels] = match shape {
        ConvShape { channels: 72, height: 1, .. } => [3, 3, 8],
        ConvShape { channels: 24, height: 1, .. } => [2, 2, 6],
        ConvShape { channels: 400, height: 1, .. } => [5, 5, 16],
        ConvShape { height: 1, .. } => return None,
        ConvShape { channels, height, width, .. } => [*height, *width, *channels],
    };
    let before = |extent: usize| match rounding {
        Rounding::Floor => 2 * extent + extent % 2,
        Rounding::Ceil => 2 * extent - extent % 2,
    };
    Some((PoolShape { height: before(height), width: before(width), rounding }, channels))
}

fn backward_input(
    harness: &mut Harness,
    verdict: &mut Verdict,
    conv: &Conv,
    precision: Precision,
) -> Result<()> {
    let &Conv { shape, images } = conv;
    let dtype = precision.storage();
    let values = |harness: &mut Harness, len| stored(precision, harness.random.floats(len));
    let (w, dy) = (values(harness, shape.weights_len()), values(harness, images * shape.output_len()));
    let x = values(harness, images * shape.input_len());
    let (w, dy) = (harness.activations(dtype, &w)?, harness.activations(dtype, &dy)?);
    let x_memory = harness.activations(dtype, &x)?;
    let chosen: Vec<u8> = x.iter().map(|_| harness.random.below(4) as u8).collect();
    let (slope, state) = ([0.0, LEAKY_SLOPE][harness.random.below(2)], state(harness)?);
    let (sums, counters) = (workspace(harness, conv, precision)?, Counters::new(harness.stream.device())?);
    let space = &Workspace { sums: sums.view(), counters: counters.view(), batch: images };
    for (pooled, drops, activated) in
        [(false, false, true), (false, true, false), (true, false, true), (true, true, true)]
    {
        let Some((window, channels)) = unpooled(harness, &shape) else { continue };
        let plane = window.out_height() * window.out_width();
        assert_eq!(channels * plane, shape.input_len(), "extents of pooled images");
        // Positions inside the images, as a forward pass chooses them.
        let inside = chosen.iter().enumerate().map(|(at, place)| {
            let pixel = at / channels % plane;
            let (i, j) = (pixel / window.out_width(), pixel % window.out_width());
            let below = if 2 * i + 1 < window.height { place & 2 } else { 0 };
            below | if 2 * j + 1 < window.width { place & 1 } else { 0 }
        });
        let chosen = harness.input(&inside.collect::<Vec<u8>>())?;
        let mask = mask(harness, channels, plane);
        let dropout = drops.then_some(Dropout { probability: 0.25, mask, state: state.view() });
        let len = if pooled { images * channels * window.height * window.width } else { x.len() };
        let outputs = [Output::of(dtype, len), Output::of(dtype, len), Output::of(dtype, x.len())];
        let found = harness.twice(verdict, &outputs, |stream, outputs| {
            let &[dx, dx_apart, gradient] = outputs else { unreachable!("three outputs") };
            let (w, dy, y, chosen) = (w.view(), dy.view(), x_memory.view(), chosen.view());
            let before = Before {
                activated: activated.then_some((y, slope)),
                pool: pooled.then_some((&window, chosen)),
                dropout,
            };
            cuda::backward_input_fused(stream, &shape, images, precision, [w, dy, dx], &before, space)?;
            cuda::backward_input(stream, &shape, images, precision, w, dy, gradient, space)?;
            dropout.map_or(Ok(()), |dropout| dropout::cuda::apply(stream, &dropout, gradient))?;
            if pooled {
                return pool::cuda::backward_fused(
                    stream, &window, channels, slope, gradient, y, chosen, dx_apart, None,
                );
            }
            if activated {
                activation::cuda::backward(stream, slope, y, gradient)?;
            }
            stream.copy(gradient, dx_apart)
        })?;
        verdict.same("gradient", &found.floats(0), &found.floats(1));
    }
    Ok(())
}

/// The gradients of weights and bias from that of the pooled and activated output.
fn backward_first(
    harness: &mut Harness,
    verdict: &mut Verdict,
    conv: &Conv,
    precision: Precision,
    pooled: bool,
) -> Result<()> {
    let &Conv { shape, images } = conv;
    let dtype = precision.storage();
    let window =
        PoolShape { height: shape.out_height(), width: shape.out_width(), rounding: rounding(harness) };
    let plane = if pooled { window.out_height() * window.out_width() } else { window.height * window.width };
    let len = images * plane * shape.filters;
    let values = |harness: &mut Harness, len| stored(precision, harness.random.floats(len));
    let x = values(harness, images * shape.input_len());
    let (y, dy) = (values(harness, len), values(harness, len));
    let [x_memory, y, dy] = [&x, &y, &dy].map(|values| harness.activations(dtype, values));
    let (x_memory, y, dy) = (x_memory?, y?, dy?);
    // Positions that are inside every window.
    let raw = values(harness, images * shape.output_len());
    let raw = harness.activations(dtype, &raw)?;
    let chosen = Memory::zeroed(harness.stream.device(), DType::U8, len)?;
    let maxima = Memory::zeroed(harness.stream.device(), dtype, len)?;
    if pooled {
        let (stream, maxima) = (&harness.stream, maxima.view());
        pool::cuda::forward(stream, &window, shape.filters, raw.view(), maxima, chosen.view())?;
    }
    let slope = [0.0, LEAKY_SLOPE][harness.random.below(2)];
    let sums = workspace(harness, conv, precision)?;
    let pool_sums = pool::cuda::workspace_len(harness.stream.device().multiprocessors(), shape.filters);
    let pool_sums = harness.input(&vec![f32::NAN; pool_sums])?;
    let counters = Counters::new(harness.stream.device())?;
    let outputs = [
        Output::of(DType::F32, shape.weights_len()),
        Output::of(DType::F32, shape.filters),
        Output::of(dtype, images * shape.output_len()),
        Output::of(DType::F32, shape.filters),
    ];
    let found = harness.twice(verdict, &outputs, |stream: &Stream, outputs: &[View<'_>]| {
        let &[dw, db, before, db_apart] = outputs else { unreachable!("four outputs") };
        let workspace = Workspace { sums: sums.view(), counters: counters.view(), batch: images };
        let pool = pooled.then_some((&window, chosen.view()));
        let gradient = OutputGradient { dy: dy.view(), activated: Some((y.view(), slope)), pool };
        first::backward(
            stream,
            &shape,
            images,
            precision,
            &Images::Stored(x_memory.view()),
            &gradient,
            &workspace,
            dw,
            Some(db),
        )?;
        if !pooled {
            stream.copy(dy.view(), before)?;
            return cuda::backward_activation(
                stream,
                &shape,
                images,
                precision,
                slope,
                y.view(),
                before,
                &workspace,
                db_apart,
            );
        }
        let bias = pool::cuda::BiasGradient {
            total: db_apart,
            workspace: pool_sums.view(),
            counters: counters.view(),
        };
        let (dy, y, chosen, channels) = (dy.view(), y.view(), chosen.view(), shape.filters);
        pool::cuda::backward_fused(stream, &window, channels, slope, dy, y, chosen, before, Some(&bias))
    })?;
    // These kernels use tensor cores for elements of 16 bits only.
    let x = multiplied(precision, false, &x);
    let before: Vec<f64> = found.floats(2).into_iter().map(f64::from).collect();
    let terms = before.len() / shape.filters;
    let cut = if dtype != DType::F32 && harness.tensor_cores(precision) { bound::cut(terms) } else { 0.0 };
    let bound = bound::sum(terms, DType::F32) + cut;
    let sums = reference::backward_weights(&shape, images, &x, &before);
    verdict.close("gradient", found.floats(0), &sums.values, |i| sums.scale(i), bound);
    let sums = reference::backward_bias(&shape, &before);
    verdict.close("bias's gradient", found.floats(1), &sums.values, |i| sums.scale(i), bound);
    Ok(())
}
