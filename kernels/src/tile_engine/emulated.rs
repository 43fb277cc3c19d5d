//! AMX in plain Rust: the sums of every block have the bits that [`super::amx`] computes.

use std::slice;

use super::arithmetic::tile_product;
use super::{Begin, DEPTH, Operands, SIDE, SUMS, TILE, TileEngine};
use crate::gemm::prefetch::Prefetch;
use crate::simd::{Simd, Task, dispatch};

/// Works on every processor.
pub(super) struct Emulated;

impl TileEngine for Emulated {
    unsafe fn multiply(&self, operands: &Operands, begin: Begin, sums: &mut [f32; SUMS], _: Prefetch) {
        if begin == Begin::Zero {
            sums.fill(0.0);
        }
        dispatch(Multiply { operands, sums });
    }
}

/// Constructed only where the operands can be read.
struct Multiply<'a> {
    operands: &'a Operands,
    sums: &'a mut [f32; SUMS],
}

impl Task for Multiply<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Operands { a, a_row, a_segment, b, b_segment, steps, segments } = *self.operands;
        for (segment, step) in (0..segments * steps).map(|at| (at / steps, at % steps)) {
            for (tile, sums) in self.sums.chunks_exact_mut(SIDE * SIDE).enumerate() {
                let a_at = segment * a_segment + step * DEPTH;
                let b_at = segment * b_segment + step * TILE;
                // SAFETY: the elements of the tiles can be read.
                let (a, b) = unsafe {
                    let rows = (SIDE - 1) * a_row + DEPTH;
                    let a = slice::from_raw_parts(a[tile / 2].add(a_at), rows);
                    (a, slice::from_raw_parts(b[tile % 2].add(b_at), TILE))
                };
                tile_product(sums, a, a_row, b);
            }
        }
    }
}
