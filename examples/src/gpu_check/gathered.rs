//! First layers that read images from a data set: the bits are those of the same layers on gathered images.

use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::Padding;
use mgpu_kernels::conv::cuda::{After, Workspace};
use mgpu_kernels::conv::first::{self, Images, OutputGradient};
use mgpu_kernels::cuda::{Counters, Memory, Result, StepState};
use mgpu_kernels::gather::cuda::{Batch, Samples, gather};
use mgpu_kernels::pool::{PoolShape, Rounding};
use mgpu_kernels::{DType, Precision};

use super::conv::workspace;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::shapes::Conv;
use super::values::stored;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut convs = vec![
        Conv::new(2, 1, 9, 6, 5, Padding::Same),
        Conv::new(3, 1, 8, 20, 3, Padding::Valid),
        Conv::new(2, 1, 10, 40, 3, Padding::Same),
        // More images than blocks.
        Conv::new(270, 1, 5, 32, 3, Padding::Same),
    ];
    if !harness.quick {
        convs.extend([
            Conv::new(5, 1, 28, 64, 5, Padding::Valid),
            Conv::new(600, 1, 9, 6, 5, Padding::Same),
            // Images of several bands.
            Conv::new(2, 1, 70, 8, 3, Padding::Same),
        ]);
    }
    convs.iter().try_for_each(|conv| {
        Precision::ALL.into_iter().try_for_each(|precision| {
            harness.check("gathered first", conv, precision.name(), |harness, verdict| {
                [false, true]
                    .into_iter()
                    .try_for_each(|pooled| each(harness, verdict, conv, precision, pooled))
            })
        })
    })
}

fn each(
    harness: &mut Harness,
    verdict: &mut Verdict,
    conv: &Conv,
    precision: Precision,
    pooled: bool,
) -> Result<()> {
    let &Conv { shape, images } = conv;
    let (dtype, pixels) = (precision.storage(), shape.input_len());
    let samples = images + 3;
    let data = [harness.random.bytes(samples * pixels), harness.random.bytes(samples)];
    let order: Vec<i32> = (0..2 * images).map(|_| harness.random.below(samples) as i32).collect();
    let [data_images, data_labels] = [harness.input(&data[0])?, harness.input(&data[1])?];
    let order = harness.input(&order)?;
    // The second half of the order.
    let state = StepState { position: 1, ..StepState::after(0) }.upload(&harness.stream)?;
    let of = Samples { images: data_images.view(), labels: data_labels.view(), order: Some(order.view()) };
    let batch = Batch::of_step(of, state.view(), images, (0, 1));

    let rounding = [Rounding::Floor, Rounding::Ceil][harness.random.below(2)];
    let window = PoolShape { height: shape.out_height(), width: shape.out_width(), rounding };
    let plane = if pooled { window.out_height() * window.out_width() } else { window.height * window.width };
    let len = images * plane * shape.filters;
    let values = |harness: &mut Harness, len| stored(precision, harness.random.floats(len));
    let (w, dy) = (values(harness, shape.weights_len()), values(harness, len));
    let bias = harness.random.floats(shape.filters);
    let (w, dy, bias) =
        (harness.activations(dtype, &w)?, harness.activations(dtype, &dy)?, harness.input(&bias)?);
    let (sums, counters) = (workspace(harness, conv, precision)?, Counters::new(harness.stream.device())?);
    let space = &Workspace { sums: sums.view(), counters: counters.view(), batch: images };

    let once = [
        Output::of(dtype, len),
        Output::holding(&vec![0u8; len]),
        Output::of(DType::U8, images),
        Output::of(DType::F32, shape.weights_len()),
        Output::of(DType::F32, shape.filters),
    ];
    let again = once.clone();
    let outputs: Vec<Output> =
        once.into_iter().chain(again).chain([Output::of(dtype, images * pixels)]).collect();
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let x = outputs[10];
        gather(stream, &batch, x, outputs[7])?;
        let stored = Images::Stored(x);
        for (from, outputs) in [(Images::Gathered(batch, outputs[2]), &outputs[..5]), (stored, &outputs[5..])]
        {
            let (y, chosen, dw, db) = (outputs[0], outputs[1], outputs[3], outputs[4]);
            let pool = pooled.then_some((&window, chosen));
            let after = After { pool, dropout: None };
            let operands = [w.view(), bias.view(), y];
            first::forward(stream, &shape, images, precision, &from, operands, LEAKY_SLOPE, &after)?;
            let gradient = OutputGradient { dy: dy.view(), activated: Some((y, LEAKY_SLOPE)), pool };
            first::backward(stream, &shape, images, precision, &from, &gradient, space, dw, Some(db))?;
        }
        Ok(())
    })?;
    for (what, output) in [("output", 0), ("place", 1), ("label", 2), ("gradient", 3), ("bias's gradient", 4)]
    {
        verdict.equal(what, found.bytes(output), found.bytes(output + 5));
    }

    // The last image is beyond the end of the order.
    let behind = Batch::range(of, images as u64 + 1, images);
    let outputs = [Output::of(dtype, len), Output::of(DType::U8, images)];
    let chosen = Memory::zeroed(harness.stream.device(), DType::U8, len)?;
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let after = After { pool: pooled.then_some((&window, chosen.view())), dropout: None };
        let from = Images::Gathered(behind, outputs[1]);
        let operands = [w.view(), bias.view(), outputs[0]];
        first::forward(stream, &shape, images, precision, &from, operands, LEAKY_SLOPE, &after)
    })?;
    let lost: Vec<bool> = found.floats(0).iter().map(|value| value.is_nan()).collect();
    let (known, unknown) = lost.split_at(len / images * (images - 1));
    verdict.equal("number of outputs of NaN for known images", &[known.contains(&true)], &[false]);
    verdict.equal("outputs of NaN for an image that does not exist", &[unknown.contains(&false)], &[false]);
    verdict.equal("its label", &found.bytes(1)[images - 1..], &[u8::MAX]);
    Ok(())
}
