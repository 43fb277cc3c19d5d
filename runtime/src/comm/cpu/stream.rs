//! Blocks of private buffers on their way through staging memory.
//!
//! Every rank has a ring of slots that its peers map. An operation cuts its payload into blocks, the same on all ranks, and
//! each block passes through up to three stages on every rank:
//!
//! | stage | what a rank does | needs |
//! |---|---|---|
//! | fill | copies what peers need of its block into its slot | that peers have finished with the slot's last block |
//! | work | reads the slots of its peers: reduces or copies | that all ranks have filled theirs |
//! | fetch | reads what its peers have put into their slots while they worked | that all ranks have worked |
//!
//! A rank fills the slots of [`FILLED_AHEAD`] blocks more than it has worked on, so that it does not wait for a peer that is
//! a little later. It publishes one counter, its *steps*: s means that it has worked on blocks below s and filled those
//! below s + FILLED_AHEAD. The arrival takes the place of the counter for the blocks that are filled first.
//!
//! **Order.** Let F be `FILLED_AHEAD`. A rank fills the slot of block j + F after it has worked on block j, for which it saw
//! that all peers had filled j, so were at step j + 1 − F. Such a peer has worked on blocks up to j − F and, since it fetches
//! after it publishes, fetched those up to j − 2F. If slots come round after K blocks at the earliest, the slot was used last by
//! block j + F − K: with K ≥ 3F, nobody reads that any more. Blocks are numbered across operations, so the same holds from
//! one operation to the next.
//!
//! **Place.** Slots have the size that an operation needs, rounded up to a power of two, and follow each other around the ring,
//! each at a multiple of its size. A slot is at most `SLOT_BYTES` long, so it lies in one of the ring's cells of that size,
//! and the next slot in the same or the next cell. They come round after as many blocks as the ring has cells, at the earliest.
//! An operation may use the beginning of the ring only, as a smaller ring: positions are counted on, and taken modulo a power
//! of two, so two blocks with the same place are at least as far apart as the smaller of their two rings is long.
//!
//! Rings are small enough to stay in the last-level cache: a payload of any size then passes through the same lines again
//! and again, and reaches memory only in the ranks' own buffers.

use super::direct::Addresses;
use super::region::SLOT_BYTES;
use super::stores::{Choice, Stores};
use super::wait::Flag;
use super::{CpuTransport, prefetch};
use crate::Result;
use crate::clock::now;
use crate::comm::signature::Signature;

/// Blocks that are filled ahead of the one that is worked on.
const FILLED_AHEAD: usize = 2;

/// Blocks after which a slot may be used again.
const REUSED_AFTER: usize = 3 * FILLED_AHEAD;

/// Bytes of the largest slots that are prefetched before they are filled: a quarter of a first-level cache.
const PREFETCHED_BYTES: usize = 8 << 10;

/// Bytes of the smallest ring.
pub(super) const SMALLEST_RING: usize = REUSED_AFTER.next_power_of_two() * SLOT_BYTES;

/// What a communicator has passed through its rings.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Streamed {
    /// Wraps.
    blocks: u32,
    /// With the gaps between slots.
    bytes: usize,
}

impl Streamed {
    /// The places of the next operation.
    fn places(self, slots: Slots, ring: usize) -> Places {
        let stride = slots.stride();
        Places { begin: self.bytes.next_multiple_of(stride), stride, ring }
    }

    /// Counts an operation of `blocks` blocks.
    fn pass(&mut self, places: Places, blocks: usize) {
        *self = Streamed { blocks: step(self.blocks, blocks), bytes: places.begin + blocks * places.stride };
    }
}

/// The blocks of an operation: how many, at least one, and how many bytes each of them needs in a slot, at most
/// [`SLOT_BYTES`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Slots {
    pub(super) count: usize,
    pub(super) bytes: usize,
}

/// Where the slots of an operation are, the same on all ranks.
#[derive(Debug, Clone, Copy)]
struct Places {
    /// The position of the first slot. Positions grow from one operation to the next.
    begin: usize,
    /// Distance between two slots.
    stride: usize,
    /// Bytes of the ring, or of its beginning.
    ring: usize,
}

impl Places {
    /// The offset of the slot of block `block` in the ring.
    fn of(&self, block: usize) -> usize {
        (self.begin + block * self.stride) % self.ring
    }
}

impl Slots {
    /// Distance between two slots. Twice a small slot: the processor prefetches beyond its end, which must not be what a
    /// peer is writing.
    fn stride(self) -> usize {
        (2 * self.bytes.max(64)).next_power_of_two().min(SLOT_BYTES)
    }
}

/// What an operation does with block `usize` in each stage. Fill gets this rank's slot, the others get those of all ranks.
/// Slots are written with the [`Stores`].
pub(super) struct Stages<Fill, Work, Fetch> {
    /// Whether this rank reads slots of its peers. Only such ranks decide how slots are written.
    pub(super) reads: bool,
    pub(super) fill: Fill,
    pub(super) work: Work,
    /// `None`: the operation is over when all have worked.
    pub(super) fetch: Option<Fetch>,
}

/// The fetch of operations without one.
pub(super) type NoFetch = fn(&CpuTransport, usize, &Addresses);

/// A block that was filled.
#[derive(Debug, Clone, Copy, Default)]
struct Filled {
    stores: Stores,
    /// How long it took, if that is of interest.
    nanoseconds: Option<u64>,
}

impl CpuTransport {
    /// Arrives at the next operation and passes its blocks through the stages.
    pub(super) fn stream<Fill, Work, Fetch>(
        &mut self,
        call: &Signature,
        slots: Slots,
        stages: &Stages<Fill, Work, Fetch>,
    ) -> Result<()>
    where
        Fill: Fn(&Self, usize, *mut u8, Stores),
        Work: Fn(&Self, usize, &Addresses, Stores),
        Fetch: Fn(&Self, usize, &Addresses),
    {
        self.region.reserve_ring(self.rank)?;
        let (begin, blocks, bytes) = (self.streamed.blocks, slots.count, slots.bytes);
        let places = self.streamed.places(slots, self.ring(slots));
        let slot = |comm: &Self, rank: u32, block: usize| comm.region.slot(rank, places.of(block));
        let slots = |comm: &Self, block: usize| -> Addresses {
            (0..comm.size).map(|rank| slot(comm, rank, block)).collect()
        };
        let mut choice = *self.stores.of(bytes);
        // How the blocks that are filled ahead were written, and how long that took if they are timed.
        let mut filled = [Filled::default(); FILLED_AHEAD];
        let fill = |comm: &Self, choice: &Choice, block: usize| {
            let is_whole = blocks == 1 || block + 1 < blocks;
            let timed = (is_whole && stages.reads && choice.is_timed(block)).then(now);
            let (stores, slot) = (choice.stores(block), slot(comm, comm.rank, block));
            if stores == Stores::Cached && bytes <= PREFETCHED_BYTES {
                prefetch::range_for_writing(slot, bytes);
            }
            (stages.fill)(comm, block, slot, stores);
            Filled { stores, nanoseconds: timed.map(|begin| now() - begin) }
        };
        for (block, filled) in filled.iter_mut().enumerate().take(blocks) {
            *filled = fill(self, &choice, block);
        }
        let preference = self.publish_preference(choice.preferred());
        self.enter_fetching(call, |comm, peer| slot(comm, peer, 0))?;
        choice.agree(self.agreed_stores(preference));
        let mut fetched = 0;
        for block in 0..blocks {
            let Filled { stores, nanoseconds } = filled[block % FILLED_AHEAD];
            let begin_work = nanoseconds.map(|_| now());
            (stages.work)(self, block, &slots(self, block), stores);
            if let (Some(nanoseconds), Some(begin)) = (nanoseconds, begin_work) {
                choice.add(stores, bytes, nanoseconds + (now() - begin));
            }
            if block + FILLED_AHEAD < blocks {
                filled[block % FILLED_AHEAD] = fill(self, &choice, block + FILLED_AHEAD);
            }
            let is_last = block + 1 == blocks;
            let done = step(begin, block + 1);
            // Nobody waits for the last step of an operation without fetch; the next one begins with an arrival. But a counter
            // that is not published for 2³¹ blocks would seem to be ahead.
            let is_over = is_last && stages.fetch.is_none();
            if !is_over || begin >> 30 != done >> 30 {
                self.region.lines(self.rank).steps().publish(done, self.policy);
            }
            if is_over {
                break;
            }
            // The next block must be filled, or at the end all blocks worked on.
            let needed = if is_last { blocks } else { (block + 2).saturating_sub(FILLED_AHEAD) };
            if let Some(fetch) = &stages.fetch {
                while fetched < needed {
                    self.await_steps(step(begin, fetched + 1), call)?;
                    fetch(self, fetched, &slots(self, fetched));
                    fetched += 1;
                }
            } else if needed > 0 {
                self.await_steps(step(begin, needed), call)?;
            }
        }
        self.streamed.pass(places, blocks);
        choice.pass(blocks);
        *self.stores.of(bytes) = choice;
        Ok(())
    }

    /// Puts how this rank prefers slots to be written into its next arrival, which has no payload. Returns whether it prefers
    /// them to be written around the caches.
    fn publish_preference(&self, preferred: Stores) -> bool {
        let arrival = self.region.lines(self.rank).arrival(self.next_sequence());
        // Ranks that take turns on a core find what the others have written in its caches.
        let uncached = preferred == Stores::Uncached && !self.policy.is_oversubscribed();
        // SAFETY: this rank's own line, which is not read before it has arrived.
        unsafe { arrival.payload().cast::<u64>().write(uncached.into()) };
        uncached
    }

    /// What all ranks have agreed on with their arrivals: to write around the caches if one of them prefers it. `own` is what
    /// this rank prefers.
    fn agreed_stores(&self, own: bool) -> Stores {
        let prefers_uncached = |rank| {
            let arrival = self.region.lines(rank).arrival(self.sequence);
            // SAFETY: the rank has arrived, and does not write this line before this one has arrived again.
            (unsafe { arrival.payload().cast::<u64>().read() }) != 0
        };
        if own || self.peers().any(prefers_uncached) { Stores::Uncached } else { Stores::Cached }
    }

    /// Bytes of the ring for an operation. A large payload leaves more of the last-level cache to the ranks' own buffers; ranks
    /// that take turns on a core share its second-level cache.
    fn ring(&self, slots: Slots) -> usize {
        let whole = self.region.ring_bytes();
        match slots.count * slots.stride() {
            _ if self.policy.is_oversubscribed() => SMALLEST_RING,
            0..SMALLEST_RING => whole,
            _ => SMALLEST_RING.max(whole / 2),
        }
    }

    /// Waits until all peers are at step `target`.
    pub(super) fn await_steps(&self, target: u32, call: &Signature) -> Result<()> {
        let steps = |peer: u32| -> &Flag { self.region.lines(peer).steps() };
        self.peers().try_for_each(|peer| {
            self.wait(steps(peer), target, call, || {
                (vec![peer], self.peers().filter(|peer| !steps(*peer).reached(target)).collect())
            })
        })
    }
}

/// The number across operations of block `block` of the operation that began with block `begin`.
fn step(begin: u32, block: usize) -> u32 {
    begin.wrapping_add(block as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_not_used_again_too_early() {
        let (mut streamed, mut latest) = (Streamed::default(), Vec::new());
        let mut random = 1u64;
        for _ in 0..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 33) as usize;
            let bytes = (SLOT_BYTES >> (number % 12)) - number % 3;
            let slots = Slots { count: 1 + number / 16 % 9, bytes };
            let ring = SMALLEST_RING << (number / 256 % 3);
            let places = streamed.places(slots, ring);
            for block in 0..slots.count {
                let begin = places.of(block);
                let own = begin..begin + bytes;
                assert!(begin + slots.stride() <= ring);
                let overlaps =
                    |other: &std::ops::Range<usize>| own.start < other.end && other.start < own.end;
                assert!(!latest.iter().rev().take(REUSED_AFTER - 1).any(overlaps), "{own:?} {latest:?}");
                latest.push(own);
            }
            let used = latest.len() - latest.len().min(REUSED_AFTER);
            latest.drain(..used);
            streamed.pass(places, slots.count);
        }
    }
}
