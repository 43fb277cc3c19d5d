//! The product that everything on the CPU comes down to: a register tile of outputs, summed over depth.
//!
//! Dense layers, all three passes of a direct convolution and the products between the transforms of a Winograd
//! convolution are sums `c[r,j] = Σ_s Σ_k a[r,k,s] · b[k,j,s]` that differ only in where the operands lie. `a` is read an
//! element at a time, each copied to all lanes, so its three strides are free. `b` is read a vector at a time, so its
//! columns are contiguous. A tile is [`Simd::ROWS`] rows by two vectors: with AVX-512 28 of the 32 registers hold sums,
//! and each multiply-add costs 4/7 of a load.
//!
//! The sum of an element runs over segments and depth in order, whatever the shape of the tile: the number of rows that
//! are computed together and the width of vectors do not show in the result.

use super::block::Block;
use crate::simd::{Simd, Task, dispatch};

/// Columns that lie together in packed operands: two of the widest vectors.
pub(crate) const PANEL: usize = 2 * crate::simd::MAX_LANES;

/// The operand whose elements are copied to all lanes, at `row·r + depth·k + segment·s`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) depth: usize,
    pub(crate) segment: usize,
}

/// The operand with contiguous columns: column j of a panel (see [`PANEL`]) at `depth·k + segment·s + j`, one panel `panel`
/// elements after the other. `panel` is [`PANEL`] for a matrix of whole rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) depth: usize,
    pub(crate) segment: usize,
    pub(crate) panel: usize,
}

/// What sums begin with.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'a> {
    /// Nothing.
    Zero,
    /// The destination.
    Existing,
    /// A value for each column.
    Bias(&'a [f32]),
}

/// Memory that will be needed after a product, to be asked for while it is computed: rows of `run` elements, `row` apart.
/// No more than a hint: the addresses may be any, and what takes longer than the product is left out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead {
    pub(crate) start: *const f32,
    pub(crate) row: usize,
    pub(crate) rows: usize,
    pub(crate) run: usize,
}

impl Ahead {
    /// Nothing is asked for.
    pub(crate) const NONE: Ahead = Ahead { start: std::ptr::null(), row: 0, rows: 0, run: 0 };

    /// What tile `tile` of `tiles` asks for.
    fn of_tile(&self, tile: usize, tiles: usize) -> Runs {
        let first = self.rows * tile / tiles;
        Runs {
            start: self.start.wrapping_add(first * self.row),
            row: self.row,
            rows: self.rows * (tile + 1) / tiles - first,
            steps: self.run.div_ceil(AHEAD),
        }
    }
}

/// One product and its extents.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) depth: usize,
    pub(crate) segments: usize,
    pub(crate) left: Left<'a>,
    pub(crate) right: Right<'a>,
    pub(crate) start: Start<'a>,
    /// Slope of an activation for negative results; 1 for none.
    pub(crate) slope: f32,
}

impl Product<'_> {
    /// Writes the product to `c`, whose rows are `row` elements apart.
    ///
    /// # Panics
    /// If an operand or `c` is too short.
    pub(crate) fn compute(&self, c: &mut [f32], row: usize) {
        self.compute_ahead(c, row, Ahead::NONE);
    }

    /// As [`compute`](Self::compute), asking for other memory meanwhile.
    pub(crate) fn compute_ahead(&self, c: &mut [f32], row: usize, ahead: Ahead) {
        dispatch(Compute { product: *self, c, row, ahead });
    }

    /// Writes the product to the upper left corner of `c`, asking for other memory meanwhile.
    ///
    /// # Panics
    /// If an operand or `c` is too small.
    pub(crate) fn compute_block(&self, c: &mut Block<'_>, ahead: Ahead) {
        assert!(self.rows <= c.rows() && self.columns <= c.columns(), "a product's destination");
        let (corner, row) = (c.corner(), c.row_stride());
        dispatch(ComputeAt { product: *self, c: corner, row, ahead });
    }

    /// As [`compute`](Self::compute), within a task.
    #[inline(always)]
    pub(crate) fn compute_with<S: Simd>(&self, simd: S, c: &mut [f32], row: usize) {
        self.compute_ahead_with(simd, c, row, Ahead::NONE);
    }

    #[inline(always)]
    fn compute_ahead_with<S: Simd>(&self, simd: S, c: &mut [f32], row: usize, ahead: Ahead) {
        let Product { rows, columns, .. } = *self;
        if rows == 0 || columns == 0 {
            return;
        }
        assert!(row >= columns || rows == 1, "rows of {columns} columns {row} elements apart");
        assert!(c.len() > (rows - 1) * row + columns - 1, "a product's destination");
        // SAFETY: the last element exists, and so do those before it.
        unsafe { self.compute_at(simd, c.as_mut_ptr(), row, ahead) }
    }

    /// Writes the product from `c` on.
    ///
    /// # Safety
    /// Rows `row` elements apart of as many columns as the product has can be written.
    #[inline(always)]
    unsafe fn compute_at<S: Simd>(&self, simd: S, c: *mut f32, row: usize, ahead: Ahead) {
        let Product { rows, columns, depth, segments, left, right, start, slope } = *self;
        if rows == 0 || columns == 0 {
            return;
        }
        if let Start::Bias(bias) = start {
            assert!(bias.len() >= columns, "a product's bias");
        }
        if depth > 0 && segments > 0 {
            let last = (depth - 1, segments - 1);
            let end = (rows - 1) * left.row + last.0 * left.depth + last.1 * left.segment;
            assert!(left.values.len() > end, "a product's left operand");
            let (panel, column) = ((columns - 1) / PANEL, (columns - 1) % PANEL);
            let end = panel * right.panel + last.0 * right.depth + last.1 * right.segment + column;
            assert!(right.values.len() > end, "a product's right operand");
        }
        // Rows in tiles of about equal height.
        let tiles = rows.div_ceil(S::ROWS);
        let tile_columns = 2 * S::LANES;
        let all = tiles * columns.div_ceil(tile_columns);
        for column in (0..columns).step_by(tile_columns) {
            let width = tile_columns.min(columns - column);
            for tile in 0..tiles {
                let first = rows * tile / tiles;
                let height = rows * (tile + 1) / tiles - first;
                // SAFETY: the furthest elements of all operands were found to exist, and this tile lies within.
                unsafe {
                    let place = Place {
                        a: left.values.as_ptr().add(first * left.row),
                        b: right.values.as_ptr().add(column / PANEL * right.panel + column % PANEL),
                        c: c.add(first * row + column),
                        row,
                        bias: match start {
                            Start::Bias(bias) => bias.as_ptr().add(column),
                            _ => std::ptr::null(),
                        },
                        existing: matches!(start, Start::Existing),
                        width,
                        slope,
                        ahead: ahead.of_tile(column / tile_columns * tiles + tile, all),
                    };
                    tile_of_height(simd, self, place, height);
                }
            }
        }
    }
}

struct Compute<'a> {
    product: Product<'a>,
    c: &'a mut [f32],
    row: usize,
    ahead: Ahead,
}

impl Task for Compute<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.product.compute_ahead_with(simd, self.c, self.row, self.ahead);
    }
}

struct ComputeAt<'a> {
    product: Product<'a>,
    c: *mut f32,
    row: usize,
    ahead: Ahead,
}

impl Task for ComputeAt<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // SAFETY: made by `compute_block` only, for a block of at least the product's extents.
        unsafe { self.product.compute_at(simd, self.c, self.row, self.ahead) }
    }
}

/// The number of register tiles that `rows` rows are cut into, of about equal height.
pub(crate) fn tiles(rows: usize) -> usize {
    struct Tiles(usize);
    impl Task for Tiles {
        type Output = usize;
        #[inline(always)]
        fn run<S: Simd>(self, _: S) -> usize {
            self.0.div_ceil(S::ROWS)
        }
    }
    dispatch(Tiles(rows))
}

/// Where a tile begins in each operand.
#[derive(Clone, Copy)]
struct Place {
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    /// Stride of `c`.
    row: usize,
    /// Null for none.
    bias: *const f32,
    existing: bool,
    /// Columns, at most two vectors.
    width: usize,
    slope: f32,
    ahead: Runs,
}

/// Memory that one tile asks for.
#[derive(Clone, Copy)]
struct Runs {
    start: *const f32,
    /// Elements from one run to the next.
    row: usize,
    rows: usize,
    /// Steps along the depth in which a run is asked for.
    steps: usize,
}

/// Elements by which requests for memory advance with each step: half a cache line, as fast as memory can follow.
const AHEAD: usize = 8;

/// Repeats `body` with the constant `I` from 0 to below `count`: written out, so that tiles stay in registers.
macro_rules! unroll {
    ($count:expr, $body:block) => { unroll!(@ $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13) };
    (@ $count:expr, $body:block, $($index:literal)*) => {
        $(if $index < $count {
            const I: usize = $index;
            $body
        })*
    };
}

/// Calls [`tile`] with the extents as constants.
///
/// # Safety
/// As for [`tile`]; `height` is 1 to `S::ROWS`.
#[inline(always)]
unsafe fn tile_of_height<S: Simd>(simd: S, product: &Product<'_>, place: Place, height: usize) {
    macro_rules! heights {
        ($($height:literal)*) => {
            match (height, place.width <= S::LANES) {
                $(
                    // SAFETY: passed on.
                    ($height, false) if $height <= S::ROWS => unsafe { tile::<S, $height, 2>(simd, product, place) },
                    // SAFETY: passed on.
                    ($height, true) if $height <= S::ROWS => unsafe { tile::<S, $height, 1>(simd, product, place) },
                )*
                _ => unreachable!("a tile of {height} rows"),
            }
        };
    }
    heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

/// The same pointer, of which the compiler forgets where it came from. It would otherwise compute the rows' addresses one
/// from the other, a chain of as many additions as a tile has rows.
#[cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(clippy::pointers_in_nomem_asm_block, reason = "only the address passes through")
)]
#[inline(always)]
fn detached(mut pointer: *const f32) -> *const f32 {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// One register tile, one or two vectors wide. Rows are addressed from a pointer for every three of them, so that each is
/// at most one multiplication by 2 away from a register.
///
/// # Safety
/// All elements of the tile exist, more than `VECTORS − 1` vectors of columns and at most `VECTORS`.
#[inline(always)]
unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    product: &Product<'_>,
    place: Place,
) {
    let Product { left, right, depth, segments, .. } = *product;
    let last = (VECTORS - 1) * S::LANES;
    let width = place.width - last;
    let whole = width == S::LANES;
    let zero = simd.splat(0.0);
    // SAFETY: the caller vouches for the elements; partial vectors touch no others.
    unsafe {
        let load_row = |from: *const f32| {
            let end = if whole { simd.load(from.add(last)) } else { simd.load_first(from.add(last), width) };
            [if VECTORS == 2 { simd.load(from) } else { end }, end]
        };
        // With one vector, only the second of each pair is computed.
        let mut sums = [[zero; 2]; ROWS];
        if place.existing {
            unroll!(ROWS, { sums[I] = load_row(place.c.add(I * place.row).cast_const()) });
        } else if !place.bias.is_null() {
            sums = [load_row(place.bias); ROWS];
        }
        for segment in 0..segments {
            let mut a = [place.a.wrapping_add(segment * left.segment); 14];
            unroll!(14, {
                if 3 * I < ROWS {
                    a[I] = detached(a[I].wrapping_add(3 * I * left.row));
                }
            });
            let mut b = place.b.wrapping_add(segment * right.segment);
            macro_rules! step {
                ($columns:expr) => {
                    let columns = $columns;
                    unroll!(ROWS, {
                        let value = simd.splat(*a[I / 3].wrapping_add(I % 3 * left.row));
                        if VECTORS == 2 {
                            sums[I][0] = simd.mul_add(value, columns[0], sums[I][0]);
                        }
                        sums[I][1] = simd.mul_add(value, columns[1], sums[I][1]);
                    });
                    unroll!(14, {
                        if 3 * I < ROWS {
                            a[I] = a[I].wrapping_add(left.depth);
                        }
                    });
                    b = b.wrapping_add(right.depth);
                };
            }
            if whole {
                let (mut ahead, mut rest) = (place.ahead, depth);
                for _ in 0..ahead.rows {
                    let mut line = ahead.start;
                    let steps = rest.min(ahead.steps);
                    for _ in 0..steps {
                        simd.prefetch(line);
                        line = line.wrapping_add(AHEAD);
                        step!([simd.load(b), simd.load(b.add(last))]);
                    }
                    ahead.start = ahead.start.wrapping_add(ahead.row);
                    rest -= steps;
                }
                for _ in 0..rest {
                    step!([simd.load(b), simd.load(b.add(last))]);
                }
            } else {
                for _ in 0..depth {
                    let end = simd.load_first(b.add(last), width);
                    step!([if VECTORS == 2 { simd.load(b) } else { end }, end]);
                }
            }
        }
        if place.slope != 1.0 {
            let slope = simd.splat(place.slope);
            unroll!(ROWS, {
                for sum in &mut sums[I] {
                    *sum = simd.select(simd.greater(*sum, zero), *sum, simd.mul(*sum, slope));
                }
            });
        }
        unroll!(ROWS, {
            let to = place.c.add(I * place.row);
            if VECTORS == 2 {
                simd.store(sums[I][0], to);
            }
            if whole {
                simd.store(sums[I][1], to.add(last));
            } else {
                simd.store_first(sums[I][1], to.add(last), width);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]
        #[test]
        fn a_product_sums_over_segments_and_depth(
            (rows, columns, depth, segments) in (1usize..40, 1usize..80, 0usize..20, 0usize..4),
            (a_rows_apart, packed, start) in (any::<bool>(), any::<bool>(), 0usize..3), leaky: bool,
        ) {
            let (row, step) = if a_rows_apart { (depth + 3, 1) } else { (1, rows + 2) };
            let left_segment = (rows + 3) * (depth + 3);
            let left = random(left_segment * segments.max(1) + 1, 1);
            let panels = columns.div_ceil(PANEL);
            let (right_depth, panel) = if packed { (PANEL, PANEL * depth * segments) } else { (columns, PANEL) };
            let right_segment = right_depth * depth;
            let right = random((panels * PANEL * depth * segments).max(columns * depth * segments), 2);
            let bias = random(columns, 3);
            let stride = columns + 5;
            let before = random(rows * stride, 4);
            let slope = if leaky { 0.2 } else { 1.0 };
            let mut expected = Vec::new();
            for (at, &old) in before.iter().enumerate() {
                let (r, j) = (at / stride, at % stride);
                if j >= columns {
                    expected.push(f64::from(old));
                    continue;
                }
                let mut sum = [0.0, f64::from(old), f64::from(bias[j])][start];
                for (s, k) in (0..segments * depth).map(|at| (at / depth, at % depth)) {
                    let a = left[r * row + k * step + s * left_segment];
                    let b = right[j / PANEL * panel + j % PANEL + k * right_depth + s * right_segment];
                    sum += f64::from(a) * f64::from(b);
                }
                expected.push(if sum > 0.0 { sum } else { sum * f64::from(slope) });
            }
            let product = Product {
                rows, columns, depth, segments, slope,
                left: Left { values: &left, row, depth: step, segment: left_segment },
                right: Right { values: &right, depth: right_depth, segment: right_segment, panel },
                start: [Start::Zero, Start::Existing, Start::Bias(&bias)][start],
            };
            let mut c = before.clone();
            product.compute(&mut c, stride);
            assert_close(&c, &expected, 1e-5);
        }
    }
}
