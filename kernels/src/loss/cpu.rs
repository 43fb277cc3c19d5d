//! Softmax cross-entropy on the CPU: there are only a few classes per sample, so one thread and `f64` throughout.

use super::{NEGLIGIBLE, Report};

/// Loss and accuracy of a batch. `logits` is \[N, K\] for the N labels.
///
/// # Panics
/// If `logits` cannot be divided into a row for each label, or a label is not below K.
pub fn score(logits: &[f32], labels: &[u8]) -> Report {
    let mut report = Report::default();
    for (row, &label) in rows(logits, labels).zip(labels) {
        let (_, _, of_sample) = evaluate(row, usize::from(label));
        report += of_sample;
    }
    report
}

/// Loss and accuracy of a batch; overwrites `gradient` \[N, K\] with the gradient of the mean loss.
///
/// # Panics
/// As [`score`], or if `gradient` is not as long as `logits`.
pub fn gradient(logits: &[f32], labels: &[u8], gradient: &mut [f32]) -> Report {
    gradient_over(logits, labels, labels.len() as f64, gradient)
}

/// As [`gradient`], of the sum of the losses divided by `samples` instead of by their number.
///
/// # Panics
/// As [`gradient`].
pub fn gradient_over(logits: &[f32], labels: &[u8], samples: f64, gradient: &mut [f32]) -> Report {
    gradient_scaled(logits, labels, (samples, 1.0), gradient)
}

/// As [`gradient_over`], multiplied by a loss scale. The report is not scaled.
///
/// # Panics
/// As [`gradient`].
pub fn gradient_scaled(
    logits: &[f32],
    labels: &[u8],
    (samples, scale): (f64, f32),
    gradient: &mut [f32],
) -> Report {
    assert_eq!(gradient.len(), logits.len());
    let mut report = Report::default();
    let share = 1.0 / samples * f64::from(scale);
    let classes = (logits.len() / labels.len().max(1)).max(1);
    let rows = rows(logits, labels).zip(gradient.chunks_exact_mut(classes));
    for ((row, gradient), &label) in rows.zip(labels) {
        let (largest, total, of_sample) = evaluate(row, usize::from(label));
        report += of_sample;
        for (k, (gradient, &logit)) in gradient.iter_mut().zip(row).enumerate() {
            let target = if k == usize::from(label) { 1.0 } else { 0.0 };
            let softmax = exp_above(logit, largest) / total;
            let softmax = if softmax < NEGLIGIBLE { 0.0 } else { softmax };
            *gradient = ((softmax - target) * share) as f32;
        }
    }
    report
}

fn rows<'a>(logits: &'a [f32], labels: &[u8]) -> std::slice::ChunksExact<'a, f32> {
    let classes = logits.len() / labels.len().max(1);
    assert_eq!(logits.len(), classes * labels.len(), "logits for {} labels", labels.len());
    logits.chunks_exact(classes.max(1))
}

fn exp_above(logit: f32, largest: f32) -> f64 {
    (f64::from(logit) - f64::from(largest)).exp()
}

/// The largest logit, the sum of exponentials relative to it, and the report of one sample.
fn evaluate(row: &[f32], label: usize) -> (f32, f64, Report) {
    assert!(label < row.len(), "label {label} of {} classes", row.len());
    let best = (1..row.len()).fold(0, |best, k| if row[k] > row[best] { k } else { best });
    let largest = row[best];
    let total: f64 = row.iter().map(|&logit| exp_above(logit, largest)).sum();
    let loss_sum = total.ln() + f64::from(largest) - f64::from(row[label]);
    (largest, total, Report { loss_sum, correct: u64::from(best == label), samples: 1 })
}
