//! Conversions of 16-bit floats. Vectors of f16 use the processor's own instructions if the caller is compiled for them;
//! single ones and bf16, which is the upper half of an f32, use integer arithmetic without branches, which the compiler
//! vectorises.
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

/// Widens to f32, exactly. NaN becomes quiet.
#[inline(always)]
pub(crate) fn widen_one_f16(element: f16) -> f32 {
    let bits = u32::from(element.to_bits());
    let (sign, rest) = ((bits & 0x8000) << 16, bits & 0x7fff);
    // Below the smallest normal number all are multiples of 2⁻²⁴.
    let subnormal = (rest as f32 * f32::from_bits(0x3380_0000)).to_bits();
    let normal = (rest << 13) + if rest < 0x7c00 { 0x3800_0000 } else { 0x7000_0000 };
    let quiet = if rest > 0x7c00 { 0x40_0000 } else { 0 };
    f32::from_bits(sign | if rest < 0x400 { subnormal } else { normal | quiet })
}

/// Rounds to nearest even; from 65,520 on to infinity. NaN stays NaN and becomes quiet.
#[inline(always)]
pub(crate) fn narrow_one_f16(value: f32) -> f16 {
    let bits = value.to_bits();
    let (sign, rest) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    // Below 2⁻¹⁴ the results are multiples of 2⁻²⁴, as are the numbers from 0.5 to 1: the addition rounds.
    let subnormal = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let normal = rest.wrapping_sub(0x3800_0000).wrapping_add(0xfff + (rest >> 13 & 1)) >> 13;
    let quiet = 0x7e00 | rest >> 13 & 0x1ff;
    let large = if rest > 0x7f80_0000 { quiet } else { 0x7c00 };
    let small = if rest < 0x3880_0000 { subnormal } else { normal };
    f16::from_bits((sign | if rest >= 0x477f_f000 { large } else { small }) as u16)
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

    #[test]
    fn every_f16_and_its_neighbourhood_convert_as_in_the_half_crate() {
        for bits in 0..=u16::MAX {
            let element = f16::from_bits(bits);
            let widened = widen_one_f16(element).to_bits();
            assert_eq!(widened, element.to_f32().to_bits(), "{bits:04x}");
            for lower in [0, 1, 0xfff, 0x1000, 0x1001, 0x1fff] {
                let value = f32::from_bits(widened | lower);
                assert_eq!(narrow_one_f16(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
            }
        }
        // Around numbers too small or too large for f16, in every exponent of f32.
        for upper in 0..=0xffff_u32 {
            for lower in [0, 1, 0x7fff, 0x8000, 0xffff] {
                let value = f32::from_bits(upper << 16 | lower);
                assert_eq!(narrow_one_f16(value).to_bits(), f16::from_f32(value).to_bits(), "{value:e}");
            }
        }
    }
}
