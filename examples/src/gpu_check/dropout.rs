//! Dropout: bit-equal to the CPU, in any memory layout.

use mgpu_kernels::cuda::StepState;
use mgpu_kernels::dropout::{Mask, cpu, cuda};

use super::harness::{Harness, Outcome, Output};
use super::shapes::{Images, Shapes, awkward_images};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut shapes = Vec::new();
    if !harness.quick {
        shapes = Shapes::of_networks(3).dropouts;
    }
    shapes.extend((0..if harness.quick { 2 } else { 6 }).map(|_| awkward_images(&mut harness.random)));
    shapes.push(Images { images: 2, channels: 16, height: 3, width: 5 });
    shapes.iter().try_for_each(|images| each(harness, images))?;
    harness.skew = 1;
    let outcome = each(harness, &Images { images: 2, channels: 8, height: 3, width: 3 });
    harness.skew = 0;
    outcome
}

fn each(harness: &mut Harness, images: &Images) -> Outcome {
    let (channels, plane) = (images.channels, images.plane());
    for (dtype, precision) in Harness::types() {
        let probability = [0.2, 0.25, 0.5, 0.75][harness.random.below(4)];
        let text = format!("{images} {probability}");
        harness.check("dropout apply", text, precision, |harness, verdict| {
            let mut values = harness.random.floats(images.len());
            values.iter_mut().for_each(|value| *value = round_to(dtype, *value));
            let seed = harness.random.below(1 << 20) as u64;
            let (layer, first_sample) =
                (harness.random.below(20) as u64, harness.random.below(1 << 20) as u64);
            let step = harness.random.below(10_000) as u64;
            let state = StepState { step, ..StepState::after(0) };
            let state = state.upload(&harness.stream)?;
            let mask = Mask { seed, stream: layer, first_sample, channels, plane };
            let outputs = [Output::activations(dtype, &values)];
            let found = harness.twice(verdict, &outputs, |stream, outputs| {
                let dropout = cuda::Dropout { probability, mask, state: state.view() };
                cuda::apply(stream, &dropout, outputs[0])
            })?;
            let mut expected = values;
            cpu::apply(&harness.threads, probability, &mask, step, &mut expected);
            expected.iter_mut().for_each(|value| *value = round_to(dtype, *value));
            verdict.same("value", &found.floats(0), &expected);
            Ok(())
        })?;
    }
    Ok(())
}
