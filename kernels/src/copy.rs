//! Copies of memory.
//!
//! From about 2 KiB on, `memcpy` of C libraries uses the processor's string instruction. On AMD processors since Zen 3 that
//! takes 10 to 20 times as long as vectors if the destination begins 1 to 31 bytes further into a page than the source: for
//! example from the beginning of a page to large memory of `malloc`, which begins at byte 16. (Measured on an EPYC with Zen 3,
//! glibc 2.36. Newer versions of glibc avoid the instruction there, see its bug 30994.) From such a source to such a destination
//! every processor copies with vectors.

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
        if bytes >= STRING_BYTES && is_slow_by_string(from, to) {
            by_vectors(from, to, bytes);
        } else {
            std::ptr::copy_nonoverlapping(from, to, bytes);
        }
    }
}

/// Whether the string instruction may be slow from here to there.
fn is_slow_by_string(from: *const u8, to: *mut u8) -> bool {
    const PAGE: usize = 4096;
    (1..32).contains(&(to.addr().wrapping_sub(from.addr()) % PAGE))
}

/// Copies at least [`STRING_BYTES`] bytes.
///
/// # Safety
/// As [`copy`].
unsafe fn by_vectors(from: *const u8, to: *mut u8, bytes: usize) {
    assert!(bytes >= STRING_BYTES);
    dispatch(Copy { from, to, bytes });
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
            at = (at + step - (to.addr() + at) % vector).min(last);
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
    }

    #[test]
    fn both_ways_copy_the_same_bytes() {
        let source: Vec<u8> = (0..6000u32).map(|at| (at % 251) as u8).collect();
        for bytes in [0, 1, 100, STRING_BYTES - 1, STRING_BYTES, 5000] {
            // Every offset between the two occurs.
            for at in (0..4096).step_by(5) {
                let mut destination = vec![0xa5; 5000 + 4096];
                // SAFETY: both ranges are within their vectors.
                unsafe { copy(source[5..].as_ptr(), destination[at..].as_mut_ptr(), bytes) };
                assert_eq!(destination[at..at + bytes], source[5..5 + bytes], "{at} {bytes}");
                let (before, after) = (&destination[..at], &destination[at + bytes..]);
                assert!(before.iter().chain(after).all(|byte| *byte == 0xa5));
            }
        }
        let page: *mut u8 = std::ptr::without_provenance_mut(4096);
        let slow = |from: usize, to: usize| is_slow_by_string(page.wrapping_add(from), page.wrapping_add(to));
        assert!(slow(0, 1) && slow(0, 16) && slow(4096, 31) && slow(4090, 2) && slow(100, 4200));
        assert!(!slow(0, 0) && !slow(0, 32) && !slow(16, 0) && !slow(0, 4095) && !slow(5, 4096 + 5));
    }
}
