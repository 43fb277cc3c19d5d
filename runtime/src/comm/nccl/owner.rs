//! The thread that owns the communicator.
//!
//! NCCL wants all calls of a communicator from one thread at a time, and any of them may turn out not to return: a peer
//! that died in the midst of the set-up, a driver that hangs. So one thread makes all of them, and nobody else ever
//! enters NCCL; whoever wants a call made hands it over and waits with a deadline of its own. When that passes, the
//! waiting thread goes on. That holds for the abort, too: at its end NCCL frees the communicator, and a call that another
//! thread is in would return into freed memory. If the owner does not come to the abort, the GPU is given up instead, and
//! all that is left goes with the process.
//!
//! The owner holds nothing that the rest of the process waits for at its end, nor anything that takes the GPU away when it
//! lets go: not the membership, whose last holder says goodbye, and not the device. A thread that is stuck for good is left
//! behind.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda::Device;
use nccl_sys::{InitConfig, Library, NcclError, Progress, UniqueId, ncclComm};

use super::call::NcclCall;
use super::group::Calls;
use crate::process::start_failure;
use crate::{Error, Result};

/// How often NCCL is asked whether something went wrong in the background, while somebody waits.
const POLL_INTERVAL: Duration = Duration::from_millis(3);

/// How long an abort may take before the GPU is given up. Whoever launched this process has little more patience.
const ABORT_LIMIT: Duration = Duration::from_secs(3);

/// The same for a communicator whose operations were captured: NCCL does not free it before the graphs are gone, which
/// their owner drops only when it has been told. What runs is ended before that.
const ABORT_LIMIT_WITH_GRAPHS: Duration = Duration::from_millis(600);

/// How long the owner may still be in another call when it is to abort. In non-blocking mode none of them takes time.
const OWNER_BUSY_LIMIT: Duration = Duration::from_millis(300);

/// How long the thread may take to begin.
const START_LIMIT: Duration = Duration::from_secs(5);

/// Something that the owner is to do.
type Task = Box<dyn FnOnce(&OwnerState) + Send>;

/// What comes of it, or NCCL's reason why nothing does.
pub(super) type Reply<R> = Result<R, String>;

/// Why a task came to nothing.
enum TaskError {
    Nccl(NcclError),
    /// Nobody waits for it any more.
    GivenUp,
}

impl From<NcclError> for TaskError {
    fn from(error: NcclError) -> Self {
        TaskError::Nccl(error)
    }
}

type Outcome<R> = Result<R, TaskError>;

/// A call of NCCL's, and since when the owner has been in it.
pub(super) type ActiveCall = (&'static str, Instant);

/// What the owner's thread and the others know in common.
pub(super) struct OwnerState {
    nccl: Library,
    /// Null before NCCL has written it, and again once the communicator is destroyed or aborted. Only the owner destroys or
    /// aborts it.
    comm: AtomicPtr<ncclComm>,
    /// NCCL will not write to `comm` any more.
    handle_is_final: AtomicBool,
    /// The call that the owner is in, and since when.
    call: Mutex<Option<ActiveCall>>,
    /// Nobody waits for the owner any more: it is to touch no address that was lent to it. Set while `call` is locked.
    given_up: AtomicBool,
    /// Graphs may have some of its operations.
    captured: AtomicBool,
    /// Those who wait for more than a moment, so that NCCL is to be asked how it is.
    watchers: AtomicU32,
    /// What NCCL said had gone wrong in the background.
    failure: OnceLock<String>,
}

impl OwnerState {
    fn call(&self) -> MutexGuard<'_, Option<ActiveCall>> {
        self.call.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a call, unless the owner was given up, and lets everybody see which.
    fn guarded<R>(&self, name: &'static str, call: impl FnOnce() -> Result<R, NcclError>) -> Outcome<R> {
        let mut active = self.call();
        // Looked at under the lock: who gives up knows then whether the owner is in a call or makes no other.
        if self.is_given_up() {
            return Err(TaskError::GivenUp);
        }
        *active = Some((name, Instant::now()));
        drop(active);
        let result = call();
        *self.call() = None;
        Ok(result?)
    }

    /// Makes a call come what may, and lets everybody see which.
    fn tracked<R>(&self, name: &'static str, call: impl FnOnce() -> Result<R, NcclError>) -> Outcome<R> {
        *self.call() = Some((name, Instant::now()));
        let result = call();
        *self.call() = None;
        Ok(result?)
    }

    fn give_up(&self) {
        let _entered = self.call();
        self.given_up.store(true, Ordering::SeqCst);
    }

    fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }

    /// An error with all that NCCL says of it.
    fn explain(&self, error: &NcclError) -> String {
        match self.nccl.last_error() {
            more if more.is_empty() => error.to_string(),
            more => format!("{error}: {more}"),
        }
    }

    fn unique_id(&self) -> Outcome<UniqueId> {
        self.guarded("ncclGetUniqueId", || self.nccl.unique_id())
    }

    fn init(&self, id: UniqueId, size: u32, rank: u32) -> Outcome<()> {
        self.handle_is_final.store(false, Ordering::SeqCst);
        let progress = self.guarded("ncclCommInitRankConfig", || {
            let config = InitConfig::non_blocking();
            // SAFETY: `self` is not freed before NCCL has written the handle for the last time: the owner sees to that at
            // its end. The thread has bound the device.
            unsafe {
                self.nccl.comm_init_rank_config(self.comm.as_ptr(), size as c_int, id, rank as c_int, config)
            }
        })?;
        self.wait_done(progress)?;
        self.handle_is_final.store(!self.is_given_up(), Ordering::SeqCst);
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
                outcome = Err(TaskError::GivenUp);
                break;
            }
            // SAFETY: the communicator is alive, and this is its thread, which alone ends it; the views that the addresses
            // were taken from were checked for their lengths, and are alive while their owner waits for the answer. If it
            // gives up meanwhile, memory is not freed before the communicator was aborted, or never.
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
            // Made in any case, since a group that is open defers the abort.
            // SAFETY: as for its start. What has been collected may begin, which does no harm: see above.
            let end = self.tracked("ncclGroupEnd", || unsafe { self.nccl.group_end() });
            outcome = match (outcome, end) {
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                (Ok(Progress::InProgress), _) | (_, Ok(Progress::InProgress)) => Ok(Progress::InProgress),
                _ => Ok(Progress::Done),
            };
        }
        self.wait_done(outcome?)
    }

    /// Waits until what is in progress is done, unless nobody waits for it any more.
    fn wait_done(&self, mut progress: Progress) -> Outcome<()> {
        let began = Instant::now();
        while progress == Progress::InProgress {
            if self.is_given_up() {
                return Err(TaskError::GivenUp);
            }
            match began.elapsed() {
                waited if waited < Duration::from_micros(200) => std::thread::yield_now(),
                waited => std::thread::park_timeout((waited / 16).min(Duration::from_millis(1))),
            }
            let comm = self.comm.load(Ordering::SeqCst);
            // A non-blocking initialisation may be under way for a moment before there is a handle.
            if !comm.is_null() {
                progress = self.async_state(comm)?;
            }
        }
        Ok(())
    }

    /// What NCCL says of the communicator.
    fn async_state(&self, comm: *mut ncclComm) -> Outcome<Progress> {
        // SAFETY: the handle is alive, since only this thread destroys or aborts it.
        self.guarded("ncclCommGetAsyncError", || unsafe { self.nccl.comm_async_error(comm) })
    }

    /// Asks NCCL whether something has gone wrong, and lets everybody see the answer.
    fn poll_async_error(&self) {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() || self.failure.get().is_some() {
            return;
        }
        if let Err(TaskError::Nccl(error)) = self.async_state(comm) {
            let _ = self.failure.set(self.explain(&error));
        }
    }

    /// Ends the communicator properly. All ranks do.
    fn finalise(&self) -> Outcome<()> {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: the handle is alive and this is its thread.
        let progress = self.guarded("ncclCommFinalize", || unsafe { self.nccl.comm_finalize(comm) })?;
        self.wait_done(progress)?;
        let destroyed = self.guarded("ncclCommDestroy", || {
            self.comm.store(ptr::null_mut(), Ordering::SeqCst);
            // SAFETY: the handle is alive, this is its thread, and nobody finds it any more.
            unsafe { self.nccl.comm_destroy(comm) }
        });
        destroyed.map(drop)
    }

    /// Aborts the communicator, if there still is one.
    fn abort(&self) {
        let comm = self.comm.swap(ptr::null_mut(), Ordering::SeqCst);
        if !comm.is_null() {
            // SAFETY: the handle was alive and is found by nobody from now on; this is its thread, which is in no other
            // call.
            let _ = unsafe { self.nccl.comm_abort(comm) };
        }
    }
}

/// How an end of a communicator went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// Nothing of it is left.
    Yes,
    /// Something does not return: the GPU was given up.
    Abandoned,
}

/// The others' side.
pub(super) struct Owner {
    state: Arc<OwnerState>,
    /// The last to let go of it is not the thread, which may do so while the process ends.
    device: Arc<Device>,
    tasks: Mutex<Sender<Task>>,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner").field("nccl", &self.state.nccl).finish_non_exhaustive()
    }
}

/// NCCL is asked how it is as long as this exists.
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
            given_up: AtomicBool::default(),
            captured: AtomicBool::default(),
            watchers: AtomicU32::default(),
            failure: OnceLock::new(),
        });
        let (owned, bound) = (Arc::clone(&state), Arc::clone(device));
        let (ready, is_ready) = sync_channel(1);
        std::thread::Builder::new()
            .name("mgpu-nccl".into())
            .spawn(move || {
                // If the driver refuses, NCCL's first call says so. The context stays as long as the other side.
                let _ = bound.bind();
                drop(bound);
                let _ = ready.send(());
                serve(&owned, &receiver);
            })
            .map_err(|error| Error::system("start the thread that owns NCCL", start_failure(&error)))?;
        let _ = is_ready.recv_timeout(START_LIMIT);
        Ok(Owner { state, device: Arc::clone(device), tasks: Mutex::new(sender) })
    }

    /// Hands a task over. The answer comes through the receiver, or never.
    fn ask_nccl<R: Send + 'static>(
        &self,
        task: impl FnOnce(&OwnerState) -> Outcome<R> + Send + 'static,
    ) -> Receiver<Reply<R>> {
        self.ask(move |state| {
            task(state).map_err(|error| match error {
                TaskError::Nccl(error) => state.explain(&error),
                TaskError::GivenUp => "the communicator was given up".into(),
            })
        })
    }

    /// Hands any task over.
    fn ask<R: Send + 'static>(&self, task: impl FnOnce(&OwnerState) -> R + Send + 'static) -> Receiver<R> {
        let (sender, receiver): (SyncSender<R>, _) = sync_channel(1);
        let task: Task = Box::new(move |state| {
            // Who has given up waiting is not interested.
            let _ = sender.send(task(state));
        });
        // If the thread is gone, so is the task, and the receiver says so.
        let _ = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).send(task);
        receiver
    }

    /// Has a new unique id made.
    pub(super) fn unique_id(&self) -> Receiver<Reply<UniqueId>> {
        self.ask_nccl(OwnerState::unique_id)
    }

    /// Has the communicator made.
    pub(super) fn init(&self, id: UniqueId, size: u32, rank: u32) -> Receiver<Reply<()>> {
        self.ask_nccl(move |state| state.init(id, size, rank))
    }

    /// Has operations put on their streams.
    pub(super) fn enqueue(&self, calls: Calls) -> Receiver<Reply<()>> {
        self.ask_nccl(move |state| state.enqueue(&calls))
    }

    /// Has NCCL asked how it is, from now on until the watcher is dropped.
    pub(super) fn watch(&self) -> Watcher<'_> {
        self.state.watchers.fetch_add(1, Ordering::SeqCst);
        drop(self.ask(OwnerState::poll_async_error));
        Watcher(&self.state)
    }

    /// Notes that operations are being captured.
    pub(super) fn note_capture(&self) {
        self.state.captured.store(true, Ordering::SeqCst);
    }

    /// What has gone wrong in the background, as far as is known.
    pub(super) fn failure(&self) -> Option<&str> {
        self.state.failure.get().map(String::as_str)
    }

    /// The call that the owner has been in for longer than `limit`: in non-blocking mode none of them should take time.
    pub(super) fn stuck_call(&self, limit: Duration) -> Option<ActiveCall> {
        self.state.call().filter(|(_, since)| since.elapsed() >= limit)
    }

    /// No call is made any more but the abort.
    pub(super) fn give_up(&self) {
        self.state.give_up();
    }

    /// Ends the communicator together with all other ranks; aborts it if that does not come to an end.
    pub(super) fn finalise(&self, limit: Duration) -> Ended {
        let done = self.ask(OwnerState::finalise);
        match done.recv_timeout(limit) {
            Ok(Ok(())) => Ended::Yes,
            _ => self.abort(),
        }
    }

    /// Ends the communicator by force, whatever state it is in. Returns within a few seconds.
    pub(super) fn abort(&self) -> Ended {
        let captured = self.state.captured.load(Ordering::SeqCst);
        let limit = if captured { ABORT_LIMIT_WITH_GRAPHS } else { ABORT_LIMIT };
        self.give_up();
        if self.device.is_abandoned() {
            // Because of another communicator, most likely: there is nothing left to be saved.
            return Ended::Abandoned;
        }
        let aborted = self.ask(OwnerState::abort);
        if aborted.recv_timeout(OWNER_BUSY_LIMIT).is_ok() {
            return self.ended();
        }
        let is_in_another_call = self.state.call().is_some();
        if !is_in_another_call && aborted.recv_timeout(limit.saturating_sub(OWNER_BUSY_LIMIT)).is_ok() {
            return self.ended();
        }
        self.device.abandon();
        Ended::Abandoned
    }

    /// Nothing hangs; but what the call that makes the communicator has left, nobody knows.
    fn ended(&self) -> Ended {
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
            // An initialisation that was given up may still write its handle.
            std::mem::forget(Arc::clone(&self.state));
        }
    }
}

/// The thread: does what it is asked for, and while somebody waits asks NCCL how it is.
fn serve(state: &OwnerState, tasks: &Receiver<Task>) {
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
