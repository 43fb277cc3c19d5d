//! The instruction sets for which vectorised loops are compiled.
//!
//! Each loop is compiled for every level below and runs on the best one that the processor supports. The environment
//! variable [`VARIABLE`] lowers the level, so that tests and comparisons can run on the others, too. It is read once,
//! inside a loop where no error can be returned: a program checks its value at the start with [`is_known`]
//! (`World::from_env` of the runtime does), and an unknown name has no effect.
//!
//! The last three levels have the vectors of AVX-512. They differ in what multiplies bf16 where that is allowed, see
//! [`crate::tile_engine`].

use std::sync::atomic::{AtomicU8, Ordering};

/// The baseline of the architecture.
pub(crate) const BASELINE: u8 = 1;
/// AVX2, FMA and F16C.
pub(crate) const AVX2: u8 = 2;
/// AVX-512 F, BW, VL and DQ.
pub(crate) const AVX512: u8 = 3;

/// The environment variable with the maximum level.
pub const VARIABLE: &str = "MGPU_SIMD";

/// Names of the levels, from the lowest. A level that the processor lacks is allowed: it means at most that level.
pub const NAMES: [&str; 6] = ["portable", "avx2", "avx512", "avx512bf16", "amx", "amx-emulated"];

/// Whether `name` is the name of a level, and so a valid value of [`VARIABLE`].
///
/// ```
/// assert!(mgpu_kernels::level::is_known("avx2"));
/// assert!(!mgpu_kernels::level::is_known("AVX2"));
/// ```
pub fn is_known(name: &str) -> bool {
    NAMES.contains(&name)
}

/// The name of the level that vectorised loops run on: one of the first three.
pub fn name() -> &'static str {
    NAMES[usize::from(detect() - BASELINE)]
}

/// The best level of this processor, or a lower one given by [`VARIABLE`].
pub(crate) fn detect() -> u8 {
    static DETECTED: AtomicU8 = AtomicU8::new(0);
    match DETECTED.load(Ordering::Relaxed) {
        0 => {
            let allowed = match std::env::var(VARIABLE).as_deref() {
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
