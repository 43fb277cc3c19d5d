//! The instruction sets that vectorised loops are compiled for.

use std::sync::atomic::{AtomicU8, Ordering};

/// What every processor of the architecture has.
pub(crate) const BASELINE: u8 = 1;
/// AVX2, FMA and F16C.
pub(crate) const AVX2: u8 = 2;
/// AVX-512 F, BW, VL and DQ.
pub(crate) const AVX512: u8 = 3;

/// The best level of this processor, or the lower one that `MGPU_SIMD` (`portable`, `avx2`) asks for: for tests
/// and comparisons.
pub(crate) fn detect() -> u8 {
    static DETECTED: AtomicU8 = AtomicU8::new(0);
    match DETECTED.load(Ordering::Relaxed) {
        0 => {
            let allowed = match std::env::var("MGPU_SIMD").as_deref() {
                Ok("portable") => BASELINE,
                Ok("avx2") => AVX2,
                _ => AVX512,
            };
            let level = best().min(allowed);
            DETECTED.store(level, Ordering::Relaxed);
            level
        }
        level => level,
    }
}

/// The best level of this processor.
pub(crate) fn best() -> u8 {
    #[cfg(target_arch = "x86_64")]
    {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        match (avx2, avx512) {
            (true, true) => AVX512,
            (true, false) => AVX2,
            _ => BASELINE,
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    BASELINE
}
