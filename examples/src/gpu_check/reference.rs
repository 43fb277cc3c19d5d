//! Convolutions as direct sums in f64, in the layout of GPUs: images \[N, H, W, C\], weights \[F, K, K, C\].
//!
//! Every sum comes with the sum of the squares of its products, which determines its error bound ([`super::bound`]).
//! A dense layer is a convolution of single pixels.

use mgpu_kernels::conv::ConvShape;

/// Sums of products, and the sums of their squares.
#[derive(Debug, Clone)]
pub(super) struct ExactSums {
    pub(super) values: Vec<f64>,
    pub(super) squares: Vec<f64>,
}

impl ExactSums {
    fn new(len: usize) -> Self {
        ExactSums { values: vec![0.0; len], squares: vec![0.0; len] }
    }

    /// Adds `factor` times each of `others` to the elements from `at` on.
    fn add(&mut self, at: usize, factor: f64, others: &[f64]) {
        let values = &mut self.values[at..at + others.len()];
        let squares = &mut self.squares[at..at + others.len()];
        for ((value, square), other) in values.iter_mut().zip(squares).zip(others) {
            let product = factor * other;
            *value += product;
            *square += product * product;
        }
    }

    /// The scale of an element's error.
    pub(super) fn scale(&self, i: usize) -> f64 {
        self.squares[i].sqrt().max(self.values[i].abs())
    }
}

/// Calls `visit(output pixel, input pixel, position in the kernel)` for each overlap.
fn for_each_overlap(shape: &ConvShape, images: usize, mut visit: impl FnMut(usize, usize, usize)) {
    let &ConvShape { height, width, kernel, .. } = shape;
    let (rows, columns, pad) = (shape.out_height(), shape.out_width(), shape.pad());
    for n in 0..images {
        for (i, j) in (0..rows * columns).map(|at| (at / columns, at % columns)) {
            for (u, v) in (0..kernel * kernel).map(|at| (at / kernel, at % kernel)) {
                let (row, column) = ((i + u).wrapping_sub(pad), (j + v).wrapping_sub(pad));
                if row < height && column < width {
                    let output = (n * rows + i) * columns + j;
                    visit(output, (n * height + row) * width + column, u * kernel + v);
                }
            }
        }
    }
}

/// \[F, K·K, C\] as \[K·K, C, F\], so that inner loops are contiguous.
fn filters_last(shape: &ConvShape, weights: &[f64]) -> Vec<f64> {
    let (filters, each) = (shape.filters, shape.filter_len());
    (0..weights.len()).map(|at| weights[at % filters * each + at / filters]).collect()
}

/// The output before activation.
pub(super) fn forward(
    shape: &ConvShape,
    images: usize,
    x: &[f64],
    weights: &[f64],
    bias: &[f64],
) -> ExactSums {
    let &ConvShape { channels, filters, .. } = shape;
    let weights = filters_last(shape, weights);
    let mut y = ExactSums::new(images * shape.output_len());
    (0..y.values.len() / filters).for_each(|pixel| y.add(pixel * filters, 1.0, bias));
    for_each_overlap(shape, images, |output, input, place| {
        for c in 0..channels {
            let of_channel = &weights[(place * channels + c) * filters..][..filters];
            y.add(output * filters, x[input * channels + c], of_channel);
        }
    });
    y
}

/// The gradient of the input.
pub(super) fn backward_input(shape: &ConvShape, images: usize, weights: &[f64], dy: &[f64]) -> ExactSums {
    let &ConvShape { channels, filters, .. } = shape;
    let mut dx = ExactSums::new(images * shape.input_len());
    for_each_overlap(shape, images, |output, input, place| {
        for f in 0..filters {
            let of_filter = &weights[f * shape.filter_len() + place * channels..][..channels];
            dx.add(input * channels, dy[output * filters + f], of_filter);
        }
    });
    dx
}

/// The gradient of the weights.
pub(super) fn backward_weights(shape: &ConvShape, images: usize, x: &[f64], dy: &[f64]) -> ExactSums {
    let &ConvShape { channels, filters, .. } = shape;
    let mut dw = ExactSums::new(shape.weights_len());
    for_each_overlap(shape, images, |output, input, place| {
        for f in 0..filters {
            let of_pixel = &x[input * channels..][..channels];
            dw.add(f * shape.filter_len() + place * channels, dy[output * filters + f], of_pixel);
        }
    });
    dw
}

/// The gradient of the bias.
pub(super) fn backward_bias(shape: &ConvShape, dy: &[f64]) -> ExactSums {
    let mut db = ExactSums::new(shape.filters);
    dy.chunks_exact(shape.filters).for_each(|pixel| db.add(0, 1.0, pixel));
    db
}

#[cfg(test)]
mod tests {
    use mgpu_kernels::conv::{Padding, cpu};
    use mgpu_kernels::threads::Threads;

    use super::super::values::{Random, to_device};
    use super::*;

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|value| f64::from(*value)).collect()
    }

    fn assert_close(found: &ExactSums, expected: &[f32]) {
        assert_eq!(found.values.len(), expected.len());
        for (found, expected) in found.values.iter().zip(expected) {
            assert!((found - f64::from(*expected)).abs() < 1e-4, "{found} {expected}");
        }
    }

    #[test]
    fn the_sums_are_those_of_the_cpu_in_another_order() {
        let images = 2;
        for padding in [Padding::Same, Padding::Valid] {
            let shape = ConvShape { channels: 3, height: 7, width: 6, filters: 5, kernel: 3, padding };
            let mut random = Random::new(1);
            let (x, w) = (random.floats(images * shape.input_len()), random.floats(shape.weights_len()));
            let (b, dy) = (random.floats(5), random.floats(images * shape.output_len()));
            let (wide_x, wide_dy, wide_w) = (wide(&x), wide(&dy), wide(&to_device(&w, 3, 9)));
            let threads = Threads::new(1);
            let mut scratch = mgpu_kernels::Scratch::new(&threads);
            let direct = cpu::ConvOptions { policy: cpu::ConvPolicy::Direct, ..cpu::ConvOptions::default() };
            let mut conv = cpu::Conv::new(shape, cpu::Epilogue::NONE, direct);

            let mut y = vec![0.0; dy.len()];
            conv.forward(&threads, &mut scratch, &x, &w, &b, &mut y, &mut []);
            assert_close(&forward(&shape, images, &wide_x, &wide_w, &wide(&b)), &y);
            let (mut dw, mut db, mut dx) = (vec![0.0; w.len()], vec![0.0; 5], vec![0.0; x.len()]);
            let from = cpu::Backward { x: &x, weights: &w, y: &y, chosen: &[], dy: &dy };
            conv.backward(&threads, &mut scratch, from, &mut dw, &mut db, Some(&mut dx));
            assert_close(&backward_input(&shape, images, &wide_w, &wide_dy), &dx);
            assert_close(&backward_weights(&shape, images, &wide_x, &wide_dy), &to_device(&dw, 3, 9));
            assert_close(&backward_bias(&shape, &wide_dy), &db);
        }
    }
}
