//! Communicators and groups.

use std::sync::{Mutex, MutexGuard};

use mgpu::Communicator;
use mgpu::replicate::{replicate, verify_equal};

use crate::call::{Result, borrow, call, free, lock, put, put_handle, slice, slice_mut};
use crate::layout::LayoutHandle;
use crate::status::{Failure, Status};

/// The ranks of a world, or of a group, for operations on host memory.
pub struct CommunicatorHandle {
    comm: Mutex<Communicator>,
    rank: u32,
    /// World rank of each rank.
    world_ranks: Vec<u32>,
}

impl CommunicatorHandle {
    pub(crate) fn new(comm: Communicator) -> Self {
        let world_ranks = (0..comm.size()).map(|rank| comm.world_rank(rank)).collect();
        CommunicatorHandle { rank: comm.rank(), world_ranks, comm: Mutex::new(comm) }
    }

    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Communicator>> {
        lock(&self.comm)
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.world_ranks.len()
    }
}

/// Frees a communicator. Null is ignored. Under NCCL all ranks free it, in the same order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_free(comm: *mut CommunicatorHandle) {
    // SAFETY: the header's rules.
    unsafe { free(comm) };
}

/// This rank, in the communicator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_rank(comm: *const CommunicatorHandle, rank: *mut u32) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(rank, "rank", borrow(comm, "comm")?.rank) })
}

/// Number of ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_size(comm: *const CommunicatorHandle, size: *mut u32) -> Status {
    // SAFETY: the header's rules.
    call(|| unsafe { put(size, "size", borrow(comm, "comm")?.world_ranks.len() as u32) })
}

/// The rank in the world of rank `rank` of the communicator. They differ in groups only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_world_rank(
    comm: *const CommunicatorHandle,
    rank: u32,
    world_rank: *mut u32,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let ranks = &unsafe { borrow(comm, "comm")? }.world_ranks;
        let found = ranks.get(rank as usize).copied();
        let found =
            found.ok_or_else(|| Failure::argument(format!("no rank {rank}: there are {}", ranks.len())))?;
        // SAFETY: the header's rules.
        unsafe { put(world_rank, "world_rank", found) }
    })
}

/// Splits a communicator into groups: a communicator for the ranks that pass the same `colour`, in the order of their
/// `key`s, and of their ranks where keys are equal. A rank with a negative colour is in no group: its `group` is null.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_split(
    comm: *mut CommunicatorHandle,
    colour: i64,
    key: i32,
    group: *mut *mut CommunicatorHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(group, "group", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let comm = unsafe { borrow(comm, "comm")? };
        let too_large = |_| Failure::argument(format!("colour {colour} is larger than {}", u32::MAX));
        let colour = (colour >= 0).then(|| u32::try_from(colour)).transpose().map_err(too_large)?;
        match comm.lock()?.split(colour, key)? {
            None => Ok(()),
            // SAFETY: the header's rules.
            Some(created) => unsafe { put_handle(group, "group", CommunicatorHandle::new(created)) },
        }
    })
}

/// Declares that other threads compute on the ranks' cores, so that waiting ranks yield their core early. All ranks call
/// it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_set_oversubscribed(comm: *mut CommunicatorHandle) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { borrow(comm, "comm")? }.lock()?.set_oversubscribed();
        Ok(())
    })
}

/// Makes `parameters` equal on all ranks: checks that all have the same layout, broadcasts those of rank 0, and compares
/// checksums. `count` is the number of elements, that of the layout. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_replicate(
    comm: *mut CommunicatorHandle,
    layout: *const LayoutHandle,
    parameters: *mut f32,
    count: usize,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (comm, layout) = unsafe { (borrow(comm, "comm")?, borrow(layout, "layout")?.get()?) };
        layout.check_count(count, "parameters")?;
        // SAFETY: the header's rules.
        let parameters = unsafe { slice_mut(parameters, count, "parameters")? };
        replicate(&mut *comm.lock()?, &layout, parameters)?;
        Ok(())
    })
}

/// Checks that all ranks have the same `parameters`, and returns their checksum. The error names the first rank and
/// tensor that differ. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_verify_equal(
    comm: *mut CommunicatorHandle,
    layout: *const LayoutHandle,
    parameters: *const f32,
    count: usize,
    checksum: *mut u64,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let (comm, layout) = unsafe { (borrow(comm, "comm")?, borrow(layout, "layout")?.get()?) };
        layout.check_count(count, "parameters")?;
        // SAFETY: the header's rules.
        let parameters = unsafe { slice(parameters, count, "parameters")? };
        let equal = verify_equal(&mut *comm.lock()?, &layout, parameters)?;
        // SAFETY: the header's rules.
        unsafe { put(checksum, "checksum", equal) }
    })
}

/// Where the shard of rank `rank` begins and ends, in elements, if `count` elements are divided among `ranks` ranks:
/// ⌈count/ranks⌉ each, except that the last ones may be shorter or empty. ranks · ⌈count/ranks⌉ must fit in a `size_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_shard(
    count: usize,
    ranks: u32,
    rank: u32,
    begin: *mut usize,
    end: *mut usize,
) -> Status {
    call(|| {
        if rank >= ranks {
            return Err(Failure::argument(format!("no rank {rank}: there are {ranks}")));
        }
        if count.div_ceil(ranks as usize).checked_mul(ranks as usize).is_none() {
            let text = format!("{count} elements among {ranks} ranks are more than can be counted");
            return Err(Failure::argument(text));
        }
        let part = mgpu::comm::shard(count, ranks, rank);
        // SAFETY: the header's rules.
        unsafe {
            put(begin, "begin", part.start)?;
            put(end, "end", part.end)
        }
    })
}
