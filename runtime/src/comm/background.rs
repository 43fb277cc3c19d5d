//! Reductions on a thread of their own, while the rank computes.
//!
//! The collectives of a CPU are over when their call returns, and while they last the rank does nothing else. This transport
//! hands every call to another communicator, by whose rules it goes. All-reduce and reduce-scatter, by which gradients travel, go
//! to a thread, one after the other, and the caller has their [`Pending`] at once. All other calls are made by the caller, after
//! those, so that the order of operations is that of the calls, on every rank.
//!
//! It gains where a core is to spare: the thread copies and adds as much as the caller would have. Where there is none, the
//! two take turns on one core, and what is left to gain is the time that a rank waits for later ones.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::call::{Call, Request};
use super::rules::FailureHandler;
use super::{Algorithm, Buffer, Capabilities, Communicator, DType, Observer, Pending, ReduceOp, Transport};
use crate::process::{Origin, start_failure};
use crate::{Error, Result};

/// See the [module](self).
pub(crate) struct Background {
    /// A forked child has a copy, and not the thread.
    origin: Origin,
    shared: Arc<WorkerState>,
    rank: u32,
    backend: &'static str,
    capabilities: Capabilities,
    observer: Option<Arc<dyn Observer>>,
    /// `None` only while it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Whether the thread may have something to do.
    busy: bool,
}

/// What the thread and the caller share.
struct WorkerState {
    comm: Mutex<Communicator>,
    /// Nobody is left to wait for results.
    stopped: AtomicBool,
}

impl WorkerState {
    /// After a panic of the other thread an operation is half done, and peers wait for the rest of it to their deadline.
    fn comm(&self) -> MutexGuard<'_, Communicator> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Job {
    Reduce(ReductionJob),
    /// Answered when all before it are over.
    Fence(SyncSender<()>),
}

/// A call for the thread. (A [`Call`] of any kind may hold what is not to leave the caller's.)
struct ReductionJob {
    call: fn(ReduceOp) -> Call<'static>,
    op: ReduceOp,
    buffer: Buffer,
    tag: Option<u32>,
    result: SyncSender<Result<Buffer>>,
}

impl Background {
    /// Has `comm` do everything. On all ranks alike.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn new(comm: Communicator) -> Result<Self> {
        let (rank, backend, capabilities) = (comm.rank(), comm.backend(), comm.capabilities());
        let observer = comm.shared_observer();
        let shared = Arc::new(WorkerState { comm: Mutex::new(comm), stopped: AtomicBool::new(false) });
        let (jobs, queue) = channel();
        let worker_state = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("reductions of rank {rank}"));
        let thread = thread
            .spawn(move || work(&worker_state, &queue))
            .map_err(|error| Error::system("start a thread for reductions", start_failure(&error)))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        let origin = Origin::here();
        Ok(Background { origin, shared, rank, backend, capabilities, observer, jobs, thread, busy: false })
    }

    /// Gives the thread a job. Where it has ended by a panic, the job's result never comes.
    fn send_job(&self, job: Job) {
        let _ = self.jobs.as_ref().expect("there are jobs until it is dropped").send(job);
    }

    fn start(
        &mut self,
        call: fn(ReduceOp) -> Call<'static>,
        op: ReduceOp,
        mut rest: Buffer,
        tag: Option<u32>,
    ) -> Result<Pending> {
        self.check_process()?;
        let (result, pending) = sync_channel(1);
        self.busy = true;
        self.send_job(Job::Reduce(ReductionJob { call, op, buffer: rest.take(), tag, result }));
        Ok(Pending::in_flight(rest, pending, self.observer.clone()))
    }

    fn check_process(&self) -> Result<()> {
        match self.origin.is_here() {
            true => Ok(()),
            false => Err(Error::Forked { rank: self.rank, process: std::process::id() }),
        }
    }

    /// The communicator, once all reductions are over.
    fn idle(&mut self) -> Result<MutexGuard<'_, Communicator>> {
        self.check_process()?;
        if std::mem::take(&mut self.busy) {
            let (fence, passed) = sync_channel(1);
            self.send_job(Job::Fence(fence));
            // What has become of the reductions is told by their own results.
            let _ = passed.recv();
        }
        Ok(self.shared.comm())
    }
}

/// What the thread does until there can be no more jobs.
fn work(shared: &WorkerState, queue: &Receiver<Job>) {
    for job in queue {
        match job {
            Job::Reduce(ReductionJob { call, op, buffer, tag, result }) => {
                if shared.stopped.load(Ordering::Relaxed) {
                    continue;
                }
                let mut comm = shared.comm();
                comm.set_background(true);
                let reduced = comm.submit(call(op), buffer, tag);
                comm.set_background(false);
                // Nobody waits any more where a step was given up.
                let _ = result.send(reduced.and_then(Pending::wait));
            }
            Job::Fence(passed) => _ = passed.send(()),
        }
    }
}

impl Drop for Background {
    /// What has not begun yet is left out: a rank that goes because of an error keeps nobody waiting for that.
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        self.jobs = None;
        if self.check_process().is_err() {
            return;
        }
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Called only while the thread has nothing to do: its own errors are those of the communicator that it calls.
impl FailureHandler for Background {
    fn stop(&self) {
        self.shared.comm().transport().stop();
    }

    fn abort(&self) {
        self.shared.comm().transport().abort();
    }
}

impl Transport for Background {
    fn backend(&self) -> &'static str {
        self.backend
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.idle()?.allocate(dtype, len)
    }

    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        let (buffer, tag) = (request.buffer.take(), request.tag);
        request.pending = Some(match std::mem::replace(&mut request.call, Call::Barrier) {
            Call::AllReduce(op) => self.start(Call::AllReduce, op, buffer, tag)?,
            Call::ReduceScatter(op) => self.start(Call::ReduceScatter, op, buffer, tag)?,
            call => self.idle()?.submit(call, buffer, tag)?,
        });
        Ok(())
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        let _ = self.idle().map(|mut comm| comm.set_algorithm(algorithm));
    }

    fn set_oversubscribed(&mut self) {
        let _ = self.idle().map(|mut comm| comm.set_oversubscribed());
    }

    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        let _ = self.idle().map(|mut comm| comm.note_arrivals(at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::World;

    /// Runs `body` on every rank of a world of `size` threads.
    fn on_ranks(size: u32, body: impl Fn(Communicator) + Sync) {
        let worlds = World::threads(size).unwrap();
        std::thread::scope(|scope| {
            for mut world in worlds {
                let body = &body;
                let mut comm = move || world.communicator().unwrap().in_background().unwrap();
                scope.spawn(move || body(comm()));
            }
        });
    }

    #[test]
    fn operations_come_to_what_they_were_begun_as_in_any_order_of_waiting() {
        on_ranks(3, |mut comm| {
            let rank = comm.rank() as f32;
            let first = comm.all_reduce(Buffer::from_slice(&[rank; 5000]), ReduceOp::Sum).unwrap();
            let second = comm.reduce_scatter(Buffer::from_slice(&[rank; 6]), ReduceOp::Avg).unwrap();
            // By the caller, after both.
            let mut values = [rank];
            comm.broadcast_slice(&mut values, 2).unwrap();
            assert_eq!(values, [2.0]);
            let own = comm.rank() as usize * 2;
            assert_eq!(second.wait().unwrap().as_slice::<f32>()[own..own + 2], [1.0; 2]);
            assert_eq!(first.wait().unwrap().as_slice::<f32>(), [3.0; 5000]);
            // One that nobody waits for is over before the next one by the caller.
            drop(comm.all_reduce(Buffer::from_slice(&[1.0f32]), ReduceOp::Sum).unwrap());
            comm.barrier().unwrap();
        });
    }

    #[test]
    fn what_has_not_begun_when_it_is_dropped_never_is() {
        let mut comm = Background::new(Communicator::alone(None)).unwrap();
        let shared = Arc::clone(&comm.shared);
        // The thread comes to the first one at most.
        let held = shared.comm();
        let mut begin =
            || comm.start(Call::AllReduce, ReduceOp::Sum, Buffer::from_slice(&[1.0f32]), None).unwrap();
        let pending: Vec<_> = (0..10).map(|_| begin()).collect();
        std::thread::scope(|scope| {
            scope.spawn(move || drop(comm));
            while !shared.stopped.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            drop(held);
        });
        let reduced = pending.into_iter().map(Pending::wait).filter(Result::is_ok).count();
        assert!(reduced <= 1, "{reduced} of 10 were carried out");
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_by_the_result() {
        on_ranks(3, |mut comm| {
            if comm.rank() == 1 {
                return;
            }
            let reduced = comm.all_reduce(Buffer::from_slice(&[1.0f32; 4]), ReduceOp::Sum).unwrap();
            assert_eq!(reduced.wait().unwrap_err().culprit(), Some(1));
        });
    }

    #[test]
    fn an_error_comes_with_what_it_is_the_error_of() {
        on_ranks(2, |mut comm| {
            let values = vec![1.0f32; 4 + comm.rank() as usize];
            let reduced = comm.all_reduce(Buffer::from_slice(&values), ReduceOp::Sum).unwrap();
            let error = reduced.wait().unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            // And everything after it fails, as without a thread.
            assert!(comm.barrier().is_err());
        });
    }
}
