//! Collectives over the shared memory of one host.
//!
//! Every operation begins with an arrival: a rank publishes what it has called, waits for its peers and compares.
//! From then on all buffers of the operation may be touched by all ranks. How the payload travels is a matter of
//! size and place:
//!
//! | payload | path | synchronisations |
//! |---|---|---|
//! | up to 48 bytes | within the arrival line | 1 |
//! | up to 8 KiB | [`eager`]: through small slots, every rank reduces all | 1 |
//! | in an arena | [`direct`]: in place, blocks claimed by whoever is free | 2 |
//! | elsewhere | [`staged`]: through staging memory, in chunks | 1 or 2 a chunk |
//! | on request | [`ring`]: from rank to rank, over [`channel`]s | 1, then pairwise |

mod call;
mod channel;
mod direct;
mod eager;
mod region;
mod ring;
mod staged;
mod wait;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use call::{Call, Kind, Path, describe};
use region::{EAGER_BYTES, INLINE_BYTES, Region};
use wait::{Flag, Patience, at_least};

use super::buffer::Arena;
use super::{Algorithm, Buffer, Communicator, DType, Pending, ReduceOp};
use crate::membership::Membership;
use crate::shm::{SharedMemory, reserve};
use crate::{Error, Result};

/// The communicator of one rank.
pub(crate) struct CpuCommunicator {
    membership: Arc<Membership>,
    name: String,
    rank: u32,
    size: u32,
    region: Region,
    /// Number of the last operation entered.
    sequence: u32,
    /// Tickets and blocks that earlier operations have used up.
    claimed: u32,
    completed: u32,
    /// Chunks sent to and received from each rank.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// Arenas allocated so far.
    arenas: u32,
    algorithm: Algorithm,
    patience: Patience,
    timeout: Duration,
    /// The error that made this communicator unusable.
    poison: Option<String>,
}

/// Joins communicator `name` of a world of `size` ranks.
pub(crate) fn connect(
    membership: &Arc<Membership>,
    size: u32,
    name: &str,
    timeout: Duration,
) -> Result<CpuCommunicator> {
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
    store.barrier(&format!("{name}/connected"), timeout)?;
    Ok(CpuCommunicator {
        membership: Arc::clone(membership),
        name: name.to_owned(),
        rank,
        size,
        region,
        sequence: 0,
        claimed: 0,
        completed: 0,
        sent: vec![0; size as usize],
        received: vec![0; size as usize],
        arenas: 0,
        algorithm: Algorithm::Auto,
        patience: Patience::for_ranks(size),
        timeout,
        poison: None,
    })
}

fn one_descriptor(fds: Vec<std::os::fd::OwnedFd>) -> Result<std::os::fd::OwnedFd> {
    let count = fds.len();
    fds.into_iter().next().filter(|_| count == 1).ok_or_else(|| Error::Protocol {
        peer: "rank 0".into(),
        problem: format!("{count} descriptors where one is expected"),
    })
}

impl CpuCommunicator {
    /// Runs an operation. Its error, unless it is about the arguments, makes the communicator unusable.
    fn guard<R>(&mut self, operation: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        if let Some(cause) = &self.poison {
            return Err(Error::Poisoned { rank: self.rank, cause: cause.clone() });
        }
        operation(self).inspect_err(|error| {
            if !matches!(error, Error::InvalidArgument { .. }) {
                self.poison = Some(error.to_string());
                self.membership.page().blame(self.rank, error);
            }
        })
    }

    /// The ranks other than this one, the next one first.
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, size) = (self.rank, self.size);
        (1..size).map(move |distance| (rank + distance) % size)
    }

    /// The number the next operation will have: what to write before [`enter`](Self::enter) belongs to it.
    fn next_sequence(&self) -> u32 {
        self.sequence.wrapping_add(1)
    }

    /// Arrives at the next operation and waits until all ranks have, with the same call.
    fn enter(&mut self, call: &Call) -> Result<()> {
        self.sequence = self.next_sequence();
        let bytes = call.len * call.dtype.size();
        self.membership.page().enter(self.rank, self.sequence, bytes);
        let ours = call.encode();
        let line = self.region.arrival(self.rank, self.sequence);
        for (slot, word) in line.call.iter().zip(ours) {
            slot.store(word, Ordering::Relaxed);
        }
        line.flag.publish(self.sequence);
        for peer in self.peers() {
            let line = self.region.arrival(peer, self.sequence);
            let missing = || self.peers().filter(|peer| !self.has_arrived(*peer)).collect();
            self.wait(&line.flag, self.sequence, Some(peer), call, missing)?;
            let theirs = [0, 1, 2].map(|index: usize| line.call[index].load(Ordering::Relaxed));
            self.compare(peer, self.sequence, ours, theirs)?;
        }
        Ok(())
    }

    fn has_arrived(&self, peer: u32) -> bool {
        at_least(self.region.arrival(peer, self.sequence).flag.load(), self.sequence)
    }

    fn compare(&self, peer: u32, sequence: u32, ours: [u64; 3], theirs: [u64; 3]) -> Result<()> {
        if ours == theirs {
            return Ok(());
        }
        let (rank, ours, theirs) = (self.rank, describe(ours), describe(theirs));
        Err(Error::Mismatch { rank, peer, sequence, ours, theirs })
    }

    /// Waits until `flag` has come to `target`. `awaited` is the rank that advances it, `None` if any may.
    fn wait(
        &self,
        flag: &Flag,
        target: u32,
        awaited: Option<u32>,
        call: &Call,
        missing: impl Fn() -> Vec<u32>,
    ) -> Result<()> {
        self.patience.wait(flag, target, |waited| {
            let operation = || format!("operation {} of {}, {call}", self.sequence, self.name);
            let awaited: Vec<u32> = awaited.map_or_else(|| self.peers().collect(), |peer| vec![peer]);
            if let Some(error) = self.membership.lost_peer(&awaited, operation) {
                return Err(error);
            }
            if waited < self.timeout {
                return Ok(());
            }
            let mut waited_for = missing();
            waited_for.sort_unstable();
            Err(Error::Timeout { rank: self.rank, waited_for, operation: operation(), after: waited })
        })
    }

    /// Waits until all ranks have finished reading and writing each other's buffers.
    fn leave(&mut self, call: &Call) -> Result<()> {
        self.region.done().count.increment();
        self.wait_completed(self.size, call)
    }

    /// Waits until `blocks` more blocks have been completed by whichever ranks.
    fn wait_completed(&mut self, blocks: u32, call: &Call) -> Result<()> {
        self.completed = self.completed.wrapping_add(blocks);
        let missing = || {
            let busy = |peer: &u32| self.region.rank_line(*peer).busy.load(Ordering::Relaxed) != 0;
            let holders: Vec<u32> = self.peers().filter(busy).collect();
            if holders.is_empty() { self.peers().collect() } else { holders }
        };
        self.wait(&self.region.done().count, self.completed, None, call, missing)
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

    /// Elements of a shard.
    fn shard(&self, operation: &'static str, buffer: &Buffer) -> Result<usize> {
        let ranks = self.size as usize;
        if buffer.len().is_multiple_of(ranks) {
            return Ok(buffer.len() / ranks);
        }
        let problem = format!("{} elements cannot be cut into {ranks} equal shards", buffer.len());
        Err(Error::InvalidArgument { operation, problem })
    }

    /// The path of an all-reduce.
    fn choose_path(&self, buffer: &Buffer) -> Result<Path> {
        let large = if buffer.arena().is_some() { Path::Direct } else { Path::Staged };
        match self.algorithm {
            Algorithm::Ring => Ok(Path::Ring),
            Algorithm::Direct => Ok(large),
            Algorithm::Eager if buffer.bytes() > EAGER_BYTES => Err(Error::InvalidArgument {
                operation: "all_reduce",
                problem: format!("the eager algorithm carries {EAGER_BYTES} bytes, not {}", buffer.bytes()),
            }),
            Algorithm::Eager => Ok(Path::Eager),
            Algorithm::Auto if buffer.bytes() <= INLINE_BYTES => Ok(Path::Inline),
            Algorithm::Auto if buffer.bytes() <= EAGER_BYTES => Ok(Path::Eager),
            Algorithm::Auto => Ok(large),
        }
    }
}

/// Direct in an arena, staged elsewhere.
fn by_place(call: Call) -> Call {
    call.via(if call.place == 0 { Path::Staged } else { Path::Direct })
}

impl Communicator for CpuCommunicator {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn backend(&self) -> &'static str {
        "cpu"
    }

    fn set_algorithm(&mut self, algorithm: Algorithm) {
        self.algorithm = algorithm;
    }

    fn allocate(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let Some(bytes) = len.checked_mul(dtype.size()).filter(|bytes| *bytes <= MOST_BYTES) else {
            let problem = format!("{len} elements of {dtype} are more than any machine has memory for");
            return Err(Error::InvalidArgument { operation: "allocate", problem });
        };
        self.guard(|comm| {
            comm.enter(&Call::plain(Kind::Allocate, dtype, len))?;
            let arena = comm.allocate_arena(bytes)?;
            // Nobody touches a peer's part before that rank has reserved it.
            comm.enter(&Call::plain(Kind::Allocate, dtype, len))?;
            Ok(Buffer::in_arena(arena, dtype, len))
        })
    }

    fn all_reduce(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.guard(|comm| {
            let path = comm.choose_path(&buffer)?;
            let call = Call::new(Kind::AllReduce, &buffer, Some(op), 0).via(path);
            match path {
                Path::Inline => comm.inline_all_reduce(&buffer, op, &call)?,
                Path::Eager => comm.eager_all_reduce(&buffer, op, &call)?,
                Path::Direct => comm.direct_all_reduce(&buffer, op, &call)?,
                Path::Ring => comm.ring_all_reduce(&buffer, op, &call)?,
                Path::Staged | Path::None => comm.staged_all_reduce(&buffer, op, &call)?,
            }
            Ok(Pending::complete(buffer))
        })
    }

    fn reduce_scatter(&mut self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.guard(|comm| {
            let shard = comm.shard("reduce_scatter", &buffer)?;
            let call = by_place(Call::new(Kind::ReduceScatter, &buffer, Some(op), 0));
            match buffer.arena() {
                Some(_) => comm.direct_reduce_scatter(&buffer, shard, op, &call)?,
                None => comm.staged_reduce_scatter(&buffer, shard, op, &call)?,
            }
            Ok(Pending::complete(buffer))
        })
    }

    fn all_gather(&mut self, buffer: Buffer) -> Result<Pending> {
        self.guard(|comm| {
            let shard = comm.shard("all_gather", &buffer)?;
            let call = by_place(Call::new(Kind::AllGather, &buffer, None, 0));
            match buffer.arena() {
                Some(_) => comm.direct_all_gather(&buffer, shard, &call)?,
                None => comm.staged_all_gather(&buffer, shard, &call)?,
            }
            Ok(Pending::complete(buffer))
        })
    }

    fn broadcast(&mut self, buffer: Buffer, root: u32) -> Result<Pending> {
        self.guard(|comm| {
            comm.check_rank("broadcast", root)?;
            let call = by_place(Call::new(Kind::Broadcast, &buffer, None, root));
            match buffer.arena() {
                Some(_) => comm.direct_broadcast(&buffer, root, &call)?,
                None => comm.staged_broadcast(&buffer, root, &call)?,
            }
            Ok(Pending::complete(buffer))
        })
    }

    fn reduce(&mut self, buffer: Buffer, op: ReduceOp, root: u32) -> Result<Pending> {
        self.guard(|comm| {
            comm.check_rank("reduce", root)?;
            let call = by_place(Call::new(Kind::Reduce, &buffer, Some(op), root));
            match buffer.arena() {
                Some(_) => comm.direct_reduce(&buffer, op, root, &call)?,
                None => comm.staged_reduce(&buffer, op, root, &call)?,
            }
            Ok(Pending::complete(buffer))
        })
    }

    fn send(&mut self, buffer: Buffer, to: u32) -> Result<Pending> {
        self.guard(|comm| {
            comm.check_peer("send", to)?;
            comm.send_message(&buffer, to)?;
            Ok(Pending::complete(buffer))
        })
    }

    fn recv(&mut self, buffer: Buffer, from: u32) -> Result<Pending> {
        self.guard(|comm| {
            comm.check_peer("recv", from)?;
            comm.receive_message(&buffer, from)?;
            Ok(Pending::complete(buffer))
        })
    }

    fn barrier(&mut self) -> Result<()> {
        self.guard(|comm| comm.enter(&Call::plain(Kind::Barrier, DType::U8, 0)))
    }
}

/// Parts of an arena are aligned to huge pages once they fill one.
const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;
/// Largest part of an arena: what its byte offsets have room for in a call's description.
const MOST_BYTES: usize = 1 << 46;
/// Offset between the parts of neighbouring ranks beyond their alignment: equal elements of all ranks must not
/// fall into the same cache set.
const STAGGER: usize = 65 * 64;

impl CpuCommunicator {
    /// Memory in which every rank has a part of `bytes` bytes.
    fn allocate_arena(&mut self, bytes: usize) -> Result<Arena> {
        let id = self.arenas;
        self.arenas += 1;
        let part = bytes + self.size as usize * STAGGER;
        let stride = part.next_multiple_of(if part >= HUGE_PAGE { HUGE_PAGE } else { PAGE });
        let parts: Vec<usize> = (0..self.size as usize).map(|rank| rank * stride + rank * STAGGER).collect();
        let total = stride * self.size as usize;
        let name = format!("{}/arena-{id}", self.name);
        let store = self.membership.store();
        let (memory, fd) = if self.rank == 0 {
            let (memory, fd) = SharedMemory::create(&name, total)?;
            store.set(&name, b"", &[fd.as_fd()], self.size - 1)?;
            (memory, fd)
        } else {
            let (_, fds) = store.get(&name, 0, self.timeout)?;
            let fd = one_descriptor(fds)?;
            (SharedMemory::open(&name, fd.as_fd(), total)?, fd)
        };
        reserve(&name, fd.as_fd(), parts[self.rank as usize], bytes)?;
        Ok(Arena { memory, id, parts, rank: self.rank })
    }
}
