//! Rotated and transposed weights: the input gradient of a convolution, computed as a forward convolution.

use mgpu_kernels::Precision;
use mgpu_kernels::conv::cuda::flip_weights;
use mgpu_kernels::conv::{ConvShape, Padding};

use super::harness::{Harness, Outcome, Output};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    // One weight, whole tiles of 32 by 32, and partial tiles.
    [(1, 1, 1), (64, 1, 32), (33, 3, 40), (7, 5, 130)]
        .into_iter()
        .try_for_each(|(filters, kernel, channels)| each(harness, filters, kernel, channels))
}

fn each(harness: &mut Harness, filters: usize, kernel: usize, channels: usize) -> Outcome {
    let shape =
        ConvShape { channels, height: kernel, width: kernel, filters, kernel, padding: Padding::Same };
    let taps = kernel * kernel;
    for (dtype, name) in Harness::types() {
        let precision: Precision = name.parse().expect("the name of a precision");
        let what = format!("{filters} of {kernel}x{kernel}x{channels}");
        harness.check("conv flip", what, name, |harness, verdict| {
            let weights = harness.random.floats(shape.weights_len()).into_iter();
            let weights: Vec<f32> = weights.map(|value| round_to(dtype, value)).collect();
            let memory = harness.activations(dtype, &weights)?;
            let outputs = [Output::of(dtype, weights.len())];
            let found = harness.twice(verdict, &outputs, |stream, outputs| {
                flip_weights(stream, &shape, precision, memory.view(), outputs[0])
            })?;
            // [channels][taps in reverse order][filters].
            let expected: Vec<f32> = (0..weights.len())
                .map(|index| {
                    let (rest, filter) = (index / filters, index % filters);
                    let (channel, tap) = (rest / taps, taps - 1 - rest % taps);
                    weights[(filter * taps + tap) * channels + channel]
                })
                .collect();
            verdict.equal("flipped weights", &found.floats(0), &expected);
            Ok(())
        })?;
    }
    Ok(())
}
