//! Rectangles of a row-major matrix, each written by one thread.

use std::marker::PhantomData;
use std::ops::Range;

use super::prefetch::Prefetch;
use crate::threads::Divide;

/// Exclusive access to some rows and columns of a matrix.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    corner: *mut f32,
    row_stride: usize,
    rows: usize,
    columns: usize,
    values: PhantomData<&'a mut [f32]>,
}

// SAFETY: a block is an exclusive borrow of its elements: it is made from a `&mut [f32]`, and no two parts of it
// share an element.
unsafe impl Send for Block<'_> {}

impl<'a> Block<'a> {
    /// The first `rows` rows of `columns` elements, `row_stride` apart.
    ///
    /// # Panics
    /// If there are fewer elements.
    pub(crate) fn new(values: &'a mut [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(row_stride >= columns, "rows of {columns} columns {row_stride} elements apart");
        assert!(
            rows == 0 || values.len() >= (rows - 1) * row_stride + columns,
            "a block of {rows}x{columns}"
        );
        Self { corner: values.as_mut_ptr(), row_stride, rows, columns, values: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Elements from one row to the next.
    pub(crate) fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// Some rows and columns to prefetch before they are written.
    pub(crate) fn prefetch(&self, rows: Range<usize>, columns: Range<usize>) -> Prefetch {
        let start = self.corner.wrapping_add(rows.start * self.row_stride + columns.start);
        Prefetch { start, row: self.row_stride, rows: rows.len(), run: columns.len() }
    }

    pub(super) fn corner(&mut self) -> *mut f32 {
        self.corner
    }

    /// The elements of one row.
    ///
    /// # Panics
    /// If there is no such row.
    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: the row lies within the matrix, and no other part of it has these columns.
        unsafe { std::slice::from_raw_parts_mut(self.corner.add(row * self.row_stride), self.columns) }
    }

    /// The rectangle from (`row`, `column`) to the end.
    ///
    /// # Panics
    /// If it has no elements.
    pub(crate) fn from(&mut self, row: usize, column: usize) -> Block<'_> {
        assert!(row < self.rows && column < self.columns, "a block within a block");
        // SAFETY: the new corner is an element of this block.
        let corner = unsafe { self.corner.add(row * self.row_stride + column) };
        Block { corner, rows: self.rows - row, columns: self.columns - column, ..*self }
    }
}

/// A block that is divided among threads by columns, in multiples of a step.
#[derive(Debug)]
pub(crate) struct Columns<'a> {
    pub(crate) block: Block<'a>,
    step: usize,
}

impl<'a> Columns<'a> {
    /// `block`, divided into items of `step` columns; the last one may have fewer.
    pub(crate) fn new(block: Block<'a>, step: usize) -> Self {
        Self { block, step }
    }
}

impl Divide for Columns<'_> {
    fn divide(self, items: usize, _parts: usize) -> (Self, Self) {
        let Columns { block, step } = self;
        let cut = (items * step).min(block.columns);
        let left = Block { columns: cut, ..block };
        // `wrapping`: the corner of a right half without rows or columns is not an element, but it is never read.
        let right = Block { corner: block.corner.wrapping_add(cut), columns: block.columns - cut, ..block };
        (Columns { block: left, step }, Columns { block: right, step })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::Threads;

    #[test]
    fn every_part_writes_its_own_columns() {
        let (rows, columns, row) = (3, 37, 40);
        for count in 1..5 {
            let mut values = vec![0.0; rows * row];
            let block = Columns::new(Block::new(&mut values, rows, columns, row), 8);
            Threads::new(count).divide(columns.div_ceil(8), 1, block, |range, mut part| {
                for r in 0..rows {
                    for (j, value) in part.block.row(r).iter_mut().enumerate() {
                        *value += (r * row + 8 * range.start + j) as f32;
                    }
                }
            });
            for (at, &value) in values.iter().enumerate() {
                assert_eq!(value, if at % row < columns { at as f32 } else { 0.0 });
            }
        }
    }
}
