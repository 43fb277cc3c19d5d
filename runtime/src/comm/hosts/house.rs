//! What ranks of one host share: memory that all of them map, a board, and a barrier among them.
//!
//! A *house* is a run of at least two ranks (see [`runs`](super::runs)). Its ranks read and write each other's buffers
//! directly between two barriers, so that a payload leaves and enters a host once, however many ranks are there. Buffers
//! that were allocated together are in memory that all of them map; others are copied through the *stage*, which the house
//! has from the start.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::HostsTransport;
use super::board::{Board, LINE as BOARD_LINE, Layout, Watch};
use super::gathering::Watched;
use super::wait::Awaited;
use crate::comm::buffer::Arena;
use crate::comm::cpu::{one_descriptor, place_parts};
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, Members, bytes_of};
use crate::membership::Membership;
use crate::progress::Operation;
use crate::shm::{SharedMemory, reserve};
use crate::{Error, Result, memory};

/// Size of the stage of each rank.
pub(super) const STAGE_BYTES: usize = 1 << 20;

/// Addresses of the buffers of all ranks of a house, in rank order.
pub(super) type Addresses = SmallVec<[*mut u8; 16]>;

/// The memory of a house.
#[derive(Debug)]
pub(super) struct House {
    /// Ranks in the communicator.
    pub(super) ranks: Range<u32>,
    pub(super) memory: SharedMemory,
    /// Where the stage of each rank begins.
    stages: Vec<usize>,
    pub(super) board: Board,
}

impl House {
    /// The house of `ranks`, whose communicator is called `key` at the rendezvous.
    pub(super) fn connect(
        membership: &Membership,
        members: &Members,
        ranks: Range<u32>,
        key: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let name = format!("{key}/house-{}", members.world_rank(ranks.start));
        // A part has a rank's stage, and its part of the board; the sheets follow.
        let layout = Layout::new(members.size());
        let part = STAGE_BYTES + BOARD_LINE + layout.bytes_of_rank();
        let (stages, sheets) = place_parts(ranks.len(), part);
        let total = sheets + layout.bytes_of_sheets();
        let shared = share(membership, (members, &ranks), &name, total, timeout)?;
        let (memory, fd) =
            shared.map_err(|problem| Error::system(format!("share memory for {key}"), problem))?;
        let own = (members.rank() - ranks.start) as usize;
        reserve(&name, &memory, fd.as_fd(), stages[own], part)?;
        if own == 0 {
            reserve(&name, &memory, fd.as_fd(), sheets, layout.bytes_of_sheets())?;
        }
        let slots = stages.iter().map(|stage| (stage + STAGE_BYTES).next_multiple_of(BOARD_LINE)).collect();
        let board = Board::new(layout, slots, sheets, own);
        Ok(House { ranks, memory, stages, board })
    }

    /// The stages of all ranks.
    pub(super) fn stages(&self) -> Addresses {
        self.stages.iter().map(|at| self.memory.at(*at)).collect()
    }

    pub(super) fn watch(&self, watched: Watched) -> Watch<'_> {
        match watched {
            Watched::Nothing => Watch::default(),
            Watched::Barrier(barrier) => self.board.watch_barrier(&self.memory, barrier),
            Watched::Arrivals(sequence) => self.board.watch_arrivals(&self.memory, sequence),
            Watched::Sheet(sequence) => self.board.watch_sheet(&self.memory, sequence),
        }
    }
}

/// Creates `total` bytes of memory on the first of `ranks`, and maps it on all of them; or why it could not be created.
fn share(
    membership: &Membership,
    (members, ranks): (&Members, &Range<u32>),
    name: &str,
    total: usize,
    timeout: Duration,
) -> Result<Result<(SharedMemory, OwnedFd), String>> {
    let (store, first) = (membership.store(), members.world_rank(ranks.start));
    if members.rank() == ranks.start {
        let created = SharedMemory::create(name, total).map_err(|error| error.to_string());
        let readers = ranks.len() as u32 - 1;
        match &created {
            Ok((_, fd)) => store.set(name, b"", &[fd.as_fd()], readers)?,
            Err(problem) => store.set(name, problem.as_bytes(), &[], readers)?,
        }
        return Ok(created);
    }
    let (problem, fds) = store.get(name, first, timeout)?;
    if !problem.is_empty() {
        return Ok(Err(String::from_utf8_lossy(&problem).into_owned()));
    }
    let fd = one_descriptor(fds)?;
    Ok(Ok((SharedMemory::open(name, fd.as_fd(), total)?, fd)))
}

impl HostsTransport {
    /// Memory for `len` elements of each rank, which the ranks of a house map together. If one rank has too little, no
    /// rank gets any.
    pub(super) fn allocate_in_house(&mut self, dtype: DType, len: usize) -> Result<Buffer> {
        let (call, bytes) = (Signature::plain(Operation::Allocate, dtype, len), bytes_of(dtype, len)?);
        let ranks = self.host.local_ranks;
        let shortage = memory::shortage(bytes.saturating_mul(ranks as usize)).map(|problem| {
            format!("{problem}, for each of {ranks} ranks of the host of rank {}", self.membership.rank())
        });
        self.agree_on(&call, shortage)?;
        if self.runs.are_single() {
            return Ok(Buffer::zeroed_of(dtype, len));
        }
        self.arenas += 1;
        let arena = match &self.house {
            Some(house) => self.create_arena(house.ranks.clone(), bytes)?.map(Some),
            None => Ok(None),
        };
        // All ranks have reserved their parts when this returns.
        self.agree_on(&call, arena.as_ref().err().cloned())?;
        Ok(match arena {
            Ok(Some(arena)) => Buffer::in_arena(arena, dtype, len),
            _ => Buffer::zeroed_of(dtype, len),
        })
    }

    /// An arena with `bytes` bytes for each of `ranks`, or why there is none.
    fn create_arena(&self, ranks: Range<u32>, bytes: usize) -> Result<Result<Arena, String>> {
        let (membership, members) = (&self.membership, &self.members);
        let name = format!("{}/house-{}/arena-{}", self.key, members.world_rank(ranks.start), self.arenas);
        let (parts, total) = place_parts(ranks.len(), bytes);
        let created = share(membership, (members, &ranks), &name, total, self.timeout)?;
        let own = parts[(members.rank() - ranks.start) as usize];
        Ok(created.and_then(|(memory, fd)| {
            reserve(&name, &memory, fd.as_fd(), own, bytes).map_err(|error| error.to_string())?;
            memory.map_pages();
            let id = u64::from(self.number) << 32 | u64::from(self.arenas);
            let parts = ranks.map(|rank| members.world_rank(rank)).zip(parts);
            Ok(Arena::new(memory, id, Arc::downgrade(membership), members, parts))
        }))
    }

    /// Waits for all ranks. An error on all of them if one has a problem.
    fn agree_on(&mut self, call: &Signature, problem: Option<String>) -> Result<()> {
        let own = problem.unwrap_or_default();
        let problems = self.enter(call, &own.as_bytes()[..own.len().min(self.small_bytes())])?;
        let theirs = problems.iter().find(|problem| !problem.is_empty());
        let theirs = theirs.map(|problem| String::from_utf8_lossy(problem).into_owned());
        match Some(own).filter(|own| !own.is_empty()).or(theirs) {
            Some(problem) => Err(Error::InvalidArgument { operation: "allocate", problem }),
            None => Ok(()),
        }
    }

    /// Identifies the memory of a buffer for the other ranks of the house; 0 if not all of them map it.
    pub(super) fn location(&self, buffer: &Buffer) -> u64 {
        // A communicator in whose order these ranks are not next to each other has several arenas of this number here.
        let has_all =
            |arena: &Arena| self.runs.own().all(|rank| arena.has_part(self.members.world_rank(rank)));
        let is_ours = |arena: &Arena| {
            arena.belongs_to(&self.membership) && arena.is_of(&self.members) && has_all(arena)
        };
        let Some((arena, offset)) = buffer.arena().filter(|(arena, _)| is_ours(arena)) else { return 0 };
        xxhash_rust::xxh3::xxh3_64_with_seed(&arena.id.to_le_bytes(), offset as u64).max(1)
    }

    /// Whether all ranks of a run map the buffers of all of them at the current collective, at the same place. All ranks
    /// come to the same result. `own` is the location of this rank's buffer.
    pub(super) fn is_in_place(&self, run: usize, own: u64) -> bool {
        let ranks = self.runs.run(run);
        let location =
            |rank: u32| if rank == self.members.rank() { own } else { self.peers[rank as usize].location };
        let first = location(ranks.start);
        ranks.len() == 1 || first != 0 && ranks.into_iter().all(|rank| location(rank) == first)
    }

    /// The buffers of all ranks of this run at the current collective, if this rank can access them; its own is `buffer`.
    pub(super) fn buffers_of_run(&self, buffer: &Buffer) -> Option<Addresses> {
        let own = self.location(buffer);
        let (arena, offset) = match buffer.arena() {
            Some(place) if self.house.is_some() => place,
            _ => return self.house.is_none().then(|| Addresses::from_slice(&[buffer.address()])),
        };
        let addresses = || self.runs.own().map(|rank| arena.address(self.members.world_rank(rank), offset));
        self.is_in_place(self.runs.position(), own).then(|| addresses().collect())
    }

    /// Waits until all ranks of the house have come here.
    pub(super) fn house_barrier(&mut self, call: &Signature) -> Result<()> {
        let Some(house) = &self.house else { return Ok(()) };
        self.barriers = self.barriers.wrapping_add(1);
        if house.board.come_to_barrier(&house.memory, self.barriers) {
            house.board.wake_all(&house.memory);
        }
        self.wait(Awaited::House, call, &mut self.empty_transfer())
    }

    /// Whether `peer` is not of the house, or has come to its last barrier.
    pub(super) fn has_come_home(&self, peer: u32) -> bool {
        let Some(House { ranks, memory, board, .. }) = &self.house else { return true };
        let position = peer.wrapping_sub(ranks.start) as usize;
        !ranks.contains(&peer) || board.has_come_to_barrier(memory, position, self.barriers)
    }
}
