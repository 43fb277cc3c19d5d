//! What launchers ask of the memory they are given, and how many threads they start.
//!
//! Kernels count elements in 32 bits and move 16 bytes at once where addresses and channels allow; where they do not,
//! the same kernels go element by element.

use super::{Arg, Grid, Result, Source, Stream, View};
use crate::DType;

/// Threads of a block that walks over elements.
pub(crate) const THREADS: u32 = 256;

/// Blocks that keep a multiprocessor busy.
const BLOCKS_EACH: u32 = 8;

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

/// Enough threads for `items`, and not many more than run at a time.
pub(crate) fn grid(stream: &Stream, items: usize) -> Grid {
    Grid::cover(items, THREADS, blocks(stream))
}

/// Blocks that keep the GPU busy.
pub(crate) fn blocks(stream: &Stream) -> u32 {
    stream.device().multiprocessors() * BLOCKS_EACH
}

/// `name` with the element type of `view`, which is one of those that activations have.
///
/// # Panics
/// If it is another.
#[track_caller]
pub(crate) fn typed(name: &str, view: View<'_>) -> String {
    let dtype = view.dtype();
    assert!(matches!(dtype, DType::F32 | DType::Bf16), "{name} of {dtype}: kernels exist for f32 and bf16");
    format!("{name}_{dtype}")
}

/// The number of elements, as kernels count.
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

/// True if every view begins where packs of `len` elements may.
pub(crate) fn aligned(len: usize, views: &[View<'_>]) -> bool {
    views.iter().all(|view| {
        let bytes = (len * view.dtype().size()).min(16) as u64;
        view.address().is_multiple_of(bytes)
    })
}

/// Whole packs of `len` elements in views of equal lengths, none if a view lies askew.
pub(crate) fn packs(len: usize, views: &[View<'_>]) -> u32 {
    let elements = views.first().map_or(0, View::len);
    if aligned(len, views) { count(elements / len) } else { 0 }
}
