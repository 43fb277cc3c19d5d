//! Learning rate schedules: a factor of the optimizer's learning rate for each step.
//!
//! Contract: steps count from 0. In the first [`warm_up`](Schedule::warm_up) steps, w of them, the factor is (step +
//! 1)/w. After the warm-up, with t the number of steps since:
//!
//! | decay | factor |
//! |---|---|
//! | [`Constant`](Decay::Constant) | 1 |
//! | [`Linear`](Decay::Linear) | 1 − t/T, and 0 from T on |
//! | [`Cosine`](Decay::Cosine) | f + (1 − f)·(1 + cos(π·t/T))/2, and f from T on |
//! | [`Step`](Decay::Step) | γ^⌊t/s⌋ |
//!
//! These are PyTorch's `LinearLR`, `CosineAnnealingLR` (its first half period) and `StepLR`; the cosine is due to
//! Loshchilov and Hutter (2017). All are in f64. On a GPU the factor is computed there, see `optimizer.cu`.

/// A learning rate schedule.
///
/// ```
/// use mgpu_kernels::schedule::{Decay, Schedule};
/// let schedule = Schedule { warm_up: 4, decay: Decay::Cosine { steps: 100, floor: 0.1 } };
/// assert_eq!(schedule.factor(0), 0.25);
/// assert_eq!(schedule.factor(4), 1.0);
/// assert!((schedule.factor(54) - 0.55).abs() < 1e-12);
/// assert!((schedule.factor(1000) - 0.1).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    /// Steps of the warm-up, in which the factor increases linearly to 1.
    pub warm_up: u64,
    /// The decay after the warm-up.
    pub decay: Decay,
}

/// The decay of the learning rate after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Decay {
    /// No decay.
    Constant,
    /// Decreases linearly to 0.
    Linear {
        /// Number of steps, at least 1.
        steps: u64,
    },
    /// Decreases like the first half period of a cosine.
    Cosine {
        /// Number of steps, at least 1.
        steps: u64,
        /// The final factor.
        floor: f64,
    },
    /// Multiplies the learning rate at regular intervals.
    Step {
        /// Steps of an interval, at least 1.
        every: u64,
        /// The factor of each multiplication.
        factor: f64,
    },
}

impl Schedule {
    /// A constant learning rate.
    pub const CONSTANT: Schedule = Schedule { warm_up: 0, decay: Decay::Constant };

    /// The factor of the learning rate in `step`, from 0.
    ///
    /// # Panics
    /// If the decay has 0 steps.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return (step + 1) as f64 / self.warm_up as f64;
        }
        let step = step - self.warm_up;
        let part = |steps: u64| step.min(steps) as f64 / steps as f64;
        assert!(self.decay.steps() > 0, "{self:?}");
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear { steps } => 1.0 - part(steps),
            Decay::Cosine { steps, floor } => {
                floor + (1.0 - floor) * (0.5 * (1.0 + (std::f64::consts::PI * part(steps)).cos()))
            }
            Decay::Step { every, factor } => factor.powf((step / every) as f64),
        }
    }
}

impl Decay {
    /// The number of steps of the decay, or between two decreases; 1 without decay.
    pub fn steps(&self) -> u64 {
        match *self {
            Decay::Constant => 1,
            Decay::Linear { steps } | Decay::Cosine { steps, .. } | Decay::Step { every: steps, .. } => steps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finished_decay_stays_constant() {
        let linear = Schedule { warm_up: 2, decay: Decay::Linear { steps: 3 } };
        assert_eq!(
            [0, 1, 2, 4, 5, 100].map(|step| linear.factor(step) as f32),
            [0.5, 1.0, 1.0, 1.0 / 3.0, 0.0, 0.0]
        );
        let cosine = Schedule { warm_up: 0, decay: Decay::Cosine { steps: 3, floor: 0.25 } };
        assert_eq!([3, 4, 100].map(|step| cosine.factor(step)), [0.25; 3]);
    }
}
