//! Whole arenas on the CPU.

use half::bf16;
use half::slice::HalfFloatSliceExt;

pub use crate::scale::scale;

/// Overwrites all elements by `value`.
pub fn fill(values: &mut [f32], value: f32) {
    values.fill(value);
}

/// Overwrites `to` with `from`, rounded.
///
/// # Panics
/// If the lengths differ.
pub fn narrow(from: &[f32], to: &mut [bf16]) {
    to.convert_from_f32_slice(from);
}

/// Overwrites `to` with `from`.
///
/// # Panics
/// If the lengths differ.
pub fn widen(from: &[bf16], to: &mut [f32]) {
    from.convert_to_f32_slice(to);
}
