//! Softmax cross-entropy.

use mgpu_kernels::DType;
use mgpu_kernels::cuda::{Result, StepState};
use mgpu_kernels::loss::cuda::{SCRATCH_BYTES, Score};
use mgpu_kernels::loss::{Report, cpu, cuda};

use super::bound;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::values::round_to;

pub(super) fn check(harness: &mut Harness) -> Outcome {
    let mut shapes = vec![(1, 10), (5, 3), (37, 10), (9, 70)];
    if !harness.quick {
        shapes.extend([(128, 10), (1024, 10), (3000, 10), (2, 256)]);
    }
    for (samples, classes) in shapes {
        for (dtype, precision) in Harness::types() {
            let text = format!("{samples}x{classes}");
            harness.check("loss gradient", &text, precision, |harness, verdict| {
                each(harness, verdict, samples, classes, (dtype, 8.0), true)
            })?;
            harness.check("loss score", &text, precision, |harness, verdict| {
                each(harness, verdict, samples, classes, (dtype, 8.0), false)
            })?;
            // Most probabilities are below NEGLIGIBLE, and many below the smallest f32.
            harness.check("loss gradient", format!("{text}, confident"), precision, |harness, verdict| {
                each(harness, verdict, samples, classes, (dtype, 100.0), true)
            })?;
        }
    }
    Ok(())
}

fn each(
    harness: &mut Harness,
    verdict: &mut Verdict,
    samples: usize,
    classes: usize,
    (dtype, spread): (DType, f32),
    gradient: bool,
) -> Result<()> {
    let round = |value: f32| round_to(dtype, spread * value);
    let mut logits: Vec<f32> = harness.random.floats(samples * classes).into_iter().map(round).collect();
    // With equal maxima, the first counts.
    let last = logits.len() - 1;
    (logits[0], logits[last]) = (spread + 1.0, logits[last - 1]);
    let labels: Vec<u8> = (0..samples).map(|_| harness.random.below(classes) as u8).collect();
    let (logits_memory, labels_memory) = (harness.activations(dtype, &logits)?, harness.input(&labels)?);
    let scale = if dtype == DType::F16 { 1024.0 } else { 1.0 };
    let state = StepState { loss_scale: scale, ..StepState::after(0) };
    let state = state.upload(&harness.stream)?;
    // Results are added to the existing contents.
    let before = Score { loss_sum: 1.5, correct: 3, samples: 7 };
    let outputs = [
        Output::of(dtype, logits.len()),
        Output::holding(&[0u8; SCRATCH_BYTES]),
        Output::holding(bytemuck::bytes_of(&before)),
    ];
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        let (logits, labels) = (logits_memory.view(), labels_memory.view());
        let [of_logits, scratch, score] = [outputs[0], outputs[1], outputs[2]];
        if gradient {
            let scaled = (samples as f64, Some(state.view()));
            cuda::gradient_scaled(stream, logits, labels, scaled, of_logits, scratch, score)
        } else {
            stream.zero(of_logits)?;
            cuda::score(stream, logits, labels, scratch, score)
        }
    })?;
    let mut expected = vec![0.0; logits.len()];
    let report = match gradient {
        true => cpu::gradient_scaled(&logits, &labels, (samples as f64, scale), &mut expected),
        false => cpu::score(&logits, &labels),
    };
    if gradient {
        let expected: Vec<f64> = expected.iter().map(|value| f64::from(*value)).collect();
        let bound = bound::chain(2, dtype);
        // A probability that f64 rounds differently on a GPU, less 1, is not close in relation to its size.
        let is_label = |i: usize| i % classes == usize::from(labels[i / classes]);
        let floor = |i| if is_label(i) { 1e-8 / samples as f64 } else { 1e-30 };
        let found = found.floats(0);
        let negligible: Vec<bool> = found.iter().map(|&entry| entry == 0.0).collect();
        verdict.close("gradient", found, &expected, |i| expected[i].abs().max(floor(i)), bound);
        for (i, negligible) in negligible.into_iter().enumerate().filter(|(i, _)| !is_label(*i)) {
            // The smallest f16 is so large that an entry next to half of it may be rounded to it or to zero.
            let unclear = dtype == DType::F16 && (1e-8..1e-7).contains(&expected[i].abs());
            let is_zero = round_to(dtype, expected[i] as f32) == 0.0;
            verdict.equal(&format!("zero at {i}"), &[negligible || unclear], &[is_zero || unclear]);
        }
    }
    let score = Report::from(Score::from_bytes(found.bytes(2)));
    verdict.equal("correct", &[score.correct], &[3 + report.correct]);
    verdict.equal("samples", &[score.samples], &[7 + samples as u64]);
    let expected = [1.5 + report.loss_sum];
    // Exponentials and logarithms come from two libraries.
    let bound = 4.0 * bound::sum_f64(samples + classes);
    verdict.close("loss", [score.loss_sum], &expected, |_| expected[0], bound);
    Ok(())
}
