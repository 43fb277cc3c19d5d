//! Copies of memory.
//!
//! From about 2 KiB on, `memcpy` of C libraries uses the processor's string instruction. On AMD processors since Zen 3 that
//! takes up to ten times as long as vectors if both ranges begin at slightly different offsets within a page, as shared memory
//! and memory of `malloc` do. (glibc 2.36, EPYC with Zen 3: 70 instead of 7 µs for 128 KiB; newer versions of glibc avoid it,
//! see its bug 30994.)

use crate::simd::{Simd, Task, dispatch};

/// Shortest copy for which `memcpy` may use the string instruction.
const STRING_BYTES: usize = 2 << 10;

/// Vectors that are loaded before they are stored.
const VECTORS: usize = 4;

/// Copies `bytes` bytes.
///
/// # Safety
/// Both ranges are valid and do not overlap; nobody writes the source or accesses the destination meanwhile.
#[inline]
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if bytes < STRING_BYTES || !strings_may_be_slow() {
            std::ptr::copy_nonoverlapping(from, to, bytes);
        } else {
            by_vectors(from, to, bytes);
        }
    }
}

/// Copies at least [`STRING_BYTES`] bytes.
///
/// # Safety
/// As [`copy`].
unsafe fn by_vectors(from: *const u8, to: *mut u8, bytes: usize) {
    assert!(bytes >= STRING_BYTES);
    dispatch(Copy { from, to, bytes });
}

/// Whether this is a processor on which the string instruction may be slow.
#[cfg(target_arch = "x86_64")]
fn strings_may_be_slow() -> bool {
    static IS_AMD: std::sync::LazyLock<bool> = std::sync::LazyLock::new(|| {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    });
    *IS_AMD
}

/// Other processors have no such instruction.
#[cfg(not(target_arch = "x86_64"))]
fn strings_may_be_slow() -> bool {
    false
}

/// A copy of at least [`STRING_BYTES`] bytes between valid ranges that do not overlap.
struct Copy {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
}

impl Task for Copy {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Copy { from, to, bytes } = self;
        let vector = S::LANES * size_of::<f32>();
        let (step, last) = (VECTORS * vector, bytes - VECTORS * vector);
        let mut at = 0;
        loop {
            // SAFETY: `at` is at most `last`, so all vectors are within the ranges, which are valid.
            unsafe {
                let (from, to) = (from.add(at).cast::<f32>(), to.add(at).cast::<f32>());
                let mut values = [simd.splat(0.0); VECTORS];
                for (part, value) in values.iter_mut().enumerate() {
                    *value = simd.load(from.add(part * S::LANES));
                }
                for (part, value) in values.iter().enumerate() {
                    simd.store(*value, to.add(part * S::LANES));
                }
            }
            if at == last {
                break;
            }
            // After the first step, stores are aligned; the last step may overlap the one before.
            at = (at + step - (to as usize + at) % vector).min(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_copied_and_no_other_is_written() {
        // All bits of NaNs are preserved, too.
        let source: Vec<u8> = (0..9000u32).map(|at| if at % 7 < 4 { 0xff } else { at as u8 }).collect();
        for (from, to) in [(0, 0), (1, 0), (0, 16), (3, 63), (64, 1)] {
            for bytes in (STRING_BYTES..STRING_BYTES + 300).chain([4096, 8191]) {
                let mut destination = vec![0xa5; 8400];
                // SAFETY: both ranges are within their vectors.
                unsafe { by_vectors(source[from..].as_ptr(), destination[to..].as_mut_ptr(), bytes) };
                assert_eq!(destination[to..to + bytes], source[from..from + bytes], "{from} {to} {bytes}");
                assert!(destination[..to].iter().chain(&destination[to + bytes..]).all(|byte| *byte == 0xa5));
            }
        }
        for bytes in [0, 1, 100, STRING_BYTES - 1, STRING_BYTES, 5000] {
            let mut destination = vec![0xa5; 6000];
            // SAFETY: as above.
            unsafe { copy(source[5..].as_ptr(), destination.as_mut_ptr(), bytes) };
            assert_eq!(destination[..bytes], source[5..5 + bytes]);
            assert!(destination[bytes..].iter().all(|byte| *byte == 0xa5));
        }
    }
}
