//! Products of bf16 matrices, summed in f32: with `--precision bf16`, those of dense layers and of direct convolutions.
//!
//! An *engine* computes blocks of 32×32 sums, `c[i,j] += Σ_k a[i,k] · b[k,j]`, in four tiles of 16×16. There are three:
//!
//! - [`Engine::Amx`]: the matrix instructions of Xeons since 2023, which multiply bf16 8 to 16 times faster than vectors
//!   multiply f32;
//! - [`Engine::AmxEmulated`]: their arithmetic in plain Rust, bit for bit, for tests on any processor;
//! - [`Engine::Avx512Bf16`]: `vdpbf16ps`, which has an arithmetic of its own. It computes two products for each lane: twice
//!   the rate of f32 on AMD's processors since Zen 4, and the same rate on Intel's.
//!
//! [`choose`] selects one by the processor and `MGPU_SIMD` alone, and never by a measurement, so that results are
//! reproducible. There may be none: then products are computed in f32.
//!
//! # Operands
//! The elements of `a` are contiguous along the depth k, 32 of them in a tile: one cache line. So an image with its
//! channels last is an operand as it is: row i is the run of inputs under a kernel row, one pixel further on for each i.
//! `b` consists of *panels* of 16 columns, each of tiles of 16 *pairs*: `b[2p,j]` and `b[2p+1,j]` are neighbours, so that
//! an instruction can multiply both at once. A depth that is not a multiple of 32 is padded with zeros in `b`; there `a`
//! may have any finite numbers. `pack` makes both copies.

#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), path = "absent.rs")]
mod amx;
mod arithmetic;
#[cfg_attr(not(target_arch = "x86_64"), path = "absent.rs")]
mod avx512bf16;
mod emulated;
pub(crate) mod pack;

use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;

use half::bf16;

use crate::gemm::prefetch::Prefetch;
use crate::{DType, Storage, level};

/// Rows and columns of a tile of sums, and the columns of a panel.
pub(crate) const SIDE: usize = 16;
/// Pairs of a tile.
const PAIRS: usize = 16;
/// The depth of a tile: the elements of `a` and `b` that one instruction multiplies.
pub(crate) const DEPTH: usize = 2 * PAIRS;
/// Elements of a tile of `a` or `b`.
pub(crate) const TILE: usize = SIDE * DEPTH;
/// Rows and columns of a block.
pub(crate) const BLOCK: usize = 2 * SIDE;
/// Sums of a block: four tiles, \[row, column\], each row by row.
pub(crate) const SUMS: usize = BLOCK * BLOCK;

/// What computes products of bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// `tdpbf16ps`.
    Amx,
    /// The same arithmetic on any processor, slowly.
    AmxEmulated,
    /// `vdpbf16ps`.
    Avx512Bf16,
}

impl Engine {
    /// The level of `MGPU_SIMD` that stands for it.
    pub const fn name(self) -> &'static str {
        match self {
            Engine::Amx => "amx",
            Engine::AmxEmulated => "amx-emulated",
            Engine::Avx512Bf16 => "avx512bf16",
        }
    }

    /// Whether it multiplies faster than Winograd's algorithm in f32, which needs up to six times fewer
    /// multiplications.
    pub(crate) fn beats_winograd(self) -> bool {
        self != Engine::Avx512Bf16
    }

    /// Prepares the calling thread for products.
    pub(crate) fn start(self) -> Session {
        let engine: &'static dyn TileEngine = match self {
            Engine::Amx => amx::engine().expect("a processor with AMX"),
            Engine::AmxEmulated => &emulated::Emulated,
            Engine::Avx512Bf16 => avx512bf16::engine().expect("a processor with avx512_bf16"),
        };
        engine.configure();
        Session { engine, of_this_thread: PhantomData }
    }

    /// All engines that work on this processor, for tests.
    #[cfg(test)]
    pub(crate) fn available() -> Vec<Engine> {
        let mut all = vec![Engine::AmxEmulated];
        all.extend(amx::engine().map(|_| Engine::Amx));
        all.extend(avx512bf16::engine().map(|_| Engine::Avx512Bf16));
        all
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The engine for products of bf16; `None` if they are computed in f32.
///
/// It is AMX where the processor has it and the kernel permits it. `vdpbf16ps` is chosen where it is faster than f32. If
/// `MGPU_SIMD` names an engine, that one is used wherever it works, and a lower level excludes it.
pub fn choose() -> Option<Engine> {
    static CHOSEN: OnceLock<Option<Engine>> = OnceLock::new();
    *CHOSEN.get_or_init(|| {
        let amx = || amx::engine().map(|_| Engine::Amx);
        let vectors = || avx512bf16::engine().map(|_| Engine::Avx512Bf16);
        let faster_vectors = || vectors().filter(|_| avx512bf16::is_faster_than_f32());
        match std::env::var(level::VARIABLE).as_deref() {
            Ok("portable" | "avx2" | "avx512") => None,
            Ok("avx512bf16") => vectors(),
            Ok("amx-emulated") => Some(Engine::AmxEmulated),
            _ => amx().or_else(faster_vectors),
        }
    })
}

/// The engine for a layer of a network whose activations are stored as `E`: none if they are f32.
pub fn of_storage<E: Storage>() -> Option<Engine> {
    if E::DTYPE == DType::Bf16 { choose() } else { None }
}

/// The contract of an engine. Each is a type that exists only if the processor has its instructions.
trait TileEngine {
    /// Prepares the calling thread.
    fn configure(&self) {}

    /// Undoes [`configure`](Self::configure).
    fn release(&self) {}

    /// Adds the product of `operands` to `sums`, or overwrites them with it, and may prefetch other memory meanwhile.
    ///
    /// # Safety
    /// All elements of the operands can be read; the calling thread is configured.
    unsafe fn multiply(&self, operands: &Operands, begin: Begin, sums: &mut [f32; SUMS], ahead: Prefetch);
}

/// What a product is added to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// The sums of earlier products.
    Sums,
    /// Nothing: what the sums were does not matter.
    Zero,
}

/// The operands of a block, as pointers: elements of a row or of a tile are contiguous.
#[derive(Debug, Clone, Copy)]
struct Operands {
    /// The first element of each group of 16 rows.
    a: [*const bf16; 2],
    /// Elements from one row to the next.
    a_row: usize,
    /// Elements from one segment to the next.
    a_segment: usize,
    /// The first tile of each panel. The tiles of a segment are contiguous.
    b: [*const bf16; 2],
    b_segment: usize,
    /// Tiles of each segment; at least one.
    steps: usize,
    /// At least one.
    segments: usize,
}

/// The left operand of a block: row i of group g, at depth k of segment s, is at `groups[g] + i·row + s·segment + k`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) values: &'a [bf16],
    pub(crate) groups: [usize; 2],
    pub(crate) row: usize,
    pub(crate) segment: usize,
}

/// The right operand of a block: tile t of segment s of panel p begins at `panels[p] + s·segment + t·TILE`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) values: &'a [bf16],
    pub(crate) panels: [usize; 2],
    pub(crate) segment: usize,
}

/// The depth of a product: segments of whole tiles each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Depth {
    pub(crate) segments: usize,
    /// Tiles of a segment.
    pub(crate) steps: usize,
}

/// An engine on a thread that is prepared for it.
pub(crate) struct Session {
    engine: &'static dyn TileEngine,
    /// Not `Send`.
    of_this_thread: PhantomData<*const ()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.engine.release();
    }
}

impl Session {
    /// Adds the product of two operands to the sums of a block, or overwrites them with it.
    ///
    /// # Panics
    /// If an operand is too short, or `sums` is not a block.
    pub(crate) fn multiply(
        &self,
        left: Left<'_>,
        right: Right<'_>,
        depth: Depth,
        begin: Begin,
        sums: &mut [f32],
    ) {
        self.multiply_prefetching(left, right, depth, begin, sums, Prefetch::NONE);
    }

    /// As [`multiply`](Self::multiply), prefetching other memory meanwhile.
    pub(crate) fn multiply_prefetching(
        &self,
        left: Left<'_>,
        right: Right<'_>,
        depth: Depth,
        begin: Begin,
        sums: &mut [f32],
        ahead: Prefetch,
    ) {
        let Depth { segments, steps } = depth;
        let sums: &mut [f32; SUMS] = sums.try_into().expect("the sums of a block");
        if segments == 0 || steps == 0 {
            if begin == Begin::Zero {
                sums.fill(0.0);
            }
            return;
        }
        let last = |start: [usize; 2], segment: usize| start[0].max(start[1]) + (segments - 1) * segment;
        let a_end = last(left.groups, left.segment) + (SIDE - 1) * left.row + steps * DEPTH;
        let b_end = last(right.panels, right.segment) + steps * TILE;
        assert!(left.values.len() >= a_end, "a left operand of {} of {a_end} elements", left.values.len());
        assert!(right.values.len() >= b_end, "a right operand of {} of {b_end} elements", right.values.len());
        let operands = Operands {
            a: left.groups.map(|at| left.values[at..].as_ptr()),
            a_row: left.row,
            a_segment: left.segment,
            b: right.panels.map(|at| right.values[at..].as_ptr()),
            b_segment: right.segment,
            steps,
            segments,
        };
        // SAFETY: the last elements of both operands exist; the session has configured this thread, which it cannot
        // leave.
        unsafe { self.engine.multiply(&operands, begin, sums, ahead) }
    }
}

/// The index of an element in the sums of a block.
#[inline(always)]
pub(crate) fn index(row: usize, column: usize) -> usize {
    (row / SIDE * 2 + column / SIDE) * SIDE * SIDE + row % SIDE * SIDE + column % SIDE
}

/// Row `row` of the sums of a block: two halves.
#[inline(always)]
pub(crate) fn row_of(sums: &[f32], row: usize) -> [&[f32; SIDE]; 2] {
    [0, 1].map(|half| {
        let at = (row / SIDE * 2 + half) * SIDE * SIDE + row % SIDE * SIDE;
        sums[at..at + SIDE].first_chunk().expect("a row of a tile")
    })
}

#[cfg(test)]
mod tests;
