//! What a communicator's owner has registered: the calls of NCCL, made by its thread.
//!
//! Registering is local and returns at once. Opening a window connects the ranks, and NCCL writes the handle when it is
//! done, like that of a new communicator.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::ncclWindow_vidmem;

use super::owner::{ABORT_LIMIT, Outcome, Owner, OwnerState, Reply, TaskError};

/// A registered range of device memory.
#[derive(Debug)]
pub(super) struct Registered {
    /// Unique within the owner.
    number: u64,
    address: u64,
    bytes: usize,
    /// NCCL's handle.
    handle: AtomicPtr<c_void>,
    /// Null without a window.
    window: Arc<Window>,
}

/// A handle that NCCL writes.
type Window = AtomicPtr<ncclWindow_vidmem>;

impl OwnerState {
    fn registered(&self) -> MutexGuard<'_, Vec<Registered>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether something is registered under this number.
    pub(super) fn has_registered(&self, number: u64) -> bool {
        self.registered().iter().any(|one| one.number == number)
    }

    /// Registers memory, and returns the number by which it is deregistered. The inner error is NCCL's, after which the
    /// communicator can still be used.
    fn register(&self, number: u64, address: u64, bytes: usize) -> Outcome<Result<u64, String>> {
        match self.registered_handle(address, bytes) {
            Ok(handle) if handle.is_null() => {
                Ok(Err("NCCL registers nothing, perhaps because of NCCL_LOCAL_REGISTER=0".into()))
            }
            Ok(handle) => {
                let (handle, window) = (AtomicPtr::new(handle), Arc::default());
                self.registered().push(Registered { number, address, bytes, handle, window });
                Ok(Ok(number))
            }
            Err(TaskError::Nccl(error)) => Ok(Err(self.error_text(&error))),
            Err(TaskError::StopRequested) => Err(TaskError::StopRequested),
        }
    }

    fn registered_handle(&self, address: u64, bytes: usize) -> Outcome<*mut c_void> {
        let comm = self.handle().ok_or(TaskError::StopRequested)?;
        self.guarded("ncclCommRegister", || {
            // SAFETY: the communicator is alive, and only this thread ends it. The memory is allocated as long as it is
            // registered: that is the contract of `DeviceCommunicator::register` and `allocate`.
            unsafe { self.library().comm_register(comm, address as *mut c_void, bytes) }
        })
    }

    /// Opens a window on registered memory. False if NCCL opens none.
    fn open_window(&self, number: u64, (address, bytes): (u64, usize)) -> Outcome<bool> {
        let comm = self.handle().ok_or(TaskError::StopRequested)?;
        let window =
            self.registered().iter().find(|one| one.number == number).map(|one| Arc::clone(&one.window));
        let window = window.ok_or(TaskError::StopRequested)?;
        let opened = self
            .guarded("ncclCommWindowRegister", || {
                // SAFETY: as for registering. The handle is not freed before NCCL has written it for the last time: see
                // below.
                unsafe {
                    let (address, handle) = (address as *mut c_void, window.as_ptr());
                    self.library().comm_window_register(comm, address, bytes, handle)
                }
            })
            .and_then(|progress| self.wait_done(progress));
        if opened.is_err() {
            // NCCL may still write the handle.
            std::mem::forget(Arc::clone(&window));
        }
        opened.map(|()| !window.load(Ordering::SeqCst).is_null())
    }

    fn close_window(&self, registered: &Registered) -> Outcome<()> {
        let window = registered.window.swap(ptr::null_mut(), Ordering::SeqCst);
        let Some(comm) = self.handle().filter(|_| !window.is_null()) else { return Ok(()) };
        // SAFETY: the communicator is alive and has opened the window. Its operations on the memory have ended.
        self.guarded("ncclCommWindowDeregister", || unsafe {
            self.library().comm_window_deregister(comm, window)
        })
    }

    fn deregister(&self, registered: &Registered) -> Outcome<()> {
        self.close_window(registered)?;
        let handle = registered.handle.load(Ordering::SeqCst);
        // NCCL may have registered nothing again.
        let Some(comm) = self.handle().filter(|_| !handle.is_null()) else { return Ok(()) };
        // SAFETY: as above.
        self.guarded("ncclCommDeregister", || unsafe { self.library().comm_deregister(comm, handle) })
    }

    /// Deregisters one range, unless the communicator is being aborted, which ends all registrations.
    fn deregister_one(&self, number: u64) {
        let mut registered = self.registered();
        let Some(index) = registered.iter().position(|one| one.number == number) else { return };
        if !self.is_stop_requested() {
            let one = registered.swap_remove(index);
            drop(registered);
            // After an error of NCCL nothing is left to be done.
            if let Err(TaskError::StopRequested) = self.deregister(&one) {
                self.registered().push(one);
            }
        }
    }

    /// Deregisters what is left, before the communicator is destroyed.
    pub(super) fn deregister_all(&self) {
        let left = std::mem::take(&mut *self.registered());
        left.iter().for_each(|one| drop(self.deregister(one)));
    }

    /// Forgets what was registered with a communicator that is gone.
    pub(super) fn forget_registered(&self) {
        self.registered().clear();
    }

    /// Registers with a new communicator what was registered with the old one.
    pub(super) fn register_again(&self) -> Outcome<()> {
        for one in self.registered().iter() {
            one.window.store(ptr::null_mut(), Ordering::SeqCst);
            one.handle.store(self.registered_handle(one.address, one.bytes)?, Ordering::SeqCst);
        }
        Ok(())
    }
}

/// Interval between two checks whether an abort has ended.
const ABORT_POLL: Duration = Duration::from_millis(1);

impl Owner {
    /// Registers memory; see [`OwnerState::register`].
    pub(super) fn register(&self, address: u64, bytes: usize) -> Receiver<Reply<Result<u64, String>>> {
        let number = self.next_registration();
        self.submit_nccl(move |state| state.register(number, address, bytes))
    }

    /// Opens a window on registered memory. False if NCCL opens none.
    pub(super) fn open_window(&self, number: u64, range: (u64, usize)) -> Receiver<Reply<bool>> {
        self.submit_nccl(move |state| state.open_window(number, range))
    }

    /// Closes the window again, in the order of the other calls.
    pub(super) fn close_window(&self, number: u64) {
        drop(self.submit(move |state| {
            let registered = state.registered();
            let one = registered.iter().find(|one| one.number == number);
            let _ = one.map(|one| state.close_window(one));
        }));
    }

    /// Deregisters memory, and returns when NCCL does not use it any more, or when the GPU is abandoned.
    pub(super) fn deregister(&self, number: u64) {
        let began = Instant::now();
        let done = self.submit(move |state| state.deregister_one(number));
        let mut is_done = !matches!(done.recv_timeout(ABORT_LIMIT), Err(RecvTimeoutError::Timeout));
        // Another thread may be about to abort the communicator.
        while is_done && self.has_registered(number) && began.elapsed() < ABORT_LIMIT && !self.is_abandoned()
        {
            std::thread::park_timeout(ABORT_POLL);
        }
        is_done &= !self.has_registered(number);
        if !is_done {
            // NCCL may still use the memory, so it must not be freed.
            self.abandon_device();
        }
    }
}
