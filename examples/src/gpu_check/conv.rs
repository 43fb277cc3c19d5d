//! Convolutions and dense layers: all passes in all precisions, with this crate's kernels.

use mgpu_kernels::DType;
use mgpu_kernels::Precision;
use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::{ConvShape, Padding, cuda};
use mgpu_kernels::cuda::{Counters, Memory, Result};
use mgpu_kernels::dense;

use super::harness::{Harness, Outcome, Output};
use super::shapes::{Conv, Shapes, awkward_conv};
use super::values::{multiplied, stored};
use super::{bound, reference};

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut convs = Vec::new();
    if harness.quick {
        convs.extend([
            Conv::new(2, 1, 9, 6, 5, Padding::Same),
            Conv::new(1, 1, 8, 40, 5, Padding::Valid),
            Conv::new(2, 1, 6, 33, 3, Padding::Same),
            Conv::new(1, 1, 7, 8, 3, Padding::Valid),
            Conv::new(1, 1, 8, 20, 5, Padding::Valid),
            Conv::new(1, 1, 7, 12, 3, Padding::Same),
            Conv::new(2, 8, 7, 16, 3, Padding::Same),
            Conv::dense(5, 72, 16),
        ]);
        convs.extend((0..2).map(|_| awkward_conv(&mut harness.random)));
    } else {
        convs.extend(Shapes::of_networks(2).convs);
        convs.extend((0..24).map(|_| awkward_conv(&mut harness.random)));
        convs.extend([Conv::dense(128, 6272, 128), Conv::dense(37, 200, 72)]);
        // Slices of the depth on many tiles: the last layers of networks.
        convs.extend(
            [(1024, 1152, 10), (128, 4800, 10), (1024, 120, 84), (200, 3000, 250), (300, 136, 1030)]
                .map(|(samples, inputs, outputs)| Conv::dense(samples, inputs, outputs)),
        );
        convs.extend([8, 12].map(|filters| Conv::new(3, 1, 11, filters, 3, Padding::Same)));
        convs.push(Conv::new(3, 1, 11, 12, 5, Padding::Same));
    }
    // Fewer channels than 16 bytes hold; the last one has several slices.
    convs.extend([
        Conv::new(2, 2, 8, 24, 3, Padding::Same),
        Conv::new(1, 4, 7, 72, 1, Padding::Valid),
        Conv::new(12, 6, 12, 24, 5, Padding::Valid),
    ]);
    // The depth is cut into slices: of the forward pass, with any number of filters, and of the gradient of the input.
    convs.extend([
        Conv::dense(3, 600, 10),
        Conv::dense(1, 4136, 1),
        Conv::dense(70, 515, 7),
        Conv::dense(2, 84, 520),
        Conv::new(1, 64, 4, 12, 3, Padding::Same),
        Conv::new(1, 6, 9, 10, 9, Padding::Same),
        Conv::new(1, 6, 5, 64, 3, Padding::Same),
        // Even numbers.
        Conv::dense(70, 84, 10),
        Conv::dense(3, 6, 84),
    ]);
    for conv in &convs {
        passes(harness, conv)?;
    }
    // Few channels and few filters. The last two have more bands than blocks, and are too wide.
    let wide = |kernel, filters| {
        let padding = Padding::Same;
        Conv { shape: ConvShape { channels: 6, height: 6, width: 110, filters, kernel, padding }, images: 1 }
    };
    for conv in [
        Conv::new(3, 6, 14, 16, 5, Padding::Valid),
        Conv::new(2, 8, 9, 8, 5, Padding::Same),
        Conv::new(5, 4, 7, 16, 3, Padding::Valid),
        wide(3, 8),
        Conv::new(100, 2, 6, 8, 3, Padding::Same),
        wide(5, 8),
    ] {
        for precision in [Precision::Bf16, Precision::F16] {
            for of in [LayerPass::Forward, LayerPass::BackwardInput, LayerPass::BackwardWeights] {
                pass(harness, &conv, precision, of)?;
            }
        }
    }
    // Addresses that rule out 16-byte accesses.
    harness.skew = 1;
    let outcome = passes(harness, &Conv::dense(9, 16, 24)).and_then(|()| {
        let shape =
            ConvShape { channels: 8, height: 6, width: 5, filters: 16, kernel: 3, padding: Padding::Same };
        passes(harness, &Conv { shape, images: 2 })
    });
    harness.skew = 0;
    outcome?;
    large_tiles(harness)
}

/// Matrices that fill the GPU with large tiles, one for each pass.
fn large_tiles(harness: &mut Harness) -> Outcome {
    let multiprocessors = harness.stream.device().multiprocessors() as usize;
    // One tile of 128 by 128 results for each multiprocessor.
    let rows = 128 * (multiprocessors / 2).max(1);
    for precision in Precision::ALL {
        pass(harness, &Conv::dense(rows, 16, 256), precision, LayerPass::Forward)?;
        pass(harness, &Conv::dense(rows, 16, 251), precision, LayerPass::Forward)?;
        pass(harness, &Conv::dense(rows, 256, 16), precision, LayerPass::BackwardInput)?;
        // The sum of a weight's gradient is split into slices of at least eight steps. Half as many slices as the
        // samples allow are enough tiles to fill large GPUs.
        let samples = 8 * 132 * if precision.is_half() { 32 } else { 16 };
        pass(harness, &Conv::dense(samples, 128, 128), precision, LayerPass::BackwardWeights)?;
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum LayerPass {
    Forward,
    BackwardInput,
    BackwardWeights,
    BackwardBias,
    BackwardActivation,
}

fn passes(harness: &mut Harness, conv: &Conv) -> Outcome {
    for precision in Precision::ALL {
        for of in [
            LayerPass::Forward,
            LayerPass::BackwardInput,
            LayerPass::BackwardWeights,
            LayerPass::BackwardBias,
            LayerPass::BackwardActivation,
        ] {
            pass(harness, conv, precision, of)?;
        }
    }
    Ok(())
}

fn pass(harness: &mut Harness, conv: &Conv, precision: Precision, pass: LayerPass) -> Outcome {
    let layer = if conv.is_dense() { "dense" } else { "conv" };
    let name = match pass {
        LayerPass::Forward => "forward",
        LayerPass::BackwardInput => "backward_input",
        LayerPass::BackwardWeights => "backward_weights",
        LayerPass::BackwardBias => "backward_bias",
        LayerPass::BackwardActivation => "backward_activation",
    };
    let &Conv { shape, images } = conv;
    // Kernels for images of one channel use tensor cores for elements of 16 bits only.
    let first = shape.channels == 1 && [3, 5].contains(&shape.kernel) && pass != LayerPass::BackwardInput;
    let dtype = precision.storage();
    let tensor_cores = harness.tensor_cores(precision) && (!first || dtype != DType::F32);
    let sum = |terms, stored| {
        let cut = if tensor_cores && precision != Precision::F32 { bound::cut(terms) } else { 0.0 };
        bound::sum(terms, stored) + cut
    };
    let as_dense = dense::DenseShape { inputs: shape.channels, outputs: shape.filters };
    harness.check(&format!("{layer} {name}"), conv, precision.name(), |harness, verdict| {
        let x = stored(precision, harness.random.floats(images * shape.input_len()));
        let w = stored(precision, harness.random.floats(shape.weights_len()));
        let dy = stored(precision, harness.random.floats(images * shape.output_len()));
        let b = harness.random.floats(shape.filters);
        let [x_memory, w_memory, dy_memory] = [&x, &w, &dy].map(|values| harness.activations(dtype, values));
        let (x_memory, w_memory, dy_memory) = (x_memory?, w_memory?, dy_memory?);
        let (x_view, w_view, dy_view) = (x_memory.view(), w_memory.view(), dy_memory.view());
        let b_memory = harness.input(&b)?;
        let sums = workspace(harness, conv, precision)?;
        let counters = Counters::new(harness.stream.device())?;
        let workspace = &cuda::Workspace { sums: sums.view(), counters: counters.view(), batch: images };
        let [x, w, dy] = [&x, &w, &dy].map(|values| multiplied(precision, tensor_cores, values));
        let pixels = dy.len() / shape.filters;
        let in_place = shape.kernel * shape.kernel;
        match pass {
            LayerPass::Forward => {
                let slope = [cuda::LINEAR, 0.0, LEAKY_SLOPE][harness.random.below(3)];
                let found = harness.twice(verdict, &[Output::of(dtype, dy.len())], |stream, outputs| {
                    let (b, y) = (b_memory.view(), outputs[0]);
                    if conv.is_dense() {
                        dense::cuda::forward(
                            stream, &as_dense, images, precision, x_view, w_view, b, slope, y, workspace,
                        )
                    } else {
                        cuda::forward(
                            stream, &shape, images, precision, x_view, w_view, b, slope, y, workspace,
                        )
                    }
                })?;
                let b: Vec<f64> = b.iter().map(|value| f64::from(*value)).collect();
                let sums = reference::forward(&shape, images, &x, &w, &b);
                let activate = |value: &f64| if *value > 0.0 { *value } else { value * f64::from(slope) };
                let expected: Vec<f64> = sums.values.iter().map(activate).collect();
                let bound = sum(shape.filter_len(), dtype);
                verdict.close("output", found.floats(0), &expected, |i| sums.scale(i), bound);
            }
            LayerPass::BackwardInput => {
                let found = harness.twice(verdict, &[Output::of(dtype, x.len())], |stream, outputs| {
                    let dx = outputs[0];
                    if conv.is_dense() {
                        dense::cuda::backward_input(
                            stream, &as_dense, images, precision, w_view, dy_view, dx, workspace,
                        )
                    } else {
                        cuda::backward_input(
                            stream, &shape, images, precision, w_view, dy_view, dx, workspace,
                        )
                    }
                })?;
                let sums = reference::backward_input(&shape, images, &w, &dy);
                let bound = sum(shape.filters * in_place, dtype);
                verdict.close("gradient", found.floats(0), &sums.values, |i| sums.scale(i), bound);
            }
            LayerPass::BackwardWeights => {
                let outputs = [Output::of(DType::F32, w.len()), Output::of(DType::F32, shape.filters)];
                let found = harness.twice(verdict, &outputs, |stream, outputs| {
                    let (dw, db) = (outputs[0], Some(outputs[1]));
                    if conv.is_dense() {
                        dense::cuda::backward_weights(
                            stream, &as_dense, images, precision, x_view, dy_view, workspace, dw, db,
                        )
                    } else {
                        cuda::backward_weights(
                            stream, &shape, images, precision, x_view, dy_view, workspace, dw, db,
                        )
                    }
                })?;
                let sums = reference::backward_weights(&shape, images, &x, &dy);
                let bound = sum(pixels, DType::F32);
                verdict.close("gradient", found.floats(0), &sums.values, |i| sums.scale(i), bound);
                // Tensor cores compute it, too. In TF32 the sum is that of the product's operand, which is rounded.
                let sums = reference::backward_bias(&shape, &dy);
                verdict.close("bias's gradient", found.floats(1), &sums.values, |i| sums.scale(i), bound);
            }
            LayerPass::BackwardBias => {
                let outputs = [Output::of(DType::F32, shape.filters)];
                let found = harness.twice(verdict, &outputs, |stream, outputs| {
                    let db = outputs[0];
                    if conv.is_dense() {
                        dense::cuda::backward_bias(
                            stream, &as_dense, images, precision, dy_view, workspace, db,
                        )
                    } else {
                        cuda::backward_bias(stream, &shape, images, precision, dy_view, workspace, db)
                    }
                })?;
                // There are no products, so nothing is rounded to TF32.
                let dy = dy_memory_values(harness, &dy_memory.view())?;
                let sums = reference::backward_bias(&shape, &dy);
                let bound = bound::sum(pixels, DType::F32);
                verdict.close("gradient", found.floats(0), &sums.values, |i| sums.scale(i), bound);
            }
            LayerPass::BackwardActivation => {
                let slope = [0.0, LEAKY_SLOPE][harness.random.below(2)];
                let y = stored(precision, harness.random.floats(dy.len()));
                let y_memory = harness.activations(dtype, &y)?;
                let outputs = [Output::of(dtype, dy.len()), Output::of(DType::F32, shape.filters)];
                let found = harness.twice(verdict, &outputs, |stream, outputs| {
                    let &[gradient, db] = outputs else { unreachable!("two outputs") };
                    stream.copy(dy_view, gradient)?;
                    let y = y_memory.view();
                    cuda::backward_activation(
                        stream, &shape, images, precision, slope, y, gradient, workspace, db,
                    )
                })?;
                let dy = dy_memory_values(harness, &dy_memory.view())?;
                let before =
                    y.iter().zip(&dy).map(|(y, dy)| if *y > 0.0 { *dy } else { *dy * f64::from(slope) });
                let expected: Vec<f64> = before.collect();
                let rounded = bound::chain(1, dtype);
                verdict.close("gradient", found.floats(0), &expected, |i| expected[i].abs(), rounded);
                // The gradient of the bias is the sum of the rounded values.
                let found_before: Vec<f64> = found.floats(0).iter().map(|value| f64::from(*value)).collect();
                let sums = reference::backward_bias(&shape, &found_before);
                let bound = bound::sum(pixels, DType::F32);
                verdict.close("bias's gradient", found.floats(1), &sums.values, |i| sums.scale(i), bound);
            }
        }
        Ok(())
    })
}

/// Values as stored.
fn dy_memory_values(harness: &Harness, view: &mgpu_kernels::cuda::View<'_>) -> Result<Vec<f64>> {
    Ok(match view.dtype() {
        DType::Bf16 => {
            view.to_vec::<half::bf16>(&harness.stream)?.iter().map(|value| value.to_f64()).collect()
        }
        DType::F16 => view.to_vec::<half::f16>(&harness.stream)?.iter().map(|value| value.to_f64()).collect(),
        _ => view.to_vec::<f32>(&harness.stream)?.iter().map(|value| f64::from(*value)).collect(),
    })
}

/// Enough workspace for a pass, filled with NaNs to detect uninitialised reads.
pub(super) fn workspace(harness: &Harness, conv: &Conv, precision: Precision) -> Result<Memory> {
    let len = cuda::workspace_bytes(&conv.shape, conv.images, precision) / size_of::<f32>();
    Memory::from_slice(&harness.stream, &vec![f32::NAN; len.max(1)])
}
