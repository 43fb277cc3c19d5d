//! Shared by the tests of the layers: reproducible inputs and comparison with an `f64` reference.

use half::bf16;

use crate::rng::Stream;

/// `len` numbers in [-1, 1) that depend on `stream` only.
pub(crate) fn random(len: usize, stream: u64) -> Vec<f32> {
    let stream = Stream::new(0x7E57, stream);
    (0..len as u64).map(|i| stream.uniform(i) * 2.0 - 1.0).collect()
}

/// Rounded to the nearest bf16.
pub(crate) fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

/// As f32, exactly.
pub(crate) fn widen(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// Panics unless every element is within `tolerance` of the reference, relative to its magnitude if that exceeds 1.
#[track_caller]
pub(crate) fn assert_close(actual: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len());
    for (i, (&actual, &expected)) in actual.iter().zip(expected).enumerate() {
        let off = (f64::from(actual) - expected).abs();
        assert!(off <= tolerance * expected.abs().max(1.0), "element {i}: {actual} instead of {expected}");
    }
}
