//! Memory for activations, gradients and scratch: on the borders of cache lines, in huge pages where there are any.
//!
//! A vector of 64 bytes that crosses a cache line costs two reads, and a batch of images is more pages of 4 KiB than a
//! processor remembers.

use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

/// As many `f32` as a cache line holds.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A slice of `f32` whose first element begins a cache line.
///
/// ```
/// let mut values = mgpu_kernels::AlignedVec::zeroed(100);
/// values[99] = 1.0;
/// assert_eq!((values.len(), values.as_ptr() as usize % 64), (100, 0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct AlignedVec {
    lines: Vec<Line>,
    len: usize,
}

impl AlignedVec {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let count = len.div_ceil(16);
        let mut lines = Vec::with_capacity(count);
        // Before it is touched: pages that are there stay as they are.
        advise_huge_pages(lines.spare_capacity_mut());
        lines.resize(count, Line([0.0; 16]));
        AlignedVec { lines, len }
    }

    /// The first `len` elements, with arbitrary contents: more memory is taken if there are fewer.
    pub(crate) fn reserve(&mut self, len: usize) -> &mut [f32] {
        if self.len < len {
            *self = Self::zeroed(len);
        }
        &mut self[..len]
    }
}

impl Deref for AlignedVec {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl DerefMut for AlignedVec {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Asks for huge pages under memory that has not been touched yet. Where there are none, small ones do.
#[cfg(target_os = "linux")]
fn advise_huge_pages(memory: &[MaybeUninit<Line>]) {
    use nix::sys::mman::{MmapAdvise, madvise};
    const HUGE: usize = 2 << 20;
    let range = memory.as_ptr_range();
    let start = (range.start as usize).next_multiple_of(HUGE);
    let end = range.end as usize / HUGE * HUGE;
    if let Some(start) = std::ptr::NonNull::new(start as *mut std::ffi::c_void).filter(|_| start < end) {
        // SAFETY: the pages lie within `memory`; the advice changes neither contents nor rights.
        let _ = unsafe { madvise(start, end - start.as_ptr() as usize, MmapAdvise::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: &[MaybeUninit<Line>]) {}
