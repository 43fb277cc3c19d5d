//! The thread that owns the communicator.
//!
//! NCCL wants all calls of a communicator from one thread at a time, and any of them may turn out not to return: a peer
//! that died in the midst of the set-up, a driver that hangs. So one thread makes all of them, and nobody else ever
//! enters NCCL; whoever wants a call made hands it over and waits with a deadline of its own. When that passes, the
//! waiting thread goes on. Only the abort may come from another thread, and does if the owner does not answer.
//!
//! The owner holds nothing that the rest of the process waits for at its end: not the membership, whose last holder says
//! goodbye. A thread that is stuck for good is left behind.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda::Device;
use nccl_sys::{InitConfig, Library, NcclError, Progress, UniqueId, ncclComm};

use super::call::Call;
use super::group::Calls;
use crate::{Error, Result};

/// How often NCCL is asked whether something went wrong in the background, while somebody waits.
const LOOK_EVERY: Duration = Duration::from_millis(3);

/// How long an abort may take before the GPU is given up. Whoever launched this process has little more patience.
const ABORT_LIMIT: Duration = Duration::from_secs(3);

/// The same for a communicator whose operations were captured: NCCL does not free it before the graphs are gone, which
/// their owner drops only when it has been told. What runs is ended before that.
const ABORT_LIMIT_WITH_GRAPHS: Duration = Duration::from_millis(600);

/// How long the owner may take to come to an abort before another thread makes it.
const OWNER_LIMIT: Duration = Duration::from_millis(300);

/// Something that the owner is to do.
type Task = Box<dyn FnOnce(&Shared) + Send>;

/// What comes of it, or NCCL's reason why nothing does.
pub(super) type Answer<R> = Result<R, String>;

/// What the owner's thread and the others know in common.
pub(super) struct Shared {
    nccl: Library,
    device: Arc<Device>,
    /// Null before NCCL has written it, and again once the communicator is destroyed or aborted.
    comm: AtomicPtr<ncclComm>,
    /// NCCL will not write to `comm` any more.
    handle_is_final: AtomicBool,
    /// The call that the owner is in, and since when.
    call: Mutex<Option<(&'static str, Instant)>>,
    /// Nobody waits for the owner any more: it is to touch no address that was lent to it.
    given_up: AtomicBool,
    abort_begun: AtomicBool,
    /// Graphs may have some of its operations.
    captured: AtomicBool,
    /// Those who wait for more than a moment, so that NCCL is to be asked how it is.
    watchers: AtomicU32,
    /// What NCCL said had gone wrong in the background.
    failure: OnceLock<String>,
}

impl Shared {
    /// Makes a call, and lets everybody see which.
    fn within<R>(&self, name: &'static str, call: impl FnOnce() -> R) -> R {
        let note = |value| *self.call.lock().unwrap_or_else(PoisonError::into_inner) = value;
        note(Some((name, Instant::now())));
        let result = call();
        note(None);
        result
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

    fn unique_id(&self) -> Result<UniqueId, NcclError> {
        self.within("ncclGetUniqueId", || self.nccl.unique_id())
    }

    fn init(&self, id: UniqueId, size: u32, rank: u32) -> Result<(), NcclError> {
        self.handle_is_final.store(false, Ordering::SeqCst);
        let progress = self.within("ncclCommInitRankConfig", || {
            let config = InitConfig::non_blocking();
            // SAFETY: `self` is not freed before NCCL has written the handle for the last time: the owner sees to that at
            // its end. The thread has bound the device.
            unsafe {
                self.nccl.comm_init_rank_config(self.comm.as_ptr(), size as c_int, id, rank as c_int, config)
            }
        })?;
        self.settle(progress)?;
        self.handle_is_final.store(!self.is_given_up(), Ordering::SeqCst);
        Ok(())
    }

    fn enqueue(&self, calls: &[Call]) -> Result<(), NcclError> {
        let group = calls.len() > 1;
        if group {
            // SAFETY: takes no arguments; ended below, in this thread.
            let _ = self.within("ncclGroupStart", || unsafe { self.nccl.group_start() })?;
        }
        let mut outcome = Ok(Progress::Done);
        for call in calls {
            let comm = self.comm.load(Ordering::SeqCst);
            if comm.is_null() || self.is_given_up() {
                break;
            }
            // SAFETY: the communicator is alive and this is its thread; the views that the addresses were taken from
            // were checked for their lengths, and are alive while their owner waits for the answer. If it has given up,
            // memory is not freed before the communicator was aborted, or never.
            let progress =
                self.within("a call of an operation", || unsafe { call.enqueue(&self.nccl, comm) });
            match progress {
                Ok(Progress::Done) => {}
                Ok(Progress::InProgress) => outcome = Ok(Progress::InProgress),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        // An abort from another thread has freed the communicator that the group would begin to use; the thread makes no
        // other call after it.
        let aborted = self.comm.load(Ordering::SeqCst).is_null();
        if group && !aborted {
            // SAFETY: as for its start.
            let end = self.within("ncclGroupEnd", || unsafe { self.nccl.group_end() });
            outcome = match (outcome, end) {
                (Err(error), _) | (Ok(_), Err(error)) => Err(error),
                (Ok(Progress::InProgress), _) | (_, Ok(Progress::InProgress)) => Ok(Progress::InProgress),
                _ => Ok(Progress::Done),
            };
        }
        self.settle(outcome?)
    }

    /// Waits until what is in progress is done. Returns early if nobody waits for it any more.
    fn settle(&self, mut progress: Progress) -> Result<(), NcclError> {
        let began = Instant::now();
        while progress == Progress::InProgress && !self.is_given_up() {
            match began.elapsed() {
                waited if waited < Duration::from_micros(200) => std::thread::yield_now(),
                waited => std::thread::park_timeout((waited / 16).min(Duration::from_millis(1))),
            }
            let comm = self.comm.load(Ordering::SeqCst);
            // A non-blocking initialisation may be under way for a moment before there is a handle.
            if !comm.is_null() {
                progress = self.state(comm)?;
            }
        }
        Ok(())
    }

    /// What NCCL says of the communicator.
    fn state(&self, comm: *mut ncclComm) -> Result<Progress, NcclError> {
        // SAFETY: the handle is alive: only this thread destroys it, and an abort from elsewhere is preceded by
        // `given_up`, which was looked at; NCCL takes a question that comes during an abort.
        self.within("ncclCommGetAsyncError", || unsafe { self.nccl.comm_async_error(comm) })
    }

    /// Asks NCCL whether something has gone wrong, and lets everybody see the answer.
    fn look(&self) {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() || self.is_given_up() || self.failure.get().is_some() {
            return;
        }
        if let Err(error) = self.state(comm) {
            let _ = self.failure.set(self.explain(&error));
        }
    }

    /// Ends the communicator properly. All ranks do.
    fn finalise(&self) -> Result<(), NcclError> {
        let comm = self.comm.load(Ordering::SeqCst);
        if comm.is_null() || self.is_given_up() {
            return Ok(());
        }
        // SAFETY: the handle is alive and this is its thread.
        let progress = self.within("ncclCommFinalize", || unsafe { self.nccl.comm_finalize(comm) })?;
        self.settle(progress)?;
        if self.is_given_up() || self.abort_begun.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.comm.store(ptr::null_mut(), Ordering::SeqCst);
        // SAFETY: as above; nobody finds the handle any more.
        self.within("ncclCommDestroy", || unsafe { self.nccl.comm_destroy(comm) }).map(drop)
    }

    /// Aborts the communicator, if nobody else does or has.
    fn abort(&self) {
        let initialising = || {
            let call = self.call.lock().unwrap_or_else(PoisonError::into_inner);
            call.is_some_and(|(name, _)| name == "ncclCommInitRankConfig")
        };
        // While the call that makes the handle has not returned, it is NCCL's alone.
        if initialising() || self.abort_begun.swap(true, Ordering::SeqCst) {
            return;
        }
        let comm = self.comm.swap(ptr::null_mut(), Ordering::SeqCst);
        if !comm.is_null() {
            // SAFETY: the handle was alive and is found by nobody from now on. This is the call that another thread may
            // make while the owner is in one.
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
    shared: Arc<Shared>,
    tasks: Mutex<Sender<Task>>,
}

impl std::fmt::Debug for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Owner").field("nccl", &self.shared.nccl).finish_non_exhaustive()
    }
}

/// NCCL is asked how it is as long as this exists.
pub(super) struct Watcher<'a>(&'a Shared);

impl Drop for Watcher<'_> {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Owner {
    /// Starts the thread.
    pub(super) fn start(nccl: Library, device: &Arc<Device>) -> Result<Self> {
        let (sender, receiver) = channel();
        let shared = Arc::new(Shared {
            nccl,
            device: Arc::clone(device),
            comm: AtomicPtr::default(),
            handle_is_final: AtomicBool::new(true),
            call: Mutex::default(),
            given_up: AtomicBool::default(),
            abort_begun: AtomicBool::default(),
            captured: AtomicBool::default(),
            watchers: AtomicU32::default(),
            failure: OnceLock::new(),
        });
        let owned = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("mgpu-nccl".into())
            .spawn(move || serve(&owned, &receiver))
            .map_err(|error| Error::system("start the thread that owns NCCL", error))?;
        Ok(Owner { shared, tasks: Mutex::new(sender) })
    }

    /// Hands a task over. The answer comes through the receiver, or never.
    fn ask_nccl<R: Send + 'static>(
        &self,
        task: impl FnOnce(&Shared) -> Result<R, NcclError> + Send + 'static,
    ) -> Receiver<Answer<R>> {
        self.ask(move |shared| task(shared).map_err(|error| shared.explain(&error)))
    }

    /// Hands any task over.
    fn ask<R: Send + 'static>(&self, task: impl FnOnce(&Shared) -> R + Send + 'static) -> Receiver<R> {
        let (sender, receiver): (SyncSender<R>, _) = sync_channel(1);
        let task: Task = Box::new(move |shared| {
            // Who has given up waiting is not interested.
            let _ = sender.send(task(shared));
        });
        // If the thread is gone, so is the task, and the receiver says so.
        let _ = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).send(task);
        receiver
    }

    /// Has a new unique id made.
    pub(super) fn unique_id(&self) -> Receiver<Answer<UniqueId>> {
        self.ask_nccl(Shared::unique_id)
    }

    /// Has the communicator made.
    pub(super) fn init(&self, id: UniqueId, size: u32, rank: u32) -> Receiver<Answer<()>> {
        self.ask_nccl(move |shared| shared.init(id, size, rank))
    }

    /// Has operations put on their streams.
    pub(super) fn enqueue(&self, calls: Calls) -> Receiver<Answer<()>> {
        self.ask_nccl(move |shared| shared.enqueue(&calls))
    }

    /// Has NCCL asked how it is, from now on until the watcher is dropped.
    pub(super) fn watch(&self) -> Watcher<'_> {
        self.shared.watchers.fetch_add(1, Ordering::SeqCst);
        drop(self.ask(Shared::look));
        Watcher(&self.shared)
    }

    /// Notes that operations are being captured.
    pub(super) fn note_capture(&self) {
        self.shared.captured.store(true, Ordering::SeqCst);
    }

    /// What has gone wrong in the background, as far as is known.
    pub(super) fn failure(&self) -> Option<&str> {
        self.shared.failure.get().map(String::as_str)
    }

    /// The call that the owner has been in for longer than `limit`: in non-blocking mode none of them should take time.
    pub(super) fn stuck_call(&self, limit: Duration) -> Option<&'static str> {
        let call = *self.shared.call.lock().unwrap_or_else(PoisonError::into_inner);
        call.filter(|(_, since)| since.elapsed() >= limit).map(|(name, _)| name)
    }

    /// Ends the communicator together with all other ranks; aborts it if that does not come to an end.
    pub(super) fn finalise(&self, limit: Duration) -> Ended {
        let done = self.ask(Shared::finalise);
        match done.recv_timeout(limit) {
            Ok(Ok(())) => Ended::Yes,
            _ => self.abort(),
        }
    }

    /// Ends the communicator by force, whatever state it is in. Returns within a few seconds.
    pub(super) fn abort(&self) -> Ended {
        let captured = self.shared.captured.load(Ordering::SeqCst);
        let limit = if captured { ABORT_LIMIT_WITH_GRAPHS } else { ABORT_LIMIT };
        let deadline = Instant::now() + limit;
        self.shared.given_up.store(true, Ordering::SeqCst);
        let by_owner = self.ask(Shared::abort);
        if by_owner.recv_timeout(OWNER_LIMIT).is_ok() {
            return self.ended();
        }
        let (sender, by_other) = sync_channel(1);
        let shared = Arc::clone(&self.shared);
        let helper = std::thread::Builder::new().name("mgpu-nccl-abort".into()).spawn(move || {
            let _ = shared.device.bind();
            shared.abort();
            let _ = sender.send(());
        });
        let left = deadline.saturating_duration_since(Instant::now());
        // After the other's abort the owner comes back from what it was in; if the owner is in the abort, it alone counts.
        let aborted = helper.is_ok() && by_other.recv_timeout(left).is_ok();
        let left = deadline.saturating_duration_since(Instant::now());
        if aborted && by_owner.recv_timeout(left).is_ok() {
            return self.ended();
        }
        self.shared.device.abandon();
        Ended::Abandoned
    }

    /// Nothing hangs; but what the call that makes the communicator has left, nobody knows.
    fn ended(&self) -> Ended {
        if self.shared.comm.load(Ordering::SeqCst).is_null() {
            return Ended::Yes;
        }
        self.shared.device.abandon();
        Ended::Abandoned
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if !self.shared.handle_is_final.load(Ordering::SeqCst) {
            // An initialisation that was given up may still write its handle.
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}

/// The thread: does what it is asked for, and while somebody waits asks NCCL how it is.
fn serve(shared: &Shared, tasks: &Receiver<Task>) {
    // If the driver refuses, NCCL's first call says so.
    let _ = shared.device.bind();
    loop {
        let task = if shared.watchers.load(Ordering::SeqCst) > 0 {
            tasks.recv_timeout(LOOK_EVERY)
        } else {
            tasks.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match task {
            Ok(task) => task(shared),
            Err(RecvTimeoutError::Timeout) => shared.look(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
