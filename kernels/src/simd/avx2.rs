//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Simd, Task};

/// Exists only if the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Runs `task` with AVX2, FMA and F16C.
///
/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<T: Task>(task: T) -> T::Output {
    task.run(Avx2(()))
}

/// As [`run`], and not inlined.
///
/// # Safety
/// As for [`run`].
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn outlined<T: Task>(task: T) -> T::Output {
    task.run(Avx2(()))
}

/// Elements of half the width, rounded to nearest even, in the lower halves of the lanes, with zeros above.
///
/// # Safety
/// As for [`run`].
#[inline(always)]
unsafe fn narrow(values: __m256) -> __m256i {
    // SAFETY: the caller guarantees the instructions.
    unsafe {
        let bits = _mm256_castps_si256(values);
        let upper = _mm256_srli_epi32::<16>(bits);
        // See `reduce::half_floats`.
        let odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        let carried = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        let rounded = _mm256_srli_epi32::<16>(carried);
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        let quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        _mm256_blendv_epi8(rounded, quiet, nan)
    }
}

/// All bits set in the first `count` lanes.
///
/// # Safety
/// `count` is at most 8, and the processor has AVX.
#[inline(always)]
unsafe fn first(count: usize) -> __m256i {
    const ENDS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    debug_assert!(count <= 8);
    // SAFETY: 8 of the 16 elements, from 8 − `count`.
    unsafe { _mm256_loadu_si256(ENDS.as_ptr().wrapping_add(8_usize.wrapping_sub(count)).cast()) }
}

// SAFETY of every block: the value `self` exists only in `run` and `outlined`, whose callers guarantee the
// instructions; the caller of the method guarantees the pointers.
impl Simd for Avx2 {
    type F32 = __m256;
    type Mask = __m256;
    const LANES: usize = 8;
    const ROWS: usize = 6;
    const WIDE_ROWS: usize = 3;
    /// Two cost fewer instructions: a processor starts only a few in a cycle, and divides them between a core's threads.
    const TERMS: usize = 2;

    #[inline(always)]
    fn call<T: Task>(self, task: T) -> T::Output {
        // SAFETY: above.
        unsafe { outlined(task) }
    }
    #[inline(always)]
    fn splat(self, value: f32) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize) -> __m256 {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm256_maskload_ps(from, first(count)) }
    }
    #[inline(always)]
    unsafe fn store(self, values: __m256, to: *mut f32) {
        // SAFETY: above.
        unsafe { _mm256_storeu_ps(to, values) }
    }
    #[inline(always)]
    unsafe fn store_first(self, values: __m256, to: *mut f32, count: usize) {
        // SAFETY: above; masked lanes are not accessed.
        unsafe { _mm256_maskstore_ps(to, first(count), values) }
    }
    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        // SAFETY: a hint, for any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m256 {
        // SAFETY: above; 8 bytes.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_places(self, from: *const u8) -> __m256 {
        // SAFETY: above; 8 bytes.
        unsafe { _mm256_castsi256_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_four(self, from: *const f32) -> __m256 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm256_broadcast_ps(&_mm_loadu_ps(from)) }
    }
    #[inline(always)]
    fn pick(self, values: __m256, places: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_permutevar_ps(values, _mm256_castps_si256(places)) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        // SAFETY: above; 16 bytes.
        unsafe {
            let upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, values: __m256, to: *mut bf16) {
        // SAFETY: above; 16 bytes.
        unsafe {
            let rounded = narrow(values);
            let (low, high) = (_mm256_castsi256_si128(rounded), _mm256_extracti128_si256::<1>(rounded));
            _mm_storeu_si128(to.cast(), _mm_packus_epi32(low, high));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, even: __m256, odd: __m256, to: *mut bf16) {
        // SAFETY: above; 32 bytes. The elements of `even` have zeros in the upper halves.
        unsafe {
            let pairs = _mm256_or_si256(narrow(even), _mm256_slli_epi32::<16>(narrow(odd)));
            _mm256_storeu_si256(to.cast(), pairs);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, values: __m256, to: *mut f16) {
        // SAFETY: above; 16 bytes.
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values)) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, values: __m256, to: *mut u8) {
        // SAFETY: above; 8 bytes.
        unsafe {
            let whole = _mm256_cvttps_epi32(values);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
            _mm_storel_epi64(to.cast(), _mm_packus_epi16(words, words));
        }
    }
    #[inline(always)]
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize) {
        // SAFETY: above. Quarters of rows i and i + 4 form a vector, so that afterwards lanes are mixed within halves
        // only.
        unsafe {
            let pair = |i: usize, half: usize| {
                let at = from.add(i * from_row + 4 * half);
                let low = _mm256_castps128_ps256(_mm_loadu_ps(at));
                _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(at.add(4 * from_row)))
            };
            for half in 0..2 {
                let rows = [pair(0, half), pair(1, half), pair(2, half), pair(3, half)];
                let (a, b) = (_mm256_unpacklo_ps(rows[0], rows[1]), _mm256_unpackhi_ps(rows[0], rows[1]));
                let (c, d) = (_mm256_unpacklo_ps(rows[2], rows[3]), _mm256_unpackhi_ps(rows[2], rows[3]));
                let to = to.add(4 * half * to_row);
                _mm256_storeu_ps(to, _mm256_shuffle_ps::<0x44>(a, c));
                _mm256_storeu_ps(to.add(to_row), _mm256_shuffle_ps::<0xEE>(a, c));
                _mm256_storeu_ps(to.add(2 * to_row), _mm256_shuffle_ps::<0x44>(b, d));
                _mm256_storeu_ps(to.add(3 * to_row), _mm256_shuffle_ps::<0xEE>(b, d));
            }
        }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn greater(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_cmp_ps::<_CMP_GT_OQ>(a, b) }
    }
    #[inline(always)]
    fn equal(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_cmp_ps::<_CMP_EQ_OQ>(a, b) }
    }
    #[inline(always)]
    fn select(self, mask: __m256, then: __m256, otherwise: __m256) -> __m256 {
        // SAFETY: above.
        unsafe { _mm256_blendv_ps(otherwise, then, mask) }
    }
}
