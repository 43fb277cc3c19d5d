//! Dynamic loss scaling, for gradients that are stored in f16.
//!
//! The smallest number of f16 is 6·10⁻⁸, and many gradients are smaller. So the gradient of the loss is multiplied by a
//! scale S, and with it all gradients of activations; the gradients of parameters, in f32, are divided by S again before
//! they are clipped and applied. The largest number of f16 is 65,504. If a gradient exceeds it, an Inf or a NaN appears
//! in the gradients of parameters: that step is skipped, and S is too large. After a number of steps without that, S is
//! tried larger (Micikevicius and others, "Mixed precision training", 2018).
//!
//! The rule is that of PyTorch's `GradScaler`, in the same arithmetic: a test compares them. There is one difference: S
//! never falls below [`LossScaler::LEAST`], so that 1/S is finite. Gradients that are not finite even there are no
//! matter of the scale: such a step is not skipped, but an error.
//!
//! [`LossScaler::after`] is the rule. On a GPU the kernel that begins a step applies it to the step before
//! ([`crate::optimizer::cuda::begin_step`]), so that the host need not wait.

/// How the scale follows the gradients.
///
/// ```
/// use mgpu_kernels::loss_scale::LossScaler;
/// let scaler = LossScaler::default().with_growth_interval(2);
/// let mut state = scaler.initial();
/// assert_eq!(state.scale, 65536.0);
/// for (overflow, scale) in [(true, 32768.0), (false, 32768.0), (false, 65536.0)] {
///     state = scaler.after(state, overflow);
///     assert_eq!(state.scale, scale);
/// }
/// assert_eq!(state.skipped, 1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LossScaler {
    /// The scale of the first step.
    pub scale: f32,
    /// The factor after [`growth_interval`](Self::growth_interval) steps that were not skipped, at least 1.
    pub growth: f64,
    /// The factor after a step that was skipped, between 0 and 1.
    pub backoff: f64,
    /// Number of steps in a row that are not skipped until the scale grows, at least 1.
    pub growth_interval: u32,
}

/// The scale, and what it depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    /// The factor of the loss's gradient.
    pub scale: f32,
    /// Number of steps since the scale changed or was confirmed, none of which was skipped.
    pub good_steps: u32,
    /// Number of steps that were skipped since the beginning of the training.
    pub skipped: u64,
}

impl LossScaler {
    /// The smallest scale: the smallest normal number of f32, 10⁻³⁸.
    pub const LEAST: f32 = f32::MIN_POSITIVE;

    /// Sets the scale of the first step.
    #[must_use]
    pub fn with_scale(self, scale: f32) -> Self {
        LossScaler { scale, ..self }
    }

    /// Sets the number of steps until the scale grows.
    #[must_use]
    pub fn with_growth_interval(self, steps: u32) -> Self {
        LossScaler { growth_interval: steps, ..self }
    }

    /// What is wrong with these numbers, if anything.
    pub fn problem(&self) -> Option<String> {
        let &LossScaler { scale, growth, backoff, growth_interval } = self;
        if !is_scale(scale) {
            Some(format!("a loss scale is a number from {:e}, not {scale}", Self::LEAST))
        } else if !(1.0..f64::INFINITY).contains(&growth) {
            Some(format!("a loss scale grows by a factor of at least 1, not {growth}"))
        } else if !(backoff > 0.0 && backoff < 1.0) {
            Some(format!("a loss scale falls by a factor between 0 and 1, not {backoff}"))
        } else if growth_interval == 0 {
            Some("a loss scale grows after at least one step".to_owned())
        } else {
            None
        }
    }

    /// The state before the first step.
    pub fn initial(&self) -> LossScale {
        LossScale { scale: self.scale, good_steps: 0, skipped: 0 }
    }

    /// The state after a step with the state `before`, whose gradients have `overflowed` or not.
    #[must_use]
    pub fn after(&self, before: LossScale, overflowed: bool) -> LossScale {
        let LossScale { scale, good_steps, skipped } = before;
        let times = |factor: f64| (f64::from(scale) * factor) as f32;
        if overflowed {
            let scale = times(self.backoff).max(Self::LEAST);
            return LossScale { scale, good_steps: 0, skipped: skipped + 1 };
        }
        // A number from a file may be the largest one.
        let good_steps = good_steps.saturating_add(1);
        if good_steps < self.growth_interval {
            return LossScale { good_steps, ..before };
        }
        let grown = times(self.growth);
        LossScale { scale: if grown.is_finite() { grown } else { scale }, good_steps: 0, skipped }
    }
}

impl Default for LossScaler {
    /// PyTorch's: from 65,536, doubled after 2,000 steps, halved after one that is skipped.
    fn default() -> Self {
        LossScaler { scale: 65536.0, growth: 2.0, backoff: 0.5, growth_interval: 2000 }
    }
}

impl LossScale {
    /// What gradients are multiplied by before they are applied.
    pub fn inverse(&self) -> f32 {
        (1.0 / f64::from(self.scale)) as f32
    }

    /// Whether a smaller scale may help if gradients are not finite.
    pub fn may_fall(&self) -> bool {
        self.scale > LossScaler::LEAST
    }

    /// Whether a training can have this state: not every number in a file is a scale.
    pub fn is_valid(&self) -> bool {
        is_scale(self.scale)
    }
}

fn is_scale(scale: f32) -> bool {
    (LossScaler::LEAST..f32::INFINITY).contains(&scale)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_scale_stays_valid_and_counts_every_skipped_step(
            exponent in -126i32..128,
            growth in 1f64..1e30,
            backoff in 1e-30f64..0.999,
            growth_interval in 1u32..5,
            overflows in prop::collection::vec(any::<bool>(), 0..300),
        ) {
            let scaler = LossScaler { scale: 2f32.powi(exponent), growth, backoff, growth_interval };
            prop_assert_eq!(scaler.problem(), None);
            let mut state = scaler.initial();
            for (index, overflowed) in overflows.iter().copied().enumerate() {
                let next = scaler.after(state, overflowed);
                prop_assert!(next.is_valid() && next.inverse().is_finite() && next.good_steps < growth_interval);
                let is_monotonic =
                    if overflowed { next.scale <= state.scale } else { next.scale >= state.scale };
                prop_assert!(is_monotonic);
                let skipped = overflows[..=index].iter().filter(|skipped| **skipped).count();
                prop_assert_eq!(next.skipped, skipped as u64);
                // Good steps are those since the last one that was skipped, modulo the interval.
                let good = overflows[..=index].iter().rev().take_while(|skipped| !**skipped).count() as u32;
                prop_assert_eq!(next.good_steps, good % growth_interval);
                state = next;
            }
        }

        #[test]
        fn powers_of_two_stay_powers_of_two(overflows in prop::collection::vec(any::<bool>(), 0..300)) {
            let scaler = LossScaler::default().with_growth_interval(3);
            let mut state = scaler.initial();
            for overflowed in overflows {
                state = scaler.after(state, overflowed);
                prop_assert_eq!(state.scale.log2().fract(), 0.0);
                prop_assert_eq!(state.scale * state.inverse(), 1.0);
            }
        }
    }

    #[test]
    fn the_scale_stops_at_both_ends_of_f32() {
        let scaler = LossScaler { scale: 2f32.powi(127), growth_interval: 1, ..LossScaler::default() };
        let grown = scaler.after(scaler.initial(), false);
        assert_eq!((grown.scale, grown.good_steps), (2f32.powi(127), 0));
        let least = LossScaler::default().with_scale(LossScaler::LEAST);
        let fallen = least.after(least.initial(), true);
        assert_eq!((fallen.scale, fallen.skipped), (LossScaler::LEAST, 1));
        assert!(!fallen.may_fall() && least.with_scale(1.0).initial().may_fall());
    }

    #[test]
    fn impossible_numbers_are_named() {
        let good = LossScaler::default();
        for (bad, expected) in [
            (good.with_scale(0.0), "a loss scale is a number from 1.1754944e-38, not 0"),
            (good.with_scale(f32::NAN), "a loss scale is a number from 1.1754944e-38, not NaN"),
            (good.with_scale(f32::INFINITY), "a loss scale is a number from 1.1754944e-38, not inf"),
            (LossScaler { growth: 0.5, ..good }, "a loss scale grows by a factor of at least 1, not 0.5"),
            (LossScaler { backoff: 1.0, ..good }, "a loss scale falls by a factor between 0 and 1, not 1"),
            (
                LossScaler { backoff: f64::NAN, ..good },
                "a loss scale falls by a factor between 0 and 1, not NaN",
            ),
            (good.with_growth_interval(0), "a loss scale grows after at least one step"),
        ] {
            assert_eq!(bad.problem().as_deref(), Some(expected));
        }
        assert_eq!(good.problem(), None);
    }
}
