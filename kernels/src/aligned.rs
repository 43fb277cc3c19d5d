//! Memory for activations, gradients and scratch, aligned to cache lines and in huge pages if available.
//!
//! A vector of 64 bytes that crosses a cache line costs two reads, and a batch of images spans more 4 KiB pages than
//! the processor's TLB holds.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};

use crate::Storage;

/// A cache line.
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A slice whose first element is at the beginning of a cache line.
///
/// ```
/// let mut values = mgpu_kernels::AlignedVec::zeroed(100);
/// values[99] = 1.0f32;
/// assert_eq!((values.len(), values.as_ptr() as usize % 64), (100, 0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct AlignedVec<T = f32> {
    lines: Vec<Line>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Storage> AlignedVec<T> {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Self {
        let count = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        let mut lines = Vec::with_capacity(count);
        // Before the memory is touched: pages that exist already keep their size.
        advise_huge_pages(lines.spare_capacity_mut());
        lines.resize(count, Line([0; 64]));
        AlignedVec { lines, len, elements: PhantomData }
    }

    /// The first `len` elements, with arbitrary contents; reallocates if there are fewer.
    pub(crate) fn reserve(&mut self, len: usize) -> &mut [T] {
        if self.len < len {
            *self = Self::zeroed(len);
        }
        &mut self[..len]
    }
}

impl<T: Storage> Deref for AlignedVec<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl<T: Storage> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

/// Asks for huge pages for memory that has not been touched yet. A refusal is ignored.
#[cfg(target_os = "linux")]
fn advise_huge_pages(memory: &[MaybeUninit<Line>]) {
    use nix::sys::mman::{MmapAdvise, madvise};
    const HUGE: usize = 2 << 20;
    let range = memory.as_ptr_range();
    let start = (range.start as usize).next_multiple_of(HUGE);
    let end = range.end as usize / HUGE * HUGE;
    if let Some(start) = std::ptr::NonNull::new(start as *mut std::ffi::c_void).filter(|_| start < end) {
        // SAFETY: the pages lie within `memory`; the advice changes neither contents nor protection.
        let _ = unsafe { madvise(start, end - start.as_ptr() as usize, MmapAdvise::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: &[MaybeUninit<Line>]) {}
