//! Batch normalisation of images, with statistics over one or several ranks.
//!
//! Contract, for `x` and `y` of shape \[N, P, C\] (P = H·W) and per channel `gamma` (weight) and `beta` (bias)
//! (Ioffe and Szegedy, "Batch Normalization", ICML 2015; semantics of PyTorch's `BatchNorm2d`):
//!
//! - With m = N·P summed over all ranks, `mean = Σx/m`, `var = Σx²/m − mean²`, `inv_std = 1/√(var + ε)`:
//!   `y = gamma · (x − mean) · inv_std + beta`.
//! - Running statistics move towards the mean and the *unbiased* variance, `var · m/(m−1)`, with weight [`MOMENTUM`].
//! - Writing `xhat = (x − mean) · inv_std`: `dbeta = Σdy`, `dgamma = Σ dy·xhat`, and
//!   `dx = gamma · inv_std · (dy − Σdy/m − xhat · Σ(dy·xhat)/m)`, where the sums in `dx` span all ranks.
//!
//! Each pass is divided in two at the sums. Between the two parts the caller sums the [`Sums`] over ranks; with a
//! single rank it does nothing. If every rank's `dy` is that of its local mean loss and gradients are averaged over
//! ranks later, the global sums and the global m give the right `dx` without further scaling.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Added to the variance before the square root.
pub const EPSILON: f64 = 1e-5;

/// Weight of a batch in the running statistics.
pub const MOMENTUM: f64 = 0.1;

/// Two sums per channel and the number of pixels summed, for exchange between ranks.
#[derive(Debug, Clone)]
pub struct Sums {
    values: Vec<f64>,
    /// The sums of each thread's pixels.
    partial: Vec<Vec<f64>>,
}

impl Sums {
    /// Sums for `channels` channels.
    pub fn new(channels: usize) -> Self {
        Self { values: vec![0.0; 2 * channels + 1], partial: Vec::new() }
    }

    /// All values to be summed element-wise over ranks: first sums, second sums, count.
    pub fn values_mut(&mut self) -> &mut [f64] {
        &mut self.values
    }

    fn channels(&self) -> usize {
        self.values.len() / 2
    }

    fn first(&self) -> &[f64] {
        &self.values[..self.channels()]
    }

    fn second(&self) -> &[f64] {
        &self.values[self.channels()..2 * self.channels()]
    }

    fn count(&self) -> f64 {
        self.values[2 * self.channels()]
    }
}

/// Mean and inverse standard deviation of every channel: a normalisation subtracts the one and multiplies by the
/// other.
#[derive(Debug, Clone)]
pub struct Statistics {
    mean: Vec<f32>,
    inv_std: Vec<f32>,
}

impl Statistics {
    /// Statistics for `channels` channels: mean 0, deviation 1.
    pub fn new(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], inv_std: vec![1.0; channels] }
    }

    /// Computes the statistics of a batch from its sums of `x` and `x²`, and updates the running statistics.
    ///
    /// # Panics
    /// If the numbers of channels differ.
    pub fn of_batch(&mut self, sums: &Sums, running_mean: &mut [f32], running_var: &mut [f32]) {
        let channels = sums.channels();
        assert_eq!([self.mean.len(), running_mean.len(), running_var.len()], [channels; 3]);
        let count = sums.count();
        let towards =
            |running: f32, now: f64| (f64::from(running) * (1.0 - MOMENTUM) + now * MOMENTUM) as f32;
        for c in 0..channels {
            let mean = sums.first()[c] / count;
            let var = (sums.second()[c] / count - mean * mean).max(0.0);
            self.mean[c] = mean as f32;
            self.inv_std[c] = (1.0 / (var + EPSILON).sqrt()) as f32;
            running_mean[c] = towards(running_mean[c], mean);
            running_var[c] = towards(running_var[c], var * count / (count - 1.0).max(1.0));
        }
    }

    /// Computes the statistics from the running statistics, for evaluation.
    ///
    /// # Panics
    /// If the numbers of channels differ.
    pub fn of_running(&mut self, running_mean: &[f32], running_var: &[f32]) {
        self.mean.copy_from_slice(running_mean);
        assert_eq!(self.inv_std.len(), running_var.len());
        for (inv_std, &var) in self.inv_std.iter_mut().zip(running_var) {
            *inv_std = (1.0 / (f64::from(var) + EPSILON).sqrt()) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use crate::threads::Threads;
    use proptest::prelude::*;

    /// Loss Σ y·weights of the batch normalisation of `x`, by the definition.
    fn reference_loss(x: &[f64], gamma: &[f64], beta: &[f64], weights: &[f32]) -> f64 {
        let channels = gamma.len();
        let channel_of = |at: usize| at % channels;
        (0..channels)
            .map(|c| {
                let mine: Vec<usize> = (0..x.len()).filter(|&at| channel_of(at) == c).collect();
                let m = mine.len() as f64;
                let mean = mine.iter().map(|&at| x[at]).sum::<f64>() / m;
                let var = mine.iter().map(|&at| (x[at] - mean).powi(2)).sum::<f64>() / m;
                let y = |at: usize| gamma[c] * (x[at] - mean) / (var + EPSILON).sqrt() + beta[c];
                mine.iter().map(|&at| y(at) * f64::from(weights[at])).sum::<f64>()
            })
            .sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn gradients_match_finite_differences(
            images in 2usize..5, channels in 1usize..4, plane in 1usize..7, count in 1usize..5,
        ) {
            let threads = Threads::new(count);
            let x = random(images * channels * plane, 1);
            let (gamma, beta) = (random(channels, 2), random(channels, 3));
            let dy = random(x.len(), 4);
            let mut statistics = Statistics::new(channels);
            let (mut mean, mut var) = (vec![0.0; channels], vec![1.0; channels]);
            let mut sums = Sums::new(channels);
            cpu::sum_inputs(&threads, &x, &mut sums);
            statistics.of_batch(&sums, &mut mean, &mut var);
            let (mut dgamma, mut dbeta) = (vec![f32::NAN; channels], vec![f32::NAN; channels]);
            cpu::sum_gradients(&threads, &statistics, &x, &dy, &mut sums);
            cpu::scale_gradient(&sums, &mut dgamma);
            cpu::shift_gradient(&sums, &mut dbeta);
            let mut dx = dy.clone();
            cpu::backward_input(&threads, &statistics, &sums, &gamma, &x, &mut dx);

            let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
            let at = [wide(&x), wide(&gamma), wide(&beta)];
            let slope = |which: usize, i: usize| {
                let moved = |by: f64| {
                    let mut at = at.clone();
                    at[which][i] += by;
                    reference_loss(&at[0], &at[1], &at[2], &dy)
                };
                (moved(1e-5) - moved(-1e-5)) / 2e-5
            };
            // A channel of nearly equal inputs has a large inverse deviation, which amplifies rounding.
            let largest = statistics.inv_std.iter().fold(1.0f32, |a, &b| a.max(b));
            let tolerance = 2e-5 * f64::from(largest) * f64::from(largest);
            assert_close(&dx, &(0..x.len()).map(|i| slope(0, i)).collect::<Vec<_>>(), tolerance);
            assert_close(&dgamma, &(0..channels).map(|i| slope(1, i)).collect::<Vec<_>>(), tolerance);
            assert_close(&dbeta, &(0..channels).map(|i| slope(2, i)).collect::<Vec<_>>(), tolerance);
        }

        #[test]
        fn halves_of_a_batch_sum_to_the_whole(images in 1usize..4, channels in 1usize..40, plane in 1usize..20) {
            let threads = Threads::new(1);
            let x = random(2 * images * channels * plane, 1);
            let mut whole = Sums::new(channels);
            cpu::sum_inputs(&threads, &x, &mut whole);
            let (left, right) = x.split_at(x.len() / 2);
            let (mut a, mut b) = (Sums::new(channels), Sums::new(channels));
            cpu::sum_inputs(&threads, left, &mut a);
            cpu::sum_inputs(&threads, right, &mut b);
            for ((whole, a), b) in whole.values.iter().zip(&a.values).zip(&b.values) {
                prop_assert!((whole - (a + b)).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn training_and_evaluation_follow_the_definition() {
        let threads = Threads::new(1);
        // Two images, one channel, two positions: mean 3, variance 5, unbiased 20/3.
        let x = [0.0, 2.0, 4.0, 6.0];
        let (mut mean, mut var) = ([1.0], [2.0]);
        let (mut sums, mut statistics) = (Sums::new(1), Statistics::new(1));
        cpu::sum_inputs(&threads, &x, &mut sums);
        statistics.of_batch(&sums, &mut mean, &mut var);
        assert_close(&mean, &[0.9 + 0.3], 1e-6);
        assert_close(&var, &[1.8 + 2.0 / 3.0], 1e-6);
        let mut y = [f32::NAN; 4];
        cpu::normalise(&threads, &statistics, &[2.0], &[0.5], &x, &mut y);
        let expected: Vec<f64> =
            x.iter().map(|&x| 2.0 * (f64::from(x) - 3.0) / (5.0 + EPSILON).sqrt() + 0.5).collect();
        assert_close(&y, &expected, 1e-6);
        statistics.of_running(&[1.0], &[4.0]);
        cpu::normalise(&threads, &statistics, &[1.0], &[0.0], &x, &mut y);
        let expected: Vec<f64> = x.iter().map(|&x| (f64::from(x) - 1.0) / (4.0 + EPSILON).sqrt()).collect();
        assert_close(&y, &expected, 1e-6);
    }
}
