//! Transposes a matrix, for operands that are contiguous in the wrong direction.

use crate::simd::{Simd, Task, dispatch};

/// A matrix to transpose.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transpose<'a> {
    pub(crate) from: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Elements from one row of `from` to the next.
    pub(crate) row: usize,
}

impl Transpose<'_> {
    /// Writes row i of the matrix to column i of `to`, whose rows are `row` elements apart.
    ///
    /// # Panics
    /// If a side is too short.
    pub(crate) fn to(&self, to: &mut [f32], row: usize) {
        if self.rows == 0 || self.columns == 0 {
            return;
        }
        assert!(self.from.len() >= (self.rows - 1) * self.row + self.columns, "a matrix to be transposed");
        assert!(row >= self.rows, "{} rows as columns of a matrix of {row}", self.rows);
        assert!(to.len() >= (self.columns - 1) * row + self.rows, "a transposed matrix");
        dispatch(Blocks { matrix: *self, to, to_row: row });
    }
}

struct Blocks<'a> {
    matrix: Transpose<'a>,
    to: &'a mut [f32],
    to_row: usize,
}

impl Task for Blocks<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Blocks { matrix: Transpose { from, rows, columns, row }, to, to_row } = self;
        let whole = (rows / S::LANES * S::LANES, columns / S::LANES * S::LANES);
        for i in (0..whole.0).step_by(S::LANES) {
            for j in (0..whole.1).step_by(S::LANES) {
                // SAFETY: rows i.. and columns j.. of a whole block exist on both sides: `to` checked the last of
                // each.
                unsafe {
                    let (from, to) = (from.as_ptr().add(i * row + j), to.as_mut_ptr().add(j * to_row + i));
                    simd.transpose(from, row, to, to_row);
                }
            }
        }
        for i in 0..rows {
            let first = if i < whole.0 { whole.1 } else { 0 };
            for j in first..columns {
                to[j * to_row + i] = from[i * row + j];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_become_columns(rows in 0usize..50, columns in 0usize..50, (apart, to_apart) in (0usize..5, 0usize..5)) {
            let (row, to_row) = (columns + apart, rows + to_apart);
            let from: Vec<f32> = (0..rows * row).map(|at| at as f32).collect();
            let mut to = vec![-1.0; columns * to_row];
            Transpose { from: &from, rows, columns, row }.to(&mut to, to_row);
            for (at, &value) in to.iter().enumerate() {
                let (j, i) = (at / to_row, at % to_row);
                prop_assert_eq!(value, if i < rows { from[i * row + j] } else { -1.0 });
            }
        }
    }
}
