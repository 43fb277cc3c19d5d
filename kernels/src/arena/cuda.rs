//! Whole arenas on a GPU, of f32, bf16 or f16.

use crate::DType;
use crate::cuda::elements::{check, count, grid, half_float, pack, packs, run, typed};
use crate::cuda::{Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "arena", text: include_str!("arena.cu") };

/// Sets all elements to `value`, rounded to their type.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are not f32, bf16 or f16.
pub fn fill(stream: &Stream, values: View<'_>, value: f32) -> Result<()> {
    in_place(stream, "arena_fill", values, value)
}

/// Multiplies every element by `factor`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are not f32, bf16 or f16.
pub fn scale(stream: &Stream, values: View<'_>, factor: f32) -> Result<()> {
    in_place(stream, "arena_scale", values, factor)
}

fn in_place(stream: &Stream, name: &str, values: View<'_>, number: f32) -> Result<()> {
    let name = typed(name, values);
    let pack = pack(values.dtype());
    let arguments = [values.into(), count(values.len()).into(), packs(pack, &[values]).into(), number.into()];
    // SAFETY: the kernel visits as many elements as the view has.
    unsafe { run(stream, &SOURCE, &name, grid(stream, values.len().div_ceil(pack)), &arguments) }
}

/// Adds `from` (f32) to `to` (f32), and divides the sums by `divisor`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn add(stream: &Stream, to: View<'_>, from: View<'_>, divisor: f32) -> Result<()> {
    check("sums", to, DType::F32, to.len());
    check("what is added", from, DType::F32, to.len());
    let pack = pack(DType::F32);
    let packs = packs(pack, &[to, from]);
    let arguments = [to.into(), from.into(), count(to.len()).into(), packs.into(), divisor.into()];
    // SAFETY: the kernel visits as many elements as both views have.
    unsafe { run(stream, &SOURCE, "arena_add_f32", grid(stream, to.len().div_ceil(pack)), &arguments) }
}

/// Overwrites `to` (bf16 or f16) with `from` (f32), rounded.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn narrow(stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
    check("f32 to be rounded", from, DType::F32, from.len());
    check("rounded numbers", to, half_float(to), from.len());
    cast(stream, &typed("arena_narrow", to), from, to)
}

/// Overwrites `to` (f32) with `from` (bf16 or f16).
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn widen(stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
    check("numbers to be widened", from, half_float(from), from.len());
    check("widened f32", to, DType::F32, from.len());
    cast(stream, &typed("arena_widen", from), from, to)
}

fn cast(stream: &Stream, name: &str, from: View<'_>, to: View<'_>) -> Result<()> {
    // A pack has as many elements as fit in 16 bytes of the narrower of the two types.
    let pack = pack(from.dtype()).max(pack(to.dtype()));
    let arguments = [from.into(), to.into(), count(from.len()).into(), packs(pack, &[from, to]).into()];
    // SAFETY: the kernel visits as many elements as both views have.
    unsafe { run(stream, &SOURCE, name, grid(stream, from.len().div_ceil(pack)), &arguments) }
}
