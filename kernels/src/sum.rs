//! Sums over many elements.
//!
//! Bias gradients, batch-norm statistics and losses add up to a hundred thousand terms of mixed sign; a running
//! `f32` would lose the last digits that a comparison between one rank and many needs. These sums run in `f64`,
//! in eight independent lanes so that the additions do not wait for each other.

const LANES: usize = 8;

/// The sum of `term(a[i], b[i])` over two slices of equal length.
#[inline]
pub(crate) fn sum_pairs(a: &[f32], b: &[f32], term: impl Fn(f64, f64) -> f64) -> f64 {
    debug_assert_eq!(a.len(), b.len());
    let mut lanes = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks.remainder().iter().zip(b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(f64::from(a[lane]), f64::from(b[lane]));
        }
    }
    let tail: f64 = rest.map(|(&a, &b)| term(f64::from(a), f64::from(b))).sum();
    lanes.iter().sum::<f64>() + tail
}

/// The sum of a slice.
#[inline]
pub(crate) fn sum(values: &[f32]) -> f64 {
    sum_pairs(values, values, |value, _| value)
}

/// The sum of the squares of a slice.
#[inline]
pub(crate) fn sum_squares(values: &[f32]) -> f64 {
    sum_pairs(values, values, |value, _| value * value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_cover_every_element() {
        for len in [0, 1, 7, 8, 9, 100] {
            let values: Vec<f32> = (1..=len).map(|i| i as f32).collect();
            assert_eq!(sum(&values), (len * (len + 1) / 2) as f64);
            assert_eq!(sum_squares(&values), (len * (len + 1) * (2 * len + 1) / 6) as f64);
        }
    }
}
