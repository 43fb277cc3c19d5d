//! Layers as networks use them: with the fastest kernels, including those of libraries.
//!
//! A library may sum in blocks or transform (Winograd, FFT), truncates operands to TF32 instead of rounding them, and
//! rounds to 16 bits before a bias is added or a gradient is widened. So the bounds are wider here: they detect wrong
//! results (layout, dtype), not different rounding.

use mgpu_kernels::DType;
use mgpu_kernels::Precision;
use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::{ConvShape, Padding, gpu};
use mgpu_kernels::cuda::{AutotuneOptions, Memory, Result};

use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::{Conv, Shapes};
use super::values::stored;
use super::{bound, reference};

use crate::print::outln;

/// The checks, except in `--quick` without `--only` that names them: cuDNN's search among its algorithms takes long,
/// most of all under a sanitizer.
pub(super) fn check(harness: &mut Harness) -> Outcome {
    if harness.quick && !harness.names("layer") {
        return Ok(());
    }
    let mut convs = vec![Conv::dense(6, 72, 40)];
    if harness.quick {
        let shape =
            ConvShape { channels: 8, height: 7, width: 6, filters: 16, kernel: 3, padding: Padding::Same };
        convs.push(Conv { shape, images: 2 });
    } else {
        convs.extend(Shapes::of_networks(4).convs);
    }
    for conv in convs.into_iter().filter(|conv| conv.shape.channels > 1) {
        for precision in Precision::ALL {
            let name = if conv.is_dense() { "dense layers" } else { "conv layers" };
            harness.check(name, conv, precision.name(), |harness, verdict| {
                each(harness, verdict, &conv, precision)
            })?;
        }
    }
    Ok(())
}

/// [`bound::sum`], widened for libraries.
fn bound(terms: usize, precision: Precision) -> f64 {
    let operands = match precision {
        Precision::F32 => 0.0,
        // Truncation makes each operand too small by up to 2^-10 of its magnitude.
        Precision::Tf32 => 6.0 / f64::from(1 << 10),
        // Product, bias and activation are each rounded.
        Precision::Bf16 | Precision::F16 => 3.0 * bound::kept(precision.storage()),
    };
    16.0 * bound::sum(terms, DType::F32) + operands
}

fn each(harness: &mut Harness, verdict: &mut Verdict, conv: &Conv, precision: Precision) -> Result<()> {
    let &Conv { shape, images } = conv;
    let dtype = precision.storage();
    let slope = [1.0, 0.0, LEAKY_SLOPE][harness.random.below(3)];
    let layer =
        gpu::Conv::new(&harness.stream, shape, images, precision, slope, true, AutotuneOptions::default())?;
    // It reports times, which mean nothing on a fake GPU.
    if !harness.fake() {
        outln!("       {}", layer.describe());
    }
    let x = stored(precision, harness.random.floats(images * shape.input_len()));
    let w = stored(precision, harness.random.floats(shape.weights_len()));
    let dy = stored(precision, harness.random.floats(images * shape.output_len()));
    let b = harness.random.floats(shape.filters);
    let [x_memory, w_memory, dy_memory] = [&x, &w, &dy].map(|values| harness.activations(dtype, values));
    let (x_memory, w_memory, dy_memory) = (x_memory?, w_memory?, dy_memory?);
    let b_memory = harness.input(&b)?;
    let space = layer.workspace_bytes().div_ceil(4).max(1);
    let space = Memory::from_slice(&harness.stream, &vec![f32::NAN; space])?;
    let (x_view, w_view, b_view) = (x_memory.view(), w_memory.view(), b_memory.view());
    let (dy_view, space) = (dy_memory.view(), space.view());
    let outputs = [
        Output::of(dtype, dy.len()),
        Output::of(dtype, x.len()),
        Output::of(DType::F32, w.len()),
        Output::of(DType::F32, shape.filters),
    ];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let &[y, dx, dw, db] = outputs else { unreachable!("four outputs") };
        layer.forward(stream, images, x_view, w_view, b_view, y, space)?;
        layer.backward_input(stream, images, w_view, dy_view, dx, space)?;
        layer.backward_parameters(stream, images, x_view, dy_view, dw, db, space)
    })?;
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|value| f64::from(*value)).collect() };
    let (x, w, b, dy) = (wide(&x), wide(&w), wide(&b), wide(&dy));
    let in_place = shape.kernel * shape.kernel;
    let pixels = dy.len() / shape.filters;

    let y = reference::forward(&shape, images, &x, &w, &b);
    let activate = |value: &f64| if *value > 0.0 { *value } else { value * f64::from(slope) };
    let expected: Vec<f64> = y.values.iter().map(activate).collect();
    let allowed = bound(shape.filter_len(), precision);
    verdict.close("output", found.floats(0), &expected, |i| y.scale(i), allowed);
    let dx = reference::backward_input(&shape, images, &w, &dy);
    let allowed = bound(shape.filters * in_place, precision);
    verdict.close("input's gradient", found.floats(1), &dx.values, |i| dx.scale(i), allowed);
    let dw = reference::backward_weights(&shape, images, &x, &dy);
    verdict.close(
        "weights' gradient",
        found.floats(2),
        &dw.values,
        |i| dw.scale(i),
        bound(pixels, precision),
    );
    let db = reference::backward_bias(&shape, &dy);
    verdict.close("bias's gradient", found.floats(3), &db.values, |i| db.scale(i), bound(pixels, precision));
    Ok(())
}
