//! Max-pooling over windows of 2×2, stride 2.
//!
//! Contract: every channel \[H, W\] of an image becomes one of \[H', W'\], with H' = ⌊H/2⌋ or ⌈H/2⌉ by [`Rounding`],
//! and likewise W'. `y[i,j]` is the maximum of those `x[2i+u, 2j+v]` with u, v in {0, 1} that lie inside the image;
//! of equal values the first in row-major order counts, as in PyTorch. The forward pass stores the position 2u+v in
//! one byte per output; the backward pass writes `dy` there and zero everywhere else. Batches are \[N, H, W, C\].

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Treatment of the last row or column of an image with an odd number of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// It is ignored: 7 becomes 3.
    Floor,
    /// It is pooled by itself: 7 becomes 4.
    Ceil,
}

/// The extents of a pooling layer, except for the numbers of images and channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolShape {
    /// Input rows, H.
    pub height: usize,
    /// Input columns, W.
    pub width: usize,
    /// Treatment of odd extents.
    pub rounding: Rounding,
}

impl PoolShape {
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

    /// Pixels of an image of the input.
    fn input_len(&self) -> usize {
        self.height * self.width
    }

    /// Pixels of an image of the output.
    fn output_len(&self) -> usize {
        self.out_height() * self.out_width()
    }

    /// The index of the input pixel at position 2u+v of the window of output pixel `at`, both counted over the batch.
    /// Beyond the edge, the coordinate is that of the previous position.
    #[inline(always)]
    fn pixel(&self, at: usize, place: usize) -> usize {
        let (out, columns) = (self.output_len(), self.out_width());
        let (image, i, j) = (at / out, at % out / columns, at % out % columns);
        let row = (2 * i + place / 2).min(self.height - 1);
        let column = (2 * j + place % 2).min(self.width - 1);
        (image * self.height + row) * self.width + column
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
            height in 2usize..10, width in 2usize..10, images in 1usize..4, channels in 1usize..20, ceil: bool,
            count in 1usize..5,
        ) {
            let rounding = if ceil { Rounding::Ceil } else { Rounding::Floor };
            let shape = PoolShape { height, width, rounding };
            let (oh, ow) = (shape.out_height(), shape.out_width());
            // Few distinct values, so that windows have ties.
            let x: Vec<f32> = random(images * height * width * channels, 1).iter().map(|v| (v * 3.0).round()).collect();
            let dy = random(images * oh * ow * channels, 2);
            let (mut ey, mut edx) = (Vec::new(), vec![0.0; x.len()]);
            for (at, &gradient) in dy.iter().enumerate() {
                let (pixel, c) = (at / channels, at % channels);
                let (image, i, j) = (pixel / (oh * ow), pixel / ow % oh, pixel % ow);
                let inside = |&(row, col): &(usize, usize)| row < height && col < width;
                let window = [(2 * i, 2 * j), (2 * i, 2 * j + 1), (2 * i + 1, 2 * j), (2 * i + 1, 2 * j + 1)];
                let places = window.iter().filter(|place| inside(place));
                let places = places.map(|(row, col)| ((image * height + row) * width + col) * channels + c);
                let best = places.reduce(|best, place| if x[place] > x[best] { place } else { best }).unwrap();
                ey.push(x[best]);
                edx[best] = gradient;
            }
            let threads = Threads::new(count);
            let (mut y, mut chosen) = (vec![f32::NAN; dy.len()], vec![9; dy.len()]);
            cpu::forward(&threads, &shape, channels, &x, &mut y, &mut chosen);
            prop_assert_eq!(y, ey);
            let mut dx = vec![f32::NAN; x.len()];
            cpu::backward(&threads, &shape, channels, &dy, &chosen, &mut dx);
            prop_assert_eq!(dx, edx);
        }
    }
}
