//! Whole arenas on a GPU, of f32 or bf16.

use crate::DType;
use crate::cuda::elements::{check, count, grid, pack, packs, run, typed};
use crate::cuda::{Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "arena", text: include_str!("arena.cu") };

/// Sets all elements to `value`, rounded to their type.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are neither f32 nor bf16.
pub fn fill(stream: &Stream, values: View<'_>, value: f32) -> Result<()> {
    in_place(stream, "arena_fill", values, value)
}

/// Multiplies every element by `factor`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If the elements are neither f32 nor bf16.
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

/// Overwrites `to` (bf16) with `from` (f32), rounded.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn narrow(stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
    check("f32 to be rounded", from, DType::F32, from.len());
    check("rounded bf16", to, DType::Bf16, from.len());
    cast(stream, "arena_narrow_bf16", from, to)
}

/// Overwrites `to` (f32) with `from` (bf16).
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If lengths or types do not fit.
pub fn widen(stream: &Stream, from: View<'_>, to: View<'_>) -> Result<()> {
    check("bf16 to be widened", from, DType::Bf16, from.len());
    check("widened f32", to, DType::F32, from.len());
    cast(stream, "arena_widen_bf16", from, to)
}

fn cast(stream: &Stream, name: &str, from: View<'_>, to: View<'_>) -> Result<()> {
    let pack = pack(DType::Bf16);
    let arguments = [from.into(), to.into(), count(from.len()).into(), packs(pack, &[from, to]).into()];
    // SAFETY: the kernel visits as many elements as both views have.
    unsafe { run(stream, &SOURCE, name, grid(stream, from.len().div_ceil(pack)), &arguments) }
}
