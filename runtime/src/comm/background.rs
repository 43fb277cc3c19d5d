//! Reductions on a thread of their own, under what else the rank computes.
//!
//! The collectives of a CPU are over when their call returns, and while they last the rank does nothing else. This communicator
//! has another one do everything; the two operations that gradients travel by go to a thread, one after the other, and the
//! caller has their [`Pending`] at once. All other operations are done by the caller, after those, so that the order of
//! operations is that of the calls, on every rank.
//!
//! It gains where a core is to spare: the thread copies and adds as much as the caller would have. Where there is none, the
//! two take turns on one core, and what is left to gain is the time that a rank waits for later ones.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Algorithm, Buffer, Communicator, DType, Make, Pending, ReduceOp};
use crate::timeline::{self, Timeline};
use crate::{Error, Result};

/// See the [module](self).
pub(crate) struct Background {
    comm: Arc<Mutex<Box<dyn Communicator>>>,
    rank: u32,
    size: u32,
    backend: &'static str,
    timeline: Timeline,
    /// `None` only while it is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Whether the thread may have something to do.
    busy: bool,
}

/// A reduction for the thread, and where its result goes.
struct Job {
    reduction: Reduction,
    buffer: Buffer,
    op: ReduceOp,
    /// The bucket it is of, if that is recorded.
    bucket: Option<u32>,
    answer: SyncSender<Result<Buffer>>,
}

#[derive(Debug, Clone, Copy)]
enum Reduction {
    AllReduce,
    ReduceScatter,
    /// Of nothing: answered when all before it are over.
    None,
}

impl Background {
    /// Has `comm` do everything.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn new(comm: Box<dyn Communicator>) -> Result<Self> {
        let (rank, size, backend) = (comm.rank(), comm.size(), comm.backend());
        let timeline = comm.timeline().clone();
        let comm = Arc::new(Mutex::new(comm));
        let (jobs, queue) = channel();
        let (of_thread, recorded) = (Arc::clone(&comm), timeline.clone());
        let thread = std::thread::Builder::new().name(format!("reductions of rank {rank}"));
        let thread = thread
            .spawn(move || work(&of_thread, &queue, &recorded))
            .map_err(|error| Error::system("start a thread for reductions", error))?;
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Background { comm, rank, size, backend, timeline, jobs, thread, busy: false })
    }

    /// Gives a reduction to the thread.
    fn begin(&mut self, reduction: Reduction, buffer: Buffer, op: ReduceOp) -> Pending {
        let (answer, result) = sync_channel(1);
        let bucket = self.timeline.take_bucket();
        let jobs = self.jobs.as_ref().expect("there are jobs until it is dropped");
        self.busy = true;
        // Where the thread has ended the result says so.
        let _ = jobs.send(Job { reduction, buffer, op, bucket, answer });
        Pending::under_way(result, &self.timeline)
    }

    /// The communicator, once all reductions are over.
    fn idle(&mut self) -> MutexGuard<'_, Box<dyn Communicator>> {
        if std::mem::take(&mut self.busy) {
            // What has become of each is told by its own result.
            let _ = self.begin(Reduction::None, Buffer::zeroed::<u8>(0), ReduceOp::Sum).wait();
            self.busy = false;
        }
        lock(&self.comm)
    }
}

/// A thread that panicked has left an operation half done: its error, or the peers', comes with the next one.
fn lock(comm: &Mutex<Box<dyn Communicator>>) -> MutexGuard<'_, Box<dyn Communicator>> {
    comm.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the thread does until there can be no more jobs.
fn work(comm: &Mutex<Box<dyn Communicator>>, queue: &Receiver<Job>, timeline: &Timeline) {
    timeline::enter_background();
    for Job { reduction, buffer, op, bucket, answer } in queue {
        timeline.set_bucket(bucket);
        let reduced = match reduction {
            Reduction::AllReduce => lock(comm).all_reduce(buffer, op).and_then(Pending::wait),
            Reduction::ReduceScatter => lock(comm).reduce_scatter(buffer, op).and_then(Pending::wait),
            Reduction::None => Ok(buffer),
        };
        // Nobody waits any more where a step was given up.
        let _ = answer.send(reduced);
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.jobs = None;
        // Jobs that are left take no longer than the world's timeout.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Communicator for Background {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn backend(&self) -> &'static str {
        self.backend
    }

    fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.idle().note_arrivals(at);
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.idle().set_algorithm(algorithm);
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.idle().allocate(dtype, len)
    }

    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        Ok(self.begin(Reduction::AllReduce, buffer, op))
    }

    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        Ok(self.begin(Reduction::ReduceScatter, buffer, op))
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.idle().all_gather(buffer)
    }

    fn all_gather_with(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        make: &mut Make<'_>,
    ) -> Result<Pending> {
        self.idle().all_gather_with(buffer, segments, block, make)
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.idle().broadcast(buffer, root)
    }

    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.idle().reduce(buffer, op, root)
    }

    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.idle().send(buffer, to)
    }

    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.idle().recv(buffer, from)
    }

    fn barrier(&mut self) -> Result<()> {
        self.idle().barrier()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::World;

    #[test]
    fn operations_come_to_what_they_were_begun_as_in_any_order_of_waiting() {
        let worlds = World::threads(3).unwrap();
        std::thread::scope(|scope| {
            for mut world in worlds {
                scope.spawn(move || {
                    let mut comm = Background::new(world.communicator().unwrap()).unwrap();
                    let rank = comm.rank() as f32;
                    let first = comm.all_reduce(Buffer::from_slice(&[rank; 5000]), ReduceOp::Sum).unwrap();
                    let second = comm.reduce_scatter(Buffer::from_slice(&[rank; 6]), ReduceOp::Avg).unwrap();
                    // By the caller, after both.
                    let mut values = [rank];
                    (&mut comm as &mut dyn Communicator).broadcast_slice(&mut values, 2).unwrap();
                    assert_eq!(values, [2.0]);
                    let own = comm.rank() as usize * 2;
                    assert_eq!(second.wait().unwrap().as_slice::<f32>()[own..own + 2], [1.0; 2]);
                    assert_eq!(first.wait().unwrap().as_slice::<f32>(), [3.0; 5000]);
                    // One that nobody waits for is over before the next one by the caller.
                    drop(comm.all_reduce(Buffer::from_slice(&[1.0f32]), ReduceOp::Sum).unwrap());
                    comm.barrier().unwrap();
                });
            }
        });
    }

    #[test]
    fn an_error_comes_with_what_it_is_the_error_of() {
        let worlds = World::threads(2).unwrap();
        std::thread::scope(|scope| {
            for mut world in worlds {
                scope.spawn(move || {
                    let mut comm = Background::new(world.communicator().unwrap()).unwrap();
                    let values = vec![1.0f32; 4 + world.rank() as usize];
                    let reduced = comm.all_reduce(Buffer::from_slice(&values), ReduceOp::Sum).unwrap();
                    let error = reduced.wait().unwrap_err();
                    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
                    // And everything after it fails, as without a thread.
                    assert!(comm.barrier().is_err());
                });
            }
        });
    }
}
