//! The board: memory in which the ranks of a house tell each other that they have arrived.
//!
//! Each rank has two *slots* for its arrivals, with small contributions, and a counter of the barriers of the house that
//! it has come to. The first rank of the house, the *leader*, has two *sheets* for the arrivals of all other runs. Slots
//! and sheets of collective `s` are those of number `s mod 2`.
//!
//! **Two are enough.** A rank that writes its slot for `s` has left `s − 1`, so every rank had arrived at `s − 1` and had left
//! `s − 2` before: nobody reads what belongs to `s − 2` any more. The leader writes its sheet for `s` after it has arrived
//! there, so the same holds for sheets. How a rank learns of an arrival, from the board or by a frame, does not matter.
//!
//! **Slots and sheets are compared for equality.** While a rank is in `s`, nobody has left `s + 1`: no slot and no sheet that
//! it reads is newer than `s`. They may be older by any number of collectives, because not all arrivals go over boards.
//!
//! **Order.** The sequence number of a slot or a sheet is written last and releases; whoever reads it acquires. Everything
//! else in them is accessed only by whoever that order allows to.
//!
//! **Sleep.** A rank that waits for others of its house sleeps on a futex of its own, with a flag in it. It sets the flag,
//! and then looks at the board once more. Whoever publishes something looks at the flags afterwards, and wakes the
//! sleepers. A sequentially consistent fence on either side sees to it that at least one of the two sees what the other one
//! has written.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::time::Duration;

use nix::libc;
use smallvec::SmallVec;

use super::arrivals::Arrival;
use super::bundle::Entry;
use super::frame::SMALL_BYTES;
use crate::comm::cpu::futex;
use crate::comm::signature::SIGNATURE_WORDS;
use crate::shm::{Shared, SharedMemory};

/// The most memory for the contributions on a sheet.
const SHEET_BYTES: usize = 1 << 20;
/// Alignment of everything that different ranks write.
pub(super) const LINE: usize = 128;

/// The largest contribution to a collective of `ranks` ranks that goes over boards.
pub(super) fn most_bytes(ranks: u32) -> usize {
    (SHEET_BYTES / ranks as usize).min(SMALL_BYTES) / 64 * 64
}

/// What a rank writes beside its arrivals.
#[repr(C, align(128))]
struct State {
    /// The last barrier of the house that it has come to.
    barrier: AtomicU32,
    /// 1 while it sleeps, or is about to: a futex.
    asleep: AtomicU32,
}

// SAFETY: atomics only, any bytes are a value.
unsafe impl Shared for State {}

/// The beginning of a slot; the contribution follows.
#[repr(C, align(128))]
struct Slot {
    sequence: AtomicU32,
    length: AtomicU32,
    location: AtomicU64,
    call: [AtomicU64; SIGNATURE_WORDS],
}

// SAFETY: as above.
unsafe impl Shared for Slot {}

/// The beginning of a sheet; the entries of all ranks follow, and then their contributions.
#[repr(C, align(128))]
struct Sheet {
    sequence: AtomicU32,
}

// SAFETY: as above.
unsafe impl Shared for Sheet {}

/// The arrival of one rank on a sheet.
#[repr(C)]
struct SheetEntry {
    location: AtomicU64,
    length: AtomicU64,
}

// SAFETY: as above.
unsafe impl Shared for SheetEntry {}

/// Where the parts of a board are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    /// Number of ranks of all hosts.
    ranks: u32,
    /// Bytes of a contribution.
    most: usize,
}

impl Layout {
    /// The layout of the board of a communicator of `ranks` ranks.
    pub(super) fn new(ranks: u32) -> Self {
        Layout { ranks, most: most_bytes(ranks) }
    }

    fn slot_bytes(self) -> usize {
        (size_of::<Slot>() + self.most).next_multiple_of(LINE)
    }

    /// Bytes that each rank of the house has.
    pub(super) fn bytes_of_rank(self) -> usize {
        size_of::<State>() + 2 * self.slot_bytes()
    }

    fn sheet_bytes(self) -> usize {
        let each = size_of::<SheetEntry>() + self.most;
        (size_of::<Sheet>() + self.ranks as usize * each).next_multiple_of(LINE)
    }

    /// Bytes of the sheets.
    pub(super) fn bytes_of_sheets(self) -> usize {
        2 * self.sheet_bytes()
    }
}

/// The board of a house, in memory that all of its ranks map.
#[derive(Debug)]
pub(super) struct Board {
    layout: Layout,
    /// Where the parts of the ranks of the house begin, in rank order, and where the sheets do.
    parts: Vec<usize>,
    sheets: usize,
    /// Position of this rank.
    own: usize,
}

/// Whether a counter that wraps has reached `target`.
fn has_reached(counter: &AtomicU32, target: u32) -> bool {
    counter.load(Acquire).wrapping_sub(target) as i32 >= 0
}

impl Board {
    /// Parts and sheets begin at multiples of 128 bytes, and are as large as `layout` says.
    pub(super) fn new(layout: Layout, parts: Vec<usize>, sheets: usize, own: usize) -> Self {
        assert!(parts.iter().chain([&sheets]).all(|at| at.is_multiple_of(LINE)));
        Board { layout, parts, sheets, own }
    }

    fn state<'a>(&self, memory: &'a SharedMemory, rank: usize) -> &'a State {
        memory.view(self.parts[rank])
    }

    /// Where the slot of a rank for collective `sequence` begins.
    fn slot_at(&self, rank: usize, sequence: u32) -> usize {
        self.parts[rank] + size_of::<State>() + (sequence % 2) as usize * self.layout.slot_bytes()
    }

    fn sheet_at(&self, sequence: u32) -> usize {
        self.sheets + (sequence % 2) as usize * self.layout.sheet_bytes()
    }

    /// Publishes this rank's arrival at collective `sequence`.
    ///
    /// # Panics
    /// If the payload is too large.
    pub(super) fn arrive(&self, memory: &SharedMemory, arrival: &Arrival) {
        let at = self.slot_at(self.own, arrival.sequence);
        let slot: &Slot = memory.view(at);
        let payload = arrival.payload.as_deref().unwrap_or_default();
        assert!(payload.len() <= self.layout.most, "{} bytes in a slot", payload.len());
        let place = memory.at(at + size_of::<Slot>());
        // SAFETY: the slot has room for the payload, and nobody reads it before its sequence number is written (see the
        // module's description).
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), place, payload.len()) };
        slot.length.store(payload.len() as u32, Relaxed);
        slot.location.store(arrival.location, Relaxed);
        for (place, word) in slot.call.iter().zip(arrival.call) {
            place.store(word, Relaxed);
        }
        slot.sequence.store(arrival.sequence, Release);
        // At least one of the two ranks that arrive last sees that all have arrived.
        fence(SeqCst);
    }

    /// What the rank at this position says of its arrival at collective `sequence`; `None` before it.
    ///
    /// # Errors
    /// If it says something impossible.
    pub(super) fn arrival(
        &self,
        memory: &SharedMemory,
        rank: usize,
        sequence: u32,
    ) -> Result<Option<Arrival>, String> {
        let at = self.slot_at(rank, sequence);
        let slot: &Slot = memory.view(at);
        if slot.sequence.load(Acquire) != sequence {
            return Ok(None);
        }
        let length = slot.length.load(Relaxed) as usize;
        let payload = self.copy(memory, at + size_of::<Slot>(), length)?;
        let call = std::array::from_fn(|word| slot.call[word].load(Relaxed));
        Ok(Some(Arrival { sequence, call, location: slot.location.load(Relaxed), payload: Some(payload) }))
    }

    /// Copies a contribution of `length` bytes that was published.
    fn copy(&self, memory: &SharedMemory, at: usize, length: usize) -> Result<Vec<u8>, String> {
        if length > self.layout.most {
            return Err(format!("a contribution of {length} bytes; the maximum is {}", self.layout.most));
        }
        let mut bytes = vec![0; length];
        // SAFETY: slots and sheets have room for so many bytes, which nobody writes before all ranks of the house have left
        // the collective (see the module's description).
        unsafe { std::ptr::copy_nonoverlapping(memory.at(at).cast_const(), bytes.as_mut_ptr(), length) };
        Ok(bytes)
    }

    /// Whether all ranks of the house have arrived at collective `sequence`.
    pub(super) fn have_all_arrived(&self, memory: &SharedMemory, sequence: u32) -> bool {
        (0..self.parts.len()).all(|rank| self.arrival_flag(memory, rank, sequence).load(Acquire) == sequence)
    }

    /// Its value is the sequence number of the rank's arrival at collective `sequence`, or that of an earlier one.
    fn arrival_flag<'a>(&self, memory: &'a SharedMemory, rank: usize, sequence: u32) -> &'a AtomicU32 {
        &memory.view::<Slot>(self.slot_at(rank, sequence)).sequence
    }

    /// Writes a sheet with the arrivals of other runs at collective `sequence`. Only the leader may do so.
    pub(super) fn publish<'a>(
        &self,
        memory: &SharedMemory,
        sequence: u32,
        entries: impl Iterator<Item = Entry<'a>>,
    ) {
        let at = self.sheet_at(sequence);
        for Entry { rank, location, payload } in entries {
            assert!(payload.len() <= self.layout.most, "{} bytes on a sheet", payload.len());
            let (entry, place) = self.entry(memory, at, rank);
            entry.location.store(location, Relaxed);
            entry.length.store(payload.len() as u64, Relaxed);
            // SAFETY: as in `arrive`.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), memory.at(place), payload.len()) };
        }
        memory.view::<Sheet>(at).sequence.store(sequence, Release);
    }

    /// The entry of a rank on the sheet that begins at `sheet`, and where its contribution is.
    fn entry<'a>(&self, memory: &'a SharedMemory, sheet: usize, rank: u32) -> (&'a SheetEntry, usize) {
        let entries = sheet + size_of::<Sheet>();
        let payloads = entries + self.layout.ranks as usize * size_of::<SheetEntry>();
        let entry = memory.view(entries + rank as usize * size_of::<SheetEntry>());
        (entry, payloads + rank as usize * self.layout.most)
    }

    /// Whether the sheet of collective `sequence` is complete.
    pub(super) fn is_published(&self, memory: &SharedMemory, sequence: u32) -> bool {
        memory.view::<Sheet>(self.sheet_at(sequence)).sequence.load(Acquire) == sequence
    }

    /// Location and contribution of a rank of another run on the sheet of collective `sequence`, which is complete.
    ///
    /// # Errors
    /// If the sheet says something impossible.
    pub(super) fn published(
        &self,
        memory: &SharedMemory,
        sequence: u32,
        rank: u32,
    ) -> Result<(u64, Vec<u8>), String> {
        let (entry, place) = self.entry(memory, self.sheet_at(sequence), rank);
        let length = usize::try_from(entry.length.load(Relaxed)).unwrap_or(usize::MAX);
        Ok((entry.location.load(Relaxed), self.copy(memory, place, length)?))
    }

    /// Notes that this rank has come to a barrier. Returns whether all have.
    pub(super) fn come_to_barrier(&self, memory: &SharedMemory, barrier: u32) -> bool {
        self.state(memory, self.own).barrier.store(barrier, SeqCst);
        fence(SeqCst);
        (0..self.parts.len()).all(|rank| self.has_come_to_barrier(memory, rank, barrier))
    }

    /// Whether the rank at this position has come to a barrier.
    pub(super) fn has_come_to_barrier(&self, memory: &SharedMemory, rank: usize, barrier: u32) -> bool {
        has_reached(&self.state(memory, rank).barrier, barrier)
    }

    /// Wakes the rank at this position, if it sleeps, after something was published that it may wait for.
    pub(super) fn wake(&self, memory: &SharedMemory, rank: usize) {
        fence(SeqCst);
        let asleep = &self.state(memory, rank).asleep;
        if asleep.load(Relaxed) != 0 && asleep.swap(0, Relaxed) != 0 {
            futex(asleep, libc::FUTEX_WAKE, 1, None);
        }
    }

    /// Wakes all other ranks that sleep.
    pub(super) fn wake_all(&self, memory: &SharedMemory) {
        (0..self.parts.len()).filter(|rank| *rank != self.own).for_each(|rank| self.wake(memory, rank));
    }

    /// A wait of this rank until all ranks of the house have arrived at collective `sequence`.
    pub(super) fn watch_arrivals<'a>(&self, memory: &'a SharedMemory, sequence: u32) -> Watch<'a> {
        let others = (0..self.parts.len()).filter(|rank| *rank != self.own);
        let flags = others.map(|rank| self.arrival_flag(memory, rank, sequence)).collect();
        Watch { flags, target: Target::Exactly(sequence), asleep: Some(&self.state(memory, self.own).asleep) }
    }

    /// A wait of this rank for the sheet of collective `sequence`.
    pub(super) fn watch_sheet<'a>(&self, memory: &'a SharedMemory, sequence: u32) -> Watch<'a> {
        let flag = &memory.view::<Sheet>(self.sheet_at(sequence)).sequence;
        let asleep = Some(&self.state(memory, self.own).asleep);
        Watch { flags: SmallVec::from_slice(&[flag]), target: Target::Exactly(sequence), asleep }
    }

    /// A wait of this rank for all others at a barrier.
    pub(super) fn watch_barrier<'a>(&self, memory: &'a SharedMemory, barrier: u32) -> Watch<'a> {
        let others = (0..self.parts.len()).filter(|rank| *rank != self.own);
        let flags = others.map(|rank| &self.state(memory, rank).barrier).collect();
        Watch { flags, target: Target::AtLeast(barrier), asleep: Some(&self.state(memory, self.own).asleep) }
    }
}

/// The number that a counter has to reach.
enum Target {
    /// A slot's or a sheet's sequence number.
    Exactly(u32),
    /// A barrier, which others may have left.
    AtLeast(u32),
}

impl Target {
    fn is_reached(&self, counter: &AtomicU32) -> bool {
        match *self {
            Target::Exactly(number) => counter.load(Acquire) == number,
            Target::AtLeast(number) => has_reached(counter, number),
        }
    }
}

/// What a wait watches beside the connections: whether counters on the board have all reached a number.
pub(super) struct Watch<'a> {
    flags: SmallVec<[&'a AtomicU32; 8]>,
    target: Target,
    /// The flag of this rank's sleep.
    asleep: Option<&'a AtomicU32>,
}

impl Default for Watch<'_> {
    /// Nothing to watch.
    fn default() -> Self {
        Watch { flags: SmallVec::new(), target: Target::AtLeast(0), asleep: None }
    }
}

impl Watch<'_> {
    /// Whether there is anything to watch.
    pub(super) fn is_idle(&self) -> bool {
        self.flags.is_empty()
    }

    /// Whether all counters have reached the number; false if there is none.
    pub(super) fn is_over(&self) -> bool {
        !self.flags.is_empty() && self.flags.iter().all(|flag| self.target.is_reached(flag))
    }

    /// Sleeps until it may be [over](Self::is_over), for at most `patience`. What arrives over connections does not end the
    /// sleep.
    pub(super) fn sleep(&self, patience: Duration) {
        let Some(asleep) = self.asleep else { return };
        asleep.store(1, Relaxed);
        fence(SeqCst);
        if !self.is_over() {
            futex(asleep, libc::FUTEX_WAIT, 1, Some(patience));
        }
        asleep.store(0, Relaxed);
    }
}
