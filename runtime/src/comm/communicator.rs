//! The communicator: what a program calls, and the rules that hold for every call.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::background::Background;
use super::call::{Call, Request, SegmentUpdate, Update, check_counts};
use super::exchange::{CountMismatch, Counts};
use super::observer::{NoObserver, ObservedOperation, Observer, UpdateTiming};
use super::rules::{ProgressEntry, Rules};
use super::solo::Solo;
use super::{Algorithm, Buffer, Capabilities, DType, Pending, ReduceOp, Transport, bytes_of};
use crate::clock::now;
use crate::membership::Membership;
use crate::progress::Operation;
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
    rank: u32,
    size: u32,
    transport: Box<dyn Transport>,
    capabilities: Capabilities,
    rules: Arc<Rules>,
    /// The transport hands every call to another communicator, by whose rules it goes.
    delegates: bool,
    observer: Option<Arc<dyn Observer>>,
    /// Whether calls come from a thread beside the rank's own.
    background: bool,
    /// Collectives begun.
    number: u32,
    /// What a barrier works on; `None` after one that failed.
    nothing: Option<Buffer>,
}

impl Communicator {
    pub(crate) fn new(transport: impl Transport + 'static, rank: u32, size: u32, rules: Arc<Rules>) -> Self {
        Communicator {
            rank,
            size,
            capabilities: transport.capabilities(),
            transport: Box::new(transport),
            rules,
            delegates: false,
            observer: None,
            background: false,
            number: 0,
            nothing: None,
        }
    }

    /// That of a world of one. Where there is a launcher, it is told what the rank does.
    pub(crate) fn alone(membership: Option<Arc<Membership>>) -> Self {
        Self::new(Solo, 0, 1, Arc::new(Rules::new(membership, 0)))
    }

    /// The same ranks, with reductions [on a thread of their own](Background). On all ranks alike.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn in_background(mut self) -> Result<Self> {
        self.set_oversubscribed();
        let (rank, size, rules) = (self.rank, self.size, Arc::clone(&self.rules));
        let observer = self.observer.clone();
        let outer = Self::new(Background::new(self)?, rank, size, rules);
        Ok(Communicator { delegates: true, observer, ..outer })
    }

    /// Carries out a call. The rules of all operations, in this order.
    ///
    /// Inlined, so that what depends on the kind of call alone costs a small all-reduce nothing.
    #[inline(always)]
    pub(super) fn submit(&mut self, call: Call<'_>, buffer: Buffer, tag: Option<u32>) -> Result<Pending> {
        let number = self.number.wrapping_add(1).max(1);
        let (operation, bytes) = (call.operation(), call.bytes(&buffer));
        let is_collective = call.is_collective();
        // The arguments: told before anything is sent.
        self.check(&call, &buffer)?;
        let mut request = Request { call, buffer, tag, number, pending: None };
        if self.delegates {
            self.transport.submit(&mut request)?;
            return Ok(request.done());
        }
        if is_collective {
            self.number = number;
        }
        // A fault that is due, then the progress page; neither where an earlier error has poisoned the communicator.
        self.rules.begin(ProgressEntry { operation, number, bytes })?;
        // The operation itself, and around it the trace.
        let result = match &self.observer {
            None => self.transport.submit(&mut request),
            Some(observer) => observe(&**observer, operation, (tag, bytes, self.background), |updating| {
                submit_timed(&mut *self.transport, &mut request, updating)
            }),
        };
        // An error poisons.
        self.rules.end(result, &*self.transport)?;
        Ok(request.done())
    }

    #[inline(always)]
    fn check(&self, call: &Call<'_>, buffer: &Buffer) -> Result<()> {
        let membership = self.rules.membership();
        if let Some(membership) = membership.filter(|_| self.capabilities.shares_memory) {
            buffer.check_owner(call.operation().name(), membership)?;
        }
        call.check(self.rank, self.size, buffer.len())
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// `solo`, `cpu` or `nccl`: for display. What matters to a program is among its [capabilities](Self::capabilities).
    pub fn backend(&self) -> &'static str {
        self.transport.backend()
    }

    /// What its buffers and reductions are like.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Has `observer` told of every operation from now on, instead of the one before.
    pub fn set_observer(&mut self, observer: Arc<dyn Observer>) {
        self.observer = Some(observer);
    }

    /// Who is told of operations, for spans of the caller's own; one that records nothing, unless another was
    /// [set](Self::set_observer).
    pub fn observer(&self) -> &dyn Observer {
        self.observer.as_deref().unwrap_or(&NoObserver)
    }

    pub(super) fn shared_observer(&self) -> Option<Arc<dyn Observer>> {
        self.observer.clone()
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    /// From now on calls come from a thread beside the rank's own, or from its own again.
    pub(super) fn set_background(&mut self, background: bool) {
        self.background = background;
    }

    /// Has every collective of all ranks note in `at`, where that is 0, when the last one had come to it, by
    /// [`timeline::now`](crate::timeline::now). Backends that cannot tell leave it alone.
    pub fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.transport.note_arrivals(at);
    }

    /// Tells the launcher, if there is one, whom `error` holds responsible, because this rank is about to end with it: it
    /// names that rank even if this one ends first. The first error told stays.
    pub fn blame(&mut self, error: &Error) {
        if let Some(membership) = self.rules.membership() {
            membership.blame(error);
        }
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
        let bytes = bytes_of(dtype, len)?;
        if self.delegates {
            return self.transport.allocate(dtype, len);
        }
        self.number = self.number.wrapping_add(1).max(1);
        let operation = Operation::Allocate;
        self.rules.begin(ProgressEntry { operation, number: self.number, bytes })?;
        let result = match &self.observer {
            None => self.transport.allocate(dtype, len),
            Some(observer) => observe(&**observer, operation, (None, bytes, self.background), |_| {
                self.transport.allocate(dtype, len)
            }),
        };
        self.rules.end(result, &*self.transport)
    }

    /// Every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.submit(Call::AllReduce(op), buffer, None)
    }

    /// As [`all_reduce`](Self::all_reduce), with a number of the caller's own for [observers](Observer).
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_reduce_tagged(&mut self, buffer: Buffer, op: ReduceOp, tag: Option<u32>) -> Result<Pending> {
        self.submit(Call::AllReduce(op), buffer, tag)
    }

    /// The buffer consists of n [shards](super::shard). Shard r of rank r becomes the reduction of all ranks' shards r; the
    /// other shards hold unspecified values afterwards.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.submit(Call::ReduceScatter(op), buffer, None)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with a number of the caller's own for [observers](Observer).
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn reduce_scatter_tagged(
        &mut self,
        buffer: Buffer,
        op: ReduceOp,
        tag: Option<u32>,
    ) -> Result<Pending> {
        self.submit(Call::ReduceScatter(op), buffer, tag)
    }

    /// The buffer consists of n [shards](super::shard). Shard r of every rank becomes that of rank r.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.submit(Call::AllGather, buffer, None)
    }

    /// As [`all_gather`](Self::all_gather), of parts that have another length on each rank: part r has `counts[r]` elements.
    /// All ranks pass the same counts.
    ///
    /// # Errors
    /// If the counts are not one for each rank, or do not add up to the buffer; or as in the [contract](super).
    pub fn all_gather_v(&mut self, buffer: Buffer, counts: &[usize]) -> Result<Pending> {
        self.submit(Call::AllGatherV { counts }, buffer, None)
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
        self.submit(Call::UpdateAllGather(SegmentUpdate { segments, block, update }), buffer, None)
    }

    /// Every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.submit(Call::Broadcast { root }, buffer, None)
    }

    /// The buffer of rank `root` becomes the reduction of all ranks' buffers; the others stay as they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.submit(Call::Reduce { op, root }, buffer, None)
    }

    /// The buffer consists of n equal shards. Shard q of rank r becomes what shard r of rank q was.
    ///
    /// ```
    /// # let worlds = mgpu::World::threads(2)?;
    /// # std::thread::scope(|scope| for mut world in worlds { scope.spawn(move || -> mgpu::Result<()> {
    /// let mut comm = world.communicator()?;
    /// let buffer = mgpu::Buffer::from_slice(&[[1, 2], [3, 4]][comm.rank() as usize]);
    /// let exchanged = comm.all_to_all(buffer)?.wait()?;
    /// assert_eq!(exchanged.as_slice::<i32>(), [[1, 3], [2, 4]][comm.rank() as usize]);
    /// # Ok(()) }); });
    /// # Ok::<(), mgpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the buffer cannot be cut into equal shards, or as in the [contract](super).
    pub fn all_to_all(&mut self, buffer: Buffer) -> Result<Pending> {
        self.submit(Call::AllToAll, buffer, None)
    }

    /// Sends rank r the next `send_counts[r]` elements of `send`, and fills the next `receive_counts[r]` elements of `receive`
    /// with what rank r sends; that is as many as rank r has for this rank. `send` has been read when the call returns.
    ///
    /// # Errors
    /// If the counts are not one for each rank or do not add up to the buffers, or the buffers have two types; on all
    /// ranks, with the names of both, if a rank receives another number of elements than another one sends it; or as in the
    /// [contract](super).
    pub fn all_to_all_v(
        &mut self,
        send: &Buffer,
        send_counts: &[usize],
        receive: Buffer,
        receive_counts: &[usize],
    ) -> Result<Pending> {
        let refused = |problem| Error::InvalidArgument { operation: "all_to_all_v", problem };
        if send.dtype() != receive.dtype() {
            return Err(refused(format!("{} is sent and {} received", send.dtype(), receive.dtype())));
        }
        let ranks = self.size as usize;
        check_counts(send_counts, ranks, send.len(), "the buffer that is sent").map_err(refused)?;
        check_counts(receive_counts, ranks, receive.len(), "the buffer that is received").map_err(refused)?;
        let counts = self.agree_on_counts(send_counts, receive_counts, send.dtype())?;
        self.submit(Call::AllToAllV { from: send, counts: &counts }, receive, None)
    }

    /// What each rank sends each rank and receives from it, compared.
    fn agree_on_counts(&mut self, send: &[usize], receive: &[usize], dtype: DType) -> Result<Counts> {
        let own: Vec<i64> = send.iter().chain(receive).map(|count| *count as i64).collect();
        let all = self.all_gather_slice(&own)?;
        let counts = all.into_iter().map(|count| count as usize).collect();
        Counts::new(self.size, counts).map_err(|CountMismatch { from, to, sent, received }| {
            // Every rank is told, and none accuses itself.
            let sender = (from, format!("all_to_all_v({sent} {dtype} to rank {to})"));
            let receiver = (to, format!("all_to_all_v({received} {dtype} from rank {from})"));
            let sides = if self.rank == from { (sender, receiver) } else { (receiver, sender) };
            let ((rank, ours), (peer, theirs)) = sides;
            let sequence = self.number.wrapping_add(1);
            let error = Error::Mismatch { rank, peer, sequence, ours, theirs };
            self.rules.fail(error, &*self.transport)
        })
    }

    /// The buffer consists of n [shards](super::shard). Shard r of rank `root` becomes that of rank r; the buffers of the other
    /// ranks stay as they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn gather(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.submit(Call::Gather { root }, buffer, None)
    }

    /// The buffer consists of n [shards](super::shard). Shard r of rank r becomes that of rank `root`; all other shards stay as
    /// they are.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn scatter(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.submit(Call::Scatter { root }, buffer, None)
    }

    /// Sends a copy of the buffer to rank `to`, which calls [`recv`](Self::recv). Messages between two
    /// ranks arrive in the order they were sent.
    ///
    /// # Errors
    /// If `to` is this rank or none, or as in the [contract](super).
    pub fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.submit(Call::Send { to }, buffer, None)
    }

    /// Fills the buffer with the next message of rank `from`.
    ///
    /// # Errors
    /// If `from` is this rank or none, the message has another type or length, or as in the [contract](super).
    pub fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.submit(Call::Recv { from }, buffer, None)
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn barrier(&mut self) -> Result<()> {
        let nothing = self.nothing.take().unwrap_or_else(|| Buffer::zeroed::<u8>(0));
        self.nothing = Some(self.submit(Call::Barrier, nothing, None)?.wait()?);
        Ok(())
    }
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Communicator { rank, size, transport, .. } = self;
        f.debug_struct("Communicator")
            .field("rank", rank)
            .field("size", size)
            .field("backend", &transport.backend())
            .finish_non_exhaustive()
    }
}

/// Tells `observer` of an operation.
fn observe<R>(
    observer: &dyn Observer,
    operation: Operation,
    (tag, bytes, background): (Option<u32>, usize, bool),
    operate: impl FnOnce(&mut UpdateTiming) -> Result<R>,
) -> Result<R> {
    observer.operation_begins();
    let (mut updating, begin) = (UpdateTiming::default(), now());
    let result = operate(&mut updating);
    observer.operation_ended(&ObservedOperation {
        operation,
        tag,
        begin,
        end: now(),
        bytes,
        updating,
        background,
    });
    result
}

/// Has `transport` carry out a request, and notes what is updated in the course of it.
fn submit_timed(
    transport: &mut dyn Transport,
    request: &mut Request<'_>,
    updating: &mut UpdateTiming,
) -> Result<()> {
    let Request { call: Call::UpdateAllGather(call), buffer, tag, number, .. } = request else {
        return transport.submit(request);
    };
    let SegmentUpdate { segments, block, update } = call.by_ref();
    let mut update = |segment: usize, element: usize, block: &mut Buffer| {
        let begin = now();
        update(segment, element, block);
        updating.note(begin, now());
    };
    let call = Call::UpdateAllGather(SegmentUpdate { segments, block, update: &mut update });
    let mut timed = Request { call, buffer: buffer.take(), tag: *tag, number: *number, pending: None };
    transport.submit(&mut timed)?;
    *buffer = timed.buffer;
    request.pending = timed.pending;
    Ok(())
}
