//! Digests on a GPU: the arena is read once, and one number is written.

use std::ops::Range;

use crate::DType;
use crate::cuda::elements::{aligned, blocks, check, count, grid, pack, packs, run, typed};
use crate::cuda::{Grid, Result, Source, StepState, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "digest", text: include_str!("digest.cu") };

/// Adds to `total`, one i64, the number of non-finite elements (f32 or bf16).
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths do not fit.
pub fn count_non_finite(stream: &Stream, values: View<'_>, total: View<'_>) -> Result<()> {
    add(stream, &typed("digest_non_finite", values), values, total)
}

/// Overwrites `hash`, one i64, with the bits of the hash of `values`, f32.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths do not fit.
pub fn hash(stream: &Stream, values: View<'_>, hash: View<'_>) -> Result<()> {
    check("an arena to be hashed", values, DType::F32, values.len());
    check("a hash", hash, DType::I64, 1);
    stream.zero(hash)?;
    add(stream, "digest_hash_f32", values, hash)
}

fn add(stream: &Stream, name: &str, values: View<'_>, total: View<'_>) -> Result<()> {
    check("the sum of a digest", total, DType::I64, 1);
    assert!(aligned(1, &[total]), "address of the sum of a digest");
    let pack = pack(values.dtype());
    let arguments = [values.into(), count(values.len()).into(), packs(pack, &[values]).into(), total.into()];
    // SAFETY: the kernel visits as many elements as the view has, and adds to one number.
    unsafe { run(stream, &SOURCE, name, grid(stream, values.len().div_ceil(pack)), &arguments) }
}

/// A range of a tensor that [`find_non_finite`] checks: `struct DigestPart` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Part {
    begin: u32,
    len: u32,
    tensor: u32,
    sparse: u32,
}

/// Tensors with at most so many elements are checked completely in every step.
pub const SMALL: usize = 1 << 16;

/// Elements of a group, 16 of which are checked in a step.
const GROUP: usize = 512;

/// Maximum number of elements of a part that one block checks at a time.
const MAX_PART: usize = 4096;

/// Divides tensors, given by index and range in an arena, into parts. Those with more than [`SMALL`] elements are
/// sampled: 16 elements of 512 in a step, others in the next, so that 32 steps check all.
///
/// # Panics
/// If a tensor ends beyond 2^31.
pub fn parts(tensors: impl IntoIterator<Item = (usize, Range<usize>)>) -> Vec<Part> {
    cut(tensors, SMALL)
}

/// As [`parts`], but every element is checked in every step.
///
/// # Panics
/// If a tensor ends beyond 2^31.
pub fn whole_parts(tensors: impl IntoIterator<Item = (usize, Range<usize>)>) -> Vec<Part> {
    cut(tensors, usize::MAX)
}

/// Tensors of up to `small` elements are checked completely.
fn cut(tensors: impl IntoIterator<Item = (usize, Range<usize>)>, small: usize) -> Vec<Part> {
    let mut parts = Vec::new();
    for (tensor, range) in tensors {
        let sparse = if range.len() > small { range.len() / GROUP * GROUP } else { 0 };
        let between = range.start + sparse;
        for (elements, sparse) in [(range.start..between, true), (between..range.end, false)] {
            let max_len = if sparse { MAX_PART * GROUP / 16 } else { MAX_PART };
            for begin in elements.clone().step_by(max_len) {
                let len = max_len.min(elements.end - begin);
                parts.push(Part {
                    begin: count(begin),
                    len: count(len),
                    tensor: count(tensor),
                    sparse: u32::from(sparse),
                });
            }
        }
    }
    parts
}

/// Raises `found`, one i64, to `mark` + the index of a tensor if one of the `parts` (a table of [`Part`], as bytes,
/// or a range of one) has non-finite elements; to the largest if several have. Does nothing if `state` is halted.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths do not fit.
pub fn find_non_finite(
    stream: &Stream,
    values: View<'_>,
    parts: View<'_>,
    state: View<'_>,
    mark: u64,
    found: View<'_>,
) -> Result<()> {
    StepState::check(state);
    let table = parts.len() / size_of::<Part>();
    check("a table of parts", parts, DType::U8, table * size_of::<Part>());
    check("an arena to be checked", values, DType::F32, values.len());
    check("the mark of what is found", found, DType::I64, 1);
    assert!(parts.address().is_multiple_of(4) && aligned(1, &[found]), "addresses of parts and mark");
    if table == 0 {
        return Ok(());
    }
    let (table, len) = (count(table), count(values.len()));
    let arguments =
        [values.into(), len.into(), parts.into(), table.into(), state.into(), mark.into(), found.into()];
    let grid = Grid::new(table.min(blocks(stream)), 256);
    // SAFETY: the kernel skips parts that exceed the arena, and writes one number.
    unsafe { run(stream, &SOURCE, "digest_find_non_finite", grid, &arguments) }
}
