//! Prefetching of cache lines. It only affects time; on processors without such instructions it does nothing.

/// Prefetches the line at `address` for reading.
pub(super) fn for_reading(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch does not access memory as far as the program can observe, and any address is valid.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    let _ = address;
}

/// Prefetches the line at `address` for writing: no other core has it afterwards, so that a store does not wait for that.
pub(super) fn for_writing(address: *const u8) {
    // Not by the compiler's own function: for its baseline of x86-64 that is a prefetch for reading. Processors of Intel that do
    // not have this instruction ignore it.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: as in `for_reading`.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags));
    }
    let _ = address;
}

/// Prefetches the `bytes` bytes at `address` for writing. Peers that have read them have their lines; stores would fetch these
/// one after the other.
#[inline]
pub(super) fn range_for_writing(address: *const u8, bytes: usize) {
    (0..bytes).step_by(64).for_each(|at| for_writing(address.wrapping_add(at)));
}
