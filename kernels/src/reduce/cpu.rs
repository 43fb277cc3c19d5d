//! The reductions on the CPU.
//!
//! All functions take raw pointers: sources and destinations are memory that other processes map too, so no Rust
//! reference to them may exist. Work is done in chunks of a few vector registers: a chunk of accumulators is filled
//! from the first rank, combined with the others in order and stored to every destination, so each source is read
//! once and each destination written once.
//!
//! The loops are plain Rust, compiled three times: for the baseline, for AVX2 and for AVX-512; only the
//! conversions of 16-bit floats use the processor's own instructions. Every operation is exactly rounded and none
//! is fused or reordered, so the three give the same bits.

use half::{bf16, f16};

use super::ReduceOp;
use super::half_floats::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};
#[cfg(target_arch = "x86_64")]
use crate::level::{AVX2, AVX512};
use crate::level::{BASELINE, detect};
use crate::{DType, Element};

/// Elements per chunk: four AVX-512 registers of 4-byte accumulators, a whole number of cache lines of any type.
const CHUNK: usize = 64;

/// An element type with the arithmetic of its accumulator.
///
/// `LEVEL` is the instruction set that the caller is compiled for (see `level`).
trait Accumulate: Element {
    type Acc: bytemuck::Pod;
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn product(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn smaller(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn larger(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn divide<const N: usize>(accs: [Self::Acc; N], ranks: u32) -> [Self::Acc; N];
    fn widen<const LEVEL: u8, const N: usize>(elements: [Self; N]) -> [Self::Acc; N];
    fn narrow<const LEVEL: u8, const N: usize>(accs: [Self::Acc; N]) -> [Self; N];
}

macro_rules! accumulate_float {
    ($type:ty, $acc:ty, $widen:expr, $narrow:expr) => {
        impl Accumulate for $type {
            type Acc = $acc;
            #[inline(always)]
            fn sum(a: $acc, b: $acc) -> $acc {
                a + b
            }
            #[inline(always)]
            fn product(a: $acc, b: $acc) -> $acc {
                a * b
            }
            // If `a` or `b` is NaN, it is the result, since a comparison with NaN is false.
            #[inline(always)]
            fn smaller(a: $acc, b: $acc) -> $acc {
                if a <= b || a.is_nan() { a } else { b }
            }
            #[inline(always)]
            fn larger(a: $acc, b: $acc) -> $acc {
                if a >= b || a.is_nan() { a } else { b }
            }
            // Dividing by a power of two equals multiplying by its inverse, bit for bit, and the multiplication is
            // several times faster.
            #[inline(always)]
            fn divide<const N: usize>(accs: [$acc; N], ranks: u32) -> [$acc; N] {
                let divisor = ranks as $acc;
                if ranks.is_power_of_two() {
                    let inverse = 1.0 / divisor;
                    accs.map(|acc| acc * inverse)
                } else {
                    accs.map(|acc| acc / divisor)
                }
            }
            #[inline(always)]
            fn widen<const LEVEL: u8, const N: usize>(elements: [$type; N]) -> [$acc; N] {
                $widen(elements)
            }
            #[inline(always)]
            fn narrow<const LEVEL: u8, const N: usize>(accs: [$acc; N]) -> [$type; N] {
                $narrow(accs)
            }
        }
    };
}
accumulate_float!(f32, f32, |x| x, |x| x);
accumulate_float!(f64, f64, |x| x, |x| x);
accumulate_float!(f16, f32, widen_f16::<LEVEL, N>, narrow_f16::<LEVEL, N>);
accumulate_float!(bf16, f32, |x: [bf16; N]| x.map(widen_bf16), |accs: [f32; N]| accs.map(narrow_bf16));

macro_rules! accumulate_integer {
    ($type:ty, $acc:ty) => {
        impl Accumulate for $type {
            type Acc = $acc;
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
            fn divide<const N: usize>(accs: [$acc; N], ranks: u32) -> [$acc; N] {
                accs.map(|acc| acc / <$acc>::from(ranks))
            }
            #[inline(always)]
            fn widen<const LEVEL: u8, const N: usize>(elements: [$type; N]) -> [$acc; N] {
                elements.map(<$acc>::from)
            }
            #[inline(always)]
            fn narrow<const LEVEL: u8, const N: usize>(accs: [$acc; N]) -> [$type; N] {
                accs.map(|acc| acc as $type)
            }
        }
    };
}
accumulate_integer!(u8, u32);
accumulate_integer!(i32, i64);
accumulate_integer!(i64, i64);

/// Combines the next rank's elements into the accumulators.
#[inline(always)]
fn combine<T: Accumulate, const N: usize>(op: ReduceOp, acc: &mut [T::Acc; N], next: [T::Acc; N]) {
    #[inline(always)]
    fn each<A: Copy, const N: usize>(acc: &mut [A; N], next: [A; N], combine: impl Fn(A, A) -> A) {
        for i in 0..N {
            acc[i] = combine(acc[i], next[i]);
        }
    }
    match op {
        ReduceOp::Sum | ReduceOp::Avg => each(acc, next, T::sum),
        ReduceOp::Min => each(acc, next, T::smaller),
        ReduceOp::Max => each(acc, next, T::larger),
        ReduceOp::Prod => each(acc, next, T::product),
    }
}

/// Divides if the reduction is an average, and rounds to the element type.
#[inline(always)]
fn finished<T: Accumulate, const LEVEL: u8, const N: usize>(
    op: ReduceOp,
    ranks: u32,
    acc: [T::Acc; N],
) -> [T; N] {
    T::narrow::<LEVEL, N>(if op == ReduceOp::Avg { T::divide(acc, ranks) } else { acc })
}

/// Reduces the `N` elements at `begin`.
///
/// # Safety
/// All pointers are valid for `begin + N` elements.
#[inline(always)]
unsafe fn reduce_chunk<T: Accumulate, const LEVEL: u8, const N: usize>(
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    begin: usize,
) {
    // SAFETY: the caller's promise. A destination may be a source: it is written after all have been read.
    unsafe {
        let load = |source: &*const u8| {
            T::widen::<LEVEL, N>(source.cast::<T>().add(begin).cast::<[T; N]>().read_unaligned())
        };
        let mut acc = load(&sources[0]);
        for source in &sources[1..] {
            combine::<T, N>(op, &mut acc, load(source));
        }
        let result = finished::<T, LEVEL, N>(op, sources.len() as u32, acc);
        for destination in destinations {
            destination.cast::<T>().add(begin).cast::<[T; N]>().write_unaligned(result);
        }
    }
}

/// Continues the reduction of the `N` elements at `begin`.
///
/// # Safety
/// All pointers are valid for `begin + N` elements or accumulators.
#[inline(always)]
unsafe fn reduce_chunk_from<T: Accumulate, const LEVEL: u8, const N: usize>(
    op: ReduceOp,
    acc: Option<*const u8>,
    sources: &[*const u8],
    output: Output<'_>,
    begin: usize,
) {
    // SAFETY: the caller's promise. A destination may be a source: it is written after all have been read.
    unsafe {
        let load = |source: &*const u8| {
            T::widen::<LEVEL, N>(source.cast::<T>().add(begin).cast::<[T; N]>().read_unaligned())
        };
        let (mut sum, rest) = match acc {
            Some(acc) => (acc.cast::<T::Acc>().add(begin).cast::<[T::Acc; N]>().read_unaligned(), sources),
            None => (load(&sources[0]), &sources[1..]),
        };
        for source in rest {
            combine::<T, N>(op, &mut sum, load(source));
        }
        match output {
            Output::Accumulators(acc) => {
                acc.cast::<T::Acc>().add(begin).cast::<[T::Acc; N]>().write_unaligned(sum);
            }
            Output::Elements { ranks, destinations } => {
                let result = finished::<T, LEVEL, N>(op, ranks, sum);
                for destination in destinations {
                    destination.cast::<T>().add(begin).cast::<[T; N]>().write_unaligned(result);
                }
            }
        }
    }
}

/// Calls `$chunk::<N>($begin)` for chunks that cover `0..$len`: full ones, then small ones, then single elements.
macro_rules! in_chunks {
    ($len:expr, |$begin:ident, $N:ident| $chunk:expr) => {{
        let mut $begin = 0;
        while $len - $begin >= CHUNK {
            const $N: usize = CHUNK;
            $chunk;
            $begin += CHUNK;
        }
        while $len - $begin >= 8 {
            const $N: usize = 8;
            $chunk;
            $begin += 8;
        }
        while $begin < $len {
            const $N: usize = 1;
            $chunk;
            $begin += 1;
        }
    }};
}

/// The whole reduction.
///
/// # Safety
/// As [`reduce`].
#[inline(always)]
unsafe fn reduce_all<T: Accumulate, const LEVEL: u8>(
    op: ReduceOp,
    sources: &[*const u8],
    destinations: &[*mut u8],
    len: usize,
) {
    // SAFETY: every chunk ends at `len` at most, which the caller guarantees.
    in_chunks!(len, |begin, N| unsafe { reduce_chunk::<T, LEVEL, N>(op, sources, destinations, begin) });
}

/// The whole continuation.
///
/// # Safety
/// As [`reduce_from`].
#[inline(always)]
unsafe fn reduce_all_from<T: Accumulate, const LEVEL: u8>(
    op: ReduceOp,
    acc: Option<*const u8>,
    sources: &[*const u8],
    output: Output<'_>,
    len: usize,
) {
    // SAFETY: every chunk ends at `len` at most, which the caller guarantees.
    in_chunks!(len, |begin, N| unsafe { reduce_chunk_from::<T, LEVEL, N>(op, acc, sources, output, begin) });
}

/// Widens `len` elements into accumulators.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn start_all<T: Accumulate, const LEVEL: u8>(source: *const T, acc: *mut T::Acc, len: usize) {
    // SAFETY: every chunk ends at `len` at most, which the caller guarantees.
    in_chunks!(len, |begin, N| unsafe {
        let elements = source.add(begin).cast::<[T; N]>().read_unaligned();
        acc.add(begin).cast::<[T::Acc; N]>().write_unaligned(T::widen::<LEVEL, N>(elements));
    });
}

/// Combines `len` elements into accumulators.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn accumulate_all<T: Accumulate, const LEVEL: u8>(
    op: ReduceOp,
    source: *const T,
    acc: *mut T::Acc,
    len: usize,
) {
    // SAFETY: every chunk ends at `len` at most, which the caller guarantees.
    in_chunks!(len, |begin, N| unsafe {
        let elements = source.add(begin).cast::<[T; N]>().read_unaligned();
        let place = acc.add(begin).cast::<[T::Acc; N]>();
        let mut sum = place.read_unaligned();
        combine::<T, N>(op, &mut sum, T::widen::<LEVEL, N>(elements));
        place.write_unaligned(sum);
    });
}

/// Rounds `len` accumulators to elements.
///
/// # Safety
/// Both pointers are valid for `len` elements.
#[inline(always)]
unsafe fn finish_all<T: Accumulate, const LEVEL: u8>(
    op: ReduceOp,
    ranks: u32,
    acc: *const T::Acc,
    out: *mut T,
    len: usize,
) {
    // SAFETY: every chunk ends at `len` at most, which the caller guarantees.
    in_chunks!(len, |begin, N| unsafe {
        let accs = acc.add(begin).cast::<[T::Acc; N]>().read_unaligned();
        out.add(begin).cast::<[T; N]>().write_unaligned(finished::<T, LEVEL, N>(op, ranks, accs));
    });
}

/// Defines a function that runs `$body`, compiled for each instruction set as `LEVEL`, on the detected one.
macro_rules! dispatched {
    ($name:ident<$T:ident>($($arg:ident: $type:ty),*) $body:block) => {
        unsafe fn $name<$T: Accumulate>($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")]
            unsafe fn avx512<$T: Accumulate>($($arg: $type),*) {
                const LEVEL: u8 = AVX512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn avx2<$T: Accumulate>($($arg: $type),*) {
                const LEVEL: u8 = AVX2;
                $body
            }
            unsafe fn baseline<$T: Accumulate>($($arg: $type),*) {
                const LEVEL: u8 = BASELINE;
                $body
            }
            // SAFETY: the level was detected on this processor; the rest is the caller's promise.
            unsafe {
                match detect() {
                    #[cfg(target_arch = "x86_64")]
                    AVX512 => avx512::<$T>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    AVX2 => avx2::<$T>($($arg),*),
                    _ => baseline::<$T>($($arg),*),
                }
            }
        }
    };
}

dispatched!(reduce_for<T>(op: ReduceOp, sources: &[*const u8], destinations: &[*mut u8], len: usize) {
    // SAFETY: the promise of the caller of `reduce`.
    unsafe { reduce_all::<T, LEVEL>(op, sources, destinations, len) }
});
dispatched!(reduce_from_for<T>(
    op: ReduceOp,
    acc: Option<*const u8>,
    sources: &[*const u8],
    output: Output<'_>,
    len: usize
) {
    // SAFETY: the promise of the caller of `reduce_from`.
    unsafe { reduce_all_from::<T, LEVEL>(op, acc, sources, output, len) }
});
dispatched!(start_for<T>(source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the promise of the caller of `start`.
    unsafe { start_all::<T, LEVEL>(source.cast(), acc.cast(), len) }
});
dispatched!(accumulate_for<T>(op: ReduceOp, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the promise of the caller of `accumulate`.
    unsafe { accumulate_all::<T, LEVEL>(op, source.cast(), acc.cast(), len) }
});
dispatched!(finish_for<T>(op: ReduceOp, ranks: u32, acc: *const u8, out: *mut u8, len: usize) {
    // SAFETY: the promise of the caller of `finish`.
    unsafe { finish_all::<T, LEVEL>(op, ranks, acc.cast(), out.cast(), len) }
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
/// Every pointer is aligned for `dtype` and valid for `len` elements; nothing else writes the sources or accesses the
/// destinations meanwhile. A destination may be one of the sources, but may not overlap one otherwise.
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
    // SAFETY: the caller's promise, with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, reduce_for(op, sources, destinations, len)) }
}

/// What a reduction of the first ranks, or of some more, is stored as.
#[derive(Debug, Clone, Copy)]
pub enum Output<'a> {
    /// As accumulators (of [`accumulator_size`](super::accumulator_size) bytes each), for the ranks to come.
    Accumulators(*mut u8),
    /// As elements, in every destination: this was the last of `ranks` ranks.
    Elements {
        /// Number of ranks, for an average.
        ranks: u32,
        /// Memory for `len` elements each.
        destinations: &'a [*mut u8],
    },
}

/// Continues a reduction in one pass: combines `len` accumulators of the ranks before, if there were any, with the
/// elements of `sources`, in order.
///
/// # Safety
/// As [`reduce`]; accumulators are aligned for their type and overlap nothing else.
///
/// # Panics
/// If there is neither an accumulator nor a source.
pub unsafe fn reduce_from(
    dtype: DType,
    op: ReduceOp,
    acc: Option<*const u8>,
    sources: &[*const u8],
    output: Output<'_>,
    len: usize,
) {
    // SAFETY: the caller's promise, with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, reduce_from_for(op, acc, sources, output, len)) }
}

/// Begins a reduction in steps: widens `len` elements of the first rank into accumulators
/// (of [`accumulator_size`](super::accumulator_size) bytes each).
///
/// # Safety
/// Both pointers are aligned for their types and valid for `len` elements; the ranges do not overlap.
pub unsafe fn start(dtype: DType, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the caller's promise, with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, start_for(source, acc, len)) }
}

/// Combines `len` elements of the next rank into the accumulators.
///
/// # Safety
/// As [`start`].
pub unsafe fn accumulate(dtype: DType, op: ReduceOp, source: *const u8, acc: *mut u8, len: usize) {
    // SAFETY: the caller's promise, with the type that belongs to `dtype`.
    unsafe { by_dtype!(dtype, accumulate_for(op, source, acc, len)) }
}

/// Ends a reduction over `ranks` ranks: rounds `len` accumulators to elements.
///
/// # Safety
/// As [`start`].
pub unsafe fn finish(dtype: DType, op: ReduceOp, ranks: u32, acc: *const u8, out: *mut u8, len: usize) {
    // SAFETY: the caller's promise, with the type that belongs to `dtype`.
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
        for first in 0..=ranks.len() {
            assert_eq!(
                bytemuck::cast_slice::<T, u8>(&whole),
                bytemuck::cast_slice::<T, u8>(&in_two(op, ranks, first))
            );
        }
        whole
    }

    /// Reduces the first ranks to accumulators, and goes on with the others.
    fn in_two<T: Element>(op: ReduceOp, ranks: &[Vec<T>], first: usize) -> Vec<T> {
        let len = ranks[0].len();
        let sources: Vec<*const u8> = ranks.iter().map(|r| r.as_ptr().cast()).collect();
        let mut acc = vec![0u64; (len * accumulator_size(T::DTYPE)).div_ceil(8)];
        let acc: *mut u8 = acc.as_mut_ptr().cast();
        let mut results = vec![T::zeroed(); len];
        let destinations = [results.as_mut_ptr().cast()];
        let elements = Output::Elements { ranks: ranks.len() as u32, destinations: &destinations };
        let before = (first > 0).then_some(acc.cast_const());
        // SAFETY: all vectors hold `len` elements or accumulators, and nothing else uses them here.
        unsafe {
            if first > 0 {
                reduce_from(T::DTYPE, op, None, &sources[..first], Output::Accumulators(acc), len);
            }
            reduce_from(T::DTYPE, op, before, &sources[first..], elements, len);
        }
        results
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
