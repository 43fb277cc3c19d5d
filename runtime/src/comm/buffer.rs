//! Buffers: memory that operations take and return.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use mgpu_kernels::copy::copy;
use nix::sys::mman::{MmapAdvise, madvise};

use super::{DType, Element, Members};
use crate::membership::Membership;
use crate::shm::SharedMemory;
use crate::{Error, Result};

/// Alignment of every allocation: a cache line and a vector register.
pub(crate) const ALIGNMENT: usize = 64;

/// Alignment of large allocations.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages before the memory is touched. If there are none, small pages are used.
fn advise_huge_pages(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the whole pages of a fresh allocation; the advice does not change their contents.
    let _ = unsafe { madvise(base.cast(), bytes / HUGE_PAGE * HUGE_PAGE, MmapAdvise::MADV_HUGEPAGE) };
}

/// A shared-memory allocation of which every rank of a host has a part, and that all of them map.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) memory: SharedMemory,
    /// Number of the allocation: the same on every rank, unique within the world, never 0. Arenas of other worlds may
    /// have the same number: see [`belongs_to`](Self::belongs_to).
    pub(crate) id: u64,
    /// The rank's membership of its world.
    owner: Weak<Membership>,
    /// The ranks that have allocated it.
    members: Members,
    /// Where each rank's part begins, by world rank; `None` for a rank without one, or on another host.
    parts: Vec<Option<usize>>,
    /// Address of this rank's part.
    own: *mut u8,
}

impl Arena {
    /// `members` have allocated it together. `parts` says where the part of each of them on this host begins, by world
    /// rank.
    pub(crate) fn new(
        memory: SharedMemory,
        id: u64,
        owner: Weak<Membership>,
        members: &Members,
        parts: impl IntoIterator<Item = (u32, usize)>,
    ) -> Self {
        let ranks = members.world_ranks().iter().max().map_or(0, |last| *last as usize + 1);
        let mut by_world_rank = vec![None; ranks];
        for (rank, part) in parts {
            by_world_rank[rank as usize] = Some(part);
        }
        let own = by_world_rank[members.world_rank(members.rank()) as usize];
        let own = memory.at(own.expect("this rank has a part of the arena"));
        Arena { memory, id, owner, members: members.clone(), parts: by_world_rank, own }
    }

    /// World rank of this rank.
    fn rank(&self) -> u32 {
        self.members.world_rank(self.members.rank())
    }

    /// Whether it was allocated by this rank of this world. Only then its number identifies it for the peers; in
    /// another world that number may refer to other memory, or to none.
    pub(crate) fn belongs_to(&self, membership: &Arc<Membership>) -> bool {
        std::ptr::eq(self.owner.as_ptr(), Arc::as_ptr(membership))
    }

    /// Whether this world rank has a part in the same memory.
    pub(crate) fn has_part(&self, rank: u32) -> bool {
        self.parts.get(rank as usize).is_some_and(Option::is_some)
    }

    /// Whether all `members` have allocated it together.
    pub(crate) fn is_of(&self, members: &Members) -> bool {
        members.are_within(&self.members)
    }

    /// The error of using it in another world, or by another rank.
    #[cold]
    fn foreign_error(&self, operation: &'static str) -> Error {
        let (communicator, number) = (self.id >> 32, self.id & u64::from(u32::MAX));
        let problem = format!(
            "the buffer is in arena {number} of communicator {communicator}, which rank {} of {} allocated in another world, \
             or which belongs to another rank of this world; allocate it with a communicator of the same world, or copy \
             it into a private buffer",
            self.rank(),
            self.members.size(),
        );
        Error::InvalidArgument { operation, problem }
    }

    /// The error of using it in a communicator with members that have no part of it.
    #[cold]
    fn too_few_error(&self, operation: &'static str, members: &Members) -> Error {
        let has_part = |rank: &&u32| self.members.world_ranks().contains(rank);
        let without = members.world_ranks().iter().find(|rank| !has_part(rank));
        let problem = format!(
            "the buffer was allocated by a group of {} ranks, without rank {}; allocate it with a communicator of all ranks \
             that use it, or copy it into a private buffer",
            self.members.size(),
            without.copied().unwrap_or_default(),
        );
        Error::InvalidArgument { operation, problem }
    }

    /// Address of byte `offset` of the part of world rank `rank`, which has one.
    pub(crate) fn address(&self, rank: u32, offset: usize) -> *mut u8 {
        self.memory.at(self.parts[rank as usize].expect("a rank with a part of the arena") + offset)
    }
}

#[derive(Debug)]
enum Allocation {
    Private {
        base: NonNull<u8>,
        layout: Layout,
    },
    Arena(Arena),
    /// Memory of the program, which frees it.
    Foreign {
        base: NonNull<u8>,
    },
}

impl Allocation {
    #[inline]
    fn base(&self) -> *mut u8 {
        match self {
            Allocation::Private { base, .. } | Allocation::Foreign { base } => base.as_ptr(),
            Allocation::Arena(arena) => arena.own,
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if let Allocation::Private { base, layout } = self {
            // SAFETY: allocated with this layout in `zeroed`; this drops its only owner.
            unsafe { dealloc(base.as_ptr(), *layout) };
        }
    }
}

// SAFETY: the memory is reached only through the `Buffer`s that own its disjoint parts.
unsafe impl Send for Allocation {}
// SAFETY: as above; the struct itself is never written after its construction.
unsafe impl Sync for Allocation {}

/// Elements of one type, in private memory or in an arena that all ranks map.
///
/// A buffer exclusively owns its elements: no two buffers of a process overlap. It can be split, and its parts can be
/// passed to separate operations.
///
/// ```
/// let mut buffer = mgpu::Buffer::zeroed::<f32>(8);
/// buffer.as_mut_slice::<f32>()[5] = 1.5;
/// let (head, tail) = buffer.split_at(4);
/// assert_eq!((head.len(), tail.as_slice::<f32>()), (4, &[0.0, 1.5, 0.0, 0.0][..]));
/// ```
#[derive(Debug)]
pub struct Buffer {
    allocation: Arc<Allocation>,
    dtype: DType,
    /// First byte within this rank's part of the arena, or within the private allocation.
    offset: usize,
    len: usize,
}

impl Buffer {
    /// Zeroed private memory for `len` elements.
    ///
    /// # Panics
    /// If the size overflows. Aborts if memory is short.
    pub fn zeroed<T: Element>(len: usize) -> Self {
        Self::zeroed_of(T::DTYPE, len)
    }

    pub(crate) fn zeroed_of(dtype: DType, len: usize) -> Self {
        let bytes = len.checked_mul(dtype.size()).expect("the size of a buffer fits an address");
        let alignment = if bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGNMENT };
        let layout =
            Layout::from_size_align(bytes.max(1), alignment).expect("the size of a buffer fits an address");
        // SAFETY: the layout has a size of at least 1.
        let base = unsafe { alloc(layout) };
        let Some(base) = NonNull::new(base) else { handle_alloc_error(layout) };
        if bytes >= HUGE_PAGE {
            // Before the memory is touched, which `alloc_zeroed` does if the alignment is large.
            advise_huge_pages(base, layout.size());
        }
        // SAFETY: the allocation has so many bytes.
        unsafe { base.write_bytes(0, layout.size()) };
        Buffer { allocation: Arc::new(Allocation::Private { base, layout }), dtype, offset: 0, len }
    }

    /// A private copy of `values`.
    pub fn from_slice<T: Element>(values: &[T]) -> Self {
        let mut buffer = Self::zeroed::<T>(values.len());
        buffer.as_mut_slice().copy_from_slice(values);
        buffer
    }

    /// The elements of `values`, without a copy: operations read and write them in place, as private memory. For memory
    /// of another framework, see [`from_raw`](Self::from_raw).
    ///
    /// ```
    /// # let mut world = mgpu::World::from_env()?;
    /// # let mut comm = world.communicator()?;
    /// let mut values = vec![1.5f32; 1000];
    /// // SAFETY: `values` is not used before the operation has returned, and lives longer than `comm`.
    /// let buffer = unsafe { mgpu::Buffer::borrow(&mut values) };
    /// comm.all_reduce(buffer, mgpu::ReduceOp::Avg)?.wait()?;
    /// assert_eq!(values[999], 1.5);
    /// # Ok::<(), mgpu::Error>(())
    /// ```
    ///
    /// # Safety
    /// As [`from_raw`](Self::from_raw).
    pub unsafe fn borrow<T: Element>(values: &mut [T]) -> Self {
        let base = NonNull::from(&mut *values).cast();
        // SAFETY: a slice is aligned and initialised; the rest is the caller's promise.
        unsafe { Self::from_raw(base, T::DTYPE, values.len()) }
    }

    /// `len` elements of `dtype` at `base`, without a copy: operations read and write them in place, as private memory.
    /// Dropping the buffer does not free them.
    ///
    /// # Safety
    /// - The elements are valid and initialised.
    /// - Nobody else reads or writes them while the buffer, or a part of it, exists or is in an operation.
    /// - They stay valid until the buffer is dropped after the operation has given it back. After an error of the
    ///   operation, which gives nothing back, they stay valid until the communicator and its groups are dropped.
    ///
    /// # Panics
    /// If `base` is not aligned for the element type.
    pub unsafe fn from_raw(base: NonNull<u8>, dtype: DType, len: usize) -> Self {
        assert!((base.as_ptr() as usize).is_multiple_of(dtype.size()), "{base:?} is not aligned for {dtype}");
        Buffer { allocation: Arc::new(Allocation::Foreign { base }), dtype, offset: 0, len }
    }

    /// Another buffer of `len` elements of `dtype` in the same allocation, from byte `offset` of this buffer on. It keeps
    /// the allocation alive, and is used in place by peers if this one is.
    ///
    /// # Safety
    /// No two buffers that overlap are accessed or passed to operations at the same time.
    ///
    /// # Panics
    /// If the elements are not within this buffer, or not aligned.
    pub unsafe fn alias(&self, offset: usize, dtype: DType, len: usize) -> Self {
        let end = len.checked_mul(dtype.size()).and_then(|bytes| bytes.checked_add(offset));
        assert!(
            end.is_some_and(|end| end <= self.bytes()),
            "{len} elements at byte {offset} of {}",
            self.bytes()
        );
        let aliased =
            Buffer { allocation: Arc::clone(&self.allocation), dtype, offset: self.offset + offset, len };
        assert!((aliased.address() as usize).is_multiple_of(dtype.size()), "{dtype} at an odd address");
        aliased
    }

    /// The whole of this rank's part of `arena`, which holds at least `len` elements of `dtype`.
    pub(crate) fn in_arena(arena: Arena, dtype: DType, len: usize) -> Self {
        Buffer { allocation: Arc::new(Allocation::Arena(arena)), dtype, offset: 0, len }
    }

    /// The arena that contains the buffer, and the offset of its first byte; `None` for private memory.
    #[inline]
    pub(crate) fn arena(&self) -> Option<(&Arena, usize)> {
        match &*self.allocation {
            Allocation::Arena(arena) => Some((arena, self.offset)),
            Allocation::Private { .. } | Allocation::Foreign { .. } => None,
        }
    }

    /// Address of the first element.
    #[inline]
    pub(crate) fn address(&self) -> *mut u8 {
        // SAFETY: `offset` lies within the allocation by construction.
        unsafe { self.allocation.base().add(self.offset) }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    fn assert_type<T: Element>(&self) {
        assert!(T::DTYPE == self.dtype, "a buffer of {} read as {}", self.dtype, T::DTYPE);
    }

    /// The elements.
    ///
    /// # Panics
    /// If `T` is not the element type.
    pub fn as_slice<T: Element>(&self) -> &[T] {
        self.assert_type::<T>();
        // SAFETY: aligned, initialised, `len` long, and owned by this buffer alone. Peers that map the memory too
        // touch it only while an operation holds the buffer, and an operation that failed never returns it.
        unsafe { std::slice::from_raw_parts(self.address().cast(), self.len) }
    }

    /// The elements, mutable.
    ///
    /// # Panics
    /// If `T` is not the element type.
    pub fn as_mut_slice<T: Element>(&mut self) -> &mut [T] {
        self.assert_type::<T>();
        // SAFETY: as in `as_slice`, and `&mut self` excludes other references.
        unsafe { std::slice::from_raw_parts_mut(self.address().cast(), self.len) }
    }

    /// The elements as bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        // SAFETY: as in `as_slice`; any element is a number of initialised bytes.
        unsafe { std::slice::from_raw_parts(self.address(), self.bytes()) }
    }

    /// The elements as bytes, mutable.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_mut_slice`; any bytes are elements.
        unsafe { std::slice::from_raw_parts_mut(self.address(), self.bytes()) }
    }

    /// Checks that all `members` can reach the buffer: if it is in an arena, this rank of this world must have allocated
    /// it, together with all of them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    #[inline]
    pub(crate) fn check_owner(
        &self,
        operation: &'static str,
        membership: &Arc<Membership>,
        members: &Members,
    ) -> Result<()> {
        match self.arena() {
            Some((arena, _)) if !arena.belongs_to(membership) => Err(arena.foreign_error(operation)),
            Some((arena, _)) if !arena.is_of(members) => Err(arena.too_few_error(operation, members)),
            _ => Ok(()),
        }
    }

    /// Copies the elements `range` of `from`, which has the same element type, to the elements that begin at `at`.
    ///
    /// # Panics
    /// If a range is out of bounds, or the types differ.
    pub(crate) fn copy_from(&mut self, at: usize, from: &Buffer, range: Range<usize>) {
        assert!(self.dtype == from.dtype, "a copy of {} into {}", from.dtype, self.dtype);
        assert!(range.start <= range.end && range.end <= from.len && at + range.len() <= self.len);
        let size = self.dtype.size();
        let source = from.address().wrapping_add(range.start * size);
        // SAFETY: both ranges are within their buffers, which exclusively own their elements; one is borrowed
        // mutably.
        unsafe {
            copy(source, self.address().wrapping_add(at * size), range.len() * size);
        }
    }

    /// Moves all elements out, and leaves an empty buffer.
    pub(crate) fn take(&mut self) -> Buffer {
        let empty = Buffer { allocation: Arc::clone(&self.allocation), len: 0, ..*self };
        std::mem::replace(self, empty)
    }

    /// Splits into the first `middle` elements and the rest.
    ///
    /// # Panics
    /// If there are fewer than `middle` elements.
    pub fn split_at(self, middle: usize) -> (Buffer, Buffer) {
        assert!(middle <= self.len, "split of {} elements at {middle}", self.len);
        let offset = self.offset + middle * self.dtype.size();
        let allocation = Arc::clone(&self.allocation);
        let tail = Buffer { allocation, dtype: self.dtype, offset, len: self.len - middle };
        (Buffer { len: middle, ..self }, tail)
    }

    /// Reverses [`split_at`](Self::split_at): joins this buffer and the one that begins at its end.
    ///
    /// # Panics
    /// If `tail` does not begin there, or belongs to another allocation.
    pub fn join(self, tail: Buffer) -> Buffer {
        let adjacent = Arc::ptr_eq(&self.allocation, &tail.allocation)
            && self.dtype == tail.dtype
            && self.offset + self.bytes() == tail.offset;
        assert!(adjacent, "only neighbours within one allocation can be joined");
        Buffer { len: self.len + tail.len, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "a buffer of f32 read as i32")]
    fn a_wrong_type_panics() {
        Buffer::zeroed::<f32>(1).as_slice::<i32>();
    }

    #[test]
    fn split_buffers_can_be_joined() {
        let (head, rest) = Buffer::from_slice(&[1i64, 2, 3]).split_at(1);
        let (middle, tail) = rest.split_at(2);
        assert_eq!(head.join(middle).join(tail).as_slice::<i64>(), [1, 2, 3]);
    }

    #[test]
    #[should_panic(expected = "only neighbours")]
    fn only_adjacent_buffers_can_be_joined() {
        let (head, tail) = Buffer::zeroed::<f32>(4).split_at(2);
        let _ = tail.join(head);
    }

    #[test]
    fn borrowed_memory_is_written_in_place_and_not_freed() {
        let mut values = [1i32, 2, 3, 4];
        // SAFETY: `values` outlives the buffer, and is not used meanwhile.
        let buffer = unsafe { Buffer::borrow(&mut values) };
        let (head, mut tail) = buffer.split_at(1);
        tail.as_mut_slice::<i32>()[2] = 7;
        drop((head, tail));
        assert_eq!(values, [1, 2, 3, 7]);
    }

    #[test]
    fn an_alias_is_the_same_memory() {
        let bytes = Buffer::zeroed::<u8>(16);
        // SAFETY: only one of the two is accessed at a time.
        let mut alias = unsafe { bytes.alias(8, DType::F32, 2) };
        alias.as_mut_slice::<f32>().fill(1.0);
        assert_eq!(&bytes.as_slice::<u8>()[6..12], [0, 0, 0, 0, 128, 63]);
        // SAFETY: as above; it panics.
        let beyond = || unsafe { bytes.alias(12, DType::F64, 1) };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(beyond)).is_err());
    }

    #[test]
    fn parts_outlive_each_other() {
        let (head, tail) = Buffer::from_slice(&[1i64, 2, 3]).split_at(2);
        drop(head);
        assert_eq!(tail.as_slice::<i64>(), [3]);
        assert!(Buffer::zeroed::<f64>(0).is_empty());
    }
}
