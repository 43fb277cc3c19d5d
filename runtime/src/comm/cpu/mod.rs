//! Collectives over the shared memory of one host.
//!
//! Every operation begins with an arrival ([`agree`]): a rank publishes what it has called, waits for its peers and
//! compares. From then on all buffers of the operation may be touched by all ranks. How the payload travels is a
//! matter of size and place:
//!
//! | payload | path | synchronisations |
//! |---|---|---|
//! | up to 48 bytes | within the arrival line | 1 |
//! | up to about a KiB, 16 KiB if private | [`eager`]: through small slots, every rank reduces all | 1 |
//! | in an arena | [`direct`]: in place, in blocks that late ranks are helped with | 2 |
//! | made for an all-gather, in an arena | [`direct`]: every rank writes its shards to all, block by block | 2 |
//! | elsewhere | [`staged`]: through staging memory, in chunks | 2 a chunk |
//! | on request | [`ring`]: from rank to rank, over [`channel`]s | 1, then pairwise |

mod agree;
mod arena;
pub(super) mod call;
mod channel;
mod cores;
mod direct;
mod eager;
mod lines;
mod prefetch;
mod region;
mod ring;
mod staged;
mod wait;

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use arena::one_descriptor;
use call::{Call, Path, mix};
use cores::Cores;
use lines::INLINE_BYTES;
use region::{EAGER_BYTES, Region};
use wait::Patience;

use super::{
    Algorithm, Buffer, DType, Pending, ReduceOp, Transport, Update, check_segments, gather_segments,
    make_blocks, shard,
};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::{Error, Result};

/// The communicator of one rank.
pub(crate) struct CpuCommunicator {
    membership: Arc<Membership>,
    /// Position among the communicators of the world.
    number: u32,
    name: String,
    rank: u32,
    size: u32,
    region: Region,
    /// Number of the last operation entered.
    sequence: u32,
    /// Blocks that earlier operations have queued with each rank.
    queued: Vec<u32>,
    /// Chunks sent to and received from each rank; at this rank's own place those of the ring.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Arenas allocated so far.
    arenas: u32,
    algorithm: Algorithm,
    /// Cores that all ranks have between them.
    cores: usize,
    patience: Patience,
    timeout: Duration,
    /// Where to note when all ranks had come to an operation, if somebody wants to know.
    arrival: Option<Arc<AtomicU64>>,
    /// The error that made this communicator unusable.
    poison: Option<String>,
    /// Whether more ranks made another call than made this rank's, where calls were compared last: then none of them is to
    /// blame for the mismatch.
    outvoted: Cell<bool>,
}

/// Joins communicator `number` of a world of `size` ranks.
pub(crate) fn connect(
    membership: &Arc<Membership>,
    size: u32,
    number: u32,
    timeout: Duration,
) -> Result<CpuCommunicator> {
    let name = format!("communicator-{number}");
    membership.check_process()?;
    let (rank, page) = (membership.rank(), membership.page());
    page.enter(rank, Operation::Connect, number, 0);
    let region = share_region(membership, size, &name, timeout).inspect_err(|error| {
        membership.accuse(error);
        membership.hold_back(error);
    })?;
    page.leave(rank);
    let cores = Cores::count((0..size).map(|rank| region.cores(rank)));
    Ok(CpuCommunicator {
        membership: Arc::clone(membership),
        number,
        name,
        rank,
        size,
        region,
        sequence: 0,
        queued: vec![0; size as usize],
        sent: vec![0; size as usize],
        received: vec![0; size as usize],
        arenas: 0,
        algorithm: Algorithm::Auto,
        cores,
        patience: Patience::for_ranks(size, cores),
        timeout,
        arrival: None,
        poison: None,
        outvoted: Cell::new(false),
    })
}

/// The memory of communicator `name`: made by rank 0, mapped by all.
fn share_region(membership: &Membership, size: u32, name: &str, timeout: Duration) -> Result<Region> {
    let (rank, store) = (membership.rank(), membership.store());
    let key = format!("{name}/region");
    let (region, fd) = if rank == 0 {
        let (region, fd) = Region::create(name, size)?;
        store.set(&key, b"", &[fd.as_fd()], size - 1)?;
        (region, fd)
    } else {
        let (_, fds) = store.get(&key, 0, timeout)?;
        let fd = one_descriptor(fds)?;
        (Region::open(name, fd.as_fd(), size)?, fd)
    };
    region.reserve(name, fd.as_fd(), rank)?;
    region.cores(rank).publish();
    store.barrier(&format!("{name}/connected"), timeout)?;
    Ok(region)
}

impl CpuCommunicator {
    /// Runs an operation. Its error, unless it is about the arguments, makes the communicator unusable.
    fn guard<R>(&mut self, operation: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.membership.check_process()?;
        if let Some(cause) = &self.poison {
            return Err(Error::Poisoned { rank: self.rank, cause: cause.clone() });
        }
        let result = operation(self).inspect(|_| self.membership.page().leave(self.rank));
        result.inspect_err(|error| {
            if !matches!(error, Error::InvalidArgument { .. }) {
                self.poison = Some(error.to_string());
                let is_at_fault = matches!(error, Error::Mismatch { .. }) && self.outvoted.get();
                if !is_at_fault {
                    self.membership.accuse(error);
                }
                self.membership.hold_back(error);
            }
        })
    }

    /// As [`guard`](Self::guard), of an operation on `buffer`, which has to be private or of this rank's world.
    fn guard_buffer(
        &mut self,
        name: &'static str,
        buffer: Buffer,
        operation: impl FnOnce(&mut Self, &Buffer) -> Result<()>,
    ) -> Result<Pending> {
        self.check_owner(name, &buffer)?;
        self.guard(|comm| operation(comm, &buffer))?;
        Ok(Pending::complete(buffer))
    }

    fn check_owner(&self, operation: &'static str, buffer: &Buffer) -> Result<()> {
        let foreign = buffer.arena().filter(|(arena, _)| !arena.belongs_to(&self.membership));
        let Some((arena, _)) = foreign else { return Ok(()) };
        let (communicator, number) = (arena.id >> 32, arena.id & u64::from(u32::MAX));
        let problem = format!(
            "the buffer lies in arena {number} of communicator {communicator} that rank {} of {} allocated in another world, or \
             that is of another rank of this one; allocate it with a communicator of the same world, or copy it into a private \
             buffer",
            arena.rank,
            arena.parts.len(),
        );
        Err(Error::InvalidArgument { operation, problem })
    }

    /// The ranks other than this one, the next one first.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, size) = (self.rank, self.size);
        (1..size).map(move |distance| (rank + distance) % size)
    }

    fn check_rank(&self, operation: &'static str, rank: u32) -> Result<()> {
        if rank < self.size {
            return Ok(());
        }
        let problem = format!("there is no rank {rank} in a world of {}", self.size);
        Err(Error::InvalidArgument { operation, problem })
    }

    fn check_peer(&self, operation: &'static str, rank: u32) -> Result<()> {
        self.check_rank(operation, rank)?;
        if rank != self.rank {
            return Ok(());
        }
        Err(Error::InvalidArgument { operation, problem: format!("rank {rank} cannot be its own peer") })
    }

    /// First byte and number of elements of the shard of `rank` of an operation's buffer.
    fn shard(&self, rank: u32, call: &Call) -> (usize, usize) {
        let range = shard(call.len, self.size, rank);
        (range.start * call.dtype.size(), range.len())
    }

    /// The path of an all-reduce.
    fn choose_path(&self, buffer: &Buffer) -> Result<Path> {
        match self.algorithm {
            Algorithm::Ring => Ok(Path::Ring),
            Algorithm::Direct => Ok(large(buffer)),
            Algorithm::Eager if buffer.bytes() > EAGER_BYTES => Err(Error::InvalidArgument {
                operation: "all_reduce",
                problem: format!("the eager algorithm carries {EAGER_BYTES} bytes, not {}", buffer.bytes()),
            }),
            Algorithm::Eager => Ok(Path::Eager),
            Algorithm::Auto => Ok(self.by_size(buffer, buffer.bytes())),
        }
    }

    /// The path of an operation of which every rank contributes at most `bytes` bytes.
    fn by_size(&self, buffer: &Buffer, bytes: usize) -> Path {
        // Slots cost copies, the other paths a synchronisation more: cheap between cores, dear when ranks have to be
        // scheduled for it. All limits measured, on two ranks and on four on two cores.
        let eager = match buffer.arena() {
            Some(_) if self.patience.is_crowded() => 2 << 10,
            Some(_) => 768,
            None => EAGER_BYTES,
        };
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

impl Transport for CpuCommunicator {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn backend(&self) -> &'static str {
        "cpu"
    }

    fn note_arrivals(&mut self, at: Arc<AtomicU64>) {
        self.arrival = Some(at);
    }

    fn blame(&mut self, error: &Error) {
        self.membership.blame(error);
    }

    fn set_oversubscribed(&mut self) {
        self.patience = Patience::for_ranks(2 * self.size, self.cores);
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.algorithm = algorithm;
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        self.guard(|comm| comm.allocate_arena(dtype, len))
    }

    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.guard_buffer("all_reduce", buffer, |comm, buffer| {
            let path = comm.choose_path(buffer)?;
            let call = Call::new(Operation::AllReduce, buffer, Some(op), 0).via(path);
            match path {
                Path::Inline | Path::Eager => comm.eager_all_reduce(buffer, op, &call),
                Path::Direct => comm.direct_all_reduce(buffer, op, &call),
                Path::Ring => comm.ring_all_reduce(buffer, op, &call),
                _ => comm.staged_all_reduce(buffer, op, &call),
            }
        })
    }

    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.guard_buffer("reduce_scatter", buffer, |comm, buffer| {
            let path = comm.by_size(buffer, buffer.bytes());
            let call = Call::new(Operation::ReduceScatter, buffer, Some(op), 0).via(path);
            match path {
                Path::Inline | Path::Eager => comm.eager_reduce_scatter(buffer, op, &call),
                Path::Direct => comm.direct_reduce_scatter(buffer, op, &call),
                _ => comm.staged_reduce_scatter(buffer, op, &call),
            }
        })
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.guard_buffer("all_gather", buffer, |comm, buffer| {
            let largest = shard(buffer.len(), comm.size, 0).len() * buffer.dtype().size();
            let path = comm.by_size(buffer, largest);
            let call = Call::new(Operation::AllGather, buffer, None, 0).via(path);
            match path {
                Path::Inline | Path::Eager => comm.eager_all_gather(buffer, &call),
                Path::Direct => comm.direct_all_gather(buffer, &call),
                _ => comm.staged_all_gather(buffer, &call),
            }
        })
    }

    fn update_all_gather(
        &mut self,
        buffer: Buffer,
        segments: &[Range<usize>],
        block: usize,
        make: &mut Update<'_>,
    ) -> Result<Pending> {
        check_segments(&buffer, segments, block)?;
        self.check_owner("all_gather", &buffer)?;
        if buffer.arena().is_none() {
            let made = make_blocks(buffer, segments, (self.size, self.rank), block, make, |_, _| ());
            let gathered = gather_segments(made, segments, |shards| self.all_gather(shards)?.wait())?;
            return Ok(Pending::complete(gathered));
        }
        self.guard(|comm| {
            // In the root's place, which an all-gather has not.
            let digest =
                segments.iter().flat_map(|segment| [segment.start as u64, segment.end as u64]).fold(0, mix)
                    as u32;
            let call = Call::new(Operation::AllGather, &buffer, None, digest).via(Path::Made);
            comm.direct_update_all_gather(buffer, segments, block, make, &call).map(Pending::complete)
        })
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.guard_buffer("broadcast", buffer, |comm, buffer| {
            comm.check_rank("broadcast", root)?;
            let path = comm.by_size(buffer, buffer.bytes());
            let call = Call::new(Operation::Broadcast, buffer, None, root).via(path);
            match path {
                Path::Inline | Path::Eager => comm.eager_broadcast(buffer, root, &call),
                Path::Direct => comm.direct_broadcast(buffer, root, &call),
                _ => comm.staged_broadcast(buffer, root, &call),
            }
        })
    }

    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.guard_buffer("reduce", buffer, |comm, buffer| {
            comm.check_rank("reduce", root)?;
            let path = comm.by_size(buffer, buffer.bytes());
            let call = Call::new(Operation::Reduce, buffer, Some(op), root).via(path);
            match path {
                Path::Inline | Path::Eager => comm.eager_reduce(buffer, op, root, &call),
                Path::Direct => comm.direct_reduce(buffer, op, root, &call),
                _ => comm.staged_reduce(buffer, op, root, &call),
            }
        })
    }

    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.guard_buffer("send", buffer, |comm, buffer| {
            comm.check_peer("send", to)?;
            comm.send_message(buffer, to)
        })
    }

    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.guard_buffer("recv", buffer, |comm, buffer| {
            comm.check_peer("recv", from)?;
            comm.receive_message(buffer, from)
        })
    }

    fn barrier(&mut self) -> Result<()> {
        self.guard(|comm| comm.enter(&Call::plain(Operation::Barrier, DType::U8, 0)))
    }
}
