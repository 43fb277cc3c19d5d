//! Softmax cross-entropy.
//!
//! Contract: for logits `z` \[N, K\] and labels `t` \[N\] the loss of a sample is `log Σ_k exp(z[n,k]) − z[n,t]`,
//! computed relative to the row's maximum so that nothing overflows. The gradient of the *mean* over the N samples is
//! `(softmax(z)[n,k] − [k = t]) / N`. If a step's batches have unequal sizes, all are divided by the same number
//! instead (`gradient_over`), so that their sum weighs each sample equally. `gradient_scaled` multiplies the gradient by
//! the [loss scale](crate::loss_scale) too. Probabilities below [`NEGLIGIBLE`] are zero in
//! gradients. Losses are reported as an `f64` sum, so that
//! the sum over batches and ranks is divided by the true number of samples in the end. A sample counts as correct if its
//! label's logit is the row's first maximum.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Probabilities below 2⁻⁵³ (1.1·10⁻¹⁶) are zero in gradients, on every processor.
///
/// When a network knows its training set by heart, the probabilities of wrong classes fall below 10⁻³⁰, and the backward
/// pass would multiply them by weights and activations until they are subnormal numbers. Many processors need more than
/// a hundred cycles for each operation on such numbers, so steps would become several times longer.
///
/// The threshold is the smallest that costs no precision: `softmax(z)[n,t] − 1` is computed in f64 and does not contain
/// smaller probabilities either. It is far below what a step could use: the rounding errors of f32 are 10⁸ times as
/// large, and so is Adam's ε. And every entry of a gradient that is not zero is at least 2⁻⁵³/N, for a batch of 1024
/// about 10⁻¹⁹, which leaves 19 orders of magnitude to the smallest normal number.
pub const NEGLIGIBLE: f64 = f64::EPSILON / 2.0;

/// Loss and accuracy of some samples; reports of batches and ranks are added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Report {
    /// Sum of the losses of all samples.
    pub loss_sum: f64,
    /// Number of samples whose label has the largest logit.
    pub correct: u64,
    /// Number of samples.
    pub samples: u64,
}

impl Report {
    /// Mean loss per sample; NaN without samples.
    pub fn loss(&self) -> f64 {
        self.loss_sum / self.samples as f64
    }

    /// Fraction of correct samples in [0, 1]; NaN without samples.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.samples as f64
    }
}

impl std::ops::AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.loss_sum += other.loss_sum;
        self.correct += other.correct;
        self.samples += other.samples;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn loss_and_gradient_match_the_definition(samples in 1usize..9, classes in 1usize..12, shift in -100f32..100.0) {
            let z: Vec<f32> = random(samples * classes, 1).iter().map(|z| 5.0 * z + shift).collect();
            let labels: Vec<u8> = (0..samples).map(|n| (n * 7 % classes) as u8).collect();
            let (mut loss, mut gradient) = (0.0, Vec::new());
            for (row, &label) in z.chunks(classes).zip(&labels) {
                let exp: Vec<f64> = row.iter().map(|&z| f64::from(z).exp()).collect();
                let total: f64 = exp.iter().sum();
                loss -= (exp[usize::from(label)] / total).ln();
                let one = |k| if k == usize::from(label) { 1.0 } else { 0.0 };
                gradient.extend(exp.iter().enumerate().map(|(k, e)| (e / total - one(k)) / samples as f64));
            }
            let mut dz = vec![f32::NAN; z.len()];
            let report = cpu::gradient(&z, &labels, &mut dz);
            prop_assert!((report.loss_sum - loss).abs() < 1e-9 * loss.abs().max(1.0));
            assert_close(&dz, &gradient, 1e-7);
            prop_assert_eq!(report, cpu::score(&z, &labels));
            let mut half = vec![f32::NAN; z.len()];
            prop_assert_eq!(report, cpu::gradient_over(&z, &labels, 2.0 * samples as f64, &mut half));
            prop_assert!(half.iter().zip(&dz).all(|(half, dz)| *half == dz / 2.0 || dz.abs() < 1e-30));
        }
    }

    proptest! {
        /// Probabilities from 1 down to 10⁻¹⁷⁰, and labels of all of them.
        #[test]
        fn entries_of_a_gradient_are_zero_or_far_above_subnormal_numbers(
            samples in 1usize..9,
            classes in 1usize..12,
            stream in 0u64..100,
            spread in 0f32..200.0,
        ) {
            let z: Vec<f32> = random(samples * classes, stream).iter().map(|z| spread * z).collect();
            let labels: Vec<u8> = (0..samples).map(|n| (n * 7 % classes) as u8).collect();
            let mut dz = vec![f32::NAN; z.len()];
            cpu::gradient(&z, &labels, &mut dz);
            let share = 1.0 / samples as f64;
            let smallest = (NEGLIGIBLE * share) as f32;
            prop_assert!(dz.iter().all(|&dz| dz == 0.0 || dz.abs() >= smallest));
            for ((row, dz), &label) in z.chunks(classes).zip(dz.chunks(classes)).zip(&labels) {
                let largest = row.iter().fold(f32::MIN, |largest, &z| largest.max(z));
                let exp: Vec<f64> = row.iter().map(|&z| (f64::from(z) - f64::from(largest)).exp()).collect();
                let total: f64 = exp.iter().sum();
                for (k, (&dz, exp)) in dz.iter().zip(exp).enumerate() {
                    let entry = exp / total - if k == usize::from(label) { 1.0 } else { 0.0 };
                    let expected = if entry.abs() < NEGLIGIBLE { 0.0 } else { (entry * share) as f32 };
                    prop_assert_eq!(dz, expected, "class {} of {:?}", k, row);
                }
            }
        }
    }

    #[test]
    fn large_logits_do_not_overflow_and_ties_go_to_the_first() {
        let report = cpu::score(&[1000.0, 0.0, 1000.0, 1000.0], &[0, 1]);
        assert_eq!((report.correct, report.samples), (1, 2));
        assert!((report.loss_sum - 2f64.ln()).abs() < 1e-12);
        assert_eq!(report.accuracy(), 0.5);
    }
}
