//! Transposes batches of matrices.
//!
//! Images have their channels last on the CPU, but a dense layer that follows them has weights for \[C, H, W\],
//! PyTorch's order of a flattened image. So the images of a batch, as matrices of pixels and channels, are transposed
//! before the dense layer, and their gradients after it.

use crate::Scratch;
use crate::gemm::transpose::Transpose;
use crate::passes;
use crate::storage::{Storage, convert};
use crate::threads::{PerPart, Rows, Threads};

/// Fewer elements are not worth another thread.
const GRAIN: usize = 1 << 14;

/// Overwrites `to` with the transposes of the matrices in `from`, which have `rows` rows and `columns` columns,
/// converted to the destination's type.
///
/// ```
/// use mgpu_kernels::{Scratch, Threads, transpose};
/// let threads = Threads::new(1);
/// let mut to = [0.0f32; 6];
/// let from = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0];
/// transpose::matrices(&threads, &mut Scratch::new(&threads), (2, 3), &from, &mut to);
/// assert_eq!(to, [1.0, 4.0, 2.0, 5.0, 3.0, 6.0]);
/// ```
///
/// # Panics
/// If `from` is not a whole number of matrices, or `to` has another length.
pub fn matrices<A: Storage, B: Storage>(
    threads: &Threads,
    scratch: &mut Scratch,
    shape: (usize, usize),
    from: &[A],
    to: &mut [B],
) {
    passes::transpose(threads, scratch, shape, from, to);
}

pub(crate) fn matrices_as<A: Storage, B: Storage>(
    threads: &Threads,
    scratch: &mut Scratch,
    (rows, columns): (usize, usize),
    from: &[A],
    to: &mut [B],
) {
    let len = rows * columns;
    assert!(from.len().is_multiple_of(len), "{} elements for matrices of {rows}x{columns}", from.len());
    assert_eq!(to.len(), from.len(), "transposed matrices");
    // Memory for one matrix in f32, before and after transposing, if the element type is not f32.
    let room = if A::wide(&[]).is_some() && B::wide(&[]).is_some() { 0 } else { len };
    let outputs = (Rows::new(to, len), PerPart::new(&mut scratch.parts));
    threads.divide(from.len() / len, GRAIN / len + 1, outputs, |range, (to, part)| {
        let from = from[range.start * len..range.end * len].chunks_exact(len);
        let (before, after) = part.own().reserve(2 * room).split_at_mut(room);
        for (from, to) in from.zip(to.values.chunks_exact_mut(len)) {
            if rows == 1 || columns == 1 {
                convert(from, to);
                continue;
            }
            let from = A::wide(from).unwrap_or_else(|| {
                convert(from, before);
                before
            });
            let matrix = Transpose { from, rows, columns, row: columns };
            match B::wide_mut(to) {
                Some(to) => matrix.to(to, rows),
                None => {
                    matrix.to(after, rows);
                    convert(after, to);
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{narrow, random, widen};
    use half::bf16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_element_is_transposed_and_restored(
            count in 0usize..4, rows in 1usize..40, columns in 1usize..40, threads in 1usize..4,
        ) {
            let threads = Threads::new(threads);
            let mut scratch = Scratch::new(&threads);
            let from = random(count * rows * columns, 1);
            let (mut to, mut back) = (vec![f32::NAN; from.len()], vec![f32::NAN; from.len()]);
            matrices(&threads, &mut scratch, (rows, columns), &from, &mut to);
            for (at, value) in to.iter().enumerate() {
                let (matrix, j, i) = (at / (rows * columns), at % (rows * columns) / rows, at % rows);
                prop_assert_eq!(*value, from[(matrix * rows + i) * columns + j]);
            }
            matrices(&threads, &mut scratch, (columns, rows), &to, &mut back);
            prop_assert_eq!(back, &from[..]);

            // To bf16 and back: the values are rounded.
            let (mut rounded, mut wide) = (vec![bf16::NAN; from.len()], vec![f32::NAN; from.len()]);
            matrices(&threads, &mut scratch, (rows, columns), &from, &mut rounded);
            prop_assert_eq!(&rounded, &narrow(&to));
            matrices(&threads, &mut scratch, (columns, rows), &rounded, &mut wide);
            prop_assert_eq!(wide, widen(&narrow(&from)));
        }
    }
}
