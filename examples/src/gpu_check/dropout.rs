//! Dropout: the same elements as on the CPU, to the bit, wherever they lie.

use mgpu_kernels::cuda::StepState;
use mgpu_kernels::dropout::{Mask, cpu, cuda};

use super::bench::{Bench, Outcome, Output};
use super::shapes::{Images, Shapes, awkward_images};
use super::values::to_bf16;

pub(super) fn check(bench: &mut Bench) -> Outcome {
    let mut shapes = Vec::new();
    if !bench.quick {
        shapes = Shapes::of_networks(3).dropouts;
    }
    shapes.extend((0..if bench.quick { 2 } else { 6 }).map(|_| awkward_images(&mut bench.random)));
    shapes.push(Images { images: 2, channels: 16, height: 3, width: 5 });
    shapes.iter().try_for_each(|images| each(bench, images))?;
    bench.skew = 1;
    let outcome = each(bench, &Images { images: 2, channels: 8, height: 3, width: 3 });
    bench.skew = 0;
    outcome
}

fn each(bench: &mut Bench, images: &Images) -> Outcome {
    let (channels, plane) = (images.channels, images.plane());
    for (dtype, precision) in Bench::types() {
        let probability = [0.2, 0.25, 0.5, 0.75][bench.random.below(4)];
        let text = format!("{images} {probability}");
        bench.check("dropout apply", text, precision, |bench, judge| {
            let mut values = bench.random.floats(images.len());
            if dtype == mgpu_kernels::DType::Bf16 {
                values.iter_mut().for_each(|value| *value = to_bf16(*value));
            }
            let seed = bench.random.below(1 << 20) as u64;
            let (layer, first_sample) = (bench.random.below(20) as u64, bench.random.below(1 << 20) as u64);
            let step = bench.random.below(10_000) as u64;
            let state = StepState { step, ..StepState::after(0) };
            let state = state.upload(&bench.stream)?;
            let mask = Mask { seed, stream: layer, first_sample, channels, plane };
            let outputs = [Output::activations(dtype, &values)];
            let found = bench.twice(judge, &outputs, |stream, outputs| {
                cuda::apply(stream, probability, &mask, state.view(), outputs[0])
            })?;
            let mut expected = values;
            cpu::apply(&bench.threads, probability, &mask, step, &mut expected);
            if dtype == mgpu_kernels::DType::Bf16 {
                expected.iter_mut().for_each(|value| *value = to_bf16(*value));
            }
            judge.same("value", &found.floats(0), &expected);
            Ok(())
        })?;
    }
    Ok(())
}
