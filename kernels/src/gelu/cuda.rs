//! GELU on a GPU: one pass over memory each, with the compiler's `erfcf` and `expf`.

use crate::cuda::elements::{check, count, grid, pack, packs, run, typed};
use crate::cuda::{Result, Source, Stream, View};

/// The kernels.
pub static SOURCE: Source = Source { name: "gelu", text: include_str!("gelu.cu") };

/// Overwrites `y` with `x · Φ(x)`.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// If types or lengths differ, or the type is neither f32 nor bf16.
pub fn forward(stream: &Stream, x: View<'_>, y: View<'_>) -> Result<()> {
    visit(stream, "gelu_forward", x, y)
}

/// Replaces the gradient of the output in place by that of the input, given the input.
///
/// # Errors
/// If the kernel cannot be launched.
///
/// # Panics
/// As [`forward`].
pub fn backward(stream: &Stream, x: View<'_>, gradient: View<'_>) -> Result<()> {
    visit(stream, "gelu_backward", x, gradient)
}

fn visit(stream: &Stream, name: &str, x: View<'_>, written: View<'_>) -> Result<()> {
    check("the input of a GELU", x, written.dtype(), written.len());
    let pack = pack(x.dtype());
    let arguments = [x.into(), written.into(), count(x.len()).into(), packs(pack, &[x, written]).into()];
    let grid = grid(stream, x.len().div_ceil(pack));
    // SAFETY: the kernels visit as many elements as both views have.
    unsafe { run(stream, &SOURCE, &typed(name, x), grid, &arguments) }
}
