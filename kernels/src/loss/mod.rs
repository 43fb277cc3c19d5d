//! Softmax cross-entropy.
//!
//! Contract: for logits `z` \[N, K\] and labels `t` \[N\] the loss of a sample is `log Σ_k exp(z[n,k]) − z[n,t]`,
//! computed relative to the row's maximum so that nothing overflows. The gradient of the *mean* over the N samples is
//! `(softmax(z)[n,k] − [k = t]) / N`. If a step's batches have unequal sizes, all are divided by the same number
//! instead (`gradient_over`), so that their sum weighs each sample equally. Losses are reported as an `f64` sum, so that
//! the sum over batches and ranks is divided by the true number of samples in the end. A sample counts as correct if its
//! label's logit is the row's first maximum.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

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

    #[test]
    fn large_logits_do_not_overflow_and_ties_go_to_the_first() {
        let report = cpu::score(&[1000.0, 0.0, 1000.0, 1000.0], &[0, 1]);
        assert_eq!((report.correct, report.samples), (1, 2));
        assert!((report.loss_sum - 2f64.ln()).abs() < 1e-12);
        assert_eq!(report.accuracy(), 0.5);
    }
}
