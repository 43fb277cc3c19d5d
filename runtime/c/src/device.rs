//! Operations on GPU memory: enqueued on the program's own stream, between its own kernels.

use std::ffi::{c_char, c_void};

use mgpu::{DeviceCommunicator, ReduceOp};
use mgpu_kernels::DType;
use mgpu_kernels::cuda::{Stream, View};

use crate::call::{Result, borrow, call, free, put, put_handle, text};
use crate::status::{Failure, Status};
use crate::values::{ElementType, Operation, dtype, reduction};
use crate::world::WorldHandle;

/// The ranks of a world, for operations on the memory of their GPUs.
pub struct DeviceCommunicatorHandle(DeviceCommunicator);

/// `count` elements at a device address, and the program's stream.
struct Enqueued<'a> {
    comm: &'a DeviceCommunicator,
    stream: Stream,
    dtype: DType,
}

impl<'a> Enqueued<'a> {
    /// # Safety
    /// The header's rules.
    unsafe fn on(
        comm: *mut DeviceCommunicatorHandle,
        stream: *mut c_void,
        element: ElementType,
    ) -> Result<Enqueued<'a>> {
        // SAFETY: the caller's promise.
        let comm = &unsafe { borrow::<DeviceCommunicatorHandle>(comm, "comm")? }.0;
        // SAFETY: the caller's promise.
        let stream = unsafe { Stream::from_raw(comm.device(), stream.cast()) };
        Ok(Enqueued { comm, stream, dtype: dtype(element)? })
    }

    /// # Safety
    /// The header's rules.
    unsafe fn view(&self, address: u64, count: usize, name: &str) -> Result<View<'a>> {
        let size = self.dtype.size();
        if count.checked_mul(size).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(Failure::argument(format!("`{name}` has {count} elements, more than any memory")));
        }
        if count > 0 && address == 0 {
            return Err(Failure::argument(format!("`{name}` is null")));
        }
        if !address.is_multiple_of(size as u64) {
            let text = format!("`{name}` at {address:#x} is not aligned to an element of {}", self.dtype);
            return Err(Failure::argument(text));
        }
        // SAFETY: the caller's promise.
        Ok(unsafe { View::from_raw(address, self.dtype, count) })
    }
}

/// Creates a communicator of all ranks for GPU memory. The run must use GPUs. Collective, in the same order as other
/// communicators are created.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_comm_create(
    world: *mut WorldHandle,
    comm: *mut *mut DeviceCommunicatorHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(comm, "comm", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let world = unsafe { borrow(world, "world")? };
        let created = world.write()?.device_communicator()?;
        // SAFETY: the header's rules.
        unsafe { put_handle(comm, "comm", DeviceCommunicatorHandle(created)) }
    })
}

/// Frees a communicator, whose operations have ended (`mgpu_device_wait`). Collective, in the same order on all ranks.
/// Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_comm_free(comm: *mut DeviceCommunicatorHandle) {
    // SAFETY: the header's rules.
    unsafe { free(comm) };
}

/// All-reduce: every rank's `to` becomes the reduction of all ranks' `from`. The two are the same, or do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_all_reduce(
    comm: *mut DeviceCommunicatorHandle,
    from: u64,
    to: u64,
    count: usize,
    element: ElementType,
    operation: Operation,
    stream: *mut c_void,
) -> Status {
    call(|| {
        let operation: ReduceOp = reduction(operation)?;
        // SAFETY: the header's rules.
        let (work, from, to) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let (from, to) = (work.view(from, count, "from")?, work.view(to, count, "to")?);
            (work, from, to)
        };
        Ok(work.comm.all_reduce_into(&work.stream, from, to, operation)?)
    })
}

/// Reduce-scatter: `from` has `count` elements for each rank; `to` of rank r becomes the reduction of all ranks' shards r.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_reduce_scatter(
    comm: *mut DeviceCommunicatorHandle,
    from: u64,
    to: u64,
    count: usize,
    element: ElementType,
    operation: Operation,
    stream: *mut c_void,
) -> Status {
    call(|| {
        let operation: ReduceOp = reduction(operation)?;
        // SAFETY: the header's rules.
        let (work, from, to) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let all = count.saturating_mul(work.comm.size() as usize);
            let (from, to) = (work.view(from, all, "from")?, work.view(to, count, "to")?);
            (work, from, to)
        };
        Ok(work.comm.reduce_scatter(&work.stream, from, to, operation)?)
    })
}

/// All-gather: `to` has `count` elements for each rank; shard r of every rank becomes `from` of rank r.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_all_gather(
    comm: *mut DeviceCommunicatorHandle,
    from: u64,
    to: u64,
    count: usize,
    element: ElementType,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (work, from, to) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let all = count.saturating_mul(work.comm.size() as usize);
            let (from, to) = (work.view(from, count, "from")?, work.view(to, all, "to")?);
            (work, from, to)
        };
        Ok(work.comm.all_gather(&work.stream, from, to)?)
    })
}

/// Every rank's `data` becomes a copy of that of rank `root`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_broadcast(
    comm: *mut DeviceCommunicatorHandle,
    data: u64,
    count: usize,
    element: ElementType,
    root: u32,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (work, data) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let data = work.view(data, count, "data")?;
            (work, data)
        };
        Ok(work.comm.broadcast(&work.stream, data, root)?)
    })
}

/// The `data` of rank `root` becomes the reduction of all ranks'; that of the others is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_reduce(
    comm: *mut DeviceCommunicatorHandle,
    data: u64,
    count: usize,
    element: ElementType,
    operation: Operation,
    root: u32,
    stream: *mut c_void,
) -> Status {
    call(|| {
        let operation: ReduceOp = reduction(operation)?;
        // SAFETY: the header's rules.
        let (work, data) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let data = work.view(data, count, "data")?;
            (work, data)
        };
        Ok(work.comm.reduce(&work.stream, data, operation, root)?)
    })
}

/// Sends `data` to rank `to`, which enqueues `mgpu_device_receive` with the same type and count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_send(
    comm: *mut DeviceCommunicatorHandle,
    data: u64,
    count: usize,
    element: ElementType,
    to: u32,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (work, data) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let data = work.view(data, count, "data")?;
            (work, data)
        };
        Ok(work.comm.send(&work.stream, data, to)?)
    })
}

/// Fills `data` with what rank `from` sends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_receive(
    comm: *mut DeviceCommunicatorHandle,
    data: u64,
    count: usize,
    element: ElementType,
    from: u32,
    stream: *mut c_void,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (work, data) = unsafe {
            let work = Enqueued::on(comm, stream, element)?;
            let data = work.view(data, count, "data")?;
            (work, data)
        };
        Ok(work.comm.recv(&work.stream, data, from)?)
    })
}

/// Waits until the GPU has done all work on `stream`. Fails if another rank fails, or if the work is not done within the
/// world's timeout; waiting in another way, such as by `cudaStreamSynchronize`, would wait for ever then. `what` describes
/// the work for errors, such as "the gradients of step 7".
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_device_wait(
    comm: *mut DeviceCommunicatorHandle,
    stream: *mut c_void,
    what: *const c_char,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (comm, what) = unsafe { (&borrow(comm, "comm")?.0, text(what, "what")?) };
        // SAFETY: the header's rules.
        let stream = unsafe { Stream::from_raw(comm.device(), stream.cast()) };
        Ok(comm.wait(&stream, what)?)
    })
}
