//! Max-pooling over windows of 2×2, stride 2.
//!
//! Contract: every plane \[H, W\] of the input (there are N·C) becomes a plane \[H', W'\], H' = ⌊H/2⌋ or ⌈H/2⌉
//! by [`Rounding`], likewise W'. `y[i,j]` is the largest of `x[2i+u, 2j+v]` for u, v in {0, 1} where they lie
//! inside the plane; of equal values the first in row-major order counts, as in PyTorch. The forward pass stores
//! 2u+v in one byte an output, the backward pass sends `dy` there and zero everywhere else.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// What happens to the last row or column of a plane with an odd number of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// It is ignored: 7 becomes 3.
    Floor,
    /// It is pooled by itself: 7 becomes 4.
    Ceil,
}

/// The extents of a pooling layer, but for the number of planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Input rows, H.
    pub height: usize,
    /// Input columns, W.
    pub width: usize,
    /// Treatment of odd extents.
    pub rounding: Rounding,
}

impl Shape {
    /// Output rows, H'.
    pub fn out_height(&self) -> usize {
        self.halve(self.height)
    }

    /// Output columns, W'.
    pub fn out_width(&self) -> usize {
        self.halve(self.width)
    }

    fn halve(&self, extent: usize) -> usize {
        match self.rounding {
            Rounding::Floor => extent / 2,
            Rounding::Ceil => extent.div_ceil(2),
        }
    }

    fn input_len(&self) -> usize {
        self.height * self.width
    }

    fn output_len(&self) -> usize {
        self.out_height() * self.out_width()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;
    use crate::threads::Threads;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn both_passes_match_the_definition(
            height in 2usize..10, width in 2usize..10, planes in 1usize..6, ceil: bool, count in 1usize..5,
        ) {
            let rounding = if ceil { Rounding::Ceil } else { Rounding::Floor };
            let shape = Shape { height, width, rounding };
            let (oh, ow) = (shape.out_height(), shape.out_width());
            // Few distinct values, so that windows have ties.
            let x: Vec<f32> = random(planes * height * width, 1).iter().map(|v| (v * 3.0).round()).collect();
            let dy = random(planes * oh * ow, 2);
            let (mut ey, mut edx) = (Vec::new(), vec![0.0; x.len()]);
            for (at, &gradient) in dy.iter().enumerate() {
                let (plane, i, j) = (at / (oh * ow), at / ow % oh, at % ow);
                let inside = |&(row, col): &(usize, usize)| row < height && col < width;
                let window = [(2 * i, 2 * j), (2 * i, 2 * j + 1), (2 * i + 1, 2 * j), (2 * i + 1, 2 * j + 1)];
                let places = window.iter().filter(|place| inside(place));
                let places = places.map(|(row, col)| (plane * height + row) * width + col);
                let best = places.reduce(|best, place| if x[place] > x[best] { place } else { best }).unwrap();
                ey.push(x[best]);
                edx[best] = gradient;
            }
            let threads = Threads::new(count);
            let (mut y, mut chosen) = (vec![f32::NAN; dy.len()], vec![9; dy.len()]);
            cpu::forward(&threads, &shape, &x, &mut y, &mut chosen);
            prop_assert_eq!(y, ey);
            let mut dx = vec![f32::NAN; x.len()];
            cpu::backward(&threads, &shape, &dy, &chosen, &mut dx);
            prop_assert_eq!(dx, edx);
        }
    }
}
