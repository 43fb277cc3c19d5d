//! Digests on a GPU: the arena is read once, and one number comes back.

use crate::DType;
use crate::cuda::elements::{aligned, check, count, grid, pack, packs, run, typed};
use crate::cuda::{Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "digest", text: include_str!("digest.cu") };

/// Adds to `total`, one i64, the number of elements (f32 or bf16) that are infinite or not a number.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths do not fit.
pub fn count_not_finite(stream: &Stream, values: View<'_>, total: View<'_>) -> Result<()> {
    add(stream, &typed("digest_not_finite", values), values, total)
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
