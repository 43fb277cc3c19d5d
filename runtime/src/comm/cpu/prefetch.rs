//! Asking for cache lines before they are needed. Without effect on anything but time, and on processors that have no
//! such instructions without any.

/// Asks for the line at `address`, to be read.
pub(super) fn for_reading(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch neither reads nor writes for the program, and no address makes it fail.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    let _ = address;
}

/// Asks for the line at `address`, to be written.
pub(super) fn for_writing(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        // SAFETY: as in `for_reading`.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
    let _ = address;
}
