//! Replaying a captured step equals running it.
//!
//! The step is one of a small network: gather, convolution, dropout, loss, gradients, optimizer. Everything that
//! changes from step to step is in GPU memory. A kernel argument passed by value would keep its captured value, and
//! be detected here.

use mgpu_kernels::Precision;
use mgpu_kernels::conv::{ConvShape, Padding};
use mgpu_kernels::cuda::{Counters, Result, StepState, Stream, View};
use mgpu_kernels::loss::cuda::{SCRATCH_BYTES, Score};
use mgpu_kernels::optimizer::Factors;
use mgpu_kernels::optimizer::chunk::chunks;
use mgpu_kernels::optimizer::cuda::UpdatePlan;
use mgpu_kernels::schedule::{Decay, Schedule};
use mgpu_kernels::{DType, conv, dense, dropout, gather, loss};

use super::harness::{Harness, Outcome, Output, Verdict};
use super::optimizer::{one_step, rules};
use super::values::stored;

const STEPS: u32 = 4;
const BATCH: usize = 6;
const SAMPLES: usize = 20;
const EXTENT: usize = 8;
const FILTERS: usize = 8;
const CLASSES: usize = 10;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    for precision in Precision::ALL {
        let text = format!("{STEPS} steps of {BATCH}");
        harness.check("graph replay", text, precision.name(), |harness, verdict| {
            replay(harness, verdict, precision)
        })?;
    }
    Ok(())
}

fn replay(harness: &mut Harness, verdict: &mut Verdict, precision: Precision) -> Result<()> {
    let dtype = precision.storage();
    let shape = ConvShape {
        channels: 1,
        height: EXTENT,
        width: EXTENT,
        filters: FILTERS,
        kernel: 3,
        padding: Padding::Same,
    };
    let features = shape.output_len();
    let layer = dense::DenseShape { inputs: features, outputs: CLASSES };
    // Weights of the dense layer, then its bias; the convolution's weights are constant.
    let (weights, len) = (features * CLASSES, features * CLASSES + 64);
    let params =
        stored(precision, harness.random.floats(len).into_iter().map(|value| value / 32.0).collect());
    let filters = harness.random.floats(shape.weights_len());
    let filters = harness.activations(dtype, &filters)?;
    let bias = harness.random.floats(FILTERS);
    let bias = harness.input(&bias)?;
    let (images, labels) = (harness.random.bytes(SAMPLES * EXTENT * EXTENT), harness.random.bytes(SAMPLES));
    let labels: Vec<u8> = labels.iter().map(|label| label % CLASSES as u8).collect();
    let (images, labels) = (harness.input(&images)?, harness.input(&labels)?);
    let workspace = dense::cuda::workspace_bytes(&layer, BATCH, precision)
        .max(conv::cuda::workspace_bytes(&shape, BATCH, precision))
        / size_of::<f32>();
    let workspace = harness.input(&vec![0.0f32; workspace.max(1)])?;
    let counters = Counters::new(harness.stream.device())?;
    let table = chunks([(0..weights, Factors::ONE), (weights..weights + CLASSES, Factors::NO_DECAY)]);
    let sums = harness.input(&vec![0.0f64; table.len()])?;
    let table = harness.input(bytemuck::cast_slice::<_, u8>(&table))?;
    let mask =
        dropout::Mask { seed: 3, stream: 1, first_sample: 0, channels: FILTERS, plane: EXTENT * EXTENT };
    let (_, optimizer) = rules()[0];
    let schedule = Schedule { warm_up: 2, decay: Decay::Linear { steps: 50 } };
    let plan = UpdatePlan { steps_per_epoch: 3, schedule, loss_scaler: None };
    // The copy of the parameters, which is not used in f32.
    let copied = if dtype == DType::F16 { DType::F16 } else { DType::Bf16 };
    let outputs = [
        Output::holding(bytemuck::bytes_of(&StepState::after(0))),
        Output::holding(&params),
        Output::holding(&vec![0.0f32; len]),
        Output::holding(&vec![0.0f32; len]),
        Output::holding(&params),
        Output::activations(copied, &params),
        Output::holding(&vec![0.0f32; len]),
        Output::of(dtype, BATCH * EXTENT * EXTENT),
        Output::of(DType::U8, BATCH),
        Output::of(dtype, BATCH * features),
        Output::of(dtype, BATCH * CLASSES),
        Output::of(dtype, BATCH * CLASSES),
        Output::holding(&[0u8; SCRATCH_BYTES]),
        Output::holding(&[0u8; Score::BYTES]),
    ];
    let step = |stream: &Stream, outputs: &[View<'_>]| -> Result<()> {
        let state = outputs[0];
        let [gradients, x, labels_here, y, logits, dlogits, scratch, score] =
            outputs[6..].try_into().expect("as many outputs as there are");
        let copy = if dtype == copied { outputs[5] } else { outputs[1] };
        let (w, b) = (copy.slice(0..weights), outputs[1].slice(weights..weights + CLASSES));
        let samples = gather::cuda::Samples { images: images.view(), labels: labels.view(), order: None };
        // The optimizer uses the gradients of the previous step.
        one_step(stream, &optimizer, plan, (table.view(), sums.view()), gradients, &outputs[..6])?;
        let batch = gather::cuda::Batch::of_step(samples, state, BATCH, (0, 1));
        gather::cuda::gather(stream, &batch, x, labels_here)?;
        let space =
            &dense::cuda::Workspace { sums: workspace.view(), counters: counters.view(), batch: BATCH };
        let (filters, bias) = (filters.view(), bias.view());
        conv::cuda::forward(stream, &shape, BATCH, precision, x, filters, bias, 0.0, y, space)?;
        dropout::cuda::apply(stream, &dropout::cuda::Dropout { probability: 0.5, mask, state }, y)?;
        dense::cuda::forward(stream, &layer, BATCH, precision, y, w, b, dense::cuda::LINEAR, logits, space)?;
        loss::cuda::gradient(stream, logits, labels_here, dlogits, scratch, score)?;
        let (dw, db) = (gradients.slice(0..weights), gradients.slice(weights..weights + CLASSES));
        dense::cuda::backward_weights(stream, &layer, BATCH, precision, y, dlogits, space, dw, None)?;
        dense::cuda::backward_bias(stream, &layer, BATCH, precision, dlogits, space, db)
    };
    let eager = harness
        .twice(verdict, &outputs, |stream, outputs| (0..STEPS).try_for_each(|_| step(stream, outputs)))?;
    let graph =
        harness.twice(verdict, &outputs, |stream, outputs| stream.repeat(STEPS, || step(stream, outputs)))?;
    if let Some(output) = (0..outputs.len()).find(|output| eager.bytes(*output) != graph.bytes(*output)) {
        verdict.problem(format!("memory {output} of the step differs when it is replayed"));
    }
    // After four steps the parameters have changed and are finite.
    let moved = eager.floats(1);
    let sound = moved != params && moved.iter().all(|value| value.is_finite());
    verdict.equal("training", &[sound], &[true]);
    Ok(())
}
