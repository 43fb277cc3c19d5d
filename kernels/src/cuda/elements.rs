//! Checks and launch parameters shared by the launchers of all kernels.
//!
//! Kernels count elements in 32 bits and move 16 bytes at a time if addresses and channels allow it; otherwise the
//! same kernels move single elements.

use super::{Arg, Grid, Result, Source, Stream, View};
use crate::DType;

/// Threads per block of an element-wise kernel.
pub(crate) const THREADS: u32 = 256;

/// Blocks per multiprocessor that keep it busy.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// Runs kernel `name` of `source`.
///
/// # Errors
/// If it cannot be compiled, loaded or launched.
///
/// # Safety
/// As [`Stream::launch`].
pub(crate) unsafe fn run(
    stream: &Stream,
    source: &'static Source,
    name: &str,
    grid: Grid,
    arguments: &[Arg],
) -> Result<()> {
    let function = stream.device().function(source, name)?;
    // SAFETY: the caller's promise.
    unsafe { stream.launch(&function, grid, arguments) }
}

/// Enough threads for `items`, but not many more than run at a time.
pub(crate) fn grid(stream: &Stream, items: usize) -> Grid {
    Grid::cover(items, THREADS, blocks(stream))
}

/// Number of blocks that keep the GPU busy.
pub(crate) fn blocks(stream: &Stream) -> u32 {
    stream.device().multiprocessors() * BLOCKS_PER_MULTIPROCESSOR
}

/// `name` with the element type of `view` as a suffix.
///
/// # Panics
/// If the type is not f32, bf16 or f16.
#[track_caller]
pub(crate) fn typed(name: &str, view: View<'_>) -> String {
    let dtype = view.dtype();
    let known = matches!(dtype, DType::F32 | DType::Bf16 | DType::F16);
    assert!(known, "{name} of {dtype}: kernels exist for f32, bf16 and f16");
    format!("{name}_{dtype}")
}

/// The type of a view of 16-bit floats; bf16 if it is none.
pub(crate) fn half_float(view: View<'_>) -> DType {
    if view.dtype() == DType::F16 { DType::F16 } else { DType::Bf16 }
}

/// The number of elements as the 32-bit number that kernels take.
///
/// # Panics
/// If there are 2^31 or more.
#[track_caller]
pub(crate) fn count(len: usize) -> u32 {
    assert!(len < 1 << 31, "{len} elements: kernels take fewer than 2^31");
    len as u32
}

/// # Panics
/// Unless `view` has `len` elements of `dtype`.
#[track_caller]
pub(crate) fn check(what: &str, view: View<'_>, dtype: DType, len: usize) {
    assert_eq!((view.dtype(), view.len()), (dtype, len), "element type and number of {what}");
}

/// Elements of `dtype` in 16 bytes.
pub(crate) fn pack(dtype: DType) -> usize {
    16 / dtype.size()
}

/// True if every view is aligned for packs of `len` elements.
pub(crate) fn aligned(len: usize, views: &[View<'_>]) -> bool {
    views.iter().all(|view| {
        let bytes = (len * view.dtype().size()).min(16) as u64;
        view.address().is_multiple_of(bytes)
    })
}

/// Number of whole packs of `len` elements in views of equal lengths; 0 if a view is not aligned.
pub(crate) fn packs(len: usize, views: &[View<'_>]) -> u32 {
    let elements = views.first().map_or(0, View::len);
    if aligned(len, views) { count(elements / len) } else { 0 }
}
