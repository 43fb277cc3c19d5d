//! Activation functions, in place.
//!
//! Contract: `y = x` where `x > 0`, else `slope · x`, for a slope in [0, 1): 0 is ReLU, 0.2 the leaky ReLU of the
//! network `deep`. The sign of `y` is that of `x` (zero counts as negative, as in PyTorch), so the backward pass
//! needs the output only: `dx = dy` where `y > 0`, else `slope · dy`. If dropout scales the output in between, the
//! sign stays the same, and where dropout writes zeros, the gradient is already zero.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// The slope of the leaky ReLU for negative inputs.
pub const LEAKY_SLOPE: f32 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    #[test]
    fn both_passes_match_the_definition_at_and_around_zero() {
        let threads = Threads::new(2);
        for slope in [0.0, LEAKY_SLOPE] {
            let mut y = [-2.0, -0.0, 0.0, 3.0];
            cpu::forward(&threads, slope, &mut y);
            assert_eq!(y, [-2.0 * slope, 0.0, 0.0, 3.0]);
            let mut dy = [1.0, 2.0, 3.0, 4.0];
            cpu::backward(&threads, slope, &y, &mut dy);
            assert_eq!(dy, [slope, 2.0 * slope, 3.0 * slope, 4.0]);
        }
    }
}
