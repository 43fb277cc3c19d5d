//! Matrix products.
//!
//! - `tile` is the register tile that all products of the layers come down to; it can ask for memory that is needed next.
//! - `panels` and `transpose` copy operands in the order in which it reads them.
//! - `block` divides a result's columns among threads.
//!
//! Beside them, a bounds-checked face of the `gemm` crate: [`multiply`] runs on the calling thread; convolutions by
//! columns call it from parts of their own. [`multiply_parallel`] cuts the result into blocks of rows or columns,
//! whichever side is longer, one a thread.

pub(crate) mod block;
pub(crate) mod panels;
pub(crate) mod tile;
pub(crate) mod transpose;

use std::marker::PhantomData;

use crate::threads::{Divide, Threads};

/// A matrix that is read: a view of a slice with any two strides.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    values: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// The first `rows * cols` elements of `values`, row after row.
    ///
    /// # Panics
    /// If there are fewer elements.
    pub fn new(values: &'a [f32], rows: usize, cols: usize) -> Self {
        assert!(values.len() >= rows * cols, "{rows}x{cols} matrix in {} elements", values.len());
        Self { values, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }
}

/// What becomes of the elements that a product finds in its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Existing {
    /// They are overwritten without being read.
    Replace,
    /// The product is added to them.
    Add,
}

/// `c = a · b` or `c += a · b` on the calling thread; `c` is row-major, its extents those of the product.
///
/// # Panics
/// If the inner extents differ or `c` has fewer than `a.rows * b.cols` elements.
pub fn multiply(c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, existing: Existing) {
    Block::whole(c, a, b).multiply(a, b, existing);
}

/// [`multiply`] on all threads of a rank.
///
/// # Panics
/// As [`multiply`].
pub fn multiply_parallel(threads: &Threads, c: &mut [f32], a: Matrix<'_>, b: Matrix<'_>, existing: Existing) {
    // About 30 microseconds of arithmetic: below, waking another thread costs more than it brings.
    const WORTH_ANOTHER_THREAD: usize = 1 << 20;
    let whole = Block::whole(c, a, b);
    let tiles = whole.tiles();
    let tile_work = (a.rows * b.cols * a.cols / tiles.max(1)).max(1);
    threads.divide(tiles, WORTH_ANOTHER_THREAD.div_ceil(tile_work), whole, |_, block| {
        block.multiply(a, b, existing);
    });
}

/// Rows or columns of a block come in multiples of this, the width of an AVX-512 register.
const TILE: usize = 16;

/// A rectangle of a row-major destination, to be written by one thread.
struct Block<'a> {
    corner: *mut f32,
    row_stride: usize,
    first_row: usize,
    rows: usize,
    first_col: usize,
    cols: usize,
    by_rows: bool,
    destination: PhantomData<&'a mut [f32]>,
}

// SAFETY: a block is an exclusive borrow of its rectangle; `whole` takes it from a `&mut [f32]`, and `divide`
// gives each element of the rectangle to exactly one half.
unsafe impl Send for Block<'_> {}

impl<'a> Block<'a> {
    fn whole(c: &'a mut [f32], a: Matrix<'_>, b: Matrix<'_>) -> Self {
        assert_eq!(a.cols, b.rows, "inner extents of a matrix product");
        let (rows, cols) = (a.rows, b.cols);
        assert!(c.len() >= rows * cols, "{rows}x{cols} product in {} elements", c.len());
        Self {
            corner: c.as_mut_ptr(),
            row_stride: cols,
            first_row: 0,
            rows,
            first_col: 0,
            cols,
            by_rows: rows >= cols,
            destination: PhantomData,
        }
    }

    fn tiles(&self) -> usize {
        if self.by_rows { self.rows.div_ceil(TILE) } else { self.cols.div_ceil(TILE) }
    }

    /// Multiplies this block's rows of `a` with its columns of `b`, operands of the whole product.
    fn multiply(self, a: Matrix<'_>, b: Matrix<'_>, existing: Existing) {
        if self.rows == 0 || self.cols == 0 {
            return;
        }
        let inner = a.cols;
        // Operands without elements have nowhere to start but at their beginning.
        let (a_start, b_start) =
            if inner == 0 { (0, 0) } else { (self.first_row * a.row_stride, self.first_col * b.col_stride) };
        if inner > 0 {
            // The farthest elements read; `Matrix::new` guarantees this, and a check costs nothing here.
            assert!(a_start + (self.rows - 1) * a.row_stride + (inner - 1) * a.col_stride < a.values.len());
            assert!(b_start + (inner - 1) * b.row_stride + (self.cols - 1) * b.col_stride < b.values.len());
        }
        let (a_values, b_values) = (&a.values[a_start..], &b.values[b_start..]);
        let add = existing == Existing::Add;
        // SAFETY: the destination's rectangle lies within the slice `whole` was given and is borrowed
        // exclusively (see `Send`); the operands' extents were checked above; f32 strides of slices that exist
        // fit an isize.
        unsafe {
            gemm::gemm(
                self.rows,
                self.cols,
                inner,
                self.corner,
                1,
                self.row_stride as isize,
                add,
                a_values.as_ptr(),
                a.col_stride as isize,
                a.row_stride as isize,
                b_values.as_ptr(),
                b.col_stride as isize,
                b.row_stride as isize,
                if add { 1.0 } else { 0.0 },
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

impl Divide for Block<'_> {
    fn divide(self, items: usize, _parts: usize) -> (Self, Self) {
        let cut = items * TILE;
        let (offset, left, right) = if self.by_rows {
            let cut = cut.min(self.rows);
            let left = Self { rows: cut, ..self };
            let right = Self { first_row: self.first_row + cut, rows: self.rows - cut, ..self };
            (cut * self.row_stride, left, right)
        } else {
            let cut = cut.min(self.cols);
            let left = Self { cols: cut, ..self };
            let right = Self { first_col: self.first_col + cut, cols: self.cols - cut, ..self };
            (cut, left, right)
        };
        // An empty right half must not move its corner past the destination.
        if right.rows == 0 || right.cols == 0 {
            return (left, right);
        }
        // SAFETY: the right half is not empty, so its corner is an element of the destination.
        let corner = unsafe { self.corner.add(offset) };
        (left, Self { corner, ..right })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use proptest::prelude::*;

    fn naive(a: Matrix<'_>, b: Matrix<'_>) -> Vec<f64> {
        let at = |m: Matrix<'_>, i, j| f64::from(m.values[i * m.row_stride + j * m.col_stride]);
        let mut c = Vec::new();
        for i in 0..a.rows {
            c.extend((0..b.cols).map(|j| (0..a.cols).map(|k| at(a, i, k) * at(b, k, j)).sum::<f64>()));
        }
        c
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn products_of_all_layouts_match_the_definition(
            m in 1usize..150, n in 1usize..150, k in 0usize..70, ta: bool, tb: bool, add: bool, count in 1usize..5,
        ) {
            let (a, b) = (random(m * k, 1), random(k * n, 2));
            let a = if ta { Matrix::new(&a, k, m).transposed() } else { Matrix::new(&a, m, k) };
            let b = if tb { Matrix::new(&b, n, k).transposed() } else { Matrix::new(&b, k, n) };
            let mut c = if add { random(m * n, 3) } else { vec![f32::NAN; m * n] };
            let mut expected = naive(a, b);
            if add {
                expected.iter_mut().zip(&c).for_each(|(e, &c)| *e += f64::from(c));
            }
            let existing = if add { Existing::Add } else { Existing::Replace };
            let mut alone = c.clone();
            multiply_parallel(&Threads::new(count), &mut c, a, b, existing);
            assert_close(&c, &expected, 1e-5);
            multiply(&mut alone, a, b, existing);
            assert_close(&alone, &expected, 1e-5);
        }
    }

    #[test]
    fn large_products_are_shared_among_threads() {
        for (m, n, k) in [(300, 70, 300), (70, 300, 300)] {
            let (a, b) = (random(m * k, 1), random(k * n, 2));
            let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
            let mut c = vec![f32::NAN; m * n];
            multiply_parallel(&Threads::new(3), &mut c, a, b, Existing::Replace);
            assert_close(&c, &naive(a, b), 1e-5);
        }
    }
}
