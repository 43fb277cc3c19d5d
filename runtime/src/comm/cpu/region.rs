//! The layout of a communicator's shared memory.
//!
//! One shared-memory file, mapped by every rank:
//!
//! ```text
//! per rank          its lines (see `lines`), its cores
//! per ordered pair  the flags of a channel
//! per rank, paged   two eager slots, slots of broadcasts, a ring of slots, a two-chunk channel to each rank
//! ```
//!
//! Eager slots alternate between operations; `lines` explains why two are enough, and how many broadcasts need; `stream` how
//! large a ring must be.
//!
//! A rank writes its slots and channels itself, and allocates their memory when it first does: the channels of all
//! pairs would take gigabytes with hundreds of ranks, most of which exchange messages with few others.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::cores::Cores;
use super::lines::{ARRIVALS, RankLines};
use super::stream::SMALLEST_RING;
use super::wait::Flag;
use crate::Result;
use crate::comm::signature::SIGNATURE_WORDS;
use crate::shm::{Shared, SharedArray, SharedMemory, populate, reserve};

/// Size of an eager slot in bytes.
pub(super) const EAGER_BYTES: usize = 16 << 10;
/// Size of a slot of a broadcast in bytes.
pub(super) const AHEAD_BYTES: usize = 4 << 10;
/// Bytes of the largest slot of a stream.
pub(super) const SLOT_BYTES: usize = 128 << 10;
/// Bytes of the rings of slots of all ranks, unless a rank's ring would be too small or too large.
///
/// Slots come round when the second-level caches, of 1 or 2 MiB, have evicted them to the third level, from where a peer
/// reads them faster than from a cache of another core. (Zen 4, 2 ranks, all-reduce of 64 KiB: 9.0 µs with a ring of 1 MiB,
/// 3.6 with 4 MiB.)
const RINGS_BYTES: usize = 8 << 20;
/// Bytes of a rank's channels, unless chunks would be too small or too large.
const CHANNELS_BYTES: usize = 512 << 10;

/// The sender's line of a channel: the number of chunks sent, and the calls of the two latest ones.
#[repr(C, align(128))]
pub(super) struct ChannelSent {
    pub(super) count: Flag,
    pub(super) calls: [[AtomicU64; SIGNATURE_WORDS]; 2],
}

/// The receiver's line of a channel: the number of chunks released.
#[repr(C, align(128))]
pub(super) struct ChannelReleased {
    pub(super) count: Flag,
}

// SAFETY: all of these consist of atomics only.
unsafe impl Shared for RankLines {}
// SAFETY: as above.
unsafe impl Shared for Flag {}
// SAFETY: as above.
unsafe impl Shared for Cores {}
// SAFETY: as above.
unsafe impl Shared for ChannelSent {}
// SAFETY: as above.
unsafe impl Shared for ChannelReleased {}

const PAGE: usize = 4096;

/// Offsets within the paged part of a rank.
const AHEAD_SLOTS: usize = 2 * EAGER_BYTES;
const RING: usize = AHEAD_SLOTS + ARRIVALS * AHEAD_BYTES;

/// Offsets for a number of ranks.
#[derive(Debug, Clone, Copy)]
struct Offsets {
    ranks: usize,
    cores: usize,
    channel_lines: usize,
    data: usize,
    data_stride: usize,
    ring: usize,
    chunk: usize,
    total: usize,
}

impl Offsets {
    fn new(ranks: usize) -> Self {
        let cores = ranks * size_of::<RankLines>();
        let channel_lines = cores + ranks * size_of::<Cores>();
        let data = (channel_lines + ranks * ranks * size_of::<(ChannelSent, ChannelReleased)>())
            .next_multiple_of(PAGE);
        // Channels take about as much memory for any number of ranks.
        let chunk = (CHANNELS_BYTES / 2 / ranks).clamp(16 << 10, 128 << 10).next_multiple_of(PAGE);
        let ring = ring_bytes(ranks);
        let data_stride = RING + ring + ranks * 2 * chunk;
        let total = data + ranks * data_stride;
        Offsets { ranks, cores, channel_lines, data, data_stride, ring, chunk, total }
    }
}

/// Bytes of a rank's ring of slots: a power of two.
const fn ring_bytes(ranks: usize) -> usize {
    let most = RINGS_BYTES / if ranks < 2 { 2 } else { ranks };
    if most < SMALLEST_RING { SMALLEST_RING } else { 1 << most.ilog2() }
}

/// The mapped region.
#[derive(Debug)]
pub(super) struct Region {
    name: String,
    memory: Arc<SharedMemory>,
    offsets: Offsets,
    lines: SharedArray<RankLines>,
    /// The memory of this rank's channels is allocated.
    has_channels: bool,
    /// The memory of this rank's ring is allocated.
    has_ring: Cell<bool>,
    /// The memory of this rank's slots of broadcasts is allocated.
    has_ahead: Cell<bool>,
}

impl Region {
    pub(super) fn create(name: &str, ranks: u32) -> Result<(Self, OwnedFd)> {
        let offsets = Offsets::new(ranks as usize);
        let (memory, fd) = SharedMemory::create(name, offsets.total)?;
        reserve(name, &memory, fd.as_fd(), 0, offsets.data)?;
        Ok((Region::new(name, memory, offsets), fd))
    }

    pub(super) fn open(name: &str, fd: BorrowedFd<'_>, ranks: u32) -> Result<Self> {
        let offsets = Offsets::new(ranks as usize);
        Ok(Region::new(name, SharedMemory::open(name, fd, offsets.total)?, offsets))
    }

    fn new(name: &str, memory: SharedMemory, offsets: Offsets) -> Self {
        let memory = Arc::new(memory);
        Region {
            name: name.to_owned(),
            lines: SharedArray::new(&memory, 0, offsets.ranks),
            memory,
            offsets,
            has_channels: false,
            has_ring: Cell::new(false),
            has_ahead: Cell::new(false),
        }
    }

    /// Reserves the memory of `rank`'s own slots. If later reservations are not possible without the descriptor, reserves
    /// all of its memory.
    pub(super) fn reserve(&mut self, fd: BorrowedFd<'_>, rank: u32) -> Result<()> {
        let own = self.data(rank, 0);
        if !populate(&self.name, &self.memory, own, 2 * EAGER_BYTES)? {
            reserve(&self.name, &self.memory, fd, own, self.offsets.data_stride)?;
            self.has_channels = true;
            self.has_ring.set(true);
            self.has_ahead.set(true);
        }
        Ok(())
    }

    /// Reserves the memory of the ring of `rank`, which is this one, before its first use.
    pub(super) fn reserve_ring(&self, rank: u32) -> Result<()> {
        if !self.has_ring.get() {
            populate(&self.name, &self.memory, self.data(rank, RING), self.offsets.ring)?;
            self.has_ring.set(true);
        }
        Ok(())
    }

    /// Reserves the memory of the slots of broadcasts of `rank`, which is this one, before their first use.
    pub(super) fn reserve_ahead(&self, rank: u32) -> Result<()> {
        if !self.has_ahead.get() {
            populate(&self.name, &self.memory, self.data(rank, AHEAD_SLOTS), ARRIVALS * AHEAD_BYTES)?;
            self.has_ahead.set(true);
        }
        Ok(())
    }

    /// Reserves the memory of the channel from this rank, `from`, before its first use.
    pub(super) fn reserve_channel(&self, from: u32, to: u32) -> Result<()> {
        if !self.has_channels {
            populate(&self.name, &self.memory, self.chunk_offset(from, to, 0), 2 * self.offsets.chunk)?;
        }
        Ok(())
    }

    #[inline]
    pub(super) fn lines(&self, rank: u32) -> &RankLines {
        &self.lines[rank]
    }

    pub(super) fn cores(&self, rank: u32) -> &Cores {
        assert!((rank as usize) < self.offsets.ranks);
        self.memory.view(self.offsets.cores + rank as usize * size_of::<Cores>())
    }

    /// Number of the cache line of one of the region's flags, which identifies it to peers.
    pub(super) fn line_of(&self, flag: &Flag) -> u32 {
        let address: *const Flag = flag;
        ((address as usize - self.memory.at(0) as usize) / size_of::<Flag>()) as u32
    }

    /// The flag at line `line`, if the line can contain one.
    pub(super) fn flag_at(&self, line: u32) -> Option<&Flag> {
        let offset = line as usize * size_of::<Flag>();
        (offset + size_of::<Flag>() <= self.offsets.data).then(|| self.memory.view(offset))
    }

    fn channel(&self, from: u32, to: u32) -> usize {
        let index = from as usize * self.offsets.ranks + to as usize;
        self.offsets.channel_lines + index * size_of::<(ChannelSent, ChannelReleased)>()
    }

    pub(super) fn sent(&self, from: u32, to: u32) -> &ChannelSent {
        self.memory.view(self.channel(from, to))
    }

    pub(super) fn released(&self, from: u32, to: u32) -> &ChannelReleased {
        self.memory.view(self.channel(from, to) + size_of::<ChannelSent>())
    }

    fn data(&self, rank: u32, offset: usize) -> usize {
        assert!(rank < self.offsets.ranks as u32 && offset < self.offsets.data_stride);
        self.offsets.data + rank as usize * self.offsets.data_stride + offset
    }

    /// The eager slot of `rank` for operation `sequence`.
    pub(super) fn eager(&self, rank: u32, sequence: u32) -> *mut u8 {
        self.memory.at(self.data(rank, (sequence % 2) as usize * EAGER_BYTES))
    }

    /// Bytes of a rank's ring.
    pub(super) fn ring_bytes(&self) -> usize {
        self.offsets.ring
    }

    /// The slot that begins at byte `at` of the ring of `rank`.
    pub(super) fn slot(&self, rank: u32, at: usize) -> *mut u8 {
        self.memory.at(self.data(rank, RING + at))
    }

    /// The slot of `rank` for broadcast number `number` through such slots. Broadcasts are operations, so a slot is used again no
    /// sooner than an arrival line.
    pub(super) fn ahead(&self, rank: u32, number: u32) -> *mut u8 {
        self.memory.at(self.data(rank, AHEAD_SLOTS + number as usize % ARRIVALS * AHEAD_BYTES))
    }

    /// Bytes of a channel's chunk.
    pub(super) fn chunk_bytes(&self) -> usize {
        self.offsets.chunk
    }

    /// Chunk number `count` of the channel.
    pub(super) fn chunk(&self, from: u32, to: u32, count: u32) -> *mut u8 {
        self.memory.at(self.chunk_offset(from, to, count))
    }

    fn chunk_offset(&self, from: u32, to: u32, count: u32) -> usize {
        let index = to as usize * 2 + (count % 2) as usize;
        self.data(from, RING + self.offsets.ring + index * self.offsets.chunk)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for ranks in [2u32, 3, 9, 64] {
            let (region, _fd) = Region::create("test", ranks).unwrap();
            let base = region.memory.at(0) as usize;
            let mut parts: Vec<(usize, usize)> = Vec::new();
            for rank in 0..ranks {
                for turn in 0..2 {
                    parts.push((region.eager(rank, turn) as usize - base, EAGER_BYTES));
                    for to in 0..ranks {
                        parts.push((region.chunk(rank, to, turn) as usize - base, region.chunk_bytes()));
                    }
                }
                for turn in 0..ARRIVALS as u32 {
                    parts.push((region.ahead(rank, turn) as usize - base, AHEAD_BYTES));
                }
                for position in (0..region.offsets.ring).step_by(SLOT_BYTES) {
                    parts.push((region.slot(rank, position) as usize - base, SLOT_BYTES));
                }
                let lines: *const RankLines = region.lines(rank);
                parts.push((lines as usize - base, size_of::<RankLines>()));
                let cores: *const Cores = region.cores(rank);
                parts.push((cores as usize - base, size_of::<Cores>()));
                for to in 0..ranks {
                    let (sent, released): (*const ChannelSent, *const ChannelReleased) =
                        (region.sent(rank, to), region.released(rank, to));
                    parts.push((sent as usize - base, size_of::<ChannelSent>()));
                    parts.push((released as usize - base, size_of::<ChannelReleased>()));
                }
            }
            parts.sort_unstable();
            for pair in parts.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:?} overlap with {ranks} ranks");
            }
            let (begin, len) = parts[parts.len() - 1];
            assert!(begin + len <= region.memory.size());
        }
    }
}
