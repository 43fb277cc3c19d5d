//! Register tiles: parts of a product whose sums stay in registers over the whole depth.
//!
//! A tile is [`Simd::ROWS`] rows by two vectors: with AVX-512 28 of the 32 registers hold sums, and each multiply-add
//! costs 4/7 of a load. Products of a few rows use four vectors, so that there are enough sums to keep the multipliers
//! busy; the last columns use one vector, if that is enough.
//!
//! The sum of an element runs over segments and depth in order, in spans of [`SPAN`] terms, and the spans' sums are
//! added in order: a running sum of n terms loses as much as √(n/2) roundings, one of spans of s terms √((s + n/s)/2)
//! (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 4). The result depends neither on the number of
//! rows that are computed together nor on the width of vectors.

use super::prefetch::Prefetch;
use super::product::{Lines, PANEL, Product, Start};
use crate::simd::{Simd, Task};

/// Number of terms that are summed in registers before they are added to the destination. Fewer would round less, and
/// cost more.
const SPAN: usize = 32;

/// Elements by which prefetching advances in each step: half a cache line, as fast as memory can deliver.
const PREFETCH_STEP: usize = 8;

/// Columns that are one tile wide, in all rows and lines of a product whose destination was checked.
#[derive(Clone, Copy)]
pub(super) struct Strip<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) lines: Lines,
    pub(super) c: *mut f32,
    pub(super) row: usize,
    /// The first column.
    pub(super) column: usize,
    /// Tiles above each other.
    pub(super) tiles: usize,
    pub(super) prefetch: Prefetch,
    /// Tiles of the product that are computed before, and all, to divide the prefetches.
    pub(super) done: usize,
    pub(super) all: usize,
}

/// Computes a strip in tiles of this number of vectors. It is [called](Simd::call): a function for each number is
/// compiled in less time than one function with all tiles.
pub(super) struct InVectors<'a, const VECTORS: usize>(pub(super) Strip<'a>);

impl<const VECTORS: usize> Task for InVectors<'_, VECTORS> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Strip { product, lines, c, row, column, tiles, prefetch, done, all } = self.0;
        let Product { rows, columns, left, right, start, .. } = *product;
        let width = (VECTORS * S::LANES).min(columns - column);
        for line in 0..lines.count {
            for tile in 0..tiles {
                let first = rows * tile / tiles;
                let height = rows * (tile + 1) / tiles - first;
                // SAFETY: the last elements of all operands were checked to exist, and this tile lies within.
                unsafe {
                    let origin = TileOrigin {
                        a: left.values.as_ptr().wrapping_add(line * lines.left + first * left.row),
                        b: right.values.as_ptr().wrapping_add(column / PANEL * right.panel + column % PANEL),
                        c: c.add(line * lines.c + first * row + column),
                        row,
                        bias: match start {
                            Start::Bias(bias) => bias.as_ptr().add(column),
                            _ => std::ptr::null(),
                        },
                        existing: matches!(start, Start::Existing),
                        width,
                        prefetch: prefetch.of_tile(done + line * tiles + tile, all),
                    };
                    tile_of_height::<S, VECTORS>(simd, product, origin, height);
                }
            }
        }
    }
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
    prefetch: Prefetch,
}

/// Repeats `body` with the constant `I` from 0 up to `count`: unrolled, so that tiles stay in registers.
macro_rules! unroll {
    ($count:expr, $body:block) => { unroll!(@ $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13) };
    (@ $count:expr, $body:block, $($index:literal)*) => {
        $(if $index < $count {
            const I: usize = $index;
            $body
        })*
    };
}

/// Calls [`tile`] with the height as a constant.
///
/// # Safety
/// As for [`tile`]; `height` is 1 to `S::ROWS`, for four vectors to `S::WIDE_ROWS`.
#[inline(always)]
unsafe fn tile_of_height<S: Simd, const VECTORS: usize>(
    simd: S,
    product: &Product<'_>,
    origin: TileOrigin,
    height: usize,
) {
    macro_rules! heights {
        ($($height:literal)*) => {
            match height {
                // SAFETY: the caller's promise.
                $($height if const { $height <= max_height::<S>(VECTORS) } => unsafe {
                    tile::<S, $height, VECTORS>(simd, product, origin);
                },)*
                _ => unreachable!("a tile of {height} rows and {VECTORS} vectors"),
            }
        };
    }
    heights!(1 2 3 4 5 6 7 8 9 10 11 12 13 14);
}

/// The rows of the highest tile of this number of vectors.
const fn max_height<S: Simd>(vectors: usize) -> usize {
    if vectors == 4 { S::WIDE_ROWS } else { S::ROWS }
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
#[expect(clippy::out_of_bounds_indexing, reason = "in repetitions that `unroll` leaves out")]
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
            unroll!(VECTORS, {
                bias[I] = simd.load_first(origin.bias.wrapping_add(I * S::LANES), counts[I]);
            });
            sums = [bias; ROWS];
        }
        // Whether the destination already holds a part of the result, and the number of terms in the sums.
        let (mut existing, mut terms) = (origin.existing, 0);
        macro_rules! add_existing {
            () => {
                if existing {
                    unroll!(ROWS, {
                        const ROW: usize = I;
                        let from = origin.c.wrapping_add(ROW.wrapping_mul(origin.row)).cast_const();
                        unroll!(VECTORS, {
                            let from = from.wrapping_add(I * S::LANES);
                            let before =
                                if whole { simd.load(from) } else { simd.load_first(from, counts[I]) };
                            sums[ROW][I] = simd.add(sums[ROW][I], before);
                        });
                    });
                }
            };
        }
        macro_rules! store {
            () => {
                unroll!(ROWS, {
                    const ROW: usize = I;
                    let to = origin.c.wrapping_add(ROW.wrapping_mul(origin.row));
                    unroll!(VECTORS, {
                        let to = to.wrapping_add(I * S::LANES);
                        if whole {
                            simd.store(sums[ROW][I], to);
                        } else {
                            simd.store_first(sums[ROW][I], to, counts[I]);
                        }
                    });
                });
            };
        }
        let mut prefetch = origin.prefetch;
        let mut asked = 0;
        for segment in 0..segments {
            let mut a = [origin.a.wrapping_add(segment * left.segment); 5];
            unroll!(5, {
                if 3 * I < ROWS {
                    a[I] = detached(a[I].wrapping_add(3 * I * left.row));
                }
            });
            // Vectors 0 and 1 are in one panel, 2 and 3 in the next.
            let mut b = [origin.b.wrapping_add(segment * right.segment); 2];
            b[1] = b[1].wrapping_add(right.panel);
            macro_rules! step {
                ($from:ident, $count:ident => $load:expr) => {
                    let mut columns = [zero; VECTORS];
                    unroll!(VECTORS, {
                        let ($from, $count) = (b[I / 2 % 2].wrapping_add(I % 2 * S::LANES), counts[I]);
                        columns[I] = $load;
                    });
                    unroll!(ROWS, {
                        const ROW: usize = I;
                        let value = simd.splat(*a[I / 3].wrapping_add(I % 3 * left.row));
                        unroll!(VECTORS, {
                            sums[ROW][I] = simd.mul_add(value, columns[I], sums[ROW][I]);
                        });
                    });
                    unroll!(5, {
                        if 3 * I < ROWS {
                            a[I] = a[I].wrapping_add(left.depth);
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
                while prefetch.rows > 0 && span > 0 {
                    let steps = span.min((prefetch.run - asked).div_ceil(PREFETCH_STEP));
                    let mut line = prefetch.start.wrapping_add(asked);
                    for _ in 0..steps {
                        simd.prefetch(line);
                        line = line.wrapping_add(PREFETCH_STEP);
                        step!(from, _count => simd.load(from));
                    }
                    span -= steps;
                    asked += steps * PREFETCH_STEP;
                    if asked >= prefetch.run {
                        prefetch = Prefetch {
                            start: prefetch.start.wrapping_add(prefetch.row),
                            rows: prefetch.rows - 1,
                            ..prefetch
                        };
                        asked = 0;
                    }
                }
                for _ in 0..span {
                    step!(from, _count => simd.load(from));
                }
            }
        }
        add_existing!();
        if slope != 1.0 {
            let slope = simd.splat(slope);
            unroll!(ROWS, {
                for sum in &mut sums[I] {
                    *sum = simd.select(simd.greater(*sum, zero), *sum, simd.mul(*sum, slope));
                }
            });
        }
        store!();
    }
}
