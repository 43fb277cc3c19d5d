//! Vectors of `f32` with the width of the processor.
//!
//! Loops whose speed depends on registers are written once, with [`Simd`], and compiled for AVX-512, for AVX2 with
//! FMA and for any other processor. A value of a type that implements it exists only if the processor has the
//! instructions, so arithmetic is safe; it comes from [`dispatch`], which selects the best level of the processor (or
//! what `MGPU_SIMD` allows, see `level`) and runs a [`Task`] compiled for it.
//!
//! Each lane computes the scalar operation, and except for `transpose` and `pick` no operation mixes lanes. So a loop that sums
//! in an order independent of the number of lanes gives the same bits with AVX2 and AVX-512; on processors without
//! fused multiply-add, [`Simd::mul_add`] rounds twice.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use half::{bf16, f16};

use crate::level;

/// Maximum number of lanes of any implementation.
pub(crate) const MAX_LANES: usize = 16;

/// Minimum number of lanes of any implementation.
pub(crate) const MIN_LANES: usize = 4;

/// A copy of `count` elements, at most [`MAX_LANES`], followed by zeros.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn padded<T: Copy + Default>(from: *const T, count: usize) -> [T; MAX_LANES] {
    let mut all = [T::default(); MAX_LANES];
    for (lane, value) in all.iter_mut().enumerate().take(count) {
        // SAFETY: the caller's promise.
        *value = unsafe { from.add(lane).read() };
    }
    all
}

/// Writes the first `count` elements of `all`.
///
/// # Safety
/// The elements can be written.
#[inline(always)]
unsafe fn write_first<T: Copy>(all: &[T; MAX_LANES], to: *mut T, count: usize) {
    for (lane, value) in all.iter().enumerate().take(count) {
        // SAFETY: the caller's promise.
        unsafe { to.add(lane).write(*value) };
    }
}

/// Instructions on vectors of [`LANES`](Simd::LANES) `f32`.
///
/// All methods must be inlined into a [`Task`], where the instructions are enabled.
pub trait Simd: Copy + Send + Sync {
    /// A vector.
    type F32: Copy;
    /// The result of a comparison, lane by lane.
    type Mask: Copy;
    /// Number of elements of a vector: a divisor of [`MAX_LANES`].
    const LANES: usize;
    /// Rows of the register tile of a matrix product, with two vectors each: as many as fit the register file.
    const ROWS: usize;
    /// Rows of a tile with four vectors, for products of few rows; for all products if such a tile has as many sums. 0 for none.
    const WIDE_ROWS: usize;
    /// Terms of a product's sums in one turn of its loop, 1 or 2.
    const TERMS: usize;

    /// Runs `task` in a function of its own, with the same instructions. A register tile is compiled once that way;
    /// when it is inlined, constants of the caller may take a register that it needs.
    fn call<T: Task>(self, task: T) -> T::Output;

    /// The same value in all lanes.
    fn splat(self, value: f32) -> Self::F32;

    /// Reads `LANES` elements.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load(self, from: *const f32) -> Self::F32;

    /// Reads `count` elements, at most `LANES`; the other lanes are zero.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_first(self, from: *const f32, count: usize) -> Self::F32;

    /// Writes all lanes.
    ///
    /// # Safety
    /// The elements can be written.
    unsafe fn store(self, values: Self::F32, to: *mut f32);

    /// Writes the first `count` lanes, at most `LANES`.
    ///
    /// # Safety
    /// The elements can be written.
    unsafe fn store_first(self, values: Self::F32, to: *mut f32, count: usize);

    /// Prefetches a cache line into the L2 cache. Any address is allowed.
    fn prefetch(self, line: *const f32);

    /// Reads `LANES` bytes as numbers.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_bytes(self, from: *const u8) -> Self::F32;

    /// Reads `LANES` bytes as the bits of integers, for [`pick`](Self::pick).
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_places(self, from: *const u8) -> Self::F32;

    /// Reads four elements into each group of four lanes.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_four(self, from: *const f32) -> Self::F32;

    /// For each lane that one of the four lanes of its group in `values` which the integer in `places`, 0 to 3, tells.
    fn pick(self, values: Self::F32, places: Self::F32) -> Self::F32;

    /// Reads `LANES` elements of half the width, exactly.
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::F32;

    /// Reads `count` elements of half the width, at most `LANES`; the other lanes are zero.
    ///
    /// # Safety
    /// They can be read.
    #[inline(always)]
    unsafe fn load_first_bf16(self, from: *const bf16, count: usize) -> Self::F32 {
        // SAFETY: the caller guarantees `count` elements, and a padded copy has those of a whole vector.
        unsafe {
            if count == Self::LANES {
                self.load_bf16(from)
            } else {
                self.load_bf16(padded(from, count).as_ptr())
            }
        }
    }

    /// Writes all lanes, rounded to nearest even.
    ///
    /// # Safety
    /// The elements can be written.
    unsafe fn store_bf16(self, values: Self::F32, to: *mut bf16);

    /// Writes the first `count` lanes, at most `LANES`, rounded to nearest even.
    ///
    /// # Safety
    /// The elements can be written.
    #[inline(always)]
    unsafe fn store_first_bf16(self, values: Self::F32, to: *mut bf16, count: usize) {
        let mut all = [bf16::ZERO; MAX_LANES];
        // SAFETY: the caller guarantees `count` elements, and `all` has room for a whole vector.
        unsafe {
            if count == Self::LANES {
                return self.store_bf16(values, to);
            }
            self.store_bf16(values, all.as_mut_ptr());
            write_first(&all, to, count);
        }
    }

    /// Writes all lanes of both vectors, rounded to nearest even, in turn: a pair for each lane.
    ///
    /// # Safety
    /// The elements can be written.
    #[inline(always)]
    unsafe fn store_bf16_pairs(self, even: Self::F32, odd: Self::F32, to: *mut bf16) {
        let mut rounded = [[bf16::ZERO; MAX_LANES]; 2];
        // SAFETY: the caller guarantees two elements for each lane, and `rounded` has room for whole vectors.
        unsafe {
            self.store_bf16(even, rounded[0].as_mut_ptr());
            self.store_bf16(odd, rounded[1].as_mut_ptr());
            for (lane, (even, odd)) in rounded[0].iter().zip(&rounded[1]).take(Self::LANES).enumerate() {
                to.add(2 * lane).write(*even);
                to.add(2 * lane + 1).write(*odd);
            }
        }
    }

    /// As [`load_bf16`](Self::load_bf16).
    ///
    /// # Safety
    /// They can be read.
    unsafe fn load_f16(self, from: *const f16) -> Self::F32;

    /// As [`load_first_bf16`](Self::load_first_bf16).
    ///
    /// # Safety
    /// They can be read.
    #[inline(always)]
    unsafe fn load_first_f16(self, from: *const f16, count: usize) -> Self::F32 {
        // SAFETY: the caller guarantees `count` elements, and a padded copy has those of a whole vector.
        unsafe {
            if count == Self::LANES {
                self.load_f16(from)
            } else {
                self.load_f16(padded(from, count).as_ptr())
            }
        }
    }

    /// As [`store_bf16`](Self::store_bf16).
    ///
    /// # Safety
    /// The elements can be written.
    unsafe fn store_f16(self, values: Self::F32, to: *mut f16);

    /// As [`store_first_bf16`](Self::store_first_bf16).
    ///
    /// # Safety
    /// The elements can be written.
    #[inline(always)]
    unsafe fn store_first_f16(self, values: Self::F32, to: *mut f16, count: usize) {
        let mut all = [f16::ZERO; MAX_LANES];
        // SAFETY: the caller guarantees `count` elements, and `all` has room for a whole vector.
        unsafe {
            if count == Self::LANES {
                return self.store_f16(values, to);
            }
            self.store_f16(values, all.as_mut_ptr());
            write_first(&all, to, count);
        }
    }

    /// Writes all lanes, whole numbers from 0 to 127, as bytes.
    ///
    /// # Safety
    /// The bytes can be written.
    unsafe fn store_bytes(self, values: Self::F32, to: *mut u8);

    /// Transposes a square matrix of `LANES` rows: writes row i, rows `from_row` elements apart, to column i of a
    /// matrix whose rows are `to_row` elements apart.
    ///
    /// # Safety
    /// The elements can be read and written.
    unsafe fn transpose(self, from: *const f32, from_row: usize, to: *mut f32, to_row: usize);

    /// `a + b`.
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a − b`.
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a · b`.
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a · b + c`, rounded once if the processor has fused multiply-add.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// `a > b`; false for NaN.
    fn greater(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `a == b`.
    fn equal(self, a: Self::F32, b: Self::F32) -> Self::Mask;
    /// `then` where the mask is set, `otherwise` elsewhere.
    fn select(self, mask: Self::Mask, then: Self::F32, otherwise: Self::F32) -> Self::F32;
}

/// A computation to be compiled for each instruction set.
pub trait Task {
    /// Its result.
    type Output;
    /// Runs it. Implementations are `#[inline(always)]`, so that they are compiled with the instructions enabled.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// Runs `task` with the best instructions of this processor.
#[inline]
pub(crate) fn dispatch<T: Task>(task: T) -> T::Output {
    match level::detect() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the processor has the instructions of the level.
        level::AVX512 => unsafe { avx512::run(task) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        level::AVX2 => unsafe { avx2::run(task) },
        _ => task.run(portable::Portable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests all operations of a level against the scalar ones.
    struct Operations;

    impl Task for Operations {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let a: Vec<f32> = (0..S::LANES).map(|lane| lane as f32 - 2.5).collect();
            let b: Vec<f32> = (0..S::LANES).map(|lane| 3.0 - lane as f32 * 0.75).collect();
            let bytes: Vec<u8> = (0..S::LANES as u8).map(|lane| lane * 7).collect();
            // SAFETY: the slices have as many elements as a vector has lanes.
            unsafe {
                let (va, vb) = (simd.load(a.as_ptr()), simd.load(b.as_ptr()));
                let check = |values: S::F32, expected: &dyn Fn(f32, f32) -> f32| {
                    let mut out = vec![f32::NAN; S::LANES];
                    simd.store(values, out.as_mut_ptr());
                    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| expected(*a, *b)).collect();
                    assert_eq!(out, expected);
                };
                check(simd.add(va, vb), &|a, b| a + b);
                check(simd.sub(va, vb), &|a, b| a - b);
                check(simd.mul(va, vb), &|a, b| a * b);
                check(simd.mul_add(va, vb, simd.splat(0.5)), &|a, b| a * b + 0.5);
                check(simd.select(simd.greater(va, vb), va, vb), &f32::max);
                check(simd.select(simd.equal(va, va), va, vb), &|a, _| a);
                for count in 0..=S::LANES {
                    let mut out = vec![9.0; S::LANES];
                    simd.store_first(va, out.as_mut_ptr(), count);
                    let kept = |lane: usize| if lane < count { a[lane] } else { 9.0 };
                    assert_eq!(out, (0..S::LANES).map(kept).collect::<Vec<_>>());
                    simd.store(simd.load_first(a.as_ptr(), count), out.as_mut_ptr());
                    let read = |lane: usize| if lane < count { a[lane] } else { 0.0 };
                    assert_eq!(out, (0..S::LANES).map(read).collect::<Vec<_>>());
                }
                let halves: Vec<bf16> = a.iter().map(|a| bf16::from_f32(a * 1.001)).collect();
                let mut narrow = vec![bf16::NAN; S::LANES];
                let exact: Vec<f32> = a.iter().map(|a| a * 1.001).collect();
                simd.store_bf16(simd.load(exact.as_ptr()), narrow.as_mut_ptr());
                assert_eq!(narrow, halves);
                let mut wide = vec![f32::NAN; S::LANES];
                simd.store(simd.load_bf16(halves.as_ptr()), wide.as_mut_ptr());
                assert_eq!(wide, halves.iter().map(|half| half.to_f32()).collect::<Vec<_>>());
                for count in 0..=S::LANES {
                    let mut out = vec![bf16::ONE; S::LANES];
                    simd.store_first_bf16(simd.load(exact.as_ptr()), out.as_mut_ptr(), count);
                    let kept = |lane: usize| if lane < count { halves[lane] } else { bf16::ONE };
                    assert_eq!(out, (0..S::LANES).map(kept).collect::<Vec<_>>());
                    simd.store(simd.load_first_bf16(halves.as_ptr(), count), wide.as_mut_ptr());
                    let read = |lane: usize| if lane < count { halves[lane].to_f32() } else { 0.0 };
                    assert_eq!(wide, (0..S::LANES).map(read).collect::<Vec<_>>());
                }
                let mut pairs = vec![bf16::NAN; 2 * S::LANES];
                simd.store_bf16_pairs(simd.load(exact.as_ptr()), vb, pairs.as_mut_ptr());
                let in_turn = halves.iter().zip(&b).flat_map(|(a, b)| [*a, bf16::from_f32(*b)]);
                assert!(pairs.iter().copied().eq(in_turn));
                simd.store_bf16(simd.splat(f32::NAN), narrow.as_mut_ptr());
                assert!(narrow.iter().all(|value| value.is_nan()));
                simd.store_bf16_pairs(simd.splat(-f32::NAN), simd.splat(f32::NAN), pairs.as_mut_ptr());
                assert!(pairs.iter().all(|value| value.is_nan()));
                let places: Vec<u8> = (0..S::LANES as u8).map(|lane| lane.wrapping_mul(7) % 4).collect();
                let four = [2.5, -1.0, f32::INFINITY, 1e-40];
                let picked = simd.pick(simd.load_four(four.as_ptr()), simd.load_places(places.as_ptr()));
                check(picked, &|a, _| four[usize::from(places[(a + 2.5) as usize])]);
                let mut back = vec![0; S::LANES];
                simd.store_bytes(simd.load_bytes(bytes.as_ptr()), back.as_mut_ptr());
                assert_eq!(back, bytes);
            }
        }
    }

    /// Tests the conversions of f16 against the half crate: all numbers, and f32 between them.
    struct F16Conversions;

    impl Task for F16Conversions {
        type Output = ();
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
            let mut wide = vec![0.0f32; all.len()];
            let mut narrow = vec![f16::ZERO; all.len()];
            // SAFETY: whole vectors within slices of 65,536 elements, and `first` elements of `few`.
            unsafe {
                for at in (0..all.len()).step_by(S::LANES) {
                    simd.store(simd.load_f16(all.as_ptr().add(at)), wide.as_mut_ptr().add(at));
                }
                for lower in [0, 1, 0xfff, 0x1000, 0x1001] {
                    let values: Vec<f32> =
                        all.iter().map(|half| f32::from_bits(half.to_f32().to_bits() | lower)).collect();
                    for at in (0..all.len()).step_by(S::LANES) {
                        simd.store_f16(simd.load(values.as_ptr().add(at)), narrow.as_mut_ptr().add(at));
                    }
                    let expected = values.iter().map(|value| f16::from_f32(*value).to_bits());
                    assert!(narrow.iter().map(|half| half.to_bits()).eq(expected));
                }
                for count in 0..=S::LANES {
                    let few: Vec<f16> = (0..count).map(|lane| f16::from_f32(lane as f32 + 0.5)).collect();
                    let mut out = vec![f16::ONE; S::LANES];
                    simd.store_first_f16(simd.load_first_f16(few.as_ptr(), count), out.as_mut_ptr(), count);
                    assert_eq!(out[..count], few);
                    assert!(out[count..].iter().all(|value| *value == f16::ONE));
                    simd.store_f16(simd.load_first_f16(few.as_ptr(), count), out.as_mut_ptr());
                    assert!(out[count..].iter().all(|value| *value == f16::ZERO));
                }
            }
            let expected = all.iter().map(|half| half.to_f32().to_bits());
            assert!(wide.iter().map(|value| value.to_bits()).eq(expected));
        }
    }

    #[test]
    fn every_level_computes_the_same() {
        Operations.run(portable::Portable);
        F16Conversions.run(portable::Portable);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: each runs only if the processor has the instructions.
        unsafe {
            if level::best() >= level::AVX2 {
                avx2::run(Operations);
                avx2::run(F16Conversions);
            }
            if level::best() >= level::AVX512 {
                avx512::run(Operations);
                avx512::run(F16Conversions);
            }
        }
    }
}
