//! Batches of matrices, transposed.
//!
//! Images have their channels last on the CPU, but a dense layer behind them has weights for \[C, H, W\], PyTorch's order of
//! a flattened image. So the images of a batch, as matrices of pixels and channels, are transposed on the way there, and
//! their gradients on the way back.

use crate::gemm::transpose::Transpose;
use crate::threads::{Rows, Threads};

/// Elements below which another thread does not pay.
const GRAIN: usize = 1 << 14;

/// Overwrites `to` with the transposes of the matrices in `from`, which have `rows` rows and `columns` columns.
///
/// ```
/// use mgpu_kernels::{Threads, transpose};
/// let mut to = [0.0; 6];
/// transpose::matrices(&Threads::new(1), 2, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &mut to);
/// assert_eq!(to, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// ```
///
/// # Panics
/// If `from` is no whole number of matrices, or `to` is not as long.
pub fn matrices(threads: &Threads, rows: usize, columns: usize, from: &[f32], to: &mut [f32]) {
    let len = rows * columns;
    assert!(from.len().is_multiple_of(len), "{} elements for matrices of {rows}x{columns}", from.len());
    assert_eq!(to.len(), from.len(), "transposed matrices");
    threads.divide(from.len() / len, GRAIN / len + 1, Rows::new(to, len), |range, to| {
        let from = from[range.start * len..range.end * len].chunks_exact(len);
        for (from, to) in from.zip(to.values.chunks_exact_mut(len)) {
            if rows == 1 || columns == 1 {
                to.copy_from_slice(from);
                continue;
            }
            Transpose { from, rows, columns, row: columns }.to(to, rows);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::random;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_moves_to_its_place_and_back(
            count in 0usize..4, rows in 1usize..40, columns in 1usize..40, threads in 1usize..4,
        ) {
            let threads = Threads::new(threads);
            let from = random(count * rows * columns, 1);
            let (mut to, mut back) = (vec![f32::NAN; from.len()], vec![f32::NAN; from.len()]);
            matrices(&threads, rows, columns, &from, &mut to);
            for (at, value) in to.iter().enumerate() {
                let (matrix, j, i) = (at / (rows * columns), at % (rows * columns) / rows, at % rows);
                prop_assert_eq!(*value, from[(matrix * rows + i) * columns + j]);
            }
            matrices(&threads, columns, rows, &to, &mut back);
            prop_assert_eq!(back, from);
        }
    }
}
