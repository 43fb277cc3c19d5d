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

/// Prefetches the line at `address` for writing.
pub(super) fn for_writing(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: as in `for_reading`.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
    let _ = address;
}
