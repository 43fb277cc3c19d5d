//! Comparison of results with a reference on the GPU: all elements, with one small number copied to the host.

use super::elements::{check, count, grid, run, typed};
use super::{Memory, Result, Source, Stream, View};
use crate::DType;

/// The kernels.
pub static SOURCE: Source = Source { name: "compare", text: include_str!("compare.cu") };

/// How results differ from a reference: `struct Comparison` of the kernels.
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub struct Comparison {
    /// The largest difference; infinite if a result is NaN.
    pub largest_difference: f32,
    /// The largest magnitude in the reference.
    pub largest_expected: f32,
    /// Number of results that differ by more than the tolerance, or are NaN where they should not be, or are not NaN
    /// where they should be.
    pub wrong: u64,
}

/// How far a result may be from the reference.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// The part of `scale` + the reference's magnitude by which a result may differ.
    pub relative: f32,
    /// The magnitude that a result typically has before terms cancel.
    pub scale: f32,
}

/// Compares `found`, f32 or bf16, with `expected`, f32. If `nan_every` is given, every such element of `found`, from
/// the first on, should be NaN instead.
///
/// # Errors
/// If the kernel cannot be launched, or earlier work on the stream failed.
///
/// # Panics
/// If lengths or types do not fit.
pub fn compare(
    stream: &Stream,
    expected: View<'_>,
    found: View<'_>,
    nan_every: Option<usize>,
    tolerance: Tolerance,
) -> Result<Comparison> {
    check("expected results", expected, DType::F32, found.len());
    let result = Memory::zeroed(stream.device(), DType::U8, size_of::<Comparison>())?;
    let Tolerance { relative, scale } = tolerance;
    let arguments = [
        expected.into(),
        found.into(),
        count(found.len()).into(),
        count(nan_every.unwrap_or(0)).into(),
        scale.into(),
        relative.into(),
        result.view().into(),
    ];
    // SAFETY: the kernel reads as many elements as both views have, and writes one `Comparison`.
    unsafe { run(stream, &SOURCE, &typed("compare", found), grid(stream, found.len()), &arguments) }?;
    let mut comparison = [bytemuck::Zeroable::zeroed()];
    stream.download(result.view(), &mut comparison)?;
    Ok(comparison[0])
}

/// Fills `values`, f32 or bf16, with random numbers from -1 to 1: stream 0 of [`crate::rng`] for this seed.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are neither f32 nor bf16.
pub fn fill_random(stream: &Stream, values: View<'_>, seed: u64) -> Result<()> {
    let arguments = [values.into(), count(values.len()).into(), seed.into()];
    // SAFETY: the kernel writes as many elements as the view has.
    unsafe { run(stream, &SOURCE, &typed("compare_random", values), grid(stream, values.len()), &arguments) }
}
