//! The communicator.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::{Algorithm, Buffer, DType, Element, Pending, ReduceOp, Transport, Update};
use crate::timeline::Timeline;
use crate::{Error, Result};

/// Collectives over the ranks of a world. See the [module](super) for what holds for all of them.
///
/// ```
/// # fn main() -> mgpu::Result<()> {
/// use mgpu::{DType, ReduceOp};
/// let mut world = mgpu::World::from_env()?;
/// let mut comm = world.communicator()?;
/// // Memory that peers reach in place.
/// let mut gradients = comm.allocate(DType::F32, 1000)?;
/// gradients.as_mut_slice::<f32>().fill(1.5);
/// let averages = comm.all_reduce(gradients, ReduceOp::Avg)?.wait()?;
/// assert_eq!(averages.as_slice::<f32>()[999], 1.5);
/// // Memory of the program's own is copied in and out.
/// let mut losses = [0.25f64];
/// comm.all_reduce_slice(&mut losses, ReduceOp::Sum)?;
/// assert_eq!(losses[0], 0.25 * f64::from(comm.size()));
/// # Ok(())
/// # }
/// ```
pub struct Communicator {
    transport: Box<dyn Transport>,
}

impl Communicator {
    pub(crate) fn new(transport: impl Transport + 'static) -> Self {
        Communicator { transport: Box::new(transport) }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.transport.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.transport.size()
    }

    /// `solo`, `cpu` or `nccl`.
    pub fn backend(&self) -> &'static str {
        self.transport.backend()
    }

    /// The timeline that operations are recorded in: [off](Timeline::off), unless one [observes](Timeline::observe).
    pub fn timeline(&self) -> &Timeline {
        self.transport.timeline()
    }

    /// Has every operation of all ranks note in `at`, where that is 0, when the last one had come to it, by
    /// [`timeline::now`]. Backends that cannot tell leave it alone, and so do [`send`](Self::send) and [`recv`](Self::recv).
    pub fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.transport.note_arrivals(at);
    }

    /// Tells the launcher, if there is one, whom `error` holds responsible, because this rank is about to end with it: it
    /// names that rank even if this one ends first. The first error told stays.
    pub fn blame(&mut self, error: &Error) {
        self.transport.blame(error);
    }

    /// From now on other threads compute on the cores of the ranks while they wait here, so they are to give way soon. On all
    /// ranks alike.
    pub fn set_oversubscribed(&mut self) {
        self.transport.set_oversubscribed();
    }

    /// Chooses how the following all-reduces are carried out, on all ranks alike.
    pub fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.transport.set_algorithm(algorithm);
    }

    /// Memory for `len` zeroed elements that peers reach in place. Collective.
    ///
    /// # Errors
    /// If memory is short, or as in the [contract](super).
    pub fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.transport.allocate(dtype, len)
    }

    /// Every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.transport.all_reduce(buffer, op)
    }

    /// The buffer consists of n [shards](super::shard). Shard r of rank r becomes the reduction of all ranks' shards r; the
    /// other shards hold unspecified values afterwards.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.transport.reduce_scatter(buffer, op)
    }

    /// The buffer consists of n [shards](super::shard). Shard r of every rank becomes that of rank r.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.transport.all_gather(buffer)
    }

    /// Updates shards and [all-gathers](Self::all_gather) them in one pass, for segments of the buffer which ascend and do not
    /// overlap (the same segments on all ranks): `update` is handed this rank's own shards, front to back in blocks of at most
    /// `block` elements. A backend whose ranks reach each other's memory passes every block on while it is in the cache, and
    /// ranks wait for each other once before and once after all segments.
    ///
    /// # Errors
    /// If `block` is 0, or the segments are not as they should be; or as in the [contract](super).
    pub fn update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        update: &mut Update<'_>,
    ) -> Result<Pending> {
        self.transport.update_all_gather(buffer, segments, block, update)
    }

    /// Every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.transport.broadcast(buffer, root)
    }

    /// The buffer of rank `root` becomes the reduction of all ranks' buffers; the others stay as they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.transport.reduce(buffer, op, root)
    }

    /// Sends a copy of the buffer to rank `to`, which calls [`recv`](Self::recv). Messages between two
    /// ranks arrive in the order they were sent.
    ///
    /// # Errors
    /// If `to` is this rank or none, or as in the [contract](super).
    pub fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.transport.send(buffer, to)
    }

    /// Fills the buffer with the next message of rank `from`.
    ///
    /// # Errors
    /// If `from` is this rank or none, the message has another type or length, or as in the [contract](super).
    pub fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.transport.recv(buffer, from)
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn barrier(&mut self) -> Result<()> {
        self.transport.barrier()
    }

    /// All-reduces a slice in place.
    ///
    /// # Errors
    /// As [`Self::all_reduce`].
    pub fn all_reduce_slice<T: Element>(&mut self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let reduced = self.all_reduce(Buffer::from_slice(values), op)?.wait()?;
        values.copy_from_slice(reduced.as_slice());
        Ok(())
    }

    /// Replaces a slice by that of rank `root`.
    ///
    /// # Errors
    /// As [`Self::broadcast`].
    pub fn broadcast_slice<T: Element>(&mut self, values: &mut [T], root: u32) -> Result<()> {
        let copy = self.broadcast(Buffer::from_slice(values), root)?.wait()?;
        values.copy_from_slice(copy.as_slice());
        Ok(())
    }

    /// The values of all ranks, in rank order. All ranks pass equally many.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn all_gather_slice<T: Element>(&mut self, values: &[T]) -> Result<Vec<T>> {
        let mut all = Buffer::zeroed::<T>(values.len() * self.size() as usize);
        let begin = values.len() * self.rank() as usize;
        all.as_mut_slice::<T>()[begin..begin + values.len()].copy_from_slice(values);
        Ok(self.all_gather(all)?.wait()?.as_slice().to_vec())
    }
}
