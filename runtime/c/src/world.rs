//! The world: this rank, and what it tells the launcher.

use std::ffi::{CString, c_char};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use mgpu::{Backend, World};

use crate::call::{Result, borrow, call, free, put, put_handle, unusable};
use crate::communicator::CommunicatorHandle;
use crate::interrupt;
use crate::status::{Failure, Status};
use crate::structs::{self, SizedStruct};
use crate::values::{PhaseNumber, phase};

/// The run, as this rank sees it.
pub struct WorldHandle {
    world: RwLock<World>,
    /// The notices of the world, which do not change after it was joined.
    notices: Vec<CString>,
}

impl WorldHandle {
    fn new(world: World) -> Self {
        // The rendezvous accepts no control characters in them, so no text has a zero byte.
        let notices =
            world.notices().iter().filter_map(|notice| CString::new(notice.as_str()).ok()).collect();
        WorldHandle { world: RwLock::new(world), notices }
    }

    fn read(&self) -> Result<RwLockReadGuard<'_, World>> {
        self.world.read().map_err(|_| unusable())
    }

    pub(crate) fn write(&self) -> Result<RwLockWriteGuard<'_, World>> {
        self.world.write().map_err(|_| unusable())
    }
}

/// Who this rank is.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct WorldInfo {
    /// Set it to `sizeof(mgpu_world_info)` before the call.
    pub struct_size: usize,
    /// Rank of this process, from 0.
    pub rank: u32,
    /// Number of ranks.
    pub size: u32,
    /// Rank among the ranks on this host.
    pub local_rank: u32,
    /// Number of ranks on this host.
    pub local_size: u32,
    /// How often the launcher has restarted the ranks.
    pub restart_count: u32,
    /// Number of threads with which this rank should compute.
    pub threads: u32,
    /// 1 if collectives run on GPUs through NCCL, 0 on CPUs.
    pub uses_gpus: u32,
    /// 1 if a launcher has started this process, 0 if it is alone.
    pub is_launched: u32,
}

// SAFETY: as required.
unsafe impl SizedStruct for WorldInfo {
    const NAME: &'static str = "mgpu_world_info";
    const FIRST_SIZE: usize = 40;
}

/// Joins the run that the environment describes, under mgpurun, torchrun, mpirun or srun; without a launcher, a world of
/// one. Returns when all ranks have joined.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_init(world: *mut *mut WorldHandle) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(world, "world", std::ptr::null_mut())? };
        let joined = World::from_env()?;
        joined.interrupt_when(interrupt::is_interrupted);
        // SAFETY: the header's rules.
        unsafe { put_handle(world, "world", WorldHandle::new(joined)) }
    })
}

/// Leaves the run, once all communicators, reducers and the world are freed, in any order. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_finalize(world: *mut WorldHandle) {
    // SAFETY: the header's rules.
    unsafe { free(world) };
}

/// Fills `info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_world_get_info(world: *const WorldHandle, info: *mut WorldInfo) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let world = unsafe { borrow(world, "world")? }.read()?;
        let value = WorldInfo {
            struct_size: size_of::<WorldInfo>(),
            rank: world.rank(),
            size: world.size(),
            local_rank: world.local_rank(),
            local_size: world.local_size(),
            restart_count: world.restart_count(),
            threads: world.thread_share() as u32,
            uses_gpus: u32::from(world.backend() == Backend::Nccl),
            is_launched: u32::from(World::is_launched()),
        };
        // SAFETY: the header's rules.
        unsafe { structs::write(info, &value) }
    })
}

/// The notice with number `index`, from 0: a sentence without a full stop that the user should know, for instance that the
/// ranks have set a variable of NCCL. Null after the last one. Notices are the same on all ranks, so that one of them can
/// print them. Valid until the world is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_world_notice(
    world: *const WorldHandle,
    index: usize,
    notice: *mut *const c_char,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let notices = &unsafe { borrow(world, "world")? }.notices;
        let text = notices.get(index).map_or(std::ptr::null(), |notice| notice.as_ptr());
        // SAFETY: the header's rules.
        unsafe { put(notice, "notice", text) }
    })
}

/// Sets how long communicators that are created afterwards wait for another rank that makes no progress.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_world_set_timeout(world: *mut WorldHandle, seconds: f64) -> Status {
    call(|| {
        let timeout = Duration::try_from_secs_f64(seconds).ok().filter(|timeout| !timeout.is_zero());
        let timeout = timeout.ok_or_else(|| {
            Failure::argument(format!("a timeout of {seconds} s: pass a positive number of seconds"))
        })?;
        // SAFETY: the header's rules.
        unsafe { borrow(world, "world")? }.write()?.set_timeout(timeout);
        Ok(())
    })
}

/// Tells the launcher that training step `step` (from 1) begins.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_report_step(world: *const WorldHandle, step: u64) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { borrow(world, "world")? }.read()?.report_step(step);
        Ok(())
    })
}

/// Tells the launcher that this rank has processed `samples` more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_report_samples(world: *const WorldHandle, samples: u64) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { borrow(world, "world")? }.read()?.report_samples(samples);
        Ok(())
    })
}

/// Tells the launcher that another phase of the work begins, which may take long without a step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_report_phase(world: *const WorldHandle, number: PhaseNumber) -> Status {
    call(|| {
        let phase = phase(number)?;
        // SAFETY: the header's rules.
        unsafe { borrow(world, "world")? }.read()?.report_phase(phase);
        Ok(())
    })
}

/// Whether the ranks should save their work and exit with `MGPU_EXIT_STOPPED`: 1 or 0. All ranks ask equally often, for
/// instance before each step; the n-th call gives the same on all of them. From the first call on, this process handles
/// SIGTERM, SIGINT and SIGUSR1, except those that it handles or ignores already.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_stop_requested(world: *const WorldHandle, stop: *mut i32) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        let requested = unsafe { borrow(world, "world")? }.read()?.stop_requested()?;
        // SAFETY: the header's rules.
        unsafe { put(stop, "stop", i32::from(requested)) }
    })
}

/// Asks all ranks to stop. They learn it when all of them next call `mgpu_stop_requested`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_request_stop(world: *const WorldHandle) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { borrow(world, "world")? }.read()?.request_stop();
        Ok(())
    })
}

/// Creates a communicator of all ranks for host memory. Collective: all ranks call it equally often, in the same order as
/// they create their reducers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mgpu_comm_create(
    world: *mut WorldHandle,
    comm: *mut *mut CommunicatorHandle,
) -> Status {
    call(|| {
        // SAFETY: the header's rules.
        unsafe { put(comm, "comm", std::ptr::null_mut())? };
        // SAFETY: the header's rules.
        let world = unsafe { borrow(world, "world")? };
        let created = world.write()?.communicator()?;
        // SAFETY: the header's rules.
        unsafe { put_handle(comm, "comm", CommunicatorHandle::new(created)) }
    })
}
