//! AVX-512: 16 lanes, 32 registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Simd, Task};

/// Exists only if the processor has AVX-512 F, BW, VL and DQ.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Runs `task` with AVX-512.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL and DQ, AVX2 and FMA.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
pub(super) unsafe fn run<T: Task>(task: T) -> T::Output {
    task.run(Avx512(()))
}

/// As [`run`], and not inlined.
///
/// # Safety
/// As for [`run`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
unsafe fn outlined<T: Task>(task: T) -> T::Output {
    task.run(Avx512(()))
}

fn first(count: usize) -> __mmask16 {
    debug_assert!(count <= 16);
    ((1u32 << count) - 1) as __mmask16
}

/// Elements of half the width, rounded to nearest even, in the lower halves of the lanes, with zeros above.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn narrow(values: __m512) -> __m512i {
    // SAFETY: the caller guarantees the instructions.
    unsafe {
        let bits = _mm512_castps_si512(values);
        let upper = _mm512_srli_epi32::<16>(bits);
        // See `reduce::half_floats`; the processor's own instruction flushes denormals to zero.
        let odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        let carried = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        let rounded = _mm512_srli_epi32::<16>(carried);
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(values, values);
        _mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40))
    }
}

// SAFETY of every block: the value `self` exists only in `run` and `outlined`, whose callers guarantee the
// instructions; the caller of the method guarantees the pointers.
impl Simd for Avx512 {
    type F32 = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const ROWS: usize = 14;
    const WIDE_ROWS: usize = 6;
    const TERMS: usize = 1;

    #[inline(always)]
    fn call<T: Task>(self, task: T) -> T::Output {
        // SAFETY: above.
        unsafe { outlined(task) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize) -> __m512 {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm512_maskz_loadu_ps(first(count), from) }
    }
    #[inline(always)]
    unsafe fn store(self, values: __m512, to: *mut f32) {
        // SAFETY: above.
        unsafe { _mm512_storeu_ps(to, values) }
    }
    #[inline(always)]
    unsafe fn store_first(self, values: __m512, to: *mut f32, count: usize) {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm512_mask_storeu_ps(to, first(count), values) }
    }
    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        // SAFETY: a hint, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m512 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_places(self, from: *const u8) -> __m512 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm512_castsi512_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_four(self, from: *const f32) -> __m512 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm512_broadcast_f32x4(_mm_loadu_ps(from)) }
    }
    #[inline(always)]
    fn pick(self, values: __m512, places: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_permutevar_ps(values, _mm512_castps_si512(places)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        // SAFETY: above; 32 bytes.
        unsafe {
            let upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
        }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(self, from: *const bf16, count: usize) -> __m512 {
        // SAFETY: above; masked lanes are not accessed.
        unsafe {
            let upper = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(count), from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, values: __m512, to: *mut bf16) {
        // SAFETY: above; 32 bytes.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(narrow(values))) }
    }
    #[inline(always)]
    unsafe fn store_first_bf16(self, values: __m512, to: *mut bf16, count: usize) {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), first(count), _mm512_cvtepi32_epi16(narrow(values))) }
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, even: __m512, odd: __m512, to: *mut bf16) {
        // SAFETY: above; 64 bytes. The elements of `even` have zeros in the upper halves.
        unsafe {
            let pairs = _mm512_or_si512(narrow(even), _mm512_slli_epi32::<16>(narrow(odd)));
            _mm512_storeu_si512(to.cast(), pairs);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        // SAFETY: above; 32 bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_first_f16(self, from: *const f16, count: usize) -> __m512 {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, values: __m512, to: *mut f16) {
        // SAFETY: above; 32 bytes.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values)) }
    }
    #[inline(always)]
    unsafe fn store_first_f16(self, values: __m512, to: *mut f16, count: usize) {
        // SAFETY: above; masked lanes are not accessed.
        unsafe {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
            _mm256_mask_storeu_epi16(to.cast(), first(count), narrow);
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, values: __m512, to: *mut u8) {
        // SAFETY: above; 16 bytes.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(values))) }
    }
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: above. Quarters of rows i, i + 4, i + 8 and i + 12 form a vector, so that afterwards lanes are
        // mixed within quarters only.
        unsafe {
            let four = |i: usize, quarter: usize| {
                let at = from.add(i * from_row + 4 * quarter);
                let values = _mm512_castps128_ps512(_mm_loadu_ps(at));
                let values = _mm512_insertf32x4::<1>(values, _mm_loadu_ps(at.add(4 * from_row)));
                let values = _mm512_insertf32x4::<2>(values, _mm_loadu_ps(at.add(8 * from_row)));
                _mm512_insertf32x4::<3>(values, _mm_loadu_ps(at.add(12 * from_row)))
            };
            for quarter in 0..4 {
                let rows = [four(0, quarter), four(1, quarter), four(2, quarter), four(3, quarter)];
                let (a, b) = (_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
                let (c, d) = (_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
                let to = to.add(4 * quarter * to_row);
                _mm512_storeu_ps(to, _mm512_shuffle_ps::<0x44>(a, c));
                _mm512_storeu_ps(to.add(to_row), _mm512_shuffle_ps::<0xEE>(a, c));
                _mm512_storeu_ps(to.add(2 * to_row), _mm512_shuffle_ps::<0x44>(b, d));
                _mm512_storeu_ps(to.add(3 * to_row), _mm512_shuffle_ps::<0xEE>(b, d));
            }
        }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn greater(self, a: __m512, b: __m512) -> __mmask16 {
        // SAFETY: above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn equal(self, a: __m512, b: __m512) -> __mmask16 {
        // SAFETY: above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn select(self, mask: __mmask16, then: __m512, otherwise: __m512) -> __m512 {
        // SAFETY: above.
        unsafe { _mm512_mask_blend_ps(mask, otherwise, then) }
    }
}
