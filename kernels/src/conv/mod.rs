//! Two-dimensional convolution, stride 1, square kernels.
//!
//! Contract, for a batch of N images (all tensors contiguous, NCHW):
//!
//! | tensor | shape |
//! |---|---|
//! | input `x` | \[N, C, H, W\] |
//! | weights `w` | \[F, C, K, K\] |
//! | bias `b` | \[F\] |
//! | output `y` | \[N, F, H', W'\], H' = H + 2P − K + 1, likewise W' |
//!
//! `y[n,f,i,j] = b[f] + Σ_{c,u,v} w[f,c,u,v] · x[n, c, i+u−P, j+v−P]`, where `x` is zero outside the image: the
//! cross-correlation that the field calls convolution (Dumoulin and Visin, "A guide to convolution arithmetic for
//! deep learning", 2016). P is 0 for [`Padding::Valid`] and (K−1)/2 for [`Padding::Same`].
//!
//! The gradients of a loss L with respect to its inputs, given `dy` = ∂L/∂y:
//!
//! - `db[f] = Σ_{n,i,j} dy[n,f,i,j]`
//! - `dw[f,c,u,v] = Σ_{n,i,j} dy[n,f,i,j] · x[n, c, i+u−P, j+v−P]`
//! - `dx[n,c,p,q] = Σ_{f,u,v} w[f,c,u,v] · dy[n, f, p−u+P, q−v+P]`
//!
//! The three are separate calls: a first layer needs no `dx`, and the all-reduce of `dw` may run under `dx`.

pub mod columns;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cublaslt;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
mod cudnn;
#[cfg(feature = "cuda")]
pub mod gpu;
#[cfg(feature = "cuda")]
mod plan;

/// How a convolution treats the border of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Zeros around the image, so that output and input are of one size. Needs an odd kernel.
    Same,
    /// No padding: the output shrinks by K − 1.
    Valid,
}

/// The extents of a convolution, but for the number of images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Input channels, C.
    pub channels: usize,
    /// Input rows, H.
    pub height: usize,
    /// Input columns, W.
    pub width: usize,
    /// Output channels, F.
    pub filters: usize,
    /// Rows and columns of the kernel, K.
    pub kernel: usize,
    /// Treatment of the border.
    pub padding: Padding,
}

impl Shape {
    /// True for a dense layer: one weight for each pair of channels, of images of one pixel.
    pub fn is_dense(&self) -> bool {
        (self.height, self.width, self.kernel) == (1, 1, 1)
    }

    /// Rows or columns of zeros added on each side, P.
    pub fn pad(&self) -> usize {
        match self.padding {
            Padding::Same => (self.kernel - 1) / 2,
            Padding::Valid => 0,
        }
    }

    /// Output rows, H'.
    pub fn out_height(&self) -> usize {
        self.height + 2 * self.pad() + 1 - self.kernel
    }

    /// Output columns, W'.
    pub fn out_width(&self) -> usize {
        self.width + 2 * self.pad() + 1 - self.kernel
    }

    /// Elements of one input image, C·H·W.
    pub fn input_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// Elements of one output image, F·H'·W'.
    pub fn output_len(&self) -> usize {
        self.filters * self.out_height() * self.out_width()
    }

    /// Weights of one filter, C·K·K.
    pub fn filter_len(&self) -> usize {
        self.channels * self.kernel * self.kernel
    }

    /// All weights, F·C·K·K.
    pub fn weights_len(&self) -> usize {
        self.filters * self.filter_len()
    }

    /// Panics unless the kernel fits the image.
    fn check(&self) {
        assert!(self.kernel > 0, "a convolution needs a kernel");
        assert!(self.padding == Padding::Valid || self.kernel % 2 == 1, "same padding needs an odd kernel");
        let smallest = self.height.min(self.width) + 2 * self.pad();
        assert!(self.kernel <= smallest, "a kernel of {} on an image of {smallest}", self.kernel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use crate::threads::Threads;
    use proptest::prelude::*;

    /// Calls `visit(y index, w index, x index)` for every product in the definition.
    fn for_each_product(shape: &Shape, images: usize, mut visit: impl FnMut(usize, usize, usize)) {
        let Shape { channels, height, width, filters, kernel, .. } = *shape;
        let (oh, ow, pad) = (shape.out_height(), shape.out_width(), shape.pad());
        for n in 0..images {
            for (f, i, j) in (0..filters * oh * ow).map(|at| (at / (oh * ow), at / ow % oh, at % ow)) {
                for (c, u, v) in (0..shape.filter_len())
                    .map(|at| (at / (kernel * kernel), at / kernel % kernel, at % kernel))
                {
                    let (row, col) = ((i + u).wrapping_sub(pad), (j + v).wrapping_sub(pad));
                    if row < height && col < width {
                        let y = ((n * filters + f) * oh + i) * ow + j;
                        let w = ((f * channels + c) * kernel + u) * kernel + v;
                        let x = ((n * channels + c) * height + row) * width + col;
                        visit(y, w, x);
                    }
                }
            }
        }
    }

    fn shapes() -> impl Strategy<Value = Shape> {
        let extents = (1usize..4, 5usize..12, 5usize..12, 1usize..7);
        (extents, 0usize..3, any::<bool>()).prop_map(|((channels, height, width, filters), half, same)| {
            Shape {
                channels,
                height,
                width,
                filters,
                kernel: 2 * half + 1,
                padding: if same { Padding::Same } else { Padding::Valid },
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn all_four_passes_match_the_definition(
            shape in shapes(), images in 1usize..5, count in 1usize..5, budget in 1usize..4000,
        ) {
            let threads = Threads::new(count);
            let mut scratch = columns::Scratch::with_tile_budget(&threads, budget);
            let x = random(images * shape.input_len(), 1);
            let w = random(shape.weights_len(), 2);
            let b = random(shape.filters, 3);
            let dy = random(images * shape.output_len(), 4);
            let plane = shape.out_height() * shape.out_width();

            let mut expected: Vec<f64> =
                (0..dy.len()).map(|at| f64::from(b[at / plane % shape.filters])).collect();
            for_each_product(&shape, images, |at, wi, xi| expected[at] += f64::from(w[wi]) * f64::from(x[xi]));
            let mut y = vec![f32::NAN; dy.len()];
            columns::forward(&threads, &mut scratch, &shape, &x, &w, &b, &mut y);
            assert_close(&y, &expected, 1e-5);

            let (mut edw, mut edx) = (vec![0.0; w.len()], vec![0.0; x.len()]);
            for_each_product(&shape, images, |at, wi, xi| {
                edw[wi] += f64::from(dy[at]) * f64::from(x[xi]);
                edx[xi] += f64::from(dy[at]) * f64::from(w[wi]);
            });
            let (mut dw, mut dx, mut db) = (vec![f32::NAN; w.len()], vec![f32::NAN; x.len()], vec![f32::NAN; b.len()]);
            columns::backward_weights(&threads, &mut scratch, &shape, &x, &dy, &mut dw);
            assert_close(&dw, &edw, 1e-5);
            columns::backward_input(&threads, &mut scratch, &shape, &w, &dy, &mut dx);
            assert_close(&dx, &edx, 1e-5);
            let mut edb = vec![0.0; b.len()];
            dy.iter().enumerate().for_each(|(at, &v)| edb[at / plane % shape.filters] += f64::from(v));
            columns::backward_bias(&threads, &shape, &dy, &mut db);
            assert_close(&db, &edb, 1e-6);
        }
    }

    #[test]
    fn results_repeat_bit_for_bit() {
        let shape =
            Shape { channels: 3, height: 14, width: 14, filters: 8, kernel: 3, padding: Padding::Same };
        let (x, w) = (random(6 * shape.input_len(), 1), random(shape.weights_len(), 2));
        let run = || {
            let threads = Threads::new(3);
            let mut scratch = columns::Scratch::new(&threads);
            let mut y = vec![0.0; 6 * shape.output_len()];
            let mut dw = vec![0.0; w.len()];
            columns::forward(&threads, &mut scratch, &shape, &x, &w, &[0.5; 8], &mut y);
            columns::backward_weights(&threads, &mut scratch, &shape, &x, &y, &mut dw);
            (y, dw)
        };
        assert_eq!(run(), run());
    }

    #[test]
    #[should_panic(expected = "same padding needs an odd kernel")]
    fn an_even_kernel_has_no_same_padding() {
        Shape { channels: 1, height: 4, width: 4, filters: 1, kernel: 2, padding: Padding::Same }.check();
    }
}
