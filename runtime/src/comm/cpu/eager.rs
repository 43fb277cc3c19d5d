//! Small collectives with a single synchronisation.
//!
//! A rank copies its contribution next to its arrival flag, or into its slot, before it publishes its arrival. After
//! all have arrived, every rank computes its result by itself: it reads n·S bytes, but needs no second
//! synchronisation. In a broadcast of at most [`AHEAD_BYTES`](super::region::AHEAD_BYTES) the root waits for nobody, within
//! limits: see [`lines`](super::lines).

use mgpu_kernels::copy::copy;
use mgpu_kernels::reduce;
use smallvec::SmallVec;

use super::agree::FETCHED_BYTES;
use super::lines::AHEAD;
use super::{CpuTransport, prefetch};
use crate::Result;
use crate::comm::exchange::{Exchange, Partition};
use crate::comm::signature::{Path, Signature};
use crate::comm::{Buffer, ReduceOp};

/// Up to so many ranks, a small reduction keeps the addresses of their contributions on the stack.
const FEW_RANKS: usize = 16;

/// Addresses of all ranks' contributions. No allocation up to 16 ranks.
pub(super) type Sources = SmallVec<[*const u8; 16]>;

impl CpuTransport {
    /// The slot of `rank` for the payload of operation `sequence`: within its arrival line if it fits there.
    #[inline(always)]
    fn slot(&self, rank: u32, sequence: u32, path: Path) -> *mut u8 {
        if path == Path::Inline {
            self.region.lines(rank).arrival(sequence).payload()
        } else {
            self.region.eager(rank, sequence)
        }
    }

    /// Copies `bytes` bytes from `source` into this rank's slot of the next operation, and arrives there.
    ///
    /// # Safety
    /// `source` is valid for `bytes` bytes, which fit a slot of the call's path.
    #[inline(always)]
    unsafe fn enter_with_slot(&mut self, source: *const u8, bytes: usize, call: &Signature) -> Result<()> {
        let slot = self.slot(self.rank, self.next_sequence(), call.path);
        if call.path == Path::Eager {
            prefetch::range_for_writing(slot, bytes);
        }
        // SAFETY: the caller's promise; the slot is not read before `enter` publishes the arrival, and its readers of
        // the operation before last have finished (see `lines`).
        unsafe { copy(source, slot, bytes) };
        let is_inline = call.path == Path::Inline;
        self.enter_fetching(
            call,
            |comm, peer| if is_inline { std::ptr::null() } else { comm.eager_slot(peer) },
        )
    }

    /// The slot of `rank` for the current operation.
    fn eager_slot(&self, rank: u32) -> *const u8 {
        self.region.eager(rank, self.sequence).cast_const()
    }

    /// What `rank` contributes to the current operation: a peer's slot, and this rank's own `buffer`.
    ///
    /// Not its own slot: on some processors (an EPYC with Zen 3) this core has to fetch a line again that a peer has read, which
    /// takes as long as fetching one of the peer's.
    #[inline(always)]
    fn contribution(&self, rank: u32, buffer: &Buffer, path: Path) -> *const u8 {
        if rank == self.rank { buffer.address() } else { self.slot(rank, self.sequence, path) }
    }

    /// Calls `body` with the contributions of all ranks, each from byte `begin` on.
    #[inline(always)]
    fn with_contributions<R>(
        &self,
        buffer: &Buffer,
        begin: usize,
        path: Path,
        body: impl FnOnce(&[*const u8]) -> R,
    ) -> R {
        if self.size as usize > FEW_RANKS {
            let all = (0..self.size).map(|rank| self.contribution(rank, buffer, path).wrapping_add(begin));
            return body(&all.collect::<Vec<_>>());
        }
        let mut all = [std::ptr::null(); FEW_RANKS];
        for (rank, at) in (0..self.size).zip(&mut all) {
            *at = self.contribution(rank, buffer, path).wrapping_add(begin);
        }
        body(&all[..self.size as usize])
    }

    pub(super) fn eager_all_reduce(&mut self, buffer: &Buffer, op: ReduceOp, call: &Signature) -> Result<()> {
        // SAFETY: the payload fits a slot (the path was chosen so).
        unsafe { self.enter_with_slot(buffer.address(), buffer.bytes(), call)? };
        // SAFETY: all ranks have filled their slots with `len` elements and do not write them until the operation
        // after next; slots are aligned to at least 8 bytes, and the buffer is ours.
        self.with_contributions(buffer, 0, call.path, |all| unsafe {
            reduce::reduce(call.dtype, op, all, &[buffer.address()], call.len);
        });
        self.count(buffer.bytes(), self.size - 1);
        Ok(())
    }

    pub(super) fn eager_reduce(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        root: u32,
        call: &Signature,
    ) -> Result<()> {
        // SAFETY: the payload fits a slot (the path was chosen so).
        unsafe { self.enter_with_slot(buffer.address(), buffer.bytes(), call)? };
        if self.rank == root {
            // SAFETY: as in `eager_all_reduce`.
            self.with_contributions(buffer, 0, call.path, |all| unsafe {
                reduce::reduce(call.dtype, op, all, &[buffer.address()], call.len);
            });
            self.count(buffer.bytes(), self.size - 1);
        }
        Ok(())
    }

    pub(super) fn eager_reduce_scatter(
        &mut self,
        buffer: &Buffer,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        // SAFETY: the payload fits a slot (the path was chosen so).
        unsafe { self.enter_with_slot(buffer.address(), buffer.bytes(), call)? };
        let (begin, len) = self.shard(self.rank, call);
        let own = buffer.address().wrapping_add(begin);
        // SAFETY: as in `eager_all_reduce`, for one shard of each slot and of the buffer.
        self.with_contributions(buffer, begin, call.path, |all| unsafe {
            reduce::reduce(call.dtype, op, all, &[own], len);
        });
        self.count(len * call.dtype.size(), self.size - 1);
        Ok(())
    }

    pub(super) fn eager_gather(
        &mut self,
        buffer: &Buffer,
        parts: Partition<'_>,
        root: Option<u32>,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let at = |rank: u32| {
            let range = parts.range(rank);
            (buffer.address().wrapping_add(range.start * element), range.len() * element)
        };
        let (own, bytes) = at(self.rank);
        // SAFETY: a part fits a slot (the path was chosen so).
        unsafe { self.enter_with_slot(own, bytes, call)? };
        if root.is_some_and(|root| root != self.rank) {
            return Ok(());
        }
        for peer in self.peers() {
            let (at, bytes) = at(peer);
            let slot = self.slot(peer, self.sequence, call.path).cast_const();
            // SAFETY: the peer has filled its slot with its part and does not write it until the operation after
            // next.
            unsafe { copy(slot, at, bytes) };
            self.count(bytes, 1);
        }
        Ok(())
    }

    /// A slot has the layout of the buffer: what a rank sends to another one is in the shard of that rank.
    pub(super) fn eager_exchange(
        &mut self,
        buffer: &Buffer,
        exchange: &Exchange,
        call: &Signature,
    ) -> Result<()> {
        // SAFETY: the payload fits a slot (the path was chosen so).
        unsafe { self.enter_with_slot(buffer.address(), buffer.bytes(), call)? };
        let (begin, _) = self.shard(self.rank, call);
        let element = call.dtype.size();
        for (receive, peer) in exchange.receive.iter().zip(0..) {
            let source = self.slot(peer, self.sequence, call.path).wrapping_add(begin).cast_const();
            let at = buffer.address().wrapping_add(receive.start * element);
            // SAFETY: the peer has filled its slot with its buffer, which is as long as ours and so contains our
            // shard, and does not write it until the operation after next.
            unsafe { copy(source, at, receive.len() * element) };
            self.count(receive.len() * element, 1);
        }
        Ok(())
    }

    /// A broadcast that fits a line or a slot of its own. Ranks wait for the root only.
    pub(super) fn broadcast_ahead(&mut self, buffer: &Buffer, root: u32, call: &Signature) -> Result<()> {
        self.settle(AHEAD - 1)?;
        let is_inline = call.path == Path::Inline;
        let slot = if is_inline {
            self.region.lines(root).arrival(self.next_sequence()).payload()
        } else {
            let slot = self.region.ahead(root, self.broadcasts);
            self.broadcasts = self.broadcasts.wrapping_add(1);
            slot
        };
        if self.rank == root {
            if !is_inline {
                self.region.reserve_ahead(root)?;
            }
            // SAFETY: the payload fits (the path was chosen so). It is not read before the arrival, and its readers of the
            // operation that used it before have finished (see `lines`).
            unsafe { copy(buffer.address(), slot, buffer.bytes()) };
        }
        // Peers fetch a short payload while they wait for it.
        let is_fetched = !is_inline && buffer.bytes() <= FETCHED_BYTES;
        self.enter_after(root, if is_fetched { slot.cast_const() } else { std::ptr::null() }, call)?;
        if self.rank != root {
            // SAFETY: the root has filled its slot and does not write it until this rank has arrived at a later operation.
            unsafe { copy(slot.cast_const(), buffer.address(), buffer.bytes()) };
            self.count(buffer.bytes(), 1);
        } else if !is_inline && !is_fetched {
            // Peers have the lines of the next slot, too, and the next broadcast is often as long as this one.
            prefetch::range_for_writing(self.region.ahead(root, self.broadcasts), buffer.bytes());
        }
        Ok(())
    }
}
