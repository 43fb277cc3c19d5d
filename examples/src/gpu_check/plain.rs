//! The plain kernels that autotuning compares all others with, the comparison itself, and its random numbers.

use mgpu_kernels::conv::{ConvShape, Padding, plain};
use mgpu_kernels::cuda::Memory;
use mgpu_kernels::cuda::compare::{Tolerance, compare, fill_random};
use mgpu_kernels::{DType, rng};

use super::harness::{Harness, Outcome, Output};
use super::shapes::{Conv, awkward_conv};
use super::values::{round_to, stored};
use super::{bound, reference};

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let shape = |channels, filters, kernel, padding| ConvShape {
        channels,
        height: 7,
        width: 6,
        filters,
        kernel,
        padding,
    };
    let mut convs = vec![
        Conv { shape: shape(3, 5, 3, Padding::Same), images: 2 },
        Conv { shape: shape(8, 16, 5, Padding::Valid), images: 3 },
        Conv { shape: shape(1, 4, 5, Padding::Same), images: 2 },
        Conv::dense(5, 72, 16),
    ];
    if !harness.quick {
        convs.extend((0..12).map(|_| awkward_conv(&mut harness.random)));
        convs.extend([Conv::dense(64, 6272, 128), Conv::dense(5000, 40, 72)]);
    }
    convs.iter().try_for_each(|conv| passes(harness, conv))?;
    [1, 1003, 40_000].into_iter().try_for_each(|len| comparisons(harness, len))
}

fn passes(harness: &mut Harness, conv: &Conv) -> Outcome {
    let &Conv { shape, images } = conv;
    for (dtype, name) in Harness::types() {
        harness.check("conv plain", conv, name, |harness, verdict| {
            let precision = name.parse().expect("the name of a precision");
            let x = stored(precision, harness.random.floats(images * shape.input_len()));
            let w = stored(precision, harness.random.floats(shape.weights_len()));
            let dy = stored(precision, harness.random.floats(images * shape.output_len()));
            let b = harness.random.floats(shape.filters);
            let [x_memory, w_memory, dy_memory] =
                [&x, &w, &dy].map(|values| harness.activations(dtype, values));
            let (x_memory, w_memory, dy_memory) = (x_memory?, w_memory?, dy_memory?);
            let b_memory = harness.input(&b)?;
            let transposed = Memory::zeroed(harness.stream.device(), DType::F32, w.len())?;
            let outputs = [dy.len(), x.len(), w.len()].map(|len| Output::of(DType::F32, len));
            let found = harness.twice(verdict, &outputs, |stream, outputs| {
                let &[y, dx, dw] = outputs else { unreachable!("three outputs") };
                let (x, w, dy) = (x_memory.view(), w_memory.view(), dy_memory.view());
                let (b, transposed) = (b_memory.view(), transposed.view());
                plain::forward(stream, &shape, images, x, w, b, 0.5, transposed, y)?;
                plain::backward_input(stream, &shape, images, w, dy, dx)?;
                plain::backward_weights(stream, &shape, images, x, dy, dw)
            })?;
            let [x, w, b, dy] =
                [x, w, b, dy].map(|values| values.into_iter().map(f64::from).collect::<Vec<_>>());
            // Each product is rounded once, at random, and the compensated sum a few times; then comes the bias.
            let allowed = bound::chain(16, DType::F32);
            let y = reference::forward(&shape, images, &x, &w, &b);
            let activated = y.values.iter().map(|value| if *value > 0.0 { *value } else { value * 0.5 });
            let activated: Vec<f64> = activated.collect();
            verdict.close("output", found.floats(0), &activated, |i| y.scale(i), allowed);
            let dx = reference::backward_input(&shape, images, &w, &dy);
            verdict.close("input's gradient", found.floats(1), &dx.values, |i| dx.scale(i), allowed);
            let dw = reference::backward_weights(&shape, images, &x, &dy);
            verdict.close("weights' gradient", found.floats(2), &dw.values, |i| dw.scale(i), allowed);
            Ok(())
        })?;
    }
    Ok(())
}

fn comparisons(harness: &mut Harness, len: usize) -> Outcome {
    for (dtype, name) in Harness::types() {
        let numbers = rng::Stream::new(7, 0);
        let numbers = (0..len as u64).map(|i| numbers.uniform(i) * 2.0 - 1.0);
        let numbers: Vec<f32> = numbers.map(|value| round_to(dtype, value)).collect();
        harness.check("compare random", len, name, |harness, verdict| {
            let found = harness.twice(verdict, &[Output::of(dtype, len)], |stream, outputs| {
                fill_random(stream, outputs[0], 7)
            })?;
            verdict.equal("random number", &found.floats(0), &numbers);
            Ok(())
        })?;
        harness.check("compare results", len, name, |harness, verdict| {
            let expected = harness.input(&numbers)?;
            let at = harness.random.below(len);
            // Allows a difference of one eighth.
            let tolerance = Tolerance { relative: 1.0 / 16.0, scale: 1.0 };
            for (value, nan_every, wrong, largest) in [
                (numbers[at], None, 0, 0.0),
                (numbers[at] + 0.03125, None, 0, 0.03125),
                (numbers[at] + 2.0, None, 1, 2.0),
                (f32::NAN, None, 1, f32::INFINITY),
                // One NaN is missing, except at the first element.
                (f32::NAN, Some(len), u64::from(at > 0) * 2, if at > 0 { f32::INFINITY } else { 0.0 }),
            ] {
                let mut changed = numbers.clone();
                changed[at] = value;
                let changed = harness.activations(dtype, &changed)?;
                let result = compare(&harness.stream, expected.view(), changed.view(), nan_every, tolerance)?;
                let close = (result.largest_difference - largest).abs() <= 0.02;
                if result.wrong != wrong || !(close || result.largest_difference == largest) {
                    verdict.problem(format!("{result:?} with {value} at {at}, NaN every {nan_every:?}"));
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}
