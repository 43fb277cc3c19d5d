//! The thread that owns an NCCL communicator.
//!
//! NCCL requires that only one thread at a time calls a communicator, and any call may fail to return: because a peer
//! died during the initialisation, or because a driver hangs. So one thread makes all calls of a communicator;
//! callers send it tasks and wait with a timeout of their own, after which they continue. This also holds for the
//! abort: NCCL frees the communicator in it, so a call of another thread would return into freed memory. If the owner
//! is stuck and cannot abort, the GPU is abandoned, and everything on it is left to the end of the process.
//!
//! In non-blocking mode NCCL starts a thread for every group of operations, and each call on a communicator that is "in
//! progress" fails. So the owner waits once for each group, whose single calls only collect, and reads NCCL's state for
//! nothing else (besides the watch for asynchronous errors). What can be enqueued together is therefore cheaper in one
//! group. Operations of captured steps cost this at the capture, and nothing when they are replayed.
//!
//! The owner holds no reference whose drop the rest of the process waits for, or whose drop would release the GPU:
//! neither the membership, whose last reference leaves the run, nor the device. A thread that is stuck forever is
//! left behind.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda::Device;
use nccl_sys::{InitConfig, Library, NcclError, Progress, UniqueId, ncclComm};

use super::call::NcclCall;
use super::group::Calls;
use super::registered::Registered;
use crate::process::start_failure;
use crate::{Error, Result};

/// Interval between two polls of NCCL's asynchronous error, while somebody waits.
const POLL_INTERVAL: Duration = Duration::from_millis(3);

/// Timeout of an abort before the GPU is abandoned. The launcher does not wait much longer for this process.
pub(super) const ABORT_LIMIT: Duration = Duration::from_secs(3);

/// The same for a communicator with captured operations: NCCL does not free it before their graphs are gone, which
/// their owner only drops after it has seen the error. Running kernels are aborted before that.
const ABORT_LIMIT_WITH_GRAPHS: Duration = Duration::from_millis(600);

/// How long another call may delay the abort. In non-blocking mode calls return quickly.
const OWNER_BUSY_LIMIT: Duration = Duration::from_millis(300);

/// Timeout of the start of the thread.
const START_LIMIT: Duration = Duration::from_secs(5);

/// A task for the owner's thread.
type Task = Box<dyn FnOnce(&OwnerState) + Send>;

/// The result of a task, or NCCL's error.
pub(super) type Reply<R> = Result<R, String>;

/// Why a task has failed.
pub(super) enum TaskError {
    Nccl(NcclError),
    /// The owner was told to stop: nobody waits for the task.
    StopRequested,
}

impl From<NcclError> for TaskError {
    fn from(error: NcclError) -> Self {
        TaskError::Nccl(error)
    }
}

pub(super) type Outcome<R> = Result<R, TaskError>;

/// The reply to the end of a communicator.
pub(super) type Finalising = Receiver<Outcome<()>>;

/// An NCCL call in progress: its name and start.
pub(super) type ActiveCall = (&'static str, Instant);

/// State shared by the owner's thread and its callers.
pub(super) struct OwnerState {
    nccl: Library,
    /// Null before NCCL has written it, and after the communicator was destroyed or aborted, which only the owner's
    /// thread does.
    comm: AtomicPtr<ncclComm>,
    /// False while NCCL may still write to `comm`.
    handle_is_final: AtomicBool,
    /// The call in progress.
    call: Mutex<Option<ActiveCall>>,
    /// The owner was told to stop: it must not access any memory that was lent to it. Set while `call` is locked.
    stop_requested: AtomicBool,
    /// Whether operations were captured, so that graphs may contain them.
    captured: AtomicBool,
    /// Number of waits that want NCCL's asynchronous error to be polled.
    watchers: AtomicU32,
    /// NCCL's asynchronous error, once there is one.
    failure: OnceLock<String>,
    /// What is registered with the communicator. Only the owner's thread changes it.
    pub(super) registered: Mutex<Vec<Registered>>,
}

/// Text of an error, with NCCL's last error message.
pub(super) fn error_text(nccl: &Library, error: &NcclError) -> String {
    match nccl.last_error() {
        more if more.is_empty() => error.to_string(),
        more => format!("{error}: {more}"),
    }
}

impl OwnerState {
    fn call(&self) -> MutexGuard<'_, Option<ActiveCall>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn library(&self) -> &Library {
        &self.nccl
    }

    /// The communicator, if there is one.
    pub(super) fn handle(&self) -> Option<*mut ncclComm> {
        Some(self.comm.load(Ordering::SeqCst)).filter(|comm| !comm.is_null())
    }

    /// Makes an NCCL call and records it, unless the owner was told to stop.
    pub(super) fn guarded<R>(
        &self,
        name: &'static str,
        call: impl FnOnce() -> Result<R, NcclError>,
    ) -> Outcome<R> {
        let mut active = self.call();
        // Check this under the lock: whoever sets it then knows whether a call is in progress, and that no other will
        // follow.
        if self.is_stop_requested() {
            return Err(TaskError::StopRequested);
        }
        *active = Some((name, Instant::now()));
        drop(active);
        let result = call();
        *self.call() = None;
        Ok(result?)
    }

    /// Makes an NCCL call and records it, even if the owner was told to stop.
    fn tracked<R>(&self, name: &'static str, call: impl FnOnce() -> Result<R, NcclError>) -> Outcome<R> {
        *self.call() = Some((name, Instant::now()));
        let result = call();
        *self.call() = None;
        Ok(result?)
    }

    fn request_stop(&self) {
        let _entered = self.call();
        self.stop_requested.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_stop_requested(&self) -> bool {
        self.stop_requested.load(Ordering::SeqCst)
    }

    pub(super) fn error_text(&self, error: &NcclError) -> String {
        error_text(&self.nccl, error)
    }

    fn unique_id(&self) -> Outcome<UniqueId> {
        self.guarded("ncclGetUniqueId", || self.nccl.unique_id())
    }

    fn init(&self, id: UniqueId, size: u32, rank: u32) -> Outcome<()> {
        self.handle_is_final.store(false, Ordering::SeqCst);
        let progress = self.guarded("ncclCommInitRankConfig", || {
            let config = InitConfig::non_blocking();
            // SAFETY: `self` is not freed before NCCL has written the handle for the last time: `Owner::drop` ensures
            // that. The thread has bound the device.
            unsafe {
                self.nccl.comm_init_rank_config(self.comm.as_ptr(), size as c_int, id, rank as c_int, config)
            }
        })?;
        self.wait_done(progress)?;
        self.handle_is_final.store(!self.is_stop_requested(), Ordering::SeqCst);
        self.register_again()
    }

    /// Splits the communicator. The new handle is written to its owner, which then [awaits](Self::await_split) it.
    fn split(&self, (child, color, key): &SplitHandle) -> Outcome<()> {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() {
            return Err(TaskError::StopRequested);
        }
        child.handle_is_final.store(false, Ordering::SeqCst);
        let _ = self.guarded("ncclCommSplit", || {
            let config = InitConfig::non_blocking();
            // SAFETY: the communicator is alive, and only this thread ends it. Its operations have ended, because the
            // ranks have exchanged the arguments of the split through it. The state with the handle is not freed before
            // NCCL has written it for the last time: `Owner::drop` ensures that.
            unsafe { self.nccl.comm_split(comm, *color, *key, child.comm.as_ptr(), config) }
        })?;
        // NCCL says "done" as soon as the split has begun; only the communicator's state tells when it has ended.
        self.wait_done(Progress::InProgress)
    }

    /// Waits for the handle of a split, which NCCL may write later than it sets the state of the communicator that was
    /// split, and until the new communicator is ready.
    fn await_split(&self) -> Outcome<()> {
        self.wait_done(Progress::InProgress)?;
        self.handle_is_final.store(!self.is_stop_requested(), Ordering::SeqCst);
        Ok(())
    }

    fn enqueue(&self, calls: &[NcclCall]) -> Outcome<()> {
        let group = calls.len() > 1;
        if group {
            // SAFETY: takes no arguments; ended below, in this thread.
            let _ = self.guarded("ncclGroupStart", || unsafe { self.nccl.group_start() })?;
        }
        let mut outcome = Ok(Progress::Done);
        for call in calls {
            let comm = self.comm.load(Ordering::SeqCst);
            if comm.is_null() {
                outcome = Err(TaskError::StopRequested);
                break;
            }
            // SAFETY: the communicator is alive, and only this thread ends it. The lengths of the views were checked,
            // and the views are alive while their caller waits for the reply. If it stops waiting, memory is not
            // freed before the communicator was aborted, or never.
            let progress = self.guarded(call.function(), || unsafe { call.enqueue(&self.nccl, comm) });
            match progress {
                Ok(Progress::Done) => {}
                Ok(Progress::InProgress) => outcome = Ok(Progress::InProgress),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if group {
            // Also after an error, since an open group would delay the abort.
            // SAFETY: as for its start. The collected calls may begin, which is harmless: see above.
            let end = self.tracked("ncclGroupEnd", || unsafe { self.nccl.group_end() });
            outcome = match (outcome, end) {
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                (Ok(Progress::InProgress), _) | (_, Ok(Progress::InProgress)) => Ok(Progress::InProgress),
                _ => Ok(Progress::Done),
            };
        }
        self.wait_done(outcome?)
    }

    /// Waits until NCCL is done with a call in progress, unless the owner was told to stop.
    pub(super) fn wait_done(&self, mut progress: Progress) -> Outcome<()> {
        let began = Instant::now();
        while progress == Progress::InProgress {
            if self.is_stop_requested() {
                return Err(TaskError::StopRequested);
            }
            match began.elapsed() {
                waited if waited < Duration::from_micros(200) => std::thread::yield_now(),
                waited => std::thread::park_timeout((waited / 16).min(Duration::from_millis(1))),
            }
            let comm = self.comm.load(Ordering::SeqCst);
            // A non-blocking initialisation may be in progress before there is a handle.
            if !comm.is_null() {
                progress = self.async_state(comm)?;
            }
        }
        Ok(())
    }

    /// NCCL's asynchronous error or progress.
    fn async_state(&self, comm: *mut ncclComm) -> Outcome<Progress> {
        // SAFETY: the handle is alive, since only this thread destroys or aborts it.
        self.guarded("ncclCommGetAsyncError", || unsafe { self.nccl.comm_async_error(comm) })
    }

    /// Polls NCCL's asynchronous error and publishes it.
    fn poll_async_error(&self) {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() || self.failure.get().is_some() {
            return;
        }
        if let Err(TaskError::Nccl(error)) = self.async_state(comm) {
            let _ = self.failure.set(self.error_text(&error));
        }
    }

    /// Finalises and destroys the communicator. All ranks must do so.
    fn finalise(&self) -> Outcome<()> {
        let Some(comm) = self.handle() else { return Ok(()) };
        self.deregister_all();
        // SAFETY: the handle is alive, and this is its thread.
        let progress = self.guarded("ncclCommFinalize", || unsafe { self.nccl.comm_finalize(comm) })?;
        self.wait_done(progress)?;
        let destroyed = self.guarded("ncclCommDestroy", || {
            self.comm.store(ptr::null_mut(), Ordering::SeqCst);
            // SAFETY: the handle is alive, this is its thread, and nobody else can get it any more.
            unsafe { self.nccl.comm_destroy(comm) }
        });
        destroyed.map(drop)
    }

    /// Aborts the communicator, if it still exists.
    fn abort(&self) {
        let comm = self.comm.swap(ptr::null_mut(), Ordering::SeqCst);
        if !comm.is_null() {
            // SAFETY: the handle was alive, nobody else can get it any more, and this is its thread, which is in no
            // other call.
            let _ = unsafe { self.nccl.comm_abort(comm) };
        }
        self.forget_registered();
    }

    /// Aborts a communicator that has failed, so that another one can be connected in its place.
    fn discard(&self) -> Outcome<()> {
        let aborted = self.guarded("ncclCommAbort", || {
            let comm = self.comm.swap(ptr::null_mut(), Ordering::SeqCst);
            // SAFETY: the handle is alive, this is its thread, and nobody else can get it any more.
            if comm.is_null() { Ok(Progress::Done) } else { unsafe { self.nccl.comm_abort(comm) } }
        });
        aborted.map(drop)
    }
}

/// The owner of a new communicator of a split, with the color and the key that NCCL gets.
type SplitHandle = (Arc<OwnerState>, u16, c_int);

/// How a communicator has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// Cleanly; nothing is left.
    Yes,
    /// A call does not return: the GPU was abandoned.
    Abandoned,
}

/// The callers' side.
pub(super) struct Owner {
    state: Arc<OwnerState>,
    /// The callers keep the device: its last reference must not be dropped by the thread, which may happen while the
    /// process ends.
    device: Arc<Device>,
    tasks: Mutex<Sender<Task>>,
    /// Number of registrations so far.
    registrations: AtomicU64,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner").field("nccl", &self.state.nccl).finish_non_exhaustive()
    }
}

/// While this exists, the owner polls NCCL's asynchronous error.
pub(super) struct Watcher<'a>(&'a OwnerState);

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Owner {
    /// Starts the thread.
    pub(super) fn start(nccl: Library, device: &Arc<Device>) -> Result<Self> {
        let (sender, receiver) = channel();
        let state = Arc::new(OwnerState {
            nccl,
            comm: AtomicPtr::default(),
            handle_is_final: AtomicBool::new(true),
            call: Mutex::default(),
            stop_requested: AtomicBool::default(),
            captured: AtomicBool::default(),
            watchers: AtomicU32::default(),
            failure: OnceLock::new(),
            registered: Mutex::default(),
        });
        let (owned, bound) = (Arc::clone(&state), Arc::clone(device));
        let (ready, is_ready) = sync_channel(1);
        std::thread::Builder::new()
            .name("mgpu-nccl".into())
            .spawn(move || {
                // If this fails, NCCL's first call reports it. The context lives as long as the callers' side.
                let _ = bound.bind();
                drop(bound);
                let _ = ready.send(());
                run(&owned, &receiver);
            })
            .map_err(|error| Error::system("start the thread that owns NCCL", start_failure(&error)))?;
        let _ = is_ready.recv_timeout(START_LIMIT);
        let (device, tasks) = (Arc::clone(device), Mutex::new(sender));
        Ok(Owner { state, device, tasks, registrations: AtomicU64::default() })
    }

    /// Sends a task with an NCCL result. The reply comes through the receiver, or never.
    pub(super) fn submit_nccl<R: Send + 'static>(
        &self,
        task: impl FnOnce(&OwnerState) -> Outcome<R> + Send + 'static,
    ) -> Receiver<Reply<R>> {
        self.submit(move |state| {
            task(state).map_err(|error| match error {
                TaskError::Nccl(error) => state.error_text(&error),
                TaskError::StopRequested => "the communicator is being aborted".into(),
            })
        })
    }

    /// Sends any task.
    pub(super) fn submit<R: Send + 'static>(
        &self,
        task: impl FnOnce(&OwnerState) -> R + Send + 'static,
    ) -> Receiver<R> {
        let (sender, receiver): (SyncSender<R>, _) = sync_channel(1);
        let task: Task = Box::new(move |state| {
            // The caller may have stopped waiting.
            let _ = sender.send(task(state));
        });
        // If the thread has ended, the task is dropped, and the receiver reports that.
        let _ = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).send(task);
        receiver
    }

    /// Creates a new unique id.
    pub(super) fn unique_id(&self) -> Receiver<Reply<UniqueId>> {
        self.submit_nccl(OwnerState::unique_id)
    }

    /// Initialises the communicator.
    pub(super) fn init(&self, id: UniqueId, size: u32, rank: u32) -> Receiver<Reply<()>> {
        self.submit_nccl(move |state| state.init(id, size, rank))
    }

    /// Splits the communicator: the new one becomes that of the given owner, with this color and key.
    pub(super) fn split(&self, child: &Owner, color: u16, key: c_int) -> Receiver<Reply<()>> {
        let child = (Arc::clone(&child.state), color, key);
        self.submit_nccl(move |state| state.split(&child))
    }

    /// Waits until the communicator that a split has created is ready.
    pub(super) fn await_split(&self) -> Receiver<Reply<()>> {
        self.submit_nccl(OwnerState::await_split)
    }

    /// The library.
    pub(super) fn library(&self) -> Library {
        self.state.nccl.clone()
    }

    /// Whether operations were captured.
    pub(super) fn has_captured(&self) -> bool {
        self.state.captured.load(Ordering::SeqCst)
    }

    /// Discards a communicator that has failed; see [`init`](Self::init).
    pub(super) fn discard(&self) -> Receiver<Reply<()>> {
        self.submit_nccl(OwnerState::discard)
    }

    /// The number of a new registration.
    pub(super) fn next_registration(&self) -> u64 {
        self.registrations.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether NCCL may still use what was registered under this number.
    pub(super) fn has_registered(&self, number: u64) -> bool {
        self.state.has_registered(number)
    }

    /// Whether the GPU was abandoned.
    pub(super) fn is_abandoned(&self) -> bool {
        self.device.is_abandoned()
    }

    /// Nothing of the GPU is freed any more.
    pub(super) fn abandon_device(&self) {
        self.device.abandon();
    }

    /// False while the communicator is being initialised or split off.
    pub(super) fn is_connected(&self) -> bool {
        self.state.handle_is_final.load(Ordering::SeqCst)
    }

    /// Enqueues operations on their streams.
    pub(super) fn enqueue(&self, calls: Calls) -> Receiver<Reply<()>> {
        self.submit_nccl(move |state| state.enqueue(&calls))
    }

    /// Polls NCCL's asynchronous error until the watcher is dropped.
    pub(super) fn watch(&self) -> Watcher<'_> {
        self.state.watchers.fetch_add(1, Ordering::SeqCst);
        drop(self.submit(OwnerState::poll_async_error));
        Watcher(&self.state)
    }

    /// Records that operations are being captured.
    pub(super) fn note_capture(&self) {
        self.state.captured.store(true, Ordering::SeqCst);
    }

    /// NCCL's asynchronous error, if any is known.
    pub(super) fn failure(&self) -> Option<&str> {
        self.state.failure.get().map(String::as_str)
    }

    /// The call that has been in progress for longer than `limit`: in non-blocking mode none should.
    pub(super) fn stuck_call(&self, limit: Duration) -> Option<ActiveCall> {
        self.state.call().filter(|(_, since)| since.elapsed() >= limit)
    }

    /// Tells the owner to make no further calls but the abort.
    pub(super) fn request_stop(&self) {
        self.state.request_stop();
    }

    /// Ends the communicator together with all other ranks; aborts it if that does not end in time.
    pub(super) fn finalise(&self, limit: Duration) -> Ended {
        self.finish_finalise(&self.begin_finalise(), limit)
    }

    /// Starts to end the communicator.
    pub(super) fn begin_finalise(&self) -> Finalising {
        self.submit(OwnerState::finalise)
    }

    /// Waits for the end of the communicator; aborts it if that takes too long.
    pub(super) fn finish_finalise(&self, done: &Finalising, limit: Duration) -> Ended {
        match done.recv_timeout(limit) {
            Ok(Ok(())) => Ended::Yes,
            _ => self.abort(),
        }
    }

    /// Aborts the communicator in whatever state it is. Returns within a few seconds.
    pub(super) fn abort(&self) -> Ended {
        self.finish_abort(self.begin_abort())
    }

    /// Starts an abort.
    pub(super) fn begin_abort(&self) -> Option<Receiver<()>> {
        self.request_stop();
        (!self.device.is_abandoned()).then(|| self.submit(OwnerState::abort))
    }

    /// Waits for an abort. Returns within a few seconds.
    pub(super) fn finish_abort(&self, aborted: Option<Receiver<()>>) -> Ended {
        let limit = if self.has_captured() { ABORT_LIMIT_WITH_GRAPHS } else { ABORT_LIMIT };
        let Some(aborted) = aborted.filter(|_| !self.device.is_abandoned()) else {
            // Probably because of another communicator; nothing can be saved.
            return Ended::Abandoned;
        };
        if aborted.recv_timeout(OWNER_BUSY_LIMIT).is_ok() {
            return self.check_ended();
        }
        let is_in_another_call = self.state.call().is_some();
        if !is_in_another_call && aborted.recv_timeout(limit.saturating_sub(OWNER_BUSY_LIMIT)).is_ok() {
            return self.check_ended();
        }
        self.device.abandon();
        Ended::Abandoned
    }

    /// The thread is not stuck. But if the initialisation has left a handle, its state is unknown.
    fn check_ended(&self) -> Ended {
        if self.state.comm.load(Ordering::SeqCst).is_null() {
            return Ended::Yes;
        }
        self.device.abandon();
        Ended::Abandoned
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !self.state.handle_is_final.load(Ordering::SeqCst) {
            // An unfinished initialisation may still write its handle: leak the state.
            std::mem::forget(Arc::clone(&self.state));
        }
    }
}

/// The thread: executes tasks, and polls NCCL's asynchronous error while somebody waits.
fn run(state: &OwnerState, tasks: &Receiver<Task>) {
    loop {
        let task = if state.watchers.load(Ordering::SeqCst) > 0 {
            tasks.recv_timeout(POLL_INTERVAL)
        } else {
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match task {
            Ok(task) => task(state),
            Err(RecvTimeoutError::Timeout) => state.poll_async_error(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
