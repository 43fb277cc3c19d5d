//! Reductions on a background thread, while the rank computes.
//!
//! On the CPU backend a collective ends within its call, and the rank does nothing else during it. This transport
//! delegates every call to another communicator, which applies the rules. All-reduce, reduce-scatter and reduce, which
//! reduce gradients, run on a thread, one after the other, and the caller gets a [`Pending`] immediately. All other calls
//! wait for those and then run on the calling thread, so that all ranks execute operations in the order of the calls.
//!
//! This helps if there is a spare core: the thread copies and adds as much as the caller would. Without a spare core,
//! the two alternate on one core, and only the time that a rank waits for late ranks is gained.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::call::{Call, Request};
use super::rules::{FailureHandler, Rules};
use super::split::SplitGroup;
use super::{Algorithm, Buffer, Capabilities, Communicator, DType, Observer, Pending, ReduceOp, Transport};
use crate::interruption::CallerInterruption;
use crate::process::{ForkDetector, start_failure};
use crate::{Error, Result};

/// See the [module](self).
pub(crate) struct Background {
    /// A forked child has a copy of this, but not the thread.
    origin: ForkDetector,
    shared: Arc<WorkerState>,
    rank: u32,
    backend: &'static str,
    capabilities: Capabilities,
    observer: Option<Arc<dyn Observer>>,
    interruption: CallerInterruption,
    /// `None` only during the drop.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread ends.
    end: Mutex<Receiver<()>>,
    /// Whether the thread may have jobs.
    busy: bool,
}

/// State shared by the thread and the caller.
struct WorkerState {
    comm: Mutex<Communicator>,
    /// Set by the drop: nobody waits for results any more.
    stopped: AtomicBool,
}

impl WorkerState {
    /// Ignores poisoning: if the thread panicked, an operation is incomplete, and peers wait for the rest of it until
    /// their timeout.
    fn comm(&self) -> MutexGuard<'_, Communicator> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Job {
    Reduce(ReductionJob),
    /// Answered when all earlier jobs have ended.
    Fence(SyncSender<()>),
}

/// A call that runs on the thread, with its arguments. (It is not a [`Call`], because other kinds of calls borrow from
/// the caller.)
#[derive(Debug, Clone, Copy)]
enum ReductionCall {
    AllReduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Reduce { op: ReduceOp, root: u32, by_root: bool },
}

impl ReductionCall {
    /// The reduction that `call` is, if it is one.
    fn of(call: &Call<'_>) -> Option<Self> {
        match *call {
            Call::AllReduce(op) => Some(ReductionCall::AllReduce(op)),
            Call::ReduceScatter(op) => Some(ReductionCall::ReduceScatter(op)),
            Call::Reduce { op, root, by_root } => Some(ReductionCall::Reduce { op, root, by_root }),
            _ => None,
        }
    }

    fn call(self) -> Call<'static> {
        match self {
            ReductionCall::AllReduce(op) => Call::AllReduce(op),
            ReductionCall::ReduceScatter(op) => Call::ReduceScatter(op),
            ReductionCall::Reduce { op, root, by_root } => Call::Reduce { op, root, by_root },
        }
    }
}

/// A reduction to run on the thread.
struct ReductionJob {
    reduction: ReductionCall,
    buffer: Buffer,
    tag: Option<u32>,
    result: SyncSender<Result<Buffer>>,
}

impl Background {
    /// Delegates all calls to `comm`. All ranks must do the same.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(super) fn new(comm: Communicator) -> Result<Self> {
        let (rank, backend, capabilities) = (comm.rank(), comm.backend(), comm.capabilities());
        let observer = comm.shared_observer();
        let interruption = CallerInterruption::new(comm.membership());
        let shared = Arc::new(WorkerState { comm: Mutex::new(comm), stopped: AtomicBool::new(false) });
        let ((jobs, queue), (running, end)) = (channel(), channel());
        let (worker_state, of_caller) = (Arc::clone(&shared), interruption.clone());
        let thread = std::thread::Builder::new().name(format!("reductions of rank {rank}"));
        let thread = thread
            .spawn(move || {
                let _running: Sender<()> = running;
                of_caller.follow();
                work(&worker_state, &queue);
            })
            .map_err(|error| Error::system("start a thread for reductions", start_failure(&error)))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        let origin = ForkDetector::for_this_process();
        Ok(Background {
            origin,
            shared,
            rank,
            backend,
            capabilities,
            observer,
            interruption,
            jobs,
            thread,
            end: Mutex::new(end),
            busy: false,
        })
    }

    /// Sends the thread a job. If the thread has panicked, the result never arrives.
    fn send_job(&self, job: Job) {
        let _ = self.jobs.as_ref().expect("there are jobs until it is dropped").send(job);
    }

    fn start(&mut self, reduction: ReductionCall, mut rest: Buffer, tag: Option<u32>) -> Result<Pending> {
        self.check_process()?;
        let (result, pending) = sync_channel(1);
        self.busy = true;
        self.send_job(Job::Reduce(ReductionJob { reduction, buffer: rest.take(), tag, result }));
        Ok(Pending::in_flight(rest, pending, self.interruption.clone(), self.observer.clone()))
    }

    fn check_process(&self) -> Result<()> {
        match self.origin.is_original_process() {
            true => Ok(()),
            false => Err(Error::Forked { rank: self.rank, process: std::process::id() }),
        }
    }

    /// The communicator, after waiting for all reductions.
    fn idle(&mut self) -> Result<MutexGuard<'_, Communicator>> {
        self.check_process()?;
        if std::mem::take(&mut self.busy) {
            let (fence, passed) = sync_channel(1);
            self.send_job(Job::Fence(fence));
            // Errors of the reductions are returned with their own results.
            let _ = self.interruption.receive(&passed);
        }
        Ok(self.shared.comm())
    }
}

/// The thread: runs jobs until the sender is dropped.
fn work(shared: &WorkerState, queue: &Receiver<Job>) {
    for job in queue {
        match job {
            Job::Reduce(ReductionJob { reduction, buffer, tag, result }) => {
                if shared.stopped.load(Ordering::Relaxed) {
                    continue;
                }
                let mut comm = shared.comm();
                comm.set_background(true);
                let reduced = comm.submit(reduction.call(), buffer, tag);
                comm.set_background(false);
                // If the step was given up, nobody receives the result.
                let _ = result.send(reduced.and_then(Pending::wait));
            }
            Job::Fence(passed) => _ = passed.send(()),
        }
    }
}

impl Drop for Background {
    /// Runs the jobs that have not started, since peers may be waiting in them: all ranks run the same ones. After an error of
    /// the communicator each of them fails at once. A rank that panics skips them.
    fn drop(&mut self) {
        self.shared.stopped.store(std::thread::panicking(), Ordering::Relaxed);
        self.jobs = None;
        if self.check_process().is_err() {
            return;
        }
        // An interruption ends the jobs.
        let _ = self.interruption.receive(self.end.get_mut().unwrap_or_else(PoisonError::into_inner));
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Only called while the thread is idle. Errors of the delegate are handled by its own rules.
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

    fn connect_group(&mut self, group: &SplitGroup, rules: Rules) -> Result<Communicator> {
        self.idle()?.transport_mut().connect_group(group, rules)
    }

    fn connect_no_group(&mut self) -> Result<()> {
        self.idle()?.transport_mut().connect_no_group()
    }

    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        let (buffer, tag) = (request.buffer.take(), request.tag);
        request.pending = Some(match ReductionCall::of(&request.call) {
            Some(reduction) => self.start(reduction, buffer, tag)?,
            None => {
                let call = std::mem::replace(&mut request.call, Call::Barrier);
                self.idle()?.submit(call, buffer, tag)?
            }
        });
        Ok(())
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        let _ = self.idle().map(|mut comm| comm.set_algorithm(algorithm));
    }

    fn set_oversubscribed(&mut self) {
        let _ = self.idle().map(|mut comm| comm.set_oversubscribed());
    }

    /// Without reductions that are still in flight.
    fn traffic(&self) -> Option<u64> {
        self.shared.comm().traffic()
    }

    fn record_arrivals(&mut self, at: Arc<AtomicU64>) {
        let _ = self.idle().map(|mut comm| comm.record_arrivals(at));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

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
    fn results_do_not_depend_on_the_order_of_waiting() {
        on_ranks(3, |mut comm| {
            let rank = comm.rank() as f32;
            let first = comm.all_reduce(Buffer::from_slice(&[rank; 5000]), ReduceOp::Sum).unwrap();
            let second = comm.reduce_scatter(Buffer::from_slice(&[rank; 6]), ReduceOp::Avg).unwrap();
            let third = comm.reduce(Buffer::from_slice(&[rank; 9]), ReduceOp::Max, 1).unwrap();
            // Runs on the caller's thread, after all of them.
            let mut values = [rank];
            comm.broadcast_slice(&mut values, 2).unwrap();
            assert_eq!(values, [2.0]);
            let own = comm.rank() as usize * 2;
            assert_eq!(second.wait().unwrap().as_slice::<f32>()[own..own + 2], [1.0; 2]);
            assert_eq!(first.wait().unwrap().as_slice::<f32>(), [3.0; 5000]);
            let expected = if comm.rank() == 1 { 2.0 } else { rank };
            assert_eq!(third.wait().unwrap().as_slice::<f32>(), [expected; 9]);
            // A reduction that nobody waits for still ends before the next call on the caller's thread.
            drop(comm.all_reduce(Buffer::from_slice(&[1.0f32]), ReduceOp::Sum).unwrap());
            comm.barrier().unwrap();
        });
    }

    /// A communicator of one rank that is dropped, by a panic or not, before its first job has ended. Returns how many of the
    /// ten jobs were carried out.
    fn jobs_carried_out(by_panic: bool) -> usize {
        let mut comm = Background::new(Communicator::alone(None)).unwrap();
        let shared = Arc::clone(&comm.shared);
        // The thread starts the first one at most.
        let held = shared.comm();
        let mut begin = || {
            comm.start(ReductionCall::AllReduce(ReduceOp::Sum), Buffer::from_slice(&[1.0f32]), None).unwrap()
        };
        let pending: Vec<_> = (0..10).map(|_| begin()).collect();
        std::thread::scope(|scope| {
            let dropping = scope.spawn(move || {
                let _comm = comm;
                if by_panic {
                    std::panic::resume_unwind(Box::new(()));
                }
            });
            if by_panic {
                while !shared.stopped.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
            }
            drop(held);
            assert_eq!(dropping.join().is_err(), by_panic);
        });
        pending.into_iter().map(Pending::wait).filter(Result::is_ok).count()
    }

    #[test]
    fn only_a_panic_skips_jobs_that_have_not_started() {
        assert_eq!(jobs_carried_out(false), 10);
        assert!(jobs_carried_out(true) <= 1);
    }

    /// They give up a step at different points, and go on.
    #[test]
    fn ranks_that_drop_it_during_reductions_do_not_wait_for_each_other() {
        on_ranks(2, |mut comm| {
            let mut begin = || comm.all_reduce(Buffer::from_slice(&[1.0f32; 5000]), ReduceOp::Sum).unwrap();
            let pending: Vec<_> = (0..20).map(|_| begin()).collect();
            drop(comm);
            for reduced in pending {
                reduced.wait().unwrap();
            }
        });
    }

    thread_local! {
        static IS_INTERRUPTED: Cell<bool> = const { Cell::new(false) };
    }

    /// The interruption is one of the thread that waits for the result, and not of the one that reduces.
    #[test]
    fn an_interruption_of_the_caller_ends_its_reduction() {
        let [mut first, mut second] = World::threads(2).unwrap().try_into().unwrap();
        let (is_over, end) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let _comm = second.communicator().unwrap().in_background().unwrap();
                end.recv().unwrap_err();
            });
            first.interrupt_when(|| IS_INTERRUPTED.get());
            let mut comm = first.communicator().unwrap().in_background().unwrap();
            let reduced = comm.all_reduce(Buffer::from_slice(&[1.0f32]), ReduceOp::Sum).unwrap();
            IS_INTERRUPTED.set(true);
            let error = reduced.wait().unwrap_err();
            assert!(matches!(error, Error::Interrupted { rank: 0, .. }), "{error}");
            drop(is_over);
        });
    }

    #[test]
    fn the_result_names_a_rank_that_did_not_arrive() {
        on_ranks(3, |mut comm| {
            if comm.rank() == 1 {
                return;
            }
            let reduced = comm.all_reduce(Buffer::from_slice(&[1.0f32; 4]), ReduceOp::Sum).unwrap();
            assert_eq!(reduced.wait().unwrap_err().culprit(), Some(1));
        });
    }

    #[test]
    fn an_error_is_returned_by_its_own_operation() {
        on_ranks(2, |mut comm| {
            let values = vec![1.0f32; 4 + comm.rank() as usize];
            let reduced = comm.all_reduce(Buffer::from_slice(&values), ReduceOp::Sum).unwrap();
            let error = reduced.wait().unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            // Everything after it fails, as without a thread.
            assert!(comm.barrier().is_err());
        });
    }
}
