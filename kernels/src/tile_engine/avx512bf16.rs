//! Products by `vdpbf16ps`: a pair of `a` is broadcast to all lanes, and multiplied by the pairs of 16 columns of `b`.
//!
//! A block is computed in four parts of eight rows by two vectors: 16 sums in registers are enough to hide the
//! instruction's latency.

use std::arch::x86_64::*;

use super::{Begin, Operands, PAIRS, SIDE, SUMS, TileEngine};
use crate::gemm::prefetch::Prefetch;
use crate::level;

/// Rows of a part.
const ROWS: usize = 8;

/// Exists only if the processor has AVX-512 with bf16.
struct Avx512Bf16(());

/// The engine, if the processor has its instructions.
pub(super) fn engine() -> Option<&'static dyn TileEngine> {
    static ENGINE: Avx512Bf16 = Avx512Bf16(());
    let has = level::best() >= level::AVX512 && is_x86_feature_detected!("avx512bf16");
    has.then_some(&ENGINE as &dyn TileEngine)
}

/// Whether a `vdpbf16ps` takes no longer than a multiply-add of f32. Intel's processors have one unit for it, and two
/// for multiply-adds.
pub(super) fn is_faster_than_f32() -> bool {
    let vendor = __cpuid(0);
    (vendor.ebx, vendor.edx, vendor.ecx)
        == (u32::from_le_bytes(*b"Auth"), u32::from_le_bytes(*b"enti"), u32::from_le_bytes(*b"cAMD"))
}

impl TileEngine for Avx512Bf16 {
    unsafe fn multiply(&self, operands: &Operands, begin: Begin, sums: &mut [f32; SUMS], ahead: Prefetch) {
        for part in 0..4 {
            // SAFETY: the type exists only if the processor has the instructions; the caller guarantees the
            // operands.
            unsafe { eight_rows(operands, part / 2, part % 2 * ROWS, begin, sums, ahead.share(part, 4)) };
        }
    }
}

/// Adds the product of rows `first..first + ROWS` of a group to its sums, or overwrites them with it. The lines of `ahead` are
/// spread over it: so many at once that the processor must wait for them would cost what they save.
///
/// # Safety
/// The processor has AVX-512 with bf16; the operands can be read.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn eight_rows(
    operands: &Operands,
    group: usize,
    first: usize,
    begin: Begin,
    sums: &mut [f32; SUMS],
    ahead: Prefetch,
) {
    let Operands { a, a_row, a_segment, b, b_segment, steps, segments } = *operands;
    let at = |row: usize, panel: usize| (group * 2 + panel) * SIDE * SIDE + (first + row) * SIDE;
    let mut lines = ahead.lines();
    let lines_per_step = lines.len().div_ceil(segments * steps);
    // SAFETY: rows of tiles lie within the block; the caller guarantees the operands. A prefetch is a hint, for any address.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); 2]; ROWS];
        if begin == Begin::Sums {
            for (row, acc) in acc.iter_mut().enumerate() {
                for (panel, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_loadu_ps(sums.as_ptr().add(at(row, panel)));
                }
            }
        }
        for segment in 0..segments {
            let mut a = a[group].add(first * a_row + segment * a_segment).cast::<i32>();
            let mut b = b.map(|b| b.add(segment * b_segment).cast::<__m512i>());
            for pair in 0..steps * PAIRS {
                if pair.is_multiple_of(PAIRS) {
                    for line in lines.by_ref().take(lines_per_step) {
                        _mm_prefetch::<_MM_HINT_T1>(line.cast());
                    }
                }
                let columns = b.map(|b| bf16_pairs(_mm512_loadu_si512(b)));
                for (row, acc) in acc.iter_mut().enumerate() {
                    let pair = a.cast::<u8>().add(row * a_row * 2).cast::<i32>().read_unaligned();
                    let pair = bf16_pairs(_mm512_set1_epi32(pair));
                    acc[0] = _mm512_dpbf16_ps(acc[0], pair, columns[0]);
                    acc[1] = _mm512_dpbf16_ps(acc[1], pair, columns[1]);
                }
                a = a.wrapping_add(1);
                b = b.map(|b| b.wrapping_add(1));
            }
        }
        for (row, acc) in acc.iter().enumerate() {
            for (panel, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(sums.as_mut_ptr().add(at(row, panel)), *acc);
            }
        }
    }
}

/// A vector of pairs of bf16.
#[inline]
#[target_feature(enable = "avx512f")]
fn bf16_pairs(words: __m512i) -> __m512bh {
    // SAFETY: any bits are elements of the type, which has the same size.
    unsafe { std::mem::transmute(words) }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::arithmetic::dot_pair;
    use super::*;
    use crate::rng::Stream;

    /// The processor's own instruction.
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn instruction(sums: [f32; SIDE], a: [u32; SIDE], b: [u32; SIDE]) -> [f32; SIDE] {
        let mut result = [0.0; SIDE];
        // SAFETY: the arrays have as many elements as the vectors.
        unsafe {
            let (a, b) = (_mm512_loadu_si512(a.as_ptr().cast()), _mm512_loadu_si512(b.as_ptr().cast()));
            let sums = _mm512_dpbf16_ps(_mm512_loadu_ps(sums.as_ptr()), bf16_pairs(a), bf16_pairs(b));
            _mm512_storeu_ps(result.as_mut_ptr(), sums);
        }
        result
    }

    fn pair(word: u32) -> [bf16; 2] {
        [word as u16, (word >> 16) as u16].map(bf16::from_bits)
    }

    /// Numbers near the ends of the range, special ones, and any bits.
    fn number(stream: &Stream, index: u64) -> u16 {
        let random = |of: u64| (stream.uniform(4 * index + of) * 65536.0) as u16;
        let (any, sign) = (random(0), random(1) & 0x8000);
        match random(2) % 8 {
            // Infinity, NaN and the largest numbers; zero and denormal ones; the smallest normal ones; close to 1.
            0 => sign | (0x7f70 + any % 0x90),
            1 => sign | (any % 0x80),
            2 => sign | (0x80 + any % 0x200),
            3 | 4 => sign | (0x3f00 + any % 0x100),
            // Around the root of the smallest normal number.
            5 => sign | (0x1f80 + any % 0x200),
            _ => any,
        }
    }

    #[test]
    fn the_emulation_has_the_bits_of_the_instruction() {
        if engine().is_none() {
            println!("skipped: this processor has no avx512_bf16");
            return;
        }
        let stream = Stream::new(0xBF16, 1);
        let word = |index: u64| {
            u32::from(number(&stream, 2 * index)) << 16 | u32::from(number(&stream, 2 * index + 1))
        };
        for round in 0..40_000u64 {
            let of = |operand: u64| -> [u32; SIDE] {
                std::array::from_fn(|lane| word((round * 3 + operand) * SIDE as u64 + lane as u64))
            };
            let (sums, a, b) = (of(0).map(f32::from_bits), of(1), of(2));
            compare(sums, a, b);
        }
        // Results just below the smallest normal number, which round up to it or are denormal.
        let two_to = |exponent: i32| ((exponent + 127) as u32) << 7;
        for (exponent, mantissa) in
            (-153..-124).flat_map(|exponent| (0..0x80).map(move |mantissa| (exponent, mantissa)))
        {
            let factor = two_to(exponent + 75) | mantissa;
            let (a, b) = (two_to(-75), 0x8000 | factor);
            // The product is that of the even or of the odd elements.
            let (a, b) = if mantissa % 2 == 0 { (a, b) } else { (a << 16, b << 16) };
            let sums = std::array::from_fn(|lane| f32::from_bits(f32::MIN_POSITIVE.to_bits() + lane as u32));
            compare(sums, [a; SIDE], [b; SIDE]);
        }
    }

    /// Panics unless instruction and emulation give the same bits.
    fn compare(sums: [f32; SIDE], a: [u32; SIDE], b: [u32; SIDE]) {
        // SAFETY: the caller has made sure that the processor has the instruction.
        let actual = unsafe { instruction(sums, a, b) };
        for lane in 0..SIDE {
            let expected = dot_pair(sums[lane], pair(a[lane]), pair(b[lane]));
            assert_eq!(
                actual[lane].to_bits(),
                expected.to_bits(),
                "{:08x} + {:08x} * {:08x}: {:08x} instead of {:08x}",
                sums[lane].to_bits(),
                a[lane],
                b[lane],
                actual[lane].to_bits(),
                expected.to_bits()
            );
        }
    }
}
