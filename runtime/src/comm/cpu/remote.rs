//! Large collectives on private buffers, read where they are.
//!
//! Linux lets a process copy from the memory of another one of the same user (`process_vm_readv`), if no security module or
//! sandbox forbids it. The payload is then copied once, by the rank that needs it, and not into staging memory first. The
//! kernel looks up every page, so this pays for large buffers only: [`REMOTE_FROM`].
//!
//! Ranks only read each other's private memory, they never write it: a rank whose operation has failed may free its buffer
//! although peers still run. What they read then is an error or garbage, and their operation fails, too.
//!
//! An operation is an arrival, with the buffer's address, and one or two phases that end when all ranks have done their part
//! ([`steps`](super::lines::RankLines::steps)): a buffer must not change while a peer reads it.

use std::hash::{BuildHasher, RandomState};
use std::io::IoSliceMut;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use mgpu_kernels::reduce;
use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::CpuTransport;
use super::direct::{Addresses, Parts};
use super::eager::Sources;
use crate::comm::exchange::Partition;
use crate::comm::signature::Signature;
use crate::comm::{Buffer, DType, ReduceOp};
use crate::{Error, Result};

/// Smallest buffer of an operation that reads peers' memory, in bytes. Measured with two ranks and a second-level cache of
/// 2 MiB: smaller buffers are in the caches, where staging takes less time than the kernel's look-ups.
const REMOTE_FROM: usize = 4 << 20;

/// Bytes of all peers that are reduced at once, so that they are still in the second-level cache.
const BLOCK_BYTES: usize = 256 << 10;

/// Instead of the address of a buffer that peers cannot read.
const UNREADABLE: u64 = 0;

/// Where a rank's private memory is, for its peers.
#[derive(Default)]
#[repr(C, align(128))]
pub(super) struct PrivateMemory {
    process: AtomicU32,
    /// Whether this rank can read the memory of all others: 1 if so.
    reads_all: AtomicU32,
    /// A random number, and the address where the process has it, too.
    nonce: AtomicU64,
    nonce_at: AtomicU64,
    /// The buffers of the current operation and of the one before: addresses, or [`UNREADABLE`].
    buffers: [AtomicU64; 2],
}

impl PrivateMemory {
    fn buffer(&self, sequence: u32) -> &AtomicU64 {
        &self.buffers[sequence as usize % 2]
    }
}

impl CpuTransport {
    /// Arrives at an operation that reads its peers' buffers: returns the addresses of all of them. None, on all ranks, if
    /// the operation has to go through staging memory: the buffer is small, or a rank cannot be read.
    pub(super) fn enter_remote(&mut self, buffer: &Buffer, call: &Signature) -> Result<Option<Addresses>> {
        if call.bytes() < REMOTE_FROM || !self.reads_peers(call)? {
            return Ok(None);
        }
        let address = buffer.address() as usize;
        // The kernel reads no memory of devices for other processes, as pinned memory of a GPU's driver can be.
        let mut byte = [0];
        let mut is_readable = |at: usize| read_process(Pid::this(), at, &mut byte).is_ok();
        let is_readable = is_readable(address) && is_readable(address + call.bytes() - 1);
        let own = self.region.lines(self.rank).memory.buffer(self.next_sequence());
        own.store(if is_readable { address as u64 } else { UNREADABLE }, Ordering::Relaxed);
        self.enter(call)?;
        let address = |rank| self.region.lines(rank).memory.buffer(self.sequence).load(Ordering::Relaxed);
        let all = (0..self.size).map(address);
        Ok(all.clone().all(|address| address != UNREADABLE).then(|| all.map(|at| at as *mut u8).collect()))
    }

    /// Whether all ranks can read the memory of all others. The first time they try it, and all get the same answer.
    fn reads_peers(&mut self, call: &Signature) -> Result<bool> {
        if let Some(known) = self.reads_peers {
            return Ok(known);
        }
        // A number of another process at the same address would be found out.
        let nonce = Box::new(AtomicU64::new(RandomState::new().hash_one(self.rank) | 1));
        let own = &self.region.lines(self.rank).memory;
        own.process.store(std::process::id(), Ordering::Relaxed);
        own.nonce.store(nonce.load(Ordering::Relaxed), Ordering::Relaxed);
        own.nonce_at.store(nonce.as_ptr() as u64, Ordering::Relaxed);
        self.enter(call)?;
        let can_read = |peer: u32| {
            let memory = &self.region.lines(peer).memory;
            let mut found = [0; 8];
            let at = memory.nonce_at.load(Ordering::Relaxed) as usize;
            let expected = memory.nonce.load(Ordering::Relaxed);
            self.read(peer, at, &mut found).is_ok() && u64::from_ne_bytes(found) == expected
        };
        // With more ranks than cores staging takes less time: 16 MiB on 4 ranks and 2 cores 5.3 ms instead of 6.4.
        let reads_all = !self.policy.is_oversubscribed() && self.peers().all(can_read);
        self.region.lines(self.rank).memory.reads_all.store(reads_all.into(), Ordering::Relaxed);
        self.enter(call)?;
        let all =
            (0..self.size).all(|rank| self.region.lines(rank).memory.reads_all.load(Ordering::Relaxed) == 1);
        self.reads_peers = Some(all);
        // All peers have read it.
        drop(nonce);
        Ok(all)
    }

    /// Copies memory of `peer` that begins at `address`.
    fn read(&self, peer: u32, address: usize, into: &mut [u8]) -> nix::Result<()> {
        let process = self.region.lines(peer).memory.process.load(Ordering::Relaxed);
        read_process(Pid::from_raw(process as i32), address, into)
    }

    /// Copies `bytes` bytes of `peer` from `address` to `to`.
    ///
    /// # Safety
    /// `to` is valid for `bytes` bytes, which nobody else accesses.
    unsafe fn fetch(
        &self,
        peer: u32,
        address: *const u8,
        (to, bytes): (*mut u8, usize),
        call: &Signature,
    ) -> Result<()> {
        // SAFETY: the caller's promise; private memory and scratch memory are initialised.
        let into = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        let Err(errno) = self.read(peer, address as usize, into) else {
            self.count(bytes, 1);
            return Ok(());
        };
        Err(self.read_error(peer, errno, call))
    }

    /// The error of not being able to read the memory of `peer`.
    #[cold]
    fn read_error(&self, peer: u32, errno: Errno, call: &Signature) -> Error {
        let world_rank = self.members.world_rank(peer);
        let operation = || format!("operation {} of {}, {call}", self.sequence, self.title);
        // The memory is gone if the peer has ended or failed. That is known a little later.
        let begin = Instant::now();
        while matches!(errno, Errno::ESRCH | Errno::EFAULT) && begin.elapsed() < self.timeout {
            if let Some(error) = self.membership.lost_peer(&[world_rank], operation) {
                return error;
            }
            if self.membership.page().has_aborted(world_rank, self.family) {
                return self.membership.lost_error(world_rank, operation());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Error::system(format!("read the memory of rank {world_rank}"), errno)
    }

    /// Ends a phase: waits until all ranks have.
    fn end_phase(&self, phase: u32, call: &Signature) -> Result<()> {
        // A peer that has failed may have used its buffer again while this rank read it. It says so before it does.
        fence(Ordering::Acquire);
        let has_failed = |peer: &u32| self.membership.page().has_aborted(*peer, self.family);
        if let Some(peer) = self.peers().map(|peer| self.members.world_rank(peer)).find(has_failed) {
            return Err(self
                .membership
                .lost_error(peer, format!("operation {} of {}, {call}", self.sequence, self.title)));
        }
        let target = self.streamed.wrapping_add(phase);
        self.region.lines(self.rank).steps().publish(target, self.policy);
        self.await_steps(target, call)
    }

    /// Reduces `len` elements from byte `at` of all ranks' buffers into this rank's own.
    fn reduce_remote(
        &mut self,
        all: &Addresses,
        (at, len): (usize, usize),
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let (element, others) = (call.dtype.size(), self.size as usize - 1);
        let most = (BLOCK_BYTES / others).max(16 << 10) & !63;
        let scratch = self.scratch.take().filter(|scratch| scratch.bytes() >= others * most);
        let scratch = scratch.unwrap_or_else(|| Buffer::zeroed_of(DType::U8, others * most));
        let mut begin = 0;
        while begin < len {
            let count = (len - begin).min(most / element);
            let offset = at + begin * element;
            let own = all[self.rank as usize].wrapping_add(offset);
            let mut sources: Sources = all.iter().map(|_| own.cast_const()).collect();
            for (peer, index) in self.peers().zip(0..) {
                let place = scratch.address().wrapping_add(index * most);
                let address = all[peer as usize].wrapping_add(offset);
                // SAFETY: each peer has a piece of the scratch memory, which is long enough and only ours.
                unsafe { self.fetch(peer, address, (place, count * element), call)? };
                sources[peer as usize] = place;
            }
            // SAFETY: sources are scratch memory and our own buffer, whose part no peer reads in this phase.
            unsafe { reduce::reduce(call.dtype, op, &sources, &[own], count) };
            begin += count;
        }
        self.scratch = Some(scratch);
        Ok(())
    }

    /// Rank r reduces part r; then all copy the parts of the others.
    #[inline(never)]
    pub(super) fn remote_all_reduce(
        &mut self,
        buffer: &Buffer,
        all: &Addresses,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        let parts = Parts::equal(call.len, self.size, element);
        let part = |rank: u32| (parts.part(rank).start * element, parts.part(rank).len());
        self.reduce_remote(all, part(self.rank), op, call)?;
        self.end_phase(1, call)?;
        for peer in self.peers() {
            let (at, len) = part(peer);
            let to = (buffer.address().wrapping_add(at), len * element);
            // SAFETY: a part of our buffer that no peer reads in this phase.
            unsafe { self.fetch(peer, all[peer as usize].wrapping_add(at), to, call)? };
        }
        self.end_phase(2, call)?;
        self.streamed = self.streamed.wrapping_add(2);
        Ok(())
    }

    #[inline(never)]
    pub(super) fn remote_reduce_scatter(
        &mut self,
        all: &Addresses,
        op: ReduceOp,
        call: &Signature,
    ) -> Result<()> {
        self.reduce_remote(all, self.shard(self.rank, call), op, call)?;
        self.end_phase(1, call)?;
        self.streamed = self.streamed.wrapping_add(1);
        Ok(())
    }

    #[inline(never)]
    pub(super) fn remote_all_gather(
        &mut self,
        buffer: &Buffer,
        all: &Addresses,
        shares: Partition<'_>,
        call: &Signature,
    ) -> Result<()> {
        let element = call.dtype.size();
        for peer in self.peers() {
            let (at, bytes) = (shares.range(peer).start * element, shares.range(peer).len() * element);
            let to = (buffer.address().wrapping_add(at), bytes);
            // SAFETY: the peer's part of our buffer, which nobody reads.
            unsafe { self.fetch(peer, all[peer as usize].wrapping_add(at), to, call)? };
        }
        self.end_phase(1, call)?;
        self.streamed = self.streamed.wrapping_add(1);
        Ok(())
    }
}

/// Copies memory of a process that begins at `address`.
fn read_process(process: Pid, address: usize, into: &mut [u8]) -> nix::Result<()> {
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        let from = RemoteIoVec { base: address + done, len: rest.len() };
        match process_vm_readv(process, &mut [IoSliceMut::new(rest)], &[from]) {
            Ok(0) => return Err(Errno::EFAULT),
            Ok(bytes) => done += bytes,
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::num::NonZeroUsize;
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::ptr::NonNull;

    use nix::libc::{SYS_memfd_secret, syscall};
    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
    use nix::unistd::ftruncate;

    use super::*;
    use crate::World;

    /// Memory that the kernel reads for nobody else, as that of a device. None if the machine does not give it.
    fn unreadable_memory(bytes: usize) -> Option<NonNull<c_void>> {
        // SAFETY: the call has no memory arguments; the result is checked.
        let file = unsafe { syscall(SYS_memfd_secret, 0) };
        // SAFETY: a new descriptor, which is ours.
        let file = (file >= 0).then(|| unsafe { OwnedFd::from_raw_fd(file as i32) })?;
        ftruncate(&file, bytes as i64).ok()?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        unsafe { mmap(None, NonZeroUsize::new(bytes)?, protection, MapFlags::MAP_SHARED, &file, 0) }.ok()
    }

    #[test]
    fn memory_that_peers_cannot_read_goes_through_staging() {
        let Some(memory) = unreadable_memory(REMOTE_FROM) else {
            println!("skipped: no memfd_secret, or a limit on locked memory");
            return;
        };
        let len = REMOTE_FROM / 4;
        // SAFETY: the mapping has this many bytes, all zero, is released at the end, and is used by one rank at a time.
        let hidden = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().cast::<f32>(), len) };
        let mut hidden = Some(hidden);
        std::thread::scope(|scope| {
            for mut world in World::threads(2).unwrap() {
                let hidden = if world.rank() == 1 { hidden.take() } else { None };
                scope.spawn(move || {
                    let mut comm = world.communicator().unwrap();
                    let mut own = vec![0.0; len];
                    let values = hidden.unwrap_or(&mut own);
                    for turn in 1..4 {
                        values.fill(comm.rank() as f32 + turn as f32);
                        comm.all_reduce_slice(values, ReduceOp::Sum).unwrap();
                        assert!(values.iter().all(|value| *value == 1.0 + 2.0 * turn as f32));
                        // Both ranks can read this.
                        let mut readable = vec![1.0f32; len];
                        comm.all_reduce_slice(&mut readable, ReduceOp::Sum).unwrap();
                        assert!(readable.iter().all(|value| *value == 2.0));
                    }
                });
            }
        });
        // SAFETY: the mapping above; nobody uses it any more.
        unsafe { munmap(memory, REMOTE_FROM).unwrap() };
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let own = Pid::this();
        let values: Vec<u8> = (0..100_000).map(|index| (index % 251) as u8).collect();
        let mut found = vec![0; values.len()];
        read_process(own, values.as_ptr() as usize, &mut found).unwrap();
        assert_eq!(found, values);
        // Nothing is mapped there.
        assert_eq!(read_process(own, 64, &mut found), Err(Errno::EFAULT));
        // A process that has ended.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let ended = Pid::from_raw(child.id() as i32);
        child.wait().unwrap();
        assert_eq!(read_process(ended, values.as_ptr() as usize, &mut found), Err(Errno::ESRCH));
    }
}
