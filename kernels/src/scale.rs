//! Scaling in place: `x[i] ← factor · x[i]`, rounded once.

use crate::level::detect;
#[cfg(target_arch = "x86_64")]
use crate::level::{AVX2, AVX512};

#[inline(always)]
fn scale_all(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2")]
fn scale_avx512(values: &mut [f32], factor: f32) {
    scale_all(values, factor);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn scale_avx2(values: &mut [f32], factor: f32) {
    scale_all(values, factor);
}

/// Multiplies every element by `factor`. With so little arithmetic, the speed is that of reading and writing memory
/// in place.
pub fn scale(values: &mut [f32], factor: f32) {
    match detect() {
        // SAFETY: the level was detected on this processor.
        #[cfg(target_arch = "x86_64")]
        AVX512 => unsafe { scale_avx512(values, factor) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        AVX2 => unsafe { scale_avx2(values, factor) },
        _ => scale_all(values, factor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_multiplied() {
        for len in [0, 1, 15, 16, 17, 1000] {
            let mut values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            scale(&mut values, 0.1);
            assert!(values.iter().enumerate().all(|(i, value)| *value == i as f32 * 0.1));
        }
    }
}
