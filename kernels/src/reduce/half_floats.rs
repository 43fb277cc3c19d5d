//! Conversions of 16-bit floats. f16 uses the processor's own instructions if the caller is compiled for them; bf16,
//! which is the upper half of an f32, uses integer arithmetic without branches, which the compiler vectorises.
//!
//! All round to nearest even, so results do not depend on the level. (The bf16 instructions of AVX-512 are not
//! suitable: they flush denormals to zero.)

use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m128i, _MM_FROUND_TO_NEAREST_INT, _mm_loadu_si128, _mm_storeu_si128, _mm256_cvtph_ps, _mm256_cvtps_ph,
    _mm256_loadu_ps, _mm256_storeu_ps,
};

#[cfg(target_arch = "x86_64")]
use crate::level::BASELINE;

/// Widens to f32, exactly. A caller with a `LEVEL` above the baseline is compiled for F16C.
#[inline(always)]
pub(super) fn widen_f16<const LEVEL: u8, const N: usize>(elements: [f16; N]) -> [f32; N] {
    #[cfg(target_arch = "x86_64")]
    if LEVEL != BASELINE && N.is_multiple_of(8) {
        let mut wide = [0f32; N];
        for i in (0..N).step_by(8) {
            // SAFETY: eight elements from i on are within both arrays, and the level guarantees F16C.
            unsafe {
                let packed = _mm_loadu_si128(elements.as_ptr().add(i).cast::<__m128i>());
                _mm256_storeu_ps(wide.as_mut_ptr().add(i), _mm256_cvtph_ps(packed));
            }
        }
        return wide;
    }
    elements.map(f16::to_f32)
}

/// Rounds to nearest even. A caller with a `LEVEL` above the baseline is compiled for F16C.
#[inline(always)]
pub(super) fn narrow_f16<const LEVEL: u8, const N: usize>(values: [f32; N]) -> [f16; N] {
    #[cfg(target_arch = "x86_64")]
    if LEVEL != BASELINE && N.is_multiple_of(8) {
        let mut narrow = [f16::ZERO; N];
        for i in (0..N).step_by(8) {
            // SAFETY: eight elements from i on are within both arrays, and the level guarantees F16C.
            unsafe {
                let rounded =
                    _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(values.as_ptr().add(i)));
                _mm_storeu_si128(narrow.as_mut_ptr().add(i).cast::<__m128i>(), rounded);
            }
        }
        return narrow;
    }
    values.map(f16::from_f32)
}

/// Widens to f32, exactly.
#[inline(always)]
pub(crate) fn widen_bf16(element: bf16) -> f32 {
    f32::from_bits(u32::from(element.to_bits()) << 16)
}

/// Rounds to nearest even. NaN stays NaN and becomes quiet.
#[inline(always)]
pub(crate) fn narrow_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    // Adds half a unit in the last place if that makes the result even, and just below half a unit otherwise: the
    // carry rounds.
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_and_its_neighbourhood_convert_as_in_the_half_crate() {
        for upper in 0..=u16::MAX {
            let element = bf16::from_bits(upper);
            let widened = widen_bf16(element).to_bits();
            assert_eq!(widened, u32::from(upper) << 16);
            for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(widened | lower);
                assert_eq!(narrow_bf16(value).to_bits(), bf16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
