//! The matrix product that all CPU kernels use: a register tile of outputs, summed over depth.
//!
//! Dense layers, all three passes of a direct convolution and the products between the transforms of a Winograd
//! convolution are sums `c[r,j] = Σ_s Σ_k a[r,k,s] · b[k,j,s]` that differ only in the layout of the operands. `a` is
//! read one element at a time, each broadcast to all lanes, so its three strides are free. `b` is read one vector at
//! a time, so its columns are contiguous. With AVX-512 a tile is [`Simd::ROWS`] rows by two vectors: 28 of the 32
//! registers hold sums, and each multiply-add costs 4/7 of a load. Products of a few rows use four vectors, so that
//! there are enough sums to keep the multipliers busy. With AVX2 tiles of four vectors have as many sums as tiles of two,
//! 12 of 16 registers, and cost 7/12 of a load instead of 8/12, so they are used for all rows. The last columns use two
//! vectors or one, if that is enough.
//!
//! The sum of an element runs over segments and depth in order, in spans of [`SPAN`] terms, and the spans' sums are
//! added in order: a running sum of n terms loses as much as √(n/2) roundings, one of spans of s terms √((s + n/s)/2)
//! (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 4). The result depends neither on the number of
//! rows that are computed together nor on the width of vectors.

use super::block::Block;
use super::prefetch::Prefetch;
use crate::simd::{Simd, Task, dispatch};

/// Columns of a panel in packed operands: two of the widest vectors.
pub(crate) const PANEL: usize = 2 * crate::simd::MAX_LANES;

/// Number of terms that are summed in registers before they are added to the destination. Fewer would round less, and
/// cost more.
pub(crate) const SPAN: usize = 32;

/// The operand whose elements are broadcast to all lanes, at `row·r + depth·k + segment·s`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) row: usize,
    pub(crate) depth: usize,
    pub(crate) segment: usize,
}

/// The operand with contiguous columns: column j of a panel (see [`PANEL`]) is at `depth·k + segment·s + j`, and
/// panels are `panel` elements apart. `panel` is [`PANEL`] for a matrix with contiguous rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) values: &'a [f32],
    pub(crate) depth: usize,
    pub(crate) segment: usize,
    pub(crate) panel: usize,
}

/// The initial value of the sums.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Start<'a> {
    /// Zero.
    Zero,
    /// The contents of the destination.
    Existing,
    /// A value for each column.
    Bias(&'a [f32]),
}

/// Several products with the same right operand, whose left operands and destinations are these numbers of elements
/// apart: rows of an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lines {
    pub(crate) count: usize,
    pub(crate) left: usize,
    pub(crate) c: usize,
}

impl Lines {
    const ONE: Lines = Lines { count: 1, left: 0, c: 0 };
}

/// Elements by which prefetching advances in each step: half a cache line, as fast as memory can deliver.
const PREFETCH_STEP: usize = 8;

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
    /// Writes the product to `c`, whose rows are `row` elements apart, prefetching other memory meanwhile: all of the first
    /// area, then of the second.
    ///
    /// # Panics
    /// If an operand or `c` is too short.
    pub(crate) fn compute(&self, c: &mut [f32], row: usize, ahead: [Prefetch; 2]) {
        dispatch(Compute { product: *self, lines: Lines::ONE, c, row, ahead });
    }

    /// Writes the product to the upper left corner of `c`, prefetching other memory meanwhile.
    ///
    /// # Panics
    /// If an operand or `c` is too small.
    pub(crate) fn compute_block(&self, c: &mut Block<'_>, ahead: Prefetch) {
        assert!(self.rows <= c.rows() && self.columns <= c.columns(), "a product's destination");
        let (corner, row) = (c.corner(), c.row_stride());
        // The block has at least the extents of the product.
        let ahead = [ahead, Prefetch::NONE];
        dispatch(AtCorner(ComputeAt { product: *self, lines: Lines::ONE, c: corner, row, ahead }));
    }

    /// Computes the product for several lines, within a task: all lines for some columns, then for the next ones.
    #[inline(always)]
    pub(crate) fn compute_lines<S: Simd>(&self, simd: S, lines: Lines, c: &mut [f32], row: usize) {
        Compute { product: *self, lines, c, row, ahead: [Prefetch::NONE; 2] }.run(simd);
    }

    /// Writes the product to memory from `c` on.
    ///
    /// # Safety
    /// For each line, rows `row` elements apart with as many columns as the product has can be written.
    #[inline(always)]
    unsafe fn compute_at<S: Simd>(
        &self,
        simd: S,
        lines: Lines,
        c: *mut f32,
        row: usize,
        ahead: [Prefetch; 2],
    ) {
        let Product { rows, columns, depth, segments, left, right, start, .. } = *self;
        if rows == 0 || columns == 0 || lines.count == 0 {
            return;
        }
        if let Start::Bias(bias) = start {
            assert!(bias.len() >= columns, "a product's bias");
        }
        if depth > 0 && segments > 0 {
            let last = (depth - 1, segments - 1);
            let end = (lines.count - 1) * lines.left
                + (rows - 1) * left.row
                + last.0 * left.depth
                + last.1 * left.segment;
            assert!(left.values.len() > end, "a product's left operand");
            let (panel, column) = ((columns - 1) / PANEL, (columns - 1) % PANEL);
            let end = panel * right.panel + last.0 * right.depth + last.1 * right.segment + column;
            assert!(right.values.len() > end, "a product's right operand");
            assert!(panel == 0 || right.panel >= PANEL, "panels of a product's right operand");
        }
        // Few rows, or as many sums in a tile as with two vectors.
        let wide = S::WIDE_ROWS > 0 && (rows <= S::WIDE_ROWS || 2 * S::WIDE_ROWS >= S::ROWS);
        // Vectors and rows of most tiles, which share the prefetching.
        let (vectors, height) = if wide { (4, S::WIDE_ROWS) } else { (2, S::ROWS) };
        let all = rows.div_ceil(height) * columns.div_ceil(vectors * S::LANES);
        let (mut column, mut done) = (0, 0);
        while column < columns {
            let (vectors, height) = match columns - column {
                rest if rest <= S::LANES => (1, S::ROWS),
                rest if wide && rest >= 4 * S::LANES => (4, S::WIDE_ROWS),
                _ => (2, S::ROWS),
            };
            let width = (vectors * S::LANES).min(columns - column);
            // Divides the rows into tiles of about equal height.
            let tiles = rows.div_ceil(height);
            for line in 0..lines.count {
                for tile in 0..tiles {
                    let first = rows * tile / tiles;
                    let height = rows * (tile + 1) / tiles - first;
                    // SAFETY: the last elements of all operands were checked to exist, and this tile lies within.
                    unsafe {
                        let origin = TileOrigin {
                            a: left.values.as_ptr().wrapping_add(line * lines.left + first * left.row),
                            b: right
                                .values
                                .as_ptr()
                                .wrapping_add(column / PANEL * right.panel + column % PANEL),
                            c: c.add(line * lines.c + first * row + column),
                            row,
                            bias: match start {
                                Start::Bias(bias) => bias.as_ptr().add(column),
                                _ => std::ptr::null(),
                            },
                            existing: matches!(start, Start::Existing),
                            width,
                            ahead: ahead.map(|ahead| ahead.share(done, all)),
                        };
                        tile_of_height(simd, self, origin, height, vectors);
                    }
                    done += 1;
                }
            }
            column += width;
        }
    }
}

struct Compute<'a> {
    product: Product<'a>,
    lines: Lines,
    c: &'a mut [f32],
    row: usize,
    ahead: [Prefetch; 2],
}

impl Task for Compute<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Compute { product, lines, c, row, ahead } = self;
        let Product { rows, columns, .. } = product;
        if rows == 0 || columns == 0 || lines.count == 0 {
            return;
        }
        assert!(row >= columns || rows == 1, "rows of {columns} columns {row} elements apart");
        let last = (lines.count - 1) * lines.c + (rows - 1) * row + columns - 1;
        assert!(c.len() > last, "a product's destination");
        // The last element exists, and so do all before it.
        simd.call(ComputeAt { product, lines, c: c.as_mut_ptr(), row, ahead });
    }
}

/// A product whose destination was checked: constructed only where all its elements can be written. It is always
/// [called](Simd::call) and never inlined, because its tiles are most of the code of this crate: compiled once for each
/// instruction set.
struct ComputeAt<'a> {
    product: Product<'a>,
    lines: Lines,
    c: *mut f32,
    row: usize,
    ahead: [Prefetch; 2],
}

impl Task for ComputeAt<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ComputeAt { product, lines, c, row, ahead } = self;
        // SAFETY: whoever constructed it checked the destination.
        unsafe { product.compute_at(simd, lines, c, row, ahead) }
    }
}

struct AtCorner<'a>(ComputeAt<'a>);

impl Task for AtCorner<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        simd.call(self.0);
    }
}

/// The number of parts of about equal height into which `rows` rows are divided: each of one register tile's rows, or of
/// two if tiles have four vectors.
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

/// The position of a tile in each operand.
#[derive(Clone, Copy)]
struct TileOrigin {
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    /// Stride of `c`.
    row: usize,
    /// Null for no bias.
    bias: *const f32,
    existing: bool,
    /// Columns of the tile, at most as many as its vectors have.
    width: usize,
    ahead: [Prefetch; 2],
}

/// Repeats `body` with the constant `I` from 0 up to `count`: unrolled, so that tiles stay in registers. Conditions are
/// constants, so that the compiler leaves out repetitions before it translates a tile, not after.
macro_rules! unroll {
    (ROWS, $body:block) => { unroll!(@ ROWS, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13) };
    (VECTORS, $body:block) => { unroll!(@ VECTORS, $body, 0 1 2 3) };
    (5, $body:block) => { unroll!(@ 5, $body, 0 1 2 3 4) };
    (2, $body:block) => { unroll!(@ 2, $body, 0 1) };
    (@ $count:expr, $body:block, $($index:literal)*) => {
        $(if const { $index < $count } {
            const I: usize = $index;
            $body
        })*
    };
}

/// Calls [`tile`] with height and vectors as constants. Tiles that an instruction set has no registers for are not
/// compiled for it.
///
/// # Safety
/// As for [`tile`]; `height` is 1 to `S::ROWS`, for four vectors to `S::WIDE_ROWS`.
#[inline(always)]
unsafe fn tile_of_height<S: Simd>(
    simd: S,
    product: &Product<'_>,
    origin: TileOrigin,
    height: usize,
    vectors: usize,
) {
    macro_rules! heights {
        ($($height:literal)*) => {
            match (height, vectors) {
                // SAFETY: the caller's promise.
                $(($height, 2) if const { $height <= S::ROWS } => unsafe { tile::<S, $height, 2>(simd, product, origin) },)*
                // SAFETY: the caller's promise.
                $(($height, 1) if const { $height <= S::ROWS } => unsafe { tile::<S, $height, 1>(simd, product, origin) },)*
                // SAFETY: the caller's promise.
                $(($height, 4) if const { $height <= S::WIDE_ROWS } => unsafe { tile::<S, $height, 4>(simd, product, origin) },)*
                _ => unreachable!("a tile of {height} rows and {vectors} vectors"),
            }
        };
    }
    heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

/// Returns the same pointer, but hides its origin from the compiler. Otherwise the compiler would compute the rows'
/// addresses one from the other, a chain of as many additions as a tile has rows.
#[cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(clippy::pointers_in_nomem_asm_block, reason = "only the address passes through")
)]
#[inline(always)]
fn detached(mut pointer: *const f32) -> *const f32 {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: the assembly contains no instruction.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) pointer, options(pure, nomem, nostack, preserves_flags));
    }
    pointer
}

/// Computes one register tile. There is a base pointer for every three rows, so that the address of each row is a
/// register plus at most twice a stride. Only the last vector may be partial; with four vectors, none is.
///
/// # Safety
/// All elements of the tile exist.
#[inline(always)]
unsafe fn tile<S: Simd, const ROWS: usize, const VECTORS: usize>(
    simd: S,
    product: &Product<'_>,
    origin: TileOrigin,
) {
    let Product { left, right, depth, segments, slope, .. } = *product;
    let whole = VECTORS == 4 || origin.width == VECTORS * S::LANES;
    let mut counts = [S::LANES; VECTORS];
    if VECTORS != 4 {
        counts[VECTORS - 1] = origin.width - (VECTORS - 1) * S::LANES;
    }
    let zero = simd.splat(0.0);
    let mut sums = [[zero; VECTORS]; ROWS];
    // SAFETY: the caller guarantees the elements; partial vectors access no others.
    unsafe {
        if !origin.bias.is_null() {
            let mut bias = [zero; VECTORS];
            unroll!(VECTORS, { bias[I] = simd.load_first(origin.bias.add(I * S::LANES), counts[I]) });
            sums = [bias; ROWS];
        }
        // Whether the destination already holds a part of the result, and the number of terms in the sums. Whole and partial
        // vectors are told apart once for all of them: a branch for each would make the compiler spill registers.
        let (mut existing, mut terms) = (origin.existing, 0);
        macro_rules! add_existing {
            ($($count:ident)? => $load:ident) => {
                unroll!(ROWS, {
                    const ROW: usize = I;
                    let from = origin.c.add(ROW * origin.row).cast_const();
                    unroll!(VECTORS, {
                        let before = simd.$load(from.add(I * S::LANES) $(, $count[I])?);
                        sums[ROW][I] = simd.add(sums[ROW][I], before);
                    });
                });
            };
            () => {
                if existing {
                    if whole { add_existing!(=> load); } else { add_existing!(counts => load_first); }
                }
            };
        }
        macro_rules! store {
            ($($count:ident)? => $store:ident) => {
                unroll!(ROWS, {
                    const ROW: usize = I;
                    let to = origin.c.add(ROW * origin.row);
                    unroll!(VECTORS, {
                        simd.$store(sums[ROW][I], to.add(I * S::LANES) $(, $count[I])?);
                    });
                });
            };
            () => {
                if whole { store!(=> store); } else { store!(counts => store_first); }
            };
        }
        let [mut prefetch, mut later] = origin.ahead;
        let mut asked = 0;
        // Faster, if the tile is over too soon otherwise.
        let elements = prefetch.rows * prefetch.run + later.rows * later.run;
        let is_slow_enough = elements <= segments * depth * PREFETCH_STEP;
        let step = if is_slow_enough { PREFETCH_STEP } else { S::LANES.max(PREFETCH_STEP) };
        for segment in 0..segments {
            let mut a = [origin.a.wrapping_add(segment * left.segment); 5];
            unroll!(5, {
                if 3 * I < ROWS {
                    a[I] = detached(a[I].wrapping_add(3 * I * left.row));
                }
            });
            // Four vectors are in one panel or in two.
            let mut b = [origin.b.wrapping_add(segment * right.segment); 2];
            b[1] = b[1].wrapping_add(right.panel);
            macro_rules! step {
                ($from:ident, $count:ident => $load:expr) => {
                    macro_rules! column {
                        ($index:expr) => {{
                            let at = $index * S::LANES;
                            let ($from, $count) =
                                (b[at / PANEL % 2].wrapping_add(at % PANEL), counts[$index]);
                            $load
                        }};
                    }
                    macro_rules! value {
                        ($index:expr) => {
                            simd.splat(*a[$index / 3].wrapping_add($index % 3 * left.row))
                        };
                    }
                    // The shorter side stays in registers, so that the other takes one.
                    if VECTORS > ROWS {
                        let mut values = [zero; ROWS];
                        unroll!(ROWS, { values[I] = value!(I) });
                        unroll!(VECTORS, {
                            const VECTOR: usize = I;
                            let column = column!(I);
                            unroll!(ROWS, {
                                sums[I][VECTOR] = simd.mul_add(values[I], column, sums[I][VECTOR]);
                            });
                        });
                    } else {
                        let mut columns = [zero; VECTORS];
                        unroll!(VECTORS, { columns[I] = column!(I) });
                        unroll!(ROWS, {
                            const ROW: usize = I;
                            let value = value!(I);
                            unroll!(VECTORS, {
                                sums[ROW][I] = simd.mul_add(value, columns[I], sums[ROW][I]);
                            });
                        });
                    }
                    unroll!(5, {
                        if 3 * I < ROWS {
                            a[I] = detached(a[I].wrapping_add(left.depth));
                        }
                    });
                    unroll!(2, { b[I] = b[I].wrapping_add(right.depth) });
                };
            }
            let mut rest = depth;
            while rest > 0 {
                if terms >= SPAN {
                    add_existing!();
                    store!();
                    sums = [[zero; VECTORS]; ROWS];
                    (existing, terms) = (true, 0);
                }
                let mut span = rest.min(SPAN - terms);
                rest -= span;
                terms += span;
                if !whole {
                    for _ in 0..span {
                        step!(from, count => simd.load_first(from, count));
                    }
                    continue;
                }
                while span > 0 {
                    if prefetch.rows == 0 {
                        if later.rows == 0 {
                            break;
                        }
                        (prefetch, later) = (later, Prefetch::NONE);
                    }
                    let steps = span.min((prefetch.run - asked).div_ceil(step));
                    let mut line = prefetch.start.wrapping_add(asked);
                    for _ in 0..steps {
                        simd.prefetch(line);
                        line = line.wrapping_add(step);
                        step!(from, _count => simd.load(from));
                    }
                    span -= steps;
                    asked += steps * step;
                    if asked >= prefetch.run {
                        prefetch = Prefetch {
                            start: prefetch.start.wrapping_add(prefetch.row),
                            rows: prefetch.rows - 1,
                            ..prefetch
                        };
                        asked = 0;
                    }
                }
                for _ in 0..span / S::TERMS {
                    step!(from, _count => simd.load(from));
                    if const { S::TERMS == 2 } {
                        step!(from, _count => simd.load(from));
                    }
                }
                if span % S::TERMS == 1 {
                    step!(from, _count => simd.load(from));
                }
            }
        }
        add_existing!();
        if slope != 1.0 {
            let slope = simd.splat(slope);
            unroll!(ROWS, {
                const ROW: usize = I;
                unroll!(VECTORS, {
                    let sum = sums[ROW][I];
                    sums[ROW][I] = simd.select(simd.greater(sum, zero), sum, simd.mul(sum, slope));
                });
            });
        }
        store!();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(192))]
        #[test]
        fn a_product_sums_over_segments_and_depth(
            (rows, columns, depth, segments) in (1usize..40, 1usize..80, 0usize..50, 0usize..4),
            (a_rows_apart, packed, start) in (any::<bool>(), any::<bool>(), 0usize..3), leaky: bool, lines in 1usize..3,
        ) {
            let (row, step) = if a_rows_apart { (depth + 3, 1) } else { (1, rows + 2) };
            let left_segment = (rows + 3) * (depth + 3);
            let left_line = left_segment * segments.max(1) + 1;
            let left = random(left_line * lines, 1);
            let panels = columns.div_ceil(PANEL);
            let (right_depth, panel) = if packed { (PANEL, PANEL * depth * segments) } else { (columns, PANEL) };
            let right_segment = right_depth * depth;
            let right = random((panels * PANEL * depth * segments).max(columns * depth * segments), 2);
            let bias = random(columns, 3);
            let stride = columns + 5;
            let before = random(lines * rows * stride, 4);
            let slope = if leaky { 0.2 } else { 1.0 };
            let mut expected = Vec::new();
            for (at, &old) in before.iter().enumerate() {
                let (line, r, j) = (at / stride / rows, at / stride % rows, at % stride);
                if j >= columns {
                    expected.push(f64::from(old));
                    continue;
                }
                let mut sum = [0.0, f64::from(old), f64::from(bias[j])][start];
                for (s, k) in (0..segments * depth).map(|at| (at / depth, at % depth)) {
                    let a = left[line * left_line + r * row + k * step + s * left_segment];
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
            dispatch(Compute { product, lines: Lines { count: lines, left: left_line, c: rows * stride }, c: &mut c, row: stride, ahead: [Prefetch::NONE; 2] });
            assert_close(&c, &expected, 1e-5);
        }
    }
}
