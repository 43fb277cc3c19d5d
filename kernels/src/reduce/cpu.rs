//! The reductions on the CPU.
//!
//! All functions take raw pointers: sources and destinations are memory that other processes map too, so no Rust
//! reference to them may exist. Work is done in tiles that stay in the first-level cache: one tile of
//! accumulators is filled from the first rank, combined with the others in order and stored to every
//! destination, so each source is read once and each destination written once.
//!
//! The loops are plain Rust, compiled three times: for the baseline, for AVX2 and for AVX-512. Every operation in
//! them is exactly rounded and none is fused or reordered, so the three give the same bits.

use half::{bf16, f16};

use super::ReduceOp;
use crate::{DType, Element};

/// Elements per tile: accumulators and elements of 8 bytes together fill half of a 32 KiB first-level cache.
const TILE: usize = 1024;

/// An element type with the arithmetic of its accumulator.
trait Accumulate: Element {
    type Acc: bytemuck::Pod;
    fn widen(self) -> Self::Acc;
    fn narrow(acc: Self::Acc) -> Self;
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn product(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn smaller(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn larger(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn divide(acc: Self::Acc, ranks: u32) -> Self::Acc;
}

macro_rules! accumulate_float {
    ($type:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        impl Accumulate for $type {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> Self {
                $narrow(acc)
            }
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                a + b
            }
            #[inline(always)]
            fn product(a: $acc, b: $acc) -> $acc {
                a * b
            }
            // `a` is kept when it is NaN, `b` when it is: a comparison with NaN is false.
            #[inline(always)]
            fn smaller(a: $acc, b: $acc) -> $acc {
                if a <= b || a.is_nan() { a } else { b }
            }
            #[inline(always)]
            fn larger(a: $acc, b: $acc) -> $acc {
                if a >= b || a.is_nan() { a } else { b }
            }
            #[inline(always)]
            fn divide(acc: $acc, ranks: u32) -> $acc {
                acc / ranks as $acc
            }
        }
    };
}
accumulate_float!(f32, f32, |x| x, |x| x);
accumulate_float!(f64, f64, |x| x, |x| x);
accumulate_float!(f16, f32, f16::to_f32, f16::from_f32);
accumulate_float!(bf16, f32, bf16::to_f32, bf16::from_f32);

macro_rules! accumulate_integer {
    ($type:ty, $acc:ty) => {
        impl Accumulate for $type {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                self.into()
            }
            #[inline(always)]
            fn narrow(acc: $acc) -> Self {
                acc as $type
            }
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn product(a: $acc, b: $acc) -> $acc {
                a.wrapping_mul(b)
            }
            #[inline(always)]
            fn smaller(a: $acc, b: $acc) -> $acc {
                a.min(b)
            }
            #[inline(always)]
            fn larger(a: $acc, b: $acc) -> $acc {
                a.max(b)
            }
            #[inline(always)]
            fn divide(acc: $acc, ranks: u32) -> $acc {
                acc / <$acc>::from(ranks)
            }
        }
    };
}
accumulate_integer!(u8, u32);
accumulate_integer!(i32, i64);
accumulate_integer!(i64, i64);

/// Combines `source[i]` into `acc[i]` for `len` elements.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn combine<T: Accumulate>(op: ReduceOp, source: *const T, acc: *mut T::Acc, len: usize) {
    #[inline(always)]
    unsafe fn each<T: Accumulate>(
        source: *const T,
        acc: *mut T::Acc,
        len: usize,
        combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    ) {
        for i in 0..len {
            // SAFETY: i < len, and the caller vouches for `len` elements behind both pointers.
            unsafe { *acc.add(i) = combine(*acc.add(i), (*source.add(i)).widen()) };
        }
    }
    // SAFETY: handed through.
    unsafe {
        match op {
            ReduceOp::Sum | ReduceOp::Avg => each(source, acc, len, T::sum),
            ReduceOp::Min => each(source, acc, len, T::smaller),
            ReduceOp::Max => each(source, acc, len, T::larger),
            ReduceOp::Prod => each(source, acc, len, T::product),
        }
    }
}

/// Widens the first source into the accumulators.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn widen_all<T: Accumulate>(source: *const T, acc: *mut T::Acc, len: usize) {
    for i in 0..len {
        // SAFETY: i < len, and the caller vouches for `len` elements behind both pointers.
        unsafe { *acc.add(i) = (*source.add(i)).widen() };
    }
}

/// Divides if the reduction is an average, rounds to the element type and stores.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn narrow_all<T: Accumulate>(op: ReduceOp, ranks: u32, acc: *const T::Acc, out: *mut T, len: usize) {
    for i in 0..len {
        // SAFETY: i < len, and the caller vouches for `len` elements behind both pointers.
        unsafe {
            let value = *acc.add(i);
            *out.add(i) = T::narrow(if op == ReduceOp::Avg { T::divide(value, ranks) } else { value });
        }
    }
}

/// The whole reduction, tile by tile.
///
/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_tiles<T: Accumulate>(
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    len: usize,
) {
    let mut acc = [<T::Acc as bytemuck::Zeroable>::zeroed(); TILE];
    let mut out = [<T as bytemuck::Zeroable>::zeroed(); TILE];
    let mut begin = 0;
    while begin < len {
        let tile = TILE.min(len - begin);
        // SAFETY: begin + tile <= len, for which the caller vouches; `acc` and `out` hold TILE elements. A
        // destination may be a source, and is written only after the tile has been read from every source.
        unsafe {
            widen_all::<T>(sources[0].cast::<T>().add(begin), acc.as_mut_ptr(), tile);
            for source in &sources[1..] {
                combine::<T>(op, source.cast::<T>().add(begin), acc.as_mut_ptr(), tile);
            }
            narrow_all::<T>(op, sources.len() as u32, acc.as_ptr(), out.as_mut_ptr(), tile);
            for destination in destinations {
                std::ptr::copy_nonoverlapping(out.as_ptr(), destination.cast::<T>().add(begin), tile);
            }
        }
        begin += tile;
    }
}

/// Instruction sets the loops are compiled for.
#[derive(Clone, Copy)]
enum Level {
    Baseline,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    /// The best level of this processor; the standard library caches the detection.
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                return Level::Avx512;
            }
            if is_x86_feature_detected!("avx2") {
                return Level::Avx2;
            }
        }
        Level::Baseline
    }
}

/// Defines a function that runs `$body` compiled for the detected level.
macro_rules! dispatched {
    ($name:ident<$T:ident>($($arg:ident: $type:ty),*) $body:block) => {
        unsafe fn $name<$T: Accumulate>($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx2")]
            unsafe fn avx512<$T: Accumulate>($($arg: $type),*) $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            unsafe fn avx2<$T: Accumulate>($($arg: $type),*) $body
            unsafe fn baseline<$T: Accumulate>($($arg: $type),*) $body
            // SAFETY: the level was detected on this processor; the rest is handed through from the caller.
            unsafe {
                match Level::detect() {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => avx512::<$T>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => avx2::<$T>($($arg),*),
                    Level::Baseline => baseline::<$T>($($arg),*),
                }
            }
        }
    };
}

dispatched!(reduce_for<T>(op: ReduceOp, sources: &[*const u8], destinations: &[*mut u8], len: usize) {
    // SAFETY: handed through from `reduce`.
    unsafe { reduce_tiles::<T>(op, sources, destinations, len) }
});
dispatched!(start_for<T>(source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: handed through from `start`.
    unsafe { widen_all::<T>(source.cast(), acc.cast(), len) }
});
dispatched!(accumulate_for<T>(op: ReduceOp, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: handed through from `accumulate`.
    unsafe { combine::<T>(op, source.cast(), acc.cast(), len) }
});
dispatched!(finish_for<T>(op: ReduceOp, ranks: u32, acc: *const u8, out: *mut u8, len: usize) {
    // SAFETY: handed through from `finish`.
    unsafe { narrow_all::<T>(op, ranks, acc.cast(), out.cast(), len) }
});

/// Calls `$function::<T>($args)` with the Rust type of `$dtype`.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($arg:expr),*)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($arg),*),
            DType::F64 => $function::<f64>($($arg),*),
            DType::F16 => $function::<f16>($($arg),*),
            DType::Bf16 => $function::<bf16>($($arg),*),
            DType::I32 => $function::<i32>($($arg),*),
            DType::I64 => $function::<i64>($($arg),*),
            DType::U8 => $function::<u8>($($arg),*),
        }
    };
}

/// Reduces `len` elements of every source, in order, and stores the result to every destination.
///
/// # Safety
/// Every pointer is aligned for `dtype` and valid for `len` elements; nobody else writes the sources or touches
/// the destinations meanwhile. A destination may be one of the sources, but may not overlap one otherwise.
///
/// # Panics
/// If there is no source.
pub unsafe fn reduce(
    dtype: DType,
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    len: usize,
) {
    // SAFETY: the caller's promise, handed through with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, reduce_for(op, sources, destinations, len)) }
}

/// Begins a reduction in steps: widens `len` elements of the first rank into accumulators
/// (of [`accumulator_size`](super::accumulator_size) bytes each).
///
/// # Safety
/// Both pointers are aligned for their types and valid for `len` elements; the ranges do not overlap.
pub unsafe fn start(dtype: DType, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed through with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, start_for(source, acc, len)) }
}

/// Combines `len` elements of the next rank into the accumulators.
///
/// # Safety
/// As [`start`].
pub unsafe fn accumulate(dtype: DType, op: ReduceOp, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed through with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, accumulate_for(op, source, acc, len)) }
}

/// Ends a reduction over `ranks` ranks: rounds `len` accumulators to elements.
///
/// # Safety
/// As [`start`].
pub unsafe fn finish(dtype: DType, op: ReduceOp, ranks: u32, acc: *const u8, out: *mut u8, len: usize) {
    // SAFETY: the caller's promise, handed through with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, finish_for(op, ranks, acc, out, len)) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::reduce::accumulator_size;

    /// Reduces in one pass and in steps, checks that both agree bit for bit, and returns the result.
    fn both_ways<T: Element>(op: ReduceOp, ranks: &[Vec<T>]) -> Vec<T> {
        let len = ranks[0].len();
        let sources: Vec<*const u8> = ranks.iter().map(|r| r.as_ptr().cast()).collect();
        let mut whole = vec![T::zeroed(); len];
        let mut again = vec![T::zeroed(); len];
        let destinations = [whole.as_mut_ptr().cast(), again.as_mut_ptr().cast()];
        // SAFETY: all vectors hold `len` elements and nothing else uses them here.
        unsafe { reduce(T::DTYPE, op, &sources, &destinations, len) };
        assert_eq!(bytemuck::cast_slice::<T, u8>(&whole), bytemuck::cast_slice::<T, u8>(&again));

        let mut acc = vec![0u64; (len * accumulator_size(T::DTYPE)).div_ceil(8)];
        let mut stepped = vec![T::zeroed(); len];
        // SAFETY: `acc` has room for `len` accumulators and u64 is aligned enough for any of them.
        unsafe {
            let acc = acc.as_mut_ptr().cast();
            start(T::DTYPE, sources[0], acc, len);
            for source in &sources[1..] {
                accumulate(T::DTYPE, op, *source, acc, len);
            }
            finish(T::DTYPE, op, ranks.len() as u32, acc, stepped.as_mut_ptr().cast(), len);
        }
        assert_eq!(bytemuck::cast_slice::<T, u8>(&whole), bytemuck::cast_slice::<T, u8>(&stepped));
        whole
    }

    proptest! {
        #[test]
        fn f32_is_summed_in_rank_order(
            ranks in (1usize..6, 0usize..2500).prop_flat_map(|(n, len)| {
                prop::collection::vec(prop::collection::vec(-1e6f32..1e6, len), n)
            })
        ) {
            let sum = both_ways(ReduceOp::Sum, &ranks);
            let avg = both_ways(ReduceOp::Avg, &ranks);
            let min = both_ways(ReduceOp::Min, &ranks);
            for i in 0..sum.len() {
                let expected = ranks[1..].iter().fold(ranks[0][i], |acc, rank| acc + rank[i]);
                prop_assert_eq!(sum[i].to_bits(), expected.to_bits());
                prop_assert_eq!(avg[i].to_bits(), (expected / ranks.len() as f32).to_bits());
                let expected = ranks.iter().map(|rank| rank[i]).fold(f32::INFINITY, f32::min);
                prop_assert_eq!(min[i], expected);
            }
        }

        #[test]
        fn u8_sums_wrap_and_averages_do_not(
            ranks in (1usize..6, 0usize..300).prop_flat_map(|(n, len)| {
                prop::collection::vec(prop::collection::vec(any::<u8>(), len), n)
            })
        ) {
            let sum = both_ways(ReduceOp::Sum, &ranks);
            let avg = both_ways(ReduceOp::Avg, &ranks);
            for i in 0..sum.len() {
                let exact: usize = ranks.iter().map(|rank| usize::from(rank[i])).sum();
                prop_assert_eq!(usize::from(sum[i]), exact % 256);
                prop_assert_eq!(usize::from(avg[i]), exact / ranks.len());
            }
        }
    }

    #[test]
    fn sixteen_bit_floats_round_once() {
        // 2048 + 1 is not an f16: rounded at every step the sum would stay at 2048.
        let ranks: Vec<Vec<f16>> = [2048.0, 1.0, 1.0].map(|x| vec![f16::from_f32(x)]).to_vec();
        assert_eq!(both_ways(ReduceOp::Sum, &ranks)[0].to_f32(), 2050.0);
        let ranks: Vec<Vec<bf16>> = [256.0, 1.0, 1.0].map(|x| vec![bf16::from_f32(x)]).to_vec();
        assert_eq!(both_ways(ReduceOp::Sum, &ranks)[0].to_f32(), 258.0);
    }

    #[test]
    fn nan_is_never_masked() {
        for position in 0..3 {
            let mut ranks = vec![vec![1.0f32], vec![2.0], vec![3.0]];
            ranks[position][0] = f32::NAN;
            for op in ReduceOp::ALL {
                assert!(both_ways(op, &ranks)[0].is_nan(), "{op} with NaN on rank {position}");
            }
        }
    }

    #[test]
    fn integers_of_every_width() {
        let ranks = vec![vec![i32::MAX, -7], vec![1, 2], vec![0, 2]];
        assert_eq!(both_ways(ReduceOp::Sum, &ranks), [i32::MIN, -3]);
        assert_eq!(both_ways(ReduceOp::Avg, &ranks), [((i64::from(i32::MAX) + 1) / 3) as i32, -1]);
        assert_eq!(both_ways(ReduceOp::Prod, &ranks), [0, -28]);
        let ranks = vec![vec![i64::MAX], vec![1]];
        assert_eq!(both_ways(ReduceOp::Sum, &ranks), [i64::MIN]);
        assert_eq!(both_ways(ReduceOp::Max, &ranks), [i64::MAX]);
        assert_eq!(both_ways(ReduceOp::Max, &[vec![1.5f64], vec![2.5]]), [2.5]);
    }
}
