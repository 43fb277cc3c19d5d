//! Collectives over the shared memory of one host.
//!
//! Every operation begins with an arrival ([`agree`]): a rank publishes its call, waits for its peers and compares.
//! After that all ranks may access all buffers of the operation. The path of the payload depends on its size and
//! location:
//!
//! | payload | path | synchronisations |
//! |---|---|---|
//! | up to 48 bytes | within the arrival line | 1 |
//! | such a broadcast, up to 4 KiB | [`eager`]: within the arrival line or through a small slot; only the root is waited for | 1 |
//! | up to 1 KiB in an arena, 3 KiB in private memory | [`eager`]: through small slots, every rank reduces everything itself | 1 |
//! | in an arena | [`direct`]: in place, in blocks; ranks help late ranks | 2 |
//! | fused update + all-gather, all-to-all, parts of different lengths; in an arena | [`direct`]: every rank writes
//! its own part | 2 |
//! | reduction to a root that does all of it, in an arena | [`direct`]: the root reads all buffers | 2 |
//! | private | [`staged`]: through staging memory, in blocks that overlap ([`stream`]) | 1 per block |
//! | on request | [`ring`]: from rank to rank, over [`channel`]s | 1, then pairwise |

mod agree;
mod arena;
mod channel;
mod cores;
mod direct;
mod eager;
mod lines;
mod prefetch;
mod region;
mod ring;
mod staged;
mod stores;
mod stream;
mod wait;

use std::cell::Cell;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

pub(super) use arena::{one_descriptor, place_parts};
use cores::Cores;
use lines::{AHEAD, INLINE_BYTES};
use region::{AHEAD_BYTES, EAGER_BYTES, Region};
use smallvec::SmallVec;
use stores::{Choices, Stores};
use stream::Streamed;
use wait::WaitPolicy;
pub(super) use wait::futex;

use super::adopt::Adoption;
use super::call::{Call, Request, SegmentUpdate};
use super::exchange::{Exchange, Partition};
use super::rules::FailureHandler;
use super::segments::{gather_segments, update_blocks};
use super::signature::{Path, SIGNATURE_WORDS, Signature};
use super::split::{Members, SplitGroup};
use super::{Algorithm, Buffer, Capabilities, Communicator, DType, ReduceOp, Rules, Transport, shard};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::shm::ReplacedPages;
use crate::{Error, Result};

/// Largest private payload for eager slots of what is only copied.
const MESSAGE_EAGER_BYTES: usize = 3 << 10;

/// Largest payloads for eager slots, in bytes.
///
/// Slots cost copies, and in a reduction every rank reads all of them; the other paths cost one more synchronisation, which is
/// cheap between cores but expensive when ranks must be scheduled for it. The limits were measured with two ranks, and with four
/// on two cores. More ranks with a core each have more to read.
#[derive(Debug, Clone, Copy)]
struct EagerLimits {
    /// If the buffer is in an arena.
    arena: usize,
    /// If a reduction has a private buffer.
    private_reduction: usize,
}

impl EagerLimits {
    fn new(policy: WaitPolicy, ranks: u32) -> Self {
        if policy.is_oversubscribed() {
            return EagerLimits { arena: 2 << 10, private_reduction: 3 << 10 };
        }
        let private_reduction = ((6 << 10) / ranks as usize).clamp(1 << 10, 3 << 10);
        EagerLimits { arena: 1 << 10, private_reduction }
    }
}

/// Numbers of groups begin here, so that they differ from those of the world's communicators.
const FIRST_GROUP: u32 = 1 << 16;

/// The transport of one rank.
pub(crate) struct CpuTransport {
    membership: Arc<Membership>,
    members: Members,
    /// Number of the communicator among those of this rank.
    number: u32,
    /// Names its memory at the rendezvous.
    key: String,
    /// Names it in messages.
    title: String,
    rank: u32,
    size: u32,
    region: Region,
    /// Number of the world's communicator: this one, or the one from which this group was split.
    family: u32,
    /// Sequence number of the last operation that was entered.
    sequence: u32,
    /// The last operations in which this rank has not compared the calls of all peers yet, with its own call as it was
    /// encoded: those words are in registers, while copying the signature would wait for all stores before it.
    unsettled: SmallVec<[(u32, [u64; SIGNATURE_WORDS]); AHEAD]>,
    /// Number of broadcasts through small slots so far.
    broadcasts: u32,
    /// Number of blocks that earlier operations have put into each rank's queue.
    queued: Vec<u32>,
    /// What earlier operations have passed through staging memory.
    streamed: Streamed,
    /// How staging memory is written.
    stores: Choices,
    /// Number of chunks sent to and received from each rank; at this rank's own index, those of the ring.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Number of arenas allocated so far.
    arenas: u32,
    algorithm: Algorithm,
    /// Number of cores that all ranks have together.
    cores: usize,
    policy: WaitPolicy,
    eager: EagerLimits,
    timeout: Duration,
    /// Bytes of payload that this rank has moved between ranks.
    traffic: Cell<u64>,
    /// Where to store the time at which all ranks had arrived, if requested.
    arrival: Option<Arc<AtomicU64>>,
    /// Whether, at the last mismatch, some other call was made by more ranks than this rank's: then this rank is at
    /// fault and must not blame the others.
    in_minority: Cell<bool>,
}

/// Connects communicator `number` of a world of `size` ranks.
pub(crate) fn connect(
    membership: &Arc<Membership>,
    size: u32,
    number: u32,
    timeout: Duration,
) -> Result<Communicator> {
    let key = format!("communicator-{number}");
    membership.check_process()?;
    let (members, page) = (membership.everyone(size), membership.page());
    let rank = members.rank();
    page.enter(rank, Operation::Connect, number, 0);
    let connected = share_region(membership, &members, &key, timeout).and_then(|region| {
        Ok(membership.store().barrier(&format!("{key}/connected"), timeout).map(|()| region)?)
    });
    let region = connected.inspect_err(|error| {
        membership.record_blame(error);
        membership.delay_error(error);
    })?;
    page.leave(rank);
    let cores = Cores::count((0..size).map(|rank| region.cores(rank)));
    let policy = WaitPolicy::for_ranks(size, cores);
    let transport = CpuTransport {
        membership: Arc::clone(membership),
        members: members.clone(),
        number,
        title: key.clone(),
        key,
        rank,
        size,
        family: number,
        region,
        sequence: 0,
        unsettled: SmallVec::new(),
        broadcasts: 0,
        queued: vec![0; size as usize],
        streamed: Streamed::default(),
        stores: Choices::default(),
        sent: vec![0; size as usize],
        received: vec![0; size as usize],
        arenas: 0,
        algorithm: Algorithm::Auto,
        cores,
        policy,
        eager: EagerLimits::new(policy, size),
        timeout,
        traffic: Cell::new(0),
        arrival: None,
        in_minority: Cell::new(false),
    };
    let rules = Rules::new(Some(Arc::clone(membership)), rank).touched_by_transport();
    Ok(Communicator::new(transport, members, Arc::new(rules)))
}

/// Creates the memory of the communicator with this key on its first rank, and maps it on all of its ranks. They must
/// synchronise before they use it.
fn share_region(membership: &Membership, members: &Members, key: &str, timeout: Duration) -> Result<Region> {
    let (rank, size, store) = (members.rank(), members.size(), membership.store());
    let entry = format!("{key}/region");
    let (mut region, fd) = if rank == 0 {
        let created = Region::create(key, size);
        match &created {
            Ok((_, fd)) => store.set(&entry, b"", &[fd.as_fd()], size - 1)?,
            // The others should not wait for it.
            Err(error) => store.set(&entry, error.to_string().as_bytes(), &[], size - 1)?,
        }
        created?
    } else {
        let creator = members.world_rank(0);
        let (problem, fds) = store.get(&entry, creator, timeout)?;
        if !problem.is_empty() {
            let how = format!("has failed ({})", String::from_utf8_lossy(&problem));
            let (rank, operation) = (membership.rank(), format!("the connection of {key}"));
            return Err(Error::PeerLost { rank, peer: creator, operation, how, silent: false });
        }
        let fd = one_descriptor(fds)?;
        (Region::open(key, fd.as_fd(), size)?, fd)
    };
    region.reserve(fd.as_fd(), rank)?;
    region.cores(rank).publish();
    Ok(region)
}

impl CpuTransport {
    /// The other ranks, beginning with the next one.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, size) = (self.rank, self.size);
        (rank + 1..size).chain(0..rank)
    }

    /// First byte and number of elements of the shard of `rank`.
    fn shard(&self, rank: u32, call: &Signature) -> (usize, usize) {
        let range = shard(call.len, self.size, rank);
        (range.start * call.dtype.size(), range.len())
    }

    /// How copies write the results of this call.
    fn result_stores(&self, call: &Signature) -> Stores {
        Stores::of_results(call.bytes(), self.size)
    }

    /// Counts `bytes` bytes of payload that cross from one rank to another, `times` times.
    fn count(&self, bytes: usize, times: u32) {
        self.traffic.set(self.traffic.get() + bytes as u64 * u64::from(times));
    }

    /// The path of an all-reduce.
    fn choose_path(&self, buffer: &Buffer) -> Result<Path> {
        match self.algorithm {
            Algorithm::Ring => Ok(Path::Ring),
            Algorithm::Direct => Ok(large(buffer)),
            Algorithm::Eager if buffer.bytes() > EAGER_BYTES => Err(Error::InvalidArgument {
                operation: "all_reduce",
                problem: format!(
                    "the eager algorithm supports at most {EAGER_BYTES} bytes, not {}",
                    buffer.bytes()
                ),
            }),
            Algorithm::Eager => Ok(Path::Eager),
            Algorithm::Auto => Ok(self.by_size(buffer, buffer.bytes(), self.eager.private_reduction)),
        }
    }

    /// The path of an operation in which every rank contributes at most `bytes` bytes. Private payloads go through slots up to
    /// `private_eager` bytes.
    fn by_size(&self, buffer: &Buffer, bytes: usize, private_eager: usize) -> Path {
        let eager = if buffer.arena().is_some() { self.eager.arena } else { private_eager };
        match bytes {
            0..=INLINE_BYTES => Path::Inline,
            _ if bytes <= eager => Path::Eager,
            _ => large(buffer),
        }
    }
}

/// The path of a payload that is too large for slots.
fn large(buffer: &Buffer) -> Path {
    if buffer.arena().is_some() { Path::Direct } else { Path::Staged }
}

impl CpuTransport {
    fn all_reduce(&mut self, buffer: &Buffer, op: ReduceOp) -> Result<()> {
        let path = self.choose_path(buffer)?;
        let call = &Signature::of(&Call::AllReduce(op), buffer).with_path(path);
        match path {
            Path::Inline | Path::Eager => self.eager_all_reduce(buffer, op, call),
            Path::Direct => self.direct_all_reduce(buffer, op, call),
            Path::Ring => self.ring_all_reduce(buffer, op, call),
            _ => self.staged_all_reduce(buffer, op, call),
        }
    }

    #[inline(never)]
    fn reduce_scatter(&mut self, buffer: &Buffer, op: ReduceOp) -> Result<()> {
        // A rank reads its own shard only.
        let path = self.by_size(buffer, buffer.bytes(), 2 * self.eager.private_reduction);
        let call = &Signature::of(&Call::ReduceScatter(op), buffer).with_path(path);
        match path {
            Path::Inline | Path::Eager => self.eager_reduce_scatter(buffer, op, call),
            Path::Direct => self.direct_reduce_scatter(buffer, op, call),
            _ => self.staged_reduce_scatter(buffer, op, call),
        }
    }

    /// Gathers the parts of all ranks on all ranks, or only on `root`.
    #[inline(never)]
    fn gather(
        &mut self,
        buffer: &Buffer,
        parts: Partition<'_>,
        root: Option<u32>,
        call: Signature,
    ) -> Result<()> {
        let path = self.by_size(buffer, parts.longest() * call.dtype.size(), MESSAGE_EAGER_BYTES);
        let call = &call.with_path(path);
        match (path, root) {
            (Path::Inline | Path::Eager, _) => self.eager_gather(buffer, parts, root, call),
            (Path::Direct, Some(root)) => self.direct_gather(buffer, root, call),
            (Path::Direct, None) => self.direct_all_gather(buffer, parts, call),
            _ => self.staged_gather(buffer, parts, root, call),
        }
    }

    #[inline(never)]
    fn update_all_gather(
        &mut self,
        buffer: Buffer,
        SegmentUpdate { segments, block, update }: SegmentUpdate<'_>,
        call: Signature,
    ) -> Result<Buffer> {
        if buffer.arena().is_some() {
            return self.direct_update_all_gather(
                buffer,
                segments,
                block,
                update,
                &call.with_path(Path::Direct),
            );
        }
        let updated = update_blocks(buffer, segments, (self.size, self.rank), block, update, |_, _| ());
        gather_segments(updated, segments, |segment| {
            let shards = Partition::Shards { len: segment.len(), ranks: self.size };
            self.gather(&segment, shards, None, Signature::of(&Call::AllGather, &segment))?;
            Ok(segment)
        })
    }

    #[inline(never)]
    fn broadcast(&mut self, buffer: &Buffer, root: u32, call: Signature) -> Result<()> {
        let path = self.by_size(buffer, buffer.bytes(), AHEAD_BYTES);
        let call = &call.with_path(path);
        if matches!(path, Path::Inline | Path::Eager) {
            return self.broadcast_ahead(buffer, root, call);
        }
        self.settle(0)?;
        match path {
            Path::Direct => self.direct_broadcast(buffer, root, call),
            _ => self.staged_broadcast(buffer, root, call),
        }
    }

    #[inline(never)]
    fn reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        (root, by_root): (u32, bool),
        call: Signature,
    ) -> Result<()> {
        let path = match self.by_size(buffer, buffer.bytes(), self.eager.private_reduction) {
            Path::Direct if by_root => Path::Root,
            path => path,
        };
        let call = &call.with_path(path);
        match path {
            Path::Inline | Path::Eager => self.eager_reduce(buffer, op, root, call),
            Path::Direct => self.direct_reduce(buffer, op, root, call),
            Path::Root => self.direct_reduce_by_root(buffer, op, root, call),
            _ => self.staged_reduce(buffer, op, root, call),
        }
    }

    /// Scatters the shards of `root`, or exchanges the shards of all ranks.
    #[inline(never)]
    fn exchange(&mut self, buffer: &Buffer, request: &Call<'_>, call: Signature) -> Result<()> {
        let path = self.by_size(buffer, buffer.bytes(), MESSAGE_EAGER_BYTES);
        let call = &call.with_path(path);
        match (path, request) {
            (Path::Direct, Call::Scatter { root }) => self.direct_scatter(buffer, *root, call),
            (Path::Direct, Call::AllToAll) => self.direct_all_to_all(buffer, call),
            _ => {
                let exchange = Exchange::of(request, self.rank, self.size, buffer.len());
                let exchange = exchange.expect("a call that consists of messages");
                match path {
                    Path::Inline | Path::Eager => self.eager_exchange(buffer, &exchange, call),
                    _ => self.staged_exchange(buffer, buffer, &exchange, call),
                }
            }
        }
    }

    /// Exchanges parts of different lengths, from one buffer to another.
    #[inline(never)]
    fn all_to_all_v(
        &mut self,
        from: &Buffer,
        to: &mut Buffer,
        exchange: &Exchange,
        call: Signature,
    ) -> Result<()> {
        let (own, at) = exchange.own.clone();
        to.copy_from(at, from, own);
        self.staged_exchange(from, to, exchange, &call.with_path(Path::Staged))
    }
}

impl FailureHandler for CpuTransport {
    fn abort(&self) {
        // Nor need this rank's NCCL communicators wait for peers.
        #[cfg(feature = "cuda")]
        self.membership.collectives.fail();
        self.membership.page().note_aborted(self.membership.rank(), self.family);
    }

    fn is_at_fault(&self, error: &Error) -> bool {
        matches!(error, Error::Mismatch { .. }) && self.in_minority.get()
    }
}

impl Transport for CpuTransport {
    fn backend(&self) -> &'static str {
        "cpu"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            shares_memory: true,
            sums_in_rank_order: true,
            device_buffers: false,
            shares_cores: self.membership.page().world_size() as usize > self.cores,
            crosses_network: false,
        }
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.membership.page().touch(self.membership.rank());
        self.settle(0)?;
        self.allocate_arena(dtype, len)
    }

    fn replaces_pages(&self) -> bool {
        true
    }

    fn adopt_pages(&mut self, adoption: &Adoption<'_>) -> Result<(Buffer, ReplacedPages)> {
        self.membership.page().touch(self.membership.rank());
        self.settle(0)?;
        self.replace_by_arena(adoption)
    }

    fn releases_memory(&self) -> bool {
        // Peers never write private memory, and arenas stay mapped where they are used.
        true
    }

    fn connect_group(&mut self, group: &SplitGroup, rules: Rules) -> Result<Communicator> {
        let (members, key) = (&group.members, group.key());
        let (rank, size) = (members.rank(), members.size());
        let region = share_region(&self.membership, members, &key, self.timeout)?;
        let transport = CpuTransport {
            membership: Arc::clone(&self.membership),
            members: members.clone(),
            number: FIRST_GROUP + group.number,
            key,
            title: group.title(),
            rank,
            size,
            region,
            family: self.family,
            sequence: 0,
            unsettled: SmallVec::new(),
            broadcasts: 0,
            queued: vec![0; size as usize],
            streamed: Streamed::default(),
            stores: Choices::default(),
            sent: vec![0; size as usize],
            received: vec![0; size as usize],
            arenas: 0,
            algorithm: self.algorithm,
            // The ranks of other groups need cores, too.
            cores: self.cores,
            policy: self.policy,
            eager: EagerLimits::new(self.policy, size),
            timeout: self.timeout,
            traffic: Cell::new(0),
            arrival: None,
            in_minority: Cell::new(false),
        };
        Ok(Communicator::new(transport, members.clone(), Arc::new(rules.touched_by_transport())))
    }

    fn submit(&mut self, request: &mut Request<'_>) -> Result<()> {
        let Request { call, buffer, .. } = request;
        if !matches!(call, Call::Broadcast { .. }) && call.is_collective() {
            self.settle(0)?;
        }
        let shards = Partition::Shards { len: buffer.len(), ranks: self.size };
        match call {
            // Signatures that only depend on the kind of the call are built here, so that they are constants: small
            // operations are that sensitive.
            Call::Barrier => self.enter(&Signature::of(&Call::Barrier, buffer))?,
            &mut Call::AllReduce(op) => self.all_reduce(buffer, op)?,
            &mut Call::ReduceScatter(op) => self.reduce_scatter(buffer, op)?,
            Call::AllGather => self.gather(buffer, shards, None, Signature::of(&Call::AllGather, buffer))?,
            &mut Call::AllGatherV { counts } => {
                self.gather(buffer, Partition::Counts(counts), None, Signature::of(call, buffer))?;
            }
            &mut Call::Gather { root } => {
                self.gather(buffer, shards, Some(root), Signature::of(call, buffer))?;
            }
            Call::UpdateAllGather(_) => {
                let signature = Signature::of(call, buffer);
                let Call::UpdateAllGather(update) = call else { unreachable!("it is one") };
                *buffer = self.update_all_gather(buffer.take(), update.by_ref(), signature)?;
            }
            &mut Call::Broadcast { root } => self.broadcast(buffer, root, Signature::of(call, buffer))?,
            &mut Call::Reduce { op, root, by_root } => {
                self.reduce(buffer, op, (root, by_root), Signature::of(call, buffer))?;
            }
            Call::AllToAll | Call::Scatter { .. } => {
                self.exchange(buffer, call, Signature::of(call, buffer))?;
            }
            &mut Call::AllToAllV { from, .. } => {
                let exchange = Exchange::of(call, self.rank, self.size, buffer.len());
                let exchange = exchange.expect("a call that consists of messages");
                self.all_to_all_v(from, buffer, &exchange, Signature::of(call, buffer))?;
            }
            &mut Call::Send { to } => self.send_message(buffer, to, &Signature::of(call, buffer))?,
            &mut Call::Recv { from } => self.receive_message(buffer, from, &Signature::of(call, buffer))?,
            &mut Call::SendRecv { from, peer } => {
                self.send_and_receive(from, buffer, peer, &Signature::of(call, buffer))?;
            }
        }
        Ok(())
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.algorithm = algorithm;
    }

    fn set_oversubscribed(&mut self) {
        self.policy = WaitPolicy::for_ranks(2 * self.membership.page().world_size(), self.cores);
        self.eager = EagerLimits::new(self.policy, self.size);
    }

    fn traffic(&self) -> Option<u64> {
        Some(self.traffic.get())
    }

    fn record_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.arrival = Some(at);
    }
}
