//! How activations and their gradients are kept between layers: as f32, or as bf16, which is half the memory.
//!
//! Arithmetic is f32 either way: kernels widen what they read and round what they write, to nearest even.

use half::bf16;

use crate::simd::Simd;

/// A type that activations are kept as: `f32` or [`bf16`].
pub trait Storage: lanes::Lanes + bytemuck::Pod + Send + Sync + std::fmt::Debug {}

mod lanes {
    use super::Simd;

    /// A vector's worth of a storage type. (In a module of its own: which instructions there are is no concern of users.)
    pub trait Lanes: Copy {
        /// Reads as many elements as a vector has lanes.
        ///
        /// # Safety
        /// They can be read.
        unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32;

        /// Writes as many elements.
        ///
        /// # Safety
        /// They can be written.
        unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut Self);
    }
}

impl Storage for f32 {}

impl lanes::Lanes for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const f32) -> S::F32 {
        // SAFETY: the caller's.
        unsafe { simd.load(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { simd.store(values, to) }
    }
}

impl Storage for bf16 {}

impl lanes::Lanes for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const bf16) -> S::F32 {
        // SAFETY: the caller's.
        unsafe { simd.load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut bf16) {
        // SAFETY: the caller's.
        unsafe { simd.store_bf16(values, to) }
    }
}
