//! Whole arenas: fill, scale, sum, conversion of the type.
//!
//! Contract: an arena is one contiguous slice of f32 or bf16. [`cpu::fill`] sets all elements to one value;
//! [`cpu::scale`] multiplies them by a factor in f32 and rounds once; [`cpu::add`] adds the elements of another arena
//! and divides the sums, with one rounding each; [`cpu::narrow`] rounds f32 to bf16, to nearest even, and keeps NaNs;
//! [`cpu::widen`] is exact.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    #[test]
    fn narrow_rounds_to_even_and_widen_is_exact() {
        // The last two are halfway between two neighbours.
        let values = [1.0, -2.5, f32::INFINITY, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
        let mut narrow = [bf16::ZERO; 5];
        cpu::narrow(&values, &mut narrow);
        let mut wide = [0.0; 5];
        cpu::widen(&narrow, &mut wide);
        assert_eq!(wide, [1.0, -2.5, f32::INFINITY, 1.0, 1.0 + 4.0 / 256.0]);
        cpu::narrow(&[f32::from_bits(0x7f80_0001)], &mut narrow[..1]);
        assert!(narrow[0].is_nan());
    }

    #[test]
    fn sums_are_rounded_before_they_are_divided() {
        let mut values = [1.0, f32::MAX, 16_777_216.0];
        cpu::add(&mut values, &[2.0, f32::MAX, 1.0], 2.0);
        assert_eq!(values, [1.5, f32::INFINITY, 8_388_608.0]);
    }

    #[test]
    fn fill_and_scale_reach_every_element() {
        let mut values = [0.0; 37];
        cpu::fill(&mut values, 1.5);
        cpu::scale(&mut values, 0.1);
        assert_eq!(values, [1.5 * 0.1; 37]);
    }
}
