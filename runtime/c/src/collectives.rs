//! Operations on host memory.

use std::ffi::c_void;

use mgpu::{Buffer, Communicator, Pending};

use crate::call::{Result, borrow, call, slice};
use crate::communicator::CommunicatorHandle;
use crate::memory::ARENAS;
use crate::status::Status;
use crate::values::{ElementType, Operation, dtype, reduction};

/// The memory of an operation, as the program passes it.
struct Data {
    data: *mut c_void,
    count: usize,
    element: ElementType,
}

impl Data {
    /// # Safety
    /// The header's rules.
    unsafe fn buffer(&self) -> Result<Buffer> {
        let dtype = dtype(self.element)?;
        // SAFETY: the caller's promise.
        unsafe { ARENAS.buffer(self.data, dtype, self.count) }
    }
}

/// Runs an operation that has one buffer.
///
/// # Safety
/// The header's rules.
unsafe fn operate(
    comm: *mut CommunicatorHandle,
    data: &Data,
    operation: impl FnOnce(&mut Communicator, Buffer) -> Result<Pending>,
) -> Status {
    call(|| {
        // SAFETY: the caller's promise.
        let (handle, buffer) = unsafe { (borrow(comm, "comm")?, data.buffer()?) };
        operation(&mut *handle.lock()?, buffer)?.wait()?;
        Ok(())
    })
}

/// Returns once all ranks have called it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_barrier(comm: *mut CommunicatorHandle) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { borrow(comm, "comm")? }.lock()?.barrier()?;
        Ok(())
    })
}

/// Every rank's `data` becomes the reduction of all ranks'. Results have the same bits on all ranks and in every run: each
/// element is reduced in the order of the ranks (on GPUs, in NCCL's order).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_all_reduce(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    operation: Operation,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.all_reduce(buffer, reduction(operation)?)?)) }
}

/// The `data` of rank `root` becomes the reduction of all ranks'; that of the others is unchanged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reduce(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    operation: Operation,
    root: u32,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.reduce(buffer, reduction(operation)?, root)?)) }
}

/// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank r becomes the reduction of all ranks' shards
/// r; the other shards are unspecified afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_reduce_scatter(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    operation: Operation,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.reduce_scatter(buffer, reduction(operation)?)?)) }
}

/// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of every rank becomes that of rank r.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_all_gather(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.all_gather(buffer)?)) }
}

/// As `mgpu_all_gather`, with parts of different lengths: part r has `counts[r]` elements, of `count` together. `counts`
/// has one number for each rank, the same on all ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_all_gather_v(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    counts: *const usize,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe {
        operate(comm, &data, |comm, buffer| {
            let counts = slice(counts, comm.size() as usize, "counts")?;
            Ok(comm.all_gather_v(buffer, counts)?)
        })
    }
}

/// Every rank's `data` becomes a copy of that of rank `root`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_broadcast(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    root: u32,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.broadcast(buffer, root)?)) }
}

/// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank `root` becomes that of rank r.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_gather(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    root: u32,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.gather(buffer, root)?)) }
}

/// `data` consists of one shard for each rank (`mgpu_shard`). Shard r of rank r becomes that of rank `root`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_scatter(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    root: u32,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.scatter(buffer, root)?)) }
}

/// `data` consists of one shard for each rank, all of the same length. Shard q of rank r becomes what shard r of rank q was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_all_to_all(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.all_to_all(buffer)?)) }
}

/// Sends the next `send_counts[r]` elements of `send_data` to rank r, and receives the next `receive_counts[r]` elements of
/// `receive_data` from it. Each array of counts has one number for each rank. The two memories do not overlap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_all_to_all_v(
    comm: *mut CommunicatorHandle,
    send_data: *const c_void,
    send_counts: *const usize,
    receive_data: *mut c_void,
    receive_counts: *const usize,
    element: ElementType,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let handle = unsafe { borrow(comm, "comm")? };
        // SAFETY: the header's rules.
        let counts = unsafe {
            [(send_counts, "send_counts"), (receive_counts, "receive_counts")]
                .map(|(counts, name)| slice(counts, handle.size(), name))
        };
        let [send_counts, receive_counts] = counts;
        let (send_counts, receive_counts) = (send_counts?, receive_counts?);
        let total = |counts: &[usize]| counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
        let buffer = |data: *mut c_void, counts: &[usize]| {
            let data = Data { data, count: total(counts).unwrap_or(usize::MAX), element };
            // SAFETY: the header's rules; what is sent is only read.
            unsafe { data.buffer() }
        };
        let send = buffer(send_data.cast_mut(), send_counts)?;
        let receive = buffer(receive_data, receive_counts)?;
        handle.lock()?.all_to_all_v(&send, send_counts, receive, receive_counts)?.wait()?;
        Ok(())
    })
}

/// Sends `data` to rank `to`, which calls `mgpu_receive`. Messages between two ranks arrive in the order they were sent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_send(
    comm: *mut CommunicatorHandle,
    data: *const c_void,
    count: usize,
    element: ElementType,
    to: u32,
) -> Status {
    // What is sent is only read.
    let data = Data { data: data.cast_mut(), count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.send(buffer, to)?)) }
}

/// Fills `data` with the next message of rank `from`, which has the same type and count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_receive(
    comm: *mut CommunicatorHandle,
    data: *mut c_void,
    count: usize,
    element: ElementType,
    from: u32,
) -> Status {
    let data = Data { data, count, element };
    // SAFETY: the header's rules.
    unsafe { operate(comm, &data, |comm, buffer| Ok(comm.recv(buffer, from)?)) }
}
