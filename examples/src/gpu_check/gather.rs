//! Gathering batches from a data set.

use mgpu_kernels::cuda::StepState;
use mgpu_kernels::gather::{cpu, cuda};
use mgpu_kernels::{DType, cuda::Result};

use super::harness::{Harness, Outcome, Output, Verdict};
use super::values::round_to;

/// The label written for an invalid entry of the order.
const NO_LABEL: u8 = 255;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    for (samples, len, batch) in [(40, 784, 8), (13, 49, 5), (7, 16, 7)] {
        for skew in [0, 1] {
            harness.skew = skew;
            let outcome = [false, true].into_iter().try_for_each(|ordered| {
                Harness::types().into_iter().try_for_each(|(dtype, precision)| {
                    let order = if ordered { ", ordered" } else { "" };
                    let text = format!("{batch} of {samples}x{len}{order}");
                    let extents = [samples, len, batch];
                    harness.check("gather batch", &text, precision, |harness, verdict| {
                        each(harness, verdict, extents, ordered, dtype, true)
                    })?;
                    harness.check("gather range", &text, precision, |harness, verdict| {
                        each(harness, verdict, extents, ordered, dtype, false)
                    })
                })
            });
            harness.skew = 0;
            outcome?;
        }
    }
    Ok(())
}

fn each(
    harness: &mut Harness,
    verdict: &mut Verdict,
    [samples, len, batch]: [usize; 3],
    ordered: bool,
    dtype: DType,
    by_position: bool,
) -> Result<()> {
    let (images, labels) = (harness.random.bytes(samples * len), harness.random.bytes(samples));
    let order: Vec<u32> = (0..samples).map(|_| harness.random.below(samples) as u32).collect();
    let signed: Vec<i32> = order.iter().map(|index| *index as i32).collect();
    let [images_memory, labels_memory] = [harness.input(&images)?, harness.input(&labels)?];
    let order_memory = harness.input(&signed)?;
    let place = harness.random.below(samples / batch);
    // The same samples as a whole batch, and as the second part of a batch of twice the size.
    let (position, part) = if place % 2 == 1 { (place / 2, (1, 2)) } else { (place, (0, 1)) };
    let state = StepState { step: 77, position: position as u64, ..StepState::after(0) };
    let state = state.upload(&harness.stream)?;
    let source = cuda::Samples {
        images: images_memory.view(),
        labels: labels_memory.view(),
        order: ordered.then(|| order_memory.view()),
    };
    let outputs = [Output::of(dtype, batch * len), Output::of(DType::U8, batch)];
    let first = (place * batch) as u64;
    let found = harness.twice(verdict, &outputs, |stream, outputs| match by_position {
        true => {
            let batch = cuda::Batch::of_step(source, state.view(), batch, part);
            cuda::gather(stream, &batch, outputs[0], outputs[1])
        }
        false => cuda::gather(stream, &cuda::Batch::range(source, first, batch), outputs[0], outputs[1]),
    })?;
    let (mut x, mut expected) = (vec![0.0; batch * len], vec![0; batch]);
    let order = ordered.then_some(order.as_slice());
    cpu::range(&cpu::Samples { images: &images, labels: &labels, order }, first, &mut x, &mut expected);
    x.iter_mut().for_each(|x| *x = round_to(dtype, *x));
    verdict.same("pixel", &found.floats(0), &x);
    verdict.equal("label", found.bytes(1), &expected);

    // One entry past the end.
    let outputs = [Output::of(dtype, batch * len), Output::of(DType::U8, batch)];
    let behind = (samples - batch + 1) as u64;
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        cuda::gather(stream, &cuda::Batch::range(source, behind, batch), outputs[0], outputs[1])
    })?;
    verdict.equal("label behind the end", &found.bytes(1)[batch - 1..], &[NO_LABEL]);
    let lost = found.floats(0)[(batch - 1) * len..].iter().all(|x| x.is_nan());
    verdict.equal("pixels behind the end", &[lost], &[true]);
    Ok(())
}
