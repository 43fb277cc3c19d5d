//! Whole arenas on the CPU.

use half::bf16;
use half::slice::HalfFloatSliceExt;

pub use crate::scale::scale;
use crate::simd::{Simd, Task, dispatch};

/// Sets all elements to `value`.
pub fn fill(values: &mut [f32], value: f32) {
    values.fill(value);
}

/// Adds `from` to `to`, and divides the sums by `divisor`.
///
/// # Panics
/// If the lengths differ.
pub fn add(to: &mut [f32], from: &[f32], divisor: f32) {
    assert_eq!(to.len(), from.len(), "lengths of what is added");
    dispatch(Add { to, from, divisor });
}

struct Add<'a> {
    to: &'a mut [f32],
    from: &'a [f32],
    divisor: f32,
}

impl Task for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Add { to, from, divisor } = self;
        if divisor == 1.0 {
            for (to, from) in to.iter_mut().zip(from) {
                *to += from;
            }
        } else {
            for (to, from) in to.iter_mut().zip(from) {
                *to = (*to + from) / divisor;
            }
        }
    }
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
