//! Memory of a GPU, and pinned memory of the host.

use std::cell::RefCell;
use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::captures::Allocation;
use super::driver::{self, DriverError};
use super::error::{Context, Error, Result};
use super::uses::LastUses;
use super::{Device, Stream};
use crate::{DType, Element};

/// Elements of one type on a GPU, initially zero.
#[derive(Debug)]
pub struct Memory {
    device: Arc<Device>,
    address: sys::CUdeviceptr,
    dtype: DType,
    len: usize,
    /// When it was allocated, in the device's count.
    allocated_at: u64,
    /// Frees it, if it is not from the driver.
    deallocator: Option<&'static dyn Deallocator>,
}

/// Frees memory of a GPU that is not from the driver but from a library whose memory other GPUs can access.
pub trait Deallocator: Debug + Send + Sync {
    /// Frees memory of the current device.
    ///
    /// # Safety
    /// The library has allocated the memory at this address, and nothing uses it any more.
    unsafe fn free(&self, address: u64);
}

/// A range of the elements of a [`Memory`], for kernels to read and write.
///
/// Views may overlap, and several kernels may get the same one: streams and events determine their order.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    address: u64,
    dtype: DType,
    len: usize,
    memory: PhantomData<&'a Memory>,
}

impl Memory {
    /// Memory for `len` elements, all zero.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeroed(device: &Arc<Device>, dtype: DType, len: usize) -> Result<Self> {
        device.bind()?;
        let wanted = len as u64 * dtype.size() as u64;
        // The driver does not allocate zero bytes.
        match driver::allocate((wanted as usize).max(1)) {
            Ok(address) => Self::of_zeros(device, dtype, len, (address, None)),
            Err(DriverError::OUT_OF_MEMORY) => {
                let (free, total) = device.free_and_total()?;
                Err(Error::OutOfMemory { wanted, free, total })
            }
            Err(error) => Err(error).context("cuMemAlloc"),
        }
    }

    /// Owns memory for `len` elements at `address` that a library has allocated, and fills it with zeros.
    ///
    /// # Safety
    /// - It is memory of the GPU, aligned to 256 bytes, that nobody else uses, and for which the deallocator is made.
    /// - All work that uses it has ended when it is dropped: unlike the driver, a library need not wait for that when it
    ///   frees memory. (Graphs that are not launched any more may exist.)
    ///
    /// # Errors
    /// If the driver returns an error.
    pub unsafe fn zeroed_at(
        address: u64,
        device: &Arc<Device>,
        dtype: DType,
        len: usize,
        deallocator: &'static dyn Deallocator,
    ) -> Result<Self> {
        device.bind()?;
        Self::of_zeros(device, dtype, len, (address, Some(deallocator)))
    }

    /// Owns what was just allocated, and fills it with zeros.
    fn of_zeros(
        device: &Arc<Device>,
        dtype: DType,
        len: usize,
        (address, deallocator): (u64, Option<&'static dyn Deallocator>),
    ) -> Result<Self> {
        let bytes = (len * dtype.size()).max(1);
        let allocated_at = device.allocated(bytes as u64);
        let memory = Memory { device: Arc::clone(device), address, dtype, len, allocated_at, deallocator };
        let stream = device.set_up_stream();
        // SAFETY: the bytes that were allocated, and a stream that is never destroyed.
        unsafe { driver::fill_zero(address, bytes, stream) }.context("cuMemsetD8Async")?;
        // Whichever stream uses the memory does not wait for this one.
        // SAFETY: as above.
        unsafe { driver::synchronize_stream(stream) }.context("cuStreamSynchronize")?;
        Ok(memory)
    }

    /// A copy of `values` on the GPU of `stream`.
    ///
    /// # Errors
    /// If there is not enough memory, or the driver returns an error.
    pub fn from_slice<T: Element>(stream: &Stream, values: &[T]) -> Result<Self> {
        let memory = Memory::zeroed(stream.device(), T::DTYPE, values.len())?;
        stream.upload(values, memory.view())?;
        Ok(memory)
    }

    /// A copy on the host, after the work on `stream` so far has finished.
    ///
    /// # Errors
    /// If that work failed.
    ///
    /// # Panics
    /// If `T` is not the element type.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>> {
        self.view().to_vec(stream)
    }

    /// All elements.
    pub fn view(&self) -> View<'_> {
        View { address: self.address, dtype: self.dtype, len: self.len, memory: PhantomData }
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn slice(&self, range: Range<usize>) -> View<'_> {
        self.view().slice(range)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let bytes = (self.len as u64 * self.dtype.size() as u64).max(1);
        let Memory { address, deallocator, .. } = *self;
        self.device.release(Allocation::Device { address, bytes, deallocator }, self.allocated_at);
    }
}

impl<'a> View<'a> {
    /// `len` elements of `dtype` at device address `address`, which another owner has allocated: a framework's tensor.
    ///
    /// # Safety
    /// - The elements are memory of the GPU on whose streams the view is used, and aligned to an element.
    /// - They stay allocated for `'a`, and until all work that was enqueued with the view has finished. (After an error of
    ///   a collective, the communicator's `drain` waits for that.) A framework whose allocator reuses memory in the order
    ///   of a stream may free them once that stream waits for the work.
    /// - Work on other streams that touches them is ordered with that work by events.
    pub unsafe fn from_raw(address: u64, dtype: DType, len: usize) -> View<'a> {
        View { address, dtype, len, memory: PhantomData }
    }

    /// Device address of the first element.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }

    /// The elements of `range`.
    ///
    /// # Panics
    /// If the range exceeds the view.
    pub fn slice(&self, range: Range<usize>) -> View<'a> {
        let Range { start, end } = range;
        assert!(start <= end && end <= self.len, "elements {start}..{end} of {}", self.len);
        View { address: self.address + (start * self.dtype.size()) as u64, len: end - start, ..*self }
    }

    /// The same bytes as elements of another type, for parts of a workspace.
    ///
    /// # Panics
    /// If the bytes are not a whole number of such elements, or are not aligned for them.
    pub fn cast(self, dtype: DType) -> View<'a> {
        let size = dtype.size();
        assert!(
            self.bytes().is_multiple_of(size) && self.address.is_multiple_of(size as u64),
            "{} bytes at {:#x} seen as {dtype}",
            self.bytes(),
            self.address
        );
        View { dtype, len: self.bytes() / size, ..self }
    }

    /// A copy on the host, after the work on `stream` so far has finished.
    ///
    /// # Errors
    /// If that work failed.
    ///
    /// # Panics
    /// If `T` is not the element type.
    pub fn to_vec<T: Element>(&self, stream: &Stream) -> Result<Vec<T>> {
        assert!(T::DTYPE == self.dtype, "memory of {} read as {}", self.dtype, T::DTYPE);
        let mut values = vec![T::zeroed(); self.len];
        stream.download(*self, &mut values)?;
        Ok(values)
    }
}

/// Pinned bytes of the host, which a GPU copies from and to asynchronously.
#[derive(Debug)]
pub struct Pinned {
    device: Arc<Device>,
    address: *mut u8,
    len: usize,
    /// When it was allocated, in the device's count.
    allocated_at: u64,
    /// The copies from and to it, except those of graphs.
    copies: RefCell<LastUses>,
}

// SAFETY: memory that belongs to this object alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `len` zero bytes.
    ///
    /// # Errors
    /// If the driver refuses.
    pub fn zeroed(device: &Arc<Device>, len: usize) -> Result<Self> {
        device.bind()?;
        let address = driver::allocate_host(len.max(1)).context("cuMemHostAlloc")?.cast::<u8>();
        // SAFETY: `len` bytes that were just allocated.
        unsafe { address.write_bytes(0, len) };
        let (device, allocated_at) = (Arc::clone(device), device.allocated(0));
        Ok(Pinned { device, address, len, allocated_at, copies: RefCell::default() })
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }

    /// Notes that a copy from or to the memory was enqueued last on `stream`.
    pub(super) fn copied_by(&self, stream: &Stream) -> Result<()> {
        if !self.copies.borrow_mut().record(stream)? {
            self.device.pinned_captured();
        }
        Ok(())
    }

    /// The bytes.
    ///
    /// # Safety
    /// No copy from or to them is in flight.
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: initialised, owned, and nobody writes to it now.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The bytes, mutable.
    ///
    /// # Safety
    /// No copy from or to them is in flight.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised, owned, and nobody else reads or writes it now.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        let _ = self.device.bind();
        // If the wait fails, a copy may still be running, so the memory is never freed.
        if self.copies.get_mut().wait().is_ok() {
            self.device.release(Allocation::Host(self.address as usize), self.allocated_at);
        }
    }
}
