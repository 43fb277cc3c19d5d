//! The arithmetic of the processors' instructions for products of bf16, bit for bit, in plain Rust.
//!
//! Both instructions multiply pairs of bf16 and sum in f32 with fused multiply-adds: a product is exact, and each sum
//! is rounded once, to nearest even. They ignore the rounding mode and the flags of the thread. Denormal numbers do not
//! exist for them: operands count as zero (DAZ), and results that are denormal become zero (FTZ). They differ in the
//! order of a sum (Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2):
//!
//! - `vdpbf16ps` adds the product of the odd elements of a pair to the sum, then that of the even ones: [`dot_pair`].
//! - `tdpbf16ps` sums the products of a tile's even elements and of its odd elements apart, each from zero and in the order
//!   of the depth, adds the two sums, and adds that to the result: [`tile_product`].
//!
//! A processor decides after rounding whether a result is denormal: one that rounds up to the smallest normal number is
//! kept. [`f32::mul_add`] rounds such results with fewer bits, so they are computed again, larger by a power of two.
//!
//! If operands are NaN, the result is the first of them in the order of the arguments, quiet. An invalid operation has
//! [`INVALID`] as its result. The manual says so of `vdpbf16ps`; for `tdpbf16ps` it is an assumption.

use half::bf16;

use super::{PAIRS, SIDE, TILE};

/// The result of an invalid operation, such as 0 · ∞.
const INVALID: f32 = f32::from_bits(0xffc0_0000);

/// A power of two by which tiny products are scaled: f32 has room for it on both sides.
const SCALE: f32 = (1u64 << 63) as f32 * 2.0;

/// The number, or a zero of its sign if it is denormal.
#[inline(always)]
fn flush(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(value) } else { value }
}

/// The first NaN, quiet.
fn first_nan(values: &[f32]) -> Option<f32> {
    values.iter().find(|value| value.is_nan()).map(|nan| f32::from_bits(nan.to_bits() | 0x0040_0000))
}

/// `a · b + c`, where `a` and `b` are bf16 numbers.
#[inline]
fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
    let (a, b, c) = (flush(a), flush(b), flush(c));
    let sum = a.mul_add(b, c);
    if is_certain(sum) { sum } else { multiply_add_with_care(a, b, c, sum) }
}

/// Whether the result of a fused multiply-add is also that of the instructions.
#[inline(always)]
fn is_certain(sum: f32) -> bool {
    sum.abs() > f32::MIN_POSITIVE || sum == 0.0
}

/// The result that is not certain: it is NaN, denormal, or ± the smallest normal number.
#[cold]
fn multiply_add_with_care(a: f32, b: f32, c: f32, sum: f32) -> f32 {
    if sum.is_nan() {
        return first_nan(&[a, b, c]).unwrap_or(INVALID);
    }
    // A sum as small as this has no large terms: a product has 16 bits, so what is left after cancellation is at least
    // 2⁻²³ of the larger term. So the smaller factor and `c` may be scaled.
    let (small, large) = if a.abs() < b.abs() { (a, b) } else { (b, a) };
    let scaled = (small * SCALE).mul_add(large, c * SCALE);
    if scaled.abs() < f32::MIN_POSITIVE * SCALE { 0.0f32.copysign(sum) } else { sum }
}

/// `a + b`. A denormal sum is exact, so it is known to be denormal.
#[inline]
fn add(a: f32, b: f32) -> f32 {
    let sum = flush(a) + flush(b);
    if sum.is_nan() {
        return first_nan(&[a, b]).unwrap_or(INVALID);
    }
    flush(sum)
}

/// The even and the odd element of a pair of bf16, as f32.
#[inline(always)]
fn elements([even, odd]: [bf16; 2]) -> [f32; 2] {
    [even, odd].map(|element| f32::from_bits(u32::from(element.to_bits()) << 16))
}

/// A lane of `vdpbf16ps`: adds the products of a pair to `sum`.
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the processor's own instruction computes this; tests compare both")
)]
pub(super) fn dot_pair(sum: f32, a: [bf16; 2], b: [bf16; 2]) -> f32 {
    let (a, b) = (elements(a), elements(b));
    multiply_add(a[0], b[0], multiply_add(a[1], b[1], sum))
}

/// `tdpbf16ps` of whole tiles: adds the product of `a`, whose rows are `a_row` elements apart, and `b` to `c`.
#[inline(always)]
pub(super) fn tile_product(c: &mut [f32], a: &[bf16], a_row: usize, b: &[bf16]) {
    let (c, b): (&mut [f32; SIDE * SIDE], &[bf16; TILE]) =
        (c.try_into().expect("a tile of sums"), b.try_into().expect("a tile"));
    for (row, c) in c.chunks_exact_mut(SIDE).enumerate() {
        let a = &a[row * a_row..][..2 * PAIRS];
        let mut sums = [[0.0f32; SIDE]; 2];
        for (a, b) in a.chunks_exact(2).zip(b.chunks_exact(2 * SIDE)) {
            let a = elements([a[0], a[1]]).map(flush);
            for (odd, sums) in sums.iter_mut().enumerate() {
                let (a, before) = (a[odd], *sums);
                let mut certain = true;
                for (column, sum) in sums.iter_mut().enumerate() {
                    let b = elements([b[2 * column], b[2 * column + 1]])[odd];
                    *sum = a.mul_add(flush(b), *sum);
                    certain &= is_certain(*sum);
                }
                if !certain {
                    for (column, (sum, before)) in sums.iter_mut().zip(before).enumerate() {
                        let b = elements([b[2 * column], b[2 * column + 1]])[odd];
                        *sum = multiply_add(a, b, before);
                    }
                }
            }
        }
        for (column, c) in c.iter_mut().enumerate() {
            *c = add(*c, add(sums[0][column], sums[1][column]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(bits: u32) -> f32 {
        f32::from_bits(bits)
    }

    #[test]
    fn denormal_numbers_are_zeros() {
        let (tiny, smallest) = (number(1), f32::MIN_POSITIVE);
        assert_eq!(multiply_add(1.0, 1.0, tiny).to_bits(), 1.0f32.to_bits());
        assert_eq!(multiply_add(number(0x0001_0000), 1e30, 0.0).to_bits(), 0);
        assert_eq!(multiply_add(-smallest, 0.5, 0.0).to_bits(), 0x8000_0000);
        assert_eq!(multiply_add(smallest, 1.0, 0.0), smallest);
        assert_eq!(add(smallest, -1.5 * smallest).to_bits(), 0x8000_0000);
        assert_eq!(add(2.0 * smallest, -smallest), smallest);
    }

    #[test]
    fn a_result_is_denormal_if_it_is_after_rounding_to_24_bits() {
        let smallest = f32::MIN_POSITIVE;
        let down = |exponent: i32| -(2.0f32.powi(exponent / 2) * 2.0f32.powi(exponent - exponent / 2));
        // 2^-126 minus 2^-150 has 24 bits and is denormal; minus 2^-151 it rounds up.
        for (exponent, expected) in [(-150, 0.0), (-151, smallest), (-152, smallest)] {
            let (a, b) = (2.0f32.powi(-75), down(exponent + 75));
            assert_eq!(multiply_add(a, b, smallest), expected, "2^-126 - 2^{exponent}");
        }
    }

    #[test]
    fn the_first_nan_is_the_result_and_becomes_quiet() {
        let (signalling, other) = (number(0x7f81_0000), number(0x7fc3_0000));
        assert_eq!(multiply_add(signalling, other, 1.0).to_bits(), 0x7fc1_0000);
        assert_eq!(multiply_add(1.0, other, signalling).to_bits(), 0x7fc3_0000);
        assert_eq!(multiply_add(0.0, f32::INFINITY, 1.0).to_bits(), INVALID.to_bits());
        assert_eq!(multiply_add(0.0, f32::INFINITY, other).to_bits(), 0x7fc3_0000);
        assert_eq!(add(f32::INFINITY, f32::NEG_INFINITY).to_bits(), INVALID.to_bits());
    }

    #[test]
    fn products_are_summed_in_the_order_of_each_instruction() {
        let of = |value: f32| bf16::from_f32(value);
        let (large, one) = (of(2.0f32.powi(24)), of(1.0));
        // The odd product first: 1 is lost in 2^24.
        assert_eq!(dot_pair(0.0, [of(-1.0), one], [large, large]), 0.0);
        assert_eq!(dot_pair(1.0, [of(-1.0), one], [large, large]), 0.0);
        // Even and odd elements apart: nothing is lost before the last sum.
        let mut a = vec![bf16::ZERO; SIDE * 2 * PAIRS];
        let mut b = vec![bf16::ZERO; TILE];
        (a[0], a[1], a[2]) = (large, one, of(-1.0));
        (b[0], b[1], b[2 * SIDE]) = (one, one, large);
        let mut c = vec![0.0; SIDE * SIDE];
        c[0] = 0.5;
        tile_product(&mut c, &a, 2 * PAIRS, &b);
        assert_eq!(c[0], 1.5);
        assert!(c[1..].iter().all(|&sum| sum == 0.0));
    }
}
