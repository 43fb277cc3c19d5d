//! The communicator: the API of collectives, and the rules of every call.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::adopt::Adoption;
use super::background::Background;
use super::call::{Call, Request, SegmentUpdate, Update, check_counts};
use super::exchange::{CountMismatch, Counts};
use super::observer::{NoObserver, ObservedOperation, Observer, UpdateTiming};
use super::rules::{Begun, ProgressEntry, Rules};
use super::solo::Solo;
use super::split::{SplitGroup, agree_on_split, form_group, group_number};
use super::{Algorithm, Buffer, Capabilities, DType, Members, Pending, ReduceOp, Transport, bytes_of};
use crate::clock::now;
use crate::membership::Membership;
use crate::progress::Operation;
use crate::shm::ReplacedPages;
use crate::{Error, Result};

/// Collectives over the ranks of a world, or of a [group](Self::split) of them. The [module](super) describes the contract of all operations.
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
    members: Members,
    transport: Box<dyn Transport>,
    capabilities: Capabilities,
    rules: Arc<Rules>,
    /// The transport delegates every call to another communicator, which applies the rules.
    delegates: bool,
    observer: Option<Arc<dyn Observer>>,
    /// The title of the group; `None` for all ranks of a world.
    group: Option<Arc<str>>,
    /// Whether calls come from the background thread.
    background: bool,
    /// Sequence number of the last collective.
    number: u32,
    /// The empty buffer of a barrier; `None` after a barrier that failed.
    empty_buffer: Option<Buffer>,
}

impl Communicator {
    pub(crate) fn new(transport: impl Transport + 'static, members: Members, rules: Arc<Rules>) -> Self {
        Communicator {
            rank: members.rank(),
            size: members.size(),
            members,
            capabilities: transport.capabilities(),
            transport: Box::new(transport),
            rules,
            delegates: false,
            observer: None,
            group: None,
            background: false,
            number: 0,
            empty_buffer: None,
        }
    }

    /// The same communicator, with its number among the world's.
    pub(crate) fn numbered(self, number: u32) -> Self {
        self.rules.set_number(number);
        self
    }

    /// The communicator of a world of one. It reports to the launcher, if there is one.
    pub(crate) fn alone(membership: Option<Arc<Membership>>) -> Self {
        Self::new(Solo, Members::everyone(0, 1), Arc::new(Rules::new(membership, 0)))
    }

    /// The same ranks, with reductions on a [background thread](Background). All ranks must call it.
    ///
    /// # Errors
    /// If no thread can be started.
    pub(crate) fn in_background(mut self) -> Result<Self> {
        self.set_oversubscribed();
        let (members, rules) = (self.members.clone(), Arc::clone(&self.rules));
        let observer = self.observer.clone();
        let outer = Self::new(Background::new(self)?, members, rules);
        Ok(Communicator { delegates: true, observer, ..outer })
    }

    /// Executes a call, with the rules of all operations in this order.
    ///
    /// Inlined, so that what only depends on the kind of the call is resolved at compile time: small all-reduces are
    /// that sensitive.
    #[inline(always)]
    pub(super) fn submit(&mut self, call: Call<'_>, buffer: Buffer, tag: Option<u32>) -> Result<Pending> {
        let number = self.number.wrapping_add(1).max(1);
        let (operation, bytes) = (call.operation(), call.bytes(&buffer));
        let is_collective = call.is_collective();
        // Check the arguments before anything is sent.
        self.check(&call, &buffer)?;
        let mut request = Request { call, buffer, tag, number, pending: None };
        if self.delegates {
            self.transport.submit(&mut request)?;
            return Ok(match request.pending {
                None => Pending::complete(request.buffer),
                Some(pending) => pending,
            });
        }
        if is_collective {
            self.number = number;
        }
        // Inject a planned fault, then update the progress page; neither if an earlier error has poisoned the
        // communicator.
        let begun = self.rules.begin(ProgressEntry { operation, number, bytes, tag, on_device: false })?;
        // Execute the operation, and trace it.
        let result = match &self.observer {
            None => self.transport.submit(&mut request),
            Some(observer) => {
                let origin = Origin { group: self.group.as_deref(), background: self.background };
                observe(&**observer, origin, (operation, tag, bytes), |updating| {
                    submit_timed(&mut *self.transport, &mut request, updating)
                })
            }
        };
        // An error poisons the communicator. (Not by `end`: it would move the result, which is large.)
        if let Err(error) = result {
            return Err(self.rules.fail(error, &*self.transport));
        }
        self.rules.complete(begun);
        // Only a transport to which calls are delegated leaves an operation in flight.
        debug_assert!(request.pending.is_none());
        Ok(Pending::complete(request.buffer))
    }

    #[inline(always)]
    fn check(&self, call: &Call<'_>, buffer: &Buffer) -> Result<()> {
        let membership = self.rules.membership();
        if let Some(membership) = membership.filter(|_| self.capabilities.shares_memory) {
            buffer.check_owner(call.operation().name(), membership, &self.members)?;
        }
        call.check(self.rank, self.size, buffer.len())
    }

    /// This rank, in this communicator.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The rank in the world of rank `rank` of this communicator. They differ in a [group](Self::split) only.
    ///
    /// # Panics
    /// If this communicator has no such rank.
    pub fn world_rank(&self, rank: u32) -> u32 {
        self.members.world_rank(rank)
    }

    /// Splits the communicator into groups: a communicator for the ranks that pass the same `colour`. They are numbered
    /// from 0 in the order of their `key`s, and of their ranks here where keys are equal. A rank that passes no colour
    /// is in no group and gets `None`. Collective: every rank of this communicator calls it.
    ///
    /// Several groups can be in use at once, also overlapping ones. They share this communicator's timeout and its
    /// observer. An error in one of them makes all of them unusable, and this communicator, too.
    ///
    /// ```
    /// # let worlds = mgpu::World::threads(4)?;
    /// # std::thread::scope(|scope| for mut world in worlds { scope.spawn(move || -> mgpu::Result<()> {
    /// // A grid of two rows and two columns.
    /// let mut comm = world.communicator()?;
    /// let (row, column) = (comm.rank() / 2, comm.rank() % 2);
    /// let mut in_row = comm.split(Some(row), 0)?.expect("a rank with a colour has a group");
    /// let mut in_column = comm.split(Some(column), 0)?.expect("a rank with a colour has a group");
    /// let mut sums = [comm.rank(); 2].map(f64::from);
    /// in_row.all_reduce_slice(&mut sums[..1], mgpu::ReduceOp::Sum)?;
    /// in_column.all_reduce_slice(&mut sums[1..], mgpu::ReduceOp::Sum)?;
    /// assert_eq!(sums, [[1.0, 5.0][row as usize], [2.0, 4.0][column as usize]]);
    /// # Ok(()) }); });
    /// # Ok::<(), mgpu::Error>(())
    /// ```
    ///
    /// # Errors
    /// If shared memory is short, or as in the [contract](super): an error of one rank is an error on all.
    pub fn split(&mut self, colour: Option<u32>, key: i32) -> Result<Option<Communicator>> {
        let membership = self.membership();
        let all = agree_on_split(membership.as_deref(), (colour, key), |words| self.all_gather_slice(words))?;
        let group = form_group(&all, &self.members);
        let number = group_number(&all);
        let operation = Operation::Connect;
        self.rules.note(ProgressEntry { operation, number, bytes: 0, tag: None, on_device: false });
        let connected = match &group {
            Some(group) if group.members.size() > 1 => {
                self.transport.connect_group(group, self.rules.for_group(group)).map(Some)
            }
            _ => self.transport.connect_no_group().map(|()| {
                let alone = |group: &SplitGroup| {
                    Self::new(Solo, group.members.clone(), Arc::new(self.rules.for_group(group)))
                };
                group.as_ref().map(alone)
            }),
        };
        let connected = self.rules.end(Begun::NOTED, connected, &*self.transport)?;
        // All members have mapped the group's memory, or one of them has failed.
        self.barrier()?;
        let title = group.map(|group| group.title().into());
        Ok(connected.map(|comm| Communicator { observer: self.observer.clone(), group: title, ..comm }))
    }

    /// `solo`, `cpu` or `nccl`, for display. Programs should use the [capabilities](Self::capabilities).
    pub fn backend(&self) -> &'static str {
        self.transport.backend()
    }

    /// Properties of its buffers and reductions.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    /// Reports every following operation to `observer`, in place of the previous observer.
    pub fn set_observer(&mut self, observer: Arc<dyn Observer>) {
        self.observer = Some(observer);
    }

    /// The observer of operations, for the caller's own spans. Without one that was [set](Self::set_observer), it
    /// records nothing.
    pub fn observer(&self) -> &dyn Observer {
        self.observer.as_deref().unwrap_or(&NoObserver)
    }

    pub(super) fn membership(&self) -> Option<Arc<Membership>> {
        self.rules.membership().cloned()
    }

    pub(super) fn shared_observer(&self) -> Option<Arc<dyn Observer>> {
        self.observer.clone()
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.transport
    }

    pub(super) fn transport_mut(&mut self) -> &mut dyn Transport {
        &mut *self.transport
    }

    /// Sets whether the following calls come from the background thread.
    pub(super) fn set_background(&mut self, background: bool) {
        self.background = background;
    }

    /// Makes every collective store the time at which the last rank arrived in `at`, if that is 0. The time is that
    /// of [`timeline::now`](crate::timeline::now). Backends that do not know it leave `at` unchanged.
    pub fn record_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.transport.record_arrivals(at);
    }

    /// Tells the launcher, if there is one, which rank `error` blames, because this rank is about to end with that
    /// error: the launcher reports the blamed rank even if this one ends first. Only the first such call counts.
    pub fn blame(&mut self, error: &Error) {
        if let Some(membership) = self.rules.membership() {
            membership.blame(error);
        }
    }

    /// Declares that other threads compute on the ranks' cores, so that waiting ranks yield their core early. All
    /// ranks must call it.
    pub fn set_oversubscribed(&mut self) {
        self.transport.set_oversubscribed();
    }

    /// Chooses the algorithm of the following all-reduces. All ranks must choose the same.
    pub fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.transport.set_algorithm(algorithm);
    }

    /// The bytes of payload that this rank has moved between ranks since the communicator was created, without those of
    /// its [groups](Self::split). The sum over ranks is what all of them have moved together: every byte that crosses
    /// from one rank to another counts once, on one of the ranks.
    ///
    /// On shared memory a rank counts what it reads from a peer's buffer or staging memory to reduce it, and what it copies
    /// from one rank to another. With S bytes on each of n ranks, an all-reduce moves 2·(n − 1)·S bytes; a
    /// reduce-scatter, an all-gather and a broadcast (n − 1)·S. (Below some KiB an all-reduce moves n·(n − 1)·S, since
    /// every rank reads everything.) Work that a rank does for a late one counts as if the late one had done it. A single
    /// rank moves nothing. Flags and the control plane do not count. Between hosts a rank counts what it receives.
    ///
    /// `None` under `nccl`, where NCCL moves the bytes and does not count them.
    pub fn traffic(&self) -> Option<u64> {
        self.transport.traffic()
    }

    /// Allocates `len` zeroed elements that peers can access in place. Collective.
    ///
    /// # Errors
    /// If memory is short, or as in the [contract](super).
    pub fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let bytes = bytes_of(dtype, len)?;
        if self.delegates {
            return self.transport.allocate(dtype, len);
        }
        self.allocate_with(bytes, |transport| transport.allocate(dtype, len))
    }

    /// Whether the transport can put arenas in the place of a program's own pages.
    pub(super) fn replaces_pages(&self) -> bool {
        !self.delegates && self.transport.replaces_pages()
    }

    /// Whether a call that has returned uses the caller's memory no more.
    pub(super) fn releases_memory(&self) -> bool {
        !self.delegates && self.transport.releases_memory()
    }

    /// Puts an arena in the place of pages of the caller's own. Collective.
    pub(super) fn adopt_pages(&mut self, adoption: &Adoption<'_>) -> Result<(Buffer, ReplacedPages)> {
        let bytes = bytes_of(adoption.dtype, adoption.len)?;
        self.allocate_with(bytes, |transport| transport.adopt_pages(adoption))
    }

    /// Allocates `bytes` bytes, with the rules of all operations.
    fn allocate_with<R>(
        &mut self,
        bytes: usize,
        allocate: impl FnOnce(&mut dyn Transport) -> Result<R>,
    ) -> Result<R> {
        self.number = self.number.wrapping_add(1).max(1);
        let operation = Operation::Allocate;
        let entry = ProgressEntry { operation, number: self.number, bytes, tag: None, on_device: false };
        let begun = self.rules.begin(entry)?;
        let result = match &self.observer {
            None => allocate(&mut *self.transport),
            Some(observer) => {
                let origin = Origin { group: self.group.as_deref(), background: self.background };
                observe(&**observer, origin, (operation, None, bytes), |_| allocate(&mut *self.transport))
            }
        };
        self.rules.end(begun, result, &*self.transport)
    }

    /// All-reduce: every rank's buffer becomes the reduction of all ranks' buffers.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.submit(Call::AllReduce(op), buffer, None)
    }

    /// As [`all_reduce`](Self::all_reduce), with a tag for [observers](Observer).
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_reduce_tagged(&mut self, buffer: Buffer, op: ReduceOp, tag: Option<u32>) -> Result<Pending> {
        self.submit(Call::AllReduce(op), buffer, tag)
    }

    /// Reduce-scatter: the buffer consists of n [shards](super::shard). Shard r of rank r becomes the reduction of
    /// all ranks' shards r; the other shards are unspecified afterwards.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.submit(Call::ReduceScatter(op), buffer, None)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with a tag for [observers](Observer).
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

    /// All-gather: the buffer consists of n [shards](super::shard). Shard r of every rank becomes that of rank r.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.submit(Call::AllGather, buffer, None)
    }

    /// As [`all_gather`](Self::all_gather), with parts of different lengths: part r has `counts[r]` elements. All
    /// ranks pass the same counts.
    ///
    /// # Errors
    /// If there is not one count per rank, or they do not add up to the buffer's length; or as in the
    /// [contract](super).
    pub fn all_gather_v(&mut self, buffer: Buffer, counts: &[usize]) -> Result<Pending> {
        self.submit(Call::AllGatherV { counts }, buffer, None)
    }

    /// Fused update + all-gather: each rank updates its shard of each of the segments, and all ranks get all shards,
    /// in one pass. Segments are ascending and disjoint, and the same on all ranks. `update` gets this rank's shards,
    /// front to back, in blocks of at most `block` elements. A backend with shared memory copies every block to the
    /// peers while it is in the cache, and synchronises only once before and once after all segments.
    ///
    /// # Errors
    /// If `block` is 0, or the segments are invalid; or as in the [contract](super).
    pub fn update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        update: &mut Update<'_>,
    ) -> Result<Pending> {
        self.submit(Call::UpdateAllGather(SegmentUpdate { segments, block, update }), buffer, None)
    }

    /// Broadcast: every rank's buffer becomes a copy of that of rank `root`.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.submit(Call::Broadcast { root }, buffer, None)
    }

    /// Reduce: the buffer of rank `root` becomes the reduction of all ranks' buffers; the others are unchanged.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.submit(Call::Reduce { op, root, by_root: false }, buffer, None)
    }

    /// As [`reduce`](Self::reduce), with the work on the root alone where ranks share memory, so that no other bytes move
    /// than those of the other ranks' buffers, to the root. With a tag for [observers](Observer).
    ///
    /// # Errors
    /// As in the [contract](super).
    pub(crate) fn reduce_by_root_tagged(
        &mut self,
        buffer: Buffer,
        op: ReduceOp,
        root: u32,
        tag: Option<u32>,
    ) -> Result<Pending> {
        self.submit(Call::Reduce { op, root, by_root: true }, buffer, tag)
    }

    /// All-to-all: the buffer consists of n equal shards. Shard q of rank r becomes what shard r of rank q was.
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

    /// All-to-all with different lengths: sends the next `send_counts[r]` elements of `send` to rank r, and receives
    /// the next `receive_counts[r]` elements of `receive` from rank r, which must send as many. `send` has been read
    /// when the call returns.
    ///
    /// # Errors
    /// If there is not one count per rank, if counts do not add up to the buffers' lengths, or if the buffers have
    /// different types; on all ranks, naming both, if a rank expects another number of elements than the sender
    /// sends; or as in the [contract](super).
    pub fn all_to_all_v(
        &mut self,
        send: &Buffer,
        send_counts: &[usize],
        receive: Buffer,
        receive_counts: &[usize],
    ) -> Result<Pending> {
        let refused = |problem| Error::InvalidArgument { operation: "all_to_all_v", problem };
        if send.dtype() != receive.dtype() {
            return Err(refused(format!(
                "the send buffer is {} and the receive buffer is {}",
                send.dtype(),
                receive.dtype()
            )));
        }
        let ranks = self.size as usize;
        check_counts(send_counts, ranks, send.len(), "the send buffer").map_err(refused)?;
        check_counts(receive_counts, ranks, receive.len(), "the receive buffer").map_err(refused)?;
        let counts = self.agree_on_counts(send_counts, receive_counts, send.dtype())?;
        self.submit(Call::AllToAllV { from: send, counts: &counts }, receive, None)
    }

    /// Gathers the counts of all ranks and compares them.
    fn agree_on_counts(&mut self, send: &[usize], receive: &[usize], dtype: DType) -> Result<Counts> {
        let own: Vec<i64> = send.iter().chain(receive).map(|count| *count as i64).collect();
        let all = self.all_gather_slice(&own)?;
        let counts = all.into_iter().map(|count| count as usize).collect();
        Counts::new(self.size, counts).map_err(|CountMismatch { from, to, sent, received }| {
            // Every rank gets the error, and none blames itself.
            let sender = (from, format!("all_to_all_v({sent} {dtype} to rank {to})"));
            let receiver = (to, format!("all_to_all_v({received} {dtype} from rank {from})"));
            let sides = if self.rank == from { (sender, receiver) } else { (receiver, sender) };
            let ((rank, ours), (peer, theirs)) = sides;
            let [rank, peer] = [rank, peer].map(|rank| self.world_rank(rank));
            let sequence = self.number.wrapping_add(1);
            let error = Error::Mismatch { rank, peer, sequence, ours, theirs };
            self.rules.fail(error, &*self.transport)
        })
    }

    /// Gather: the buffer consists of n [shards](super::shard). Shard r of rank `root` becomes that of rank r; the
    /// buffers of the other ranks are unchanged.
    ///
    /// # Errors
    /// If there is no rank `root`, or as in the [contract](super).
    pub fn gather(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.submit(Call::Gather { root }, buffer, None)
    }

    /// Scatter: the buffer consists of n [shards](super::shard). Shard r of rank r becomes that of rank `root`; all
    /// other shards are unchanged.
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
    /// If `to` is this rank or does not exist, or as in the [contract](super).
    pub fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.submit(Call::Send { to }, buffer, None)
    }

    /// Fills the buffer with the next message of rank `from`.
    ///
    /// # Errors
    /// If `from` is this rank or does not exist, the message has another type or length, or as in the
    /// [contract](super).
    pub fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.submit(Call::Recv { from }, buffer, None)
    }

    /// Sends `send` to rank `peer` and fills `receive` with what that sends, both at once. Both ranks call it, with buffers
    /// of the same type and length. `send` has been read when the call returns.
    ///
    /// # Errors
    /// If `peer` is this rank or does not exist, its buffers have another type or length, or as in the
    /// [contract](super).
    pub(crate) fn send_recv(&mut self, send: &Buffer, receive: Buffer, peer: u32) -> Result<Pending> {
        assert_eq!((send.dtype(), send.len()), (receive.dtype(), receive.len()), "the buffers of send_recv");
        self.submit(Call::SendRecv { from: send, peer }, receive, None)
    }

    /// Barrier: returns once all ranks have called it.
    ///
    /// # Errors
    /// As in the [contract](super).
    pub fn barrier(&mut self) -> Result<()> {
        let empty_buffer = self.empty_buffer.take().unwrap_or_else(|| Buffer::zeroed::<u8>(0));
        self.empty_buffer = Some(self.submit(Call::Barrier, empty_buffer, None)?.wait()?);
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

/// Where an operation comes from, for observers.
struct Origin<'a> {
    group: Option<&'a str>,
    background: bool,
}

/// Runs an operation and reports it to `observer`.
fn observe<R>(
    observer: &dyn Observer,
    Origin { group, background }: Origin<'_>,
    (operation, tag, bytes): (Operation, Option<u32>, usize),
    operate: impl FnOnce(&mut UpdateTiming) -> Result<R>,
) -> Result<R> {
    observer.operation_begins();
    let (mut updating, begin) = (UpdateTiming::default(), now());
    let result = operate(&mut updating);
    observer.operation_ended(&ObservedOperation {
        operation,
        group,
        tag,
        begin,
        end: now(),
        bytes,
        updating,
        background,
    });
    result
}

/// Executes a request and measures the update within a fused update + all-gather.
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
