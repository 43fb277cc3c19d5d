//! AVX-512: 16 lanes, 32 registers.

use std::arch::x86_64::*;

use super::{Simd, Task};

/// Proof that the processor has AVX-512 F, BW, VL and DQ.
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

// SAFETY of every block: the value `self` exists only in `run`, whose caller vouches for the instructions; pointers are
// vouched for by the caller of the method.
impl Simd for Avx512 {
    type F32 = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const ROWS: usize = 14;
    const WIDE_ROWS: usize = 6;

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
        // SAFETY: above; masked lanes are not touched.
        unsafe { _mm512_maskz_loadu_ps(first(count), from) }
    }
    #[inline(always)]
    unsafe fn store(self, values: __m512, to: *mut f32) {
        // SAFETY: above.
        unsafe { _mm512_storeu_ps(to, values) }
    }
    #[inline(always)]
    unsafe fn store_first(self, values: __m512, to: *mut f32, count: usize) {
        // SAFETY: above; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, first(count), values) }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8) -> __m512 {
        // SAFETY: above; 16 bytes.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_bytes(self, values: __m512, to: *mut u8) {
        // SAFETY: above; 16 bytes.
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(values))) }
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
