//! The types that store activations and their gradients between layers: f32, or bf16 or f16 with half the memory.
//!
//! Arithmetic is f32 with all of them: kernels widen what they read and round what they write, to nearest even. So a
//! narrow type costs one rounding between two layers, and none within a sum.

use half::{bf16, f16};

use crate::Element;
use crate::passes;
use crate::reduce::half_floats::{narrow_bf16, narrow_one_f16, widen_bf16, widen_one_f16};
use crate::simd::{Simd, Task, dispatch};

/// A type that stores activations: `f32`, [`bf16`] or [`f16`].
pub trait Storage: lanes::Lanes + passes::Passes + Element + Default {}

impl Storage for f32 {}
impl Storage for bf16 {}
impl Storage for f16 {}

/// Reads and writes elements of a storage type, single ones and vectors. (In a private module, to hide the vector
/// types from users.)
pub(crate) mod lanes {
    use super::Simd;

    pub trait Lanes: Copy {
        /// As f32, exactly.
        fn widen(self) -> f32;

        /// The nearest value of this type.
        fn narrow(value: f32) -> Self;

        /// The elements themselves, if they are f32.
        fn wide(values: &[Self]) -> Option<&[f32]>;

        /// As [`wide`](Self::wide).
        fn wide_mut(values: &mut [Self]) -> Option<&mut [f32]>;

        /// Reads as many elements as a vector has lanes.
        ///
        /// # Safety
        /// They can be read.
        unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32;

        /// Reads `count` elements, at most as many as a vector has lanes; the other lanes are zero.
        ///
        /// # Safety
        /// They can be read.
        unsafe fn load_first<S: Simd>(simd: S, from: *const Self, count: usize) -> S::F32;

        /// Writes all lanes.
        ///
        /// # Safety
        /// The elements can be written.
        unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut Self);

        /// Writes the first `count` lanes.
        ///
        /// # Safety
        /// The elements can be written.
        unsafe fn store_first<S: Simd>(simd: S, values: S::F32, to: *mut Self, count: usize);

        /// Reads a vector if `room` elements are enough for one, otherwise as [`load_first`](Self::load_first): the lanes from
        /// `count` on do not matter, and some processors take longer for a part of a vector.
        ///
        /// # Safety
        /// `count` elements can be read, and `room`.
        #[inline(always)]
        unsafe fn load_at_least<S: Simd>(simd: S, from: *const Self, count: usize, room: usize) -> S::F32 {
            // SAFETY: the caller's promise.
            unsafe {
                if room >= S::LANES { Self::load(simd, from) } else { Self::load_first(simd, from, count) }
            }
        }

        /// Writes all lanes if `room` elements are enough for them, otherwise as [`store_first`](Self::store_first): the
        /// elements from `count` on are still to be written, and some processors take longer for a part of a vector.
        ///
        /// # Safety
        /// `count` elements can be written, and `room`.
        #[inline(always)]
        unsafe fn store_at_least<S: Simd>(simd: S, values: S::F32, to: *mut Self, count: usize, room: usize) {
            // SAFETY: the caller's promise.
            unsafe {
                if room >= S::LANES {
                    Self::store(simd, values, to);
                } else {
                    Self::store_first(simd, values, to, count);
                }
            }
        }
    }
}

impl lanes::Lanes for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(value: f32) -> f32 {
        value
    }
    fn wide(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }
    fn wide_mut(values: &mut [f32]) -> Option<&mut [f32]> {
        Some(values)
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const f32) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }
    #[inline(always)]
    unsafe fn load_first<S: Simd>(simd: S, from: *const f32, count: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_first(from, count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(values, to) }
    }
    #[inline(always)]
    unsafe fn store_first<S: Simd>(simd: S, values: S::F32, to: *mut f32, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_first(values, to, count) }
    }
}

impl lanes::Lanes for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_bf16(self)
    }
    #[inline(always)]
    fn narrow(value: f32) -> bf16 {
        narrow_bf16(value)
    }
    fn wide(_: &[bf16]) -> Option<&[f32]> {
        None
    }
    fn wide_mut(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const bf16) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn load_first<S: Simd>(simd: S, from: *const bf16, count: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_first_bf16(from, count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_bf16(values, to) }
    }
    #[inline(always)]
    unsafe fn store_first<S: Simd>(simd: S, values: S::F32, to: *mut bf16, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_first_bf16(values, to, count) }
    }
}

impl lanes::Lanes for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        widen_one_f16(self)
    }
    #[inline(always)]
    fn narrow(value: f32) -> f16 {
        narrow_one_f16(value)
    }
    fn wide(_: &[f16]) -> Option<&[f32]> {
        None
    }
    fn wide_mut(_: &mut [f16]) -> Option<&mut [f32]> {
        None
    }
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const f16) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(from) }
    }
    #[inline(always)]
    unsafe fn load_first<S: Simd>(simd: S, from: *const f16, count: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_first_f16(from, count) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(simd: S, values: S::F32, to: *mut f16) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_f16(values, to) }
    }
    #[inline(always)]
    unsafe fn store_first<S: Simd>(simd: S, values: S::F32, to: *mut f16, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { simd.store_first_f16(values, to, count) }
    }
}

/// Copies `from` to `to`, converting each element to the destination's type.
///
/// # Panics
/// If the lengths differ.
pub(crate) fn convert<A: Storage, B: Storage>(from: &[A], to: &mut [B]) {
    assert_eq!(from.len(), to.len(), "elements to be converted");
    if A::DTYPE == B::DTYPE {
        bytemuck::cast_slice_mut::<B, u8>(to).copy_from_slice(bytemuck::cast_slice(from));
        return;
    }
    dispatch(Convert { from, to });
}

struct Convert<'a, A, B> {
    from: &'a [A],
    to: &'a mut [B],
}

impl<A: Storage, B: Storage> Task for Convert<'_, A, B> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (from, to) in self.from.iter().zip(self.to) {
            *to = B::narrow(from.widen());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::norm::{self, Statistics, Sums};
    use crate::pool::{self, PoolShape, Rounding};
    use crate::reference::{narrow, random, widen};
    use crate::{Threads, activation, dropout};

    #[test]
    fn converting_to_bf16_rounds_and_back_is_exact() {
        let values = random(1000, 1);
        let (mut rounded, mut wide) = (vec![bf16::NAN; 1000], vec![f32::NAN; 1000]);
        convert(&values, &mut rounded);
        assert_eq!(rounded, narrow(&values));
        convert(&rounded, &mut wide);
        assert_eq!(wide, widen(&rounded));
    }

    /// All results of the layers without weights for a batch and a gradient.
    fn pass<E: Storage>(x: &[E], dy: &[E]) -> (Vec<Vec<E>>, Vec<f64>) {
        let (threads, channels) = (Threads::new(2), 21);
        let (gamma, beta) = (random(channels, 3), random(channels, 4));
        let (mut statistics, mut sums) = (Statistics::new(channels), Sums::new(channels));
        norm::cpu::sum_inputs(&threads, x, &mut sums);
        let mut all = sums.values_mut().to_vec();
        statistics.of_batch(&sums, &mut vec![0.0; channels], &mut vec![0.0; channels]);
        let mut normal = vec![E::default(); x.len()];
        norm::cpu::normalise(&threads, &statistics, &gamma, &beta, x, &mut normal);
        norm::cpu::sum_gradients(&threads, &statistics, x, dy, &mut sums);
        all.extend_from_slice(sums.values_mut());
        let mut gradient = dy.to_vec();
        norm::cpu::backward_input(&threads, &statistics, &sums, &gamma, x, &mut gradient);

        let (mut active, mut before) = (x.to_vec(), dy.to_vec());
        activation::cpu::forward(&threads, 0.2, &mut active);
        activation::cpu::backward(&threads, 0.2, x, &mut before);

        let shape = PoolShape { height: 8, width: 6, rounding: Rounding::Floor };
        let (mut pooled, mut chosen) = (vec![E::default(); x.len() / 4], vec![9; x.len() / 4]);
        pool::cpu::forward(&threads, &shape, channels, x, &mut pooled, &mut chosen);
        let mut spread = vec![E::default(); x.len()];
        pool::cpu::backward(&threads, &shape, channels, &dy[..pooled.len()], &chosen, &mut spread);

        let mut kept = x.to_vec();
        let mask = dropout::Mask { seed: 1, stream: 2, first_sample: 3, channels, plane: 48 };
        dropout::cpu::apply(&threads, 0.3, &mask, 0, &mut kept);
        (vec![normal, gradient, active, before, pooled, spread, kept], all)
    }

    #[test]
    fn layers_without_weights_only_round_their_results() {
        let len = 3 * 48 * 21;
        let (x, dy) = (narrow(&random(len, 1)), narrow(&random(len, 2)));
        let (narrow_results, sums) = pass(&x, &dy);
        let (results, expected) = pass(&widen(&x), &widen(&dy));
        assert_eq!(narrow_results, results.iter().map(|values| narrow(values)).collect::<Vec<_>>());
        assert_eq!(sums, expected);

        let halves = |values: &[f32]| values.iter().copied().map(f16::from_f32).collect::<Vec<_>>();
        let wide = |values: &[f16]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
        let (x, dy) = (halves(&random(len, 1)), halves(&random(len, 2)));
        let (half_results, sums) = pass(&x, &dy);
        let (results, expected) = pass(&wide(&x), &wide(&dy));
        assert_eq!(half_results, results.iter().map(|values| halves(values)).collect::<Vec<_>>());
        assert_eq!(sums, expected);
    }
}
