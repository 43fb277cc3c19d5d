//! The cache lines of shared memory on which ranks synchronise, and the order in which they may be accessed.
//!
//! **Arrival.** A rank publishes operation `s` in one of its arrival lines, which it uses in turn: a digest of its
//! arguments, a small payload and then the flag, all in one cache line, so that a peer that sees the flag has everything.
//! In most operations every rank waits until all peers have arrived, and compares their digests. For what is written
//! only there, two copies are enough: a rank that writes the copy for `s` has left `s − 1`, which required that every
//! peer had arrived there and so had finished reading what belonged to `s − 2`.
//!
//! **Running ahead.** In a small broadcast a rank waits for the root only, and the root for nobody. What is not compared
//! there is compared later: before a rank arrives at `s`, all peers must have arrived at `s − AHEAD`, with equal digests
//! up to there. So when a rank writes its line for `s`, its peers have compared everything up to `s − 2·AHEAD`, and have
//! finished reading payloads up to `s − AHEAD − 1`: that many lines are enough. Before any other operation a rank
//! catches up with all comparisons.
//!
//! **Work.** Each rank has a queue of blocks of the current operation. A queue is a pair of counters that only grow
//! (and wrap): tickets drawn, and blocks completed. Every rank knows from the sequence of operations where each
//! operation begins. A rank processes its own queue, and then those of late ranks, so that a descheduled rank delays
//! the others by at most one block. The counters are on separate lines, so that they cost nothing while nobody helps;
//! a single counter for all would have to be fetched from another core for every block.
//!
//! **Order.** Publishing a flag or completing a block releases; observing it acquires. Between the arrival of all
//! ranks and the completion of all blocks, a ticket gives its holder exclusive access to the block's memory.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::prefetch;
use super::wait::{FLAG_WORDS, Flag, WaitPolicy};
use crate::comm::signature::{SIGNATURE_WORDS, Signature};

/// Size of the payload that fits into an arrival line.
pub(super) const INLINE_BYTES: usize = (FLAG_WORDS - 1) * 8;

/// How many broadcasts a rank may be ahead of its peers.
pub(super) const AHEAD: usize = 8;

/// Number of a rank's arrival lines.
pub(super) const ARRIVALS: usize = 2 * AHEAD;

/// A rank's arrival at an operation.
#[derive(Default)]
#[repr(C)]
pub(super) struct Arrival {
    /// Sequence number of the operation; in its line are the digest of the call and the payload.
    pub(super) flag: Flag,
}

impl Arrival {
    pub(super) fn digest(&self) -> u64 {
        self.flag.words[0].load(Ordering::Relaxed)
    }

    /// The payload: [`INLINE_BYTES`] bytes, aligned to 8. Plain memory, like a slot: written before the arrival and
    /// read after it.
    pub(super) fn payload(&self) -> *mut u8 {
        self.flag.words[1..].as_ptr().cast_mut().cast()
    }
}

/// Tickets drawn from a rank's queue.
#[derive(Default)]
#[repr(C, align(128))]
struct Tickets {
    count: AtomicU32,
}

/// Read by peers only when something is wrong.
#[derive(Default)]
#[repr(C, align(128))]
struct Diagnostics {
    /// The queue from which this rank is processing a block, plus one; 0 for none.
    busy: AtomicU32,
    /// Sequence lock of the record of a long wait; odd during a change.
    version: AtomicU32,
    /// During a long wait: the rank it waits for, plus one; the number of the flag's line; the flag's target.
    waiting: [AtomicU32; 3],
    /// The call in which it waits.
    waits_in: [AtomicU64; SIGNATURE_WORDS],
    /// The arguments of the last operations, as many as there are arrival lines.
    calls: [[AtomicU64; SIGNATURE_WORDS]; ARRIVALS],
}

/// The record of a long wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Waiting {
    /// The rank that must advance the flag.
    pub(super) peer: u32,
    /// Number of the flag's line in the region.
    pub(super) flag: u32,
    pub(super) target: u32,
    /// The encoded call in which the rank waits.
    pub(super) call: [u64; SIGNATURE_WORDS],
}

/// All lines of one rank.
#[derive(Default)]
#[repr(C)]
pub(super) struct RankLines {
    arrivals: [Arrival; ARRIVALS],
    tickets: Tickets,
    /// Completed blocks of this rank's queue.
    completed: Flag,
    /// Steps of this rank's streams.
    steps: Flag,
    diagnostics: Diagnostics,
}

impl RankLines {
    /// The line for operation `sequence`.
    pub(super) fn arrival(&self, sequence: u32) -> &Arrival {
        &self.arrivals[sequence as usize % ARRIVALS]
    }

    /// Publishes this rank's arrival at operation `sequence`. Returns the digest of its call.
    #[inline(always)]
    pub(super) fn arrive(&self, sequence: u32, call: &Signature, policy: WaitPolicy) -> u64 {
        let words = call.encode();
        let digest = Signature::digest(words);
        for (slot, word) in self.diagnostics.calls[sequence as usize % ARRIVALS].iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        let flag = &self.arrival(sequence).flag;
        flag.words[0].store(digest, Ordering::Relaxed);
        flag.publish(sequence, policy);
        digest
    }

    /// What this rank passed to operation `sequence`, for the error message of a peer that passed something else.
    pub(super) fn call(&self, sequence: u32) -> [u64; SIGNATURE_WORDS] {
        let words = &self.diagnostics.calls[sequence as usize % ARRIVALS];
        std::array::from_fn(|index| words[index].load(Ordering::Relaxed))
    }

    /// Processes the remaining blocks of this rank's queue on behalf of `worker`. The operation began at count `begin`
    /// of the queue and has `blocks` blocks. Returns how many blocks it has processed.
    pub(super) fn process(
        &self,
        worker: (&RankLines, u32),
        begin: u32,
        blocks: u32,
        mut each: impl FnMut(u32),
    ) -> u32 {
        let (lines, queue) = worker;
        // Peers have waited for it in the last operation.
        let completed: *const Flag = &self.completed;
        prefetch::for_writing(completed.cast());
        lines.diagnostics.busy.store(queue + 1, Ordering::Relaxed);
        let mut processed = 0;
        while let Some(block) = self.draw_ticket(begin, blocks) {
            each(block);
            self.completed.increment();
            processed += 1;
        }
        lines.diagnostics.busy.store(0, Ordering::Relaxed);
        processed
    }

    /// Draws a ticket, unless none is left.
    fn draw_ticket(&self, begin: u32, blocks: u32) -> Option<u32> {
        let draw = |count: u32| (count.wrapping_sub(begin) < blocks).then_some(count.wrapping_add(1));
        let ticket = self.tickets.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, draw);
        ticket.ok().map(|count| count.wrapping_sub(begin))
    }

    /// Completed blocks of this rank's queue.
    pub(super) fn completed(&self) -> &Flag {
        &self.completed
    }

    /// Steps of this rank's streams (see `stream`).
    pub(super) fn steps(&self) -> &Flag {
        &self.steps
    }

    /// Records what this rank has been waiting for. Only the rank itself may call it.
    ///
    /// The version and the fences form a sequence lock (Boehm 2012, "Can seqlocks get along with programming language
    /// memory models?"): a reader that sees the same even version before and after has read a consistent record.
    pub(super) fn set_waiting(&self, waiting: Option<Waiting>) {
        if waiting == self.waiting() {
            return;
        }
        let Diagnostics { version, waiting: record, waits_in, .. } = &self.diagnostics;
        let begin = version.load(Ordering::Relaxed).wrapping_add(1);
        version.store(begin, Ordering::Relaxed);
        fence(Ordering::Release);
        let words = waiting.map_or([0; 3], |wait| [wait.peer + 1, wait.flag, wait.target]);
        for (slot, word) in record.iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
        for (slot, word) in waits_in.iter().zip(waiting.map_or([0; SIGNATURE_WORDS], |wait| wait.call)) {
            slot.store(word, Ordering::Relaxed);
        }
        version.store(begin.wrapping_add(1), Ordering::Release);
    }

    /// What this rank has been waiting for; also `None` while the record is being changed.
    pub(super) fn waiting(&self) -> Option<Waiting> {
        let Diagnostics { version, waiting, waits_in, .. } = &self.diagnostics;
        let begin = version.load(Ordering::Acquire);
        let [peer, flag, target] = std::array::from_fn(|index| waiting[index].load(Ordering::Relaxed));
        let call = std::array::from_fn(|index| waits_in[index].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if begin % 2 != 0 || version.load(Ordering::Relaxed) != begin {
            return None;
        }
        Some(Waiting { peer: peer.checked_sub(1)?, flag, target, call })
    }

    /// The queue from which this rank is processing a block.
    pub(super) fn busy_with(&self) -> Option<u32> {
        self.diagnostics.busy.load(Ordering::Relaxed).checked_sub(1)
    }
}

#[cfg(test)]
mod tests {
    //! The protocol alone, without mappings, sockets or processes, so that Miri and ThreadSanitizer can check it.
    //! Payloads are plain memory, so that a missing order is a data race.

    use std::cell::UnsafeCell;

    use super::*;
    use crate::comm::{DType, ReduceOp};
    use crate::progress::Operation;

    const RANKS: u32 = if cfg!(miri) { 3 } else { 4 };
    const ROUNDS: u32 = if cfg!(miri) { 6 } else { 2000 };
    const BLOCKS: usize = 2;

    /// Memory that only the protocol protects.
    #[derive(Default)]
    struct Plain<T>(UnsafeCell<T>);

    // SAFETY: this is what the tests verify.
    unsafe impl<T: Send> Sync for Plain<T> {}

    impl<T: Copy> Plain<T> {
        fn read(&self) -> T {
            // SAFETY: as above.
            unsafe { *self.0.get() }
        }

        fn write(&self, value: T) {
            // SAFETY: as above.
            unsafe { *self.0.get() = value };
        }
    }

    #[derive(Default)]
    struct Rank {
        lines: RankLines,
        slots: [Plain<u32>; 2],
        /// Slots of broadcasts.
        ahead: [Plain<u32>; ARRIVALS],
        /// One element per block of every queue.
        buffer: [Plain<u32>; RANKS as usize * BLOCKS],
    }

    fn call() -> Signature {
        let len = RANKS as usize * BLOCKS;
        Signature { op: Some(ReduceOp::Sum), ..Signature::plain(Operation::AllReduce, DType::I32, len) }
    }

    /// One of the ranks.
    #[derive(Clone, Copy)]
    struct Member<'a> {
        ranks: &'a [Rank],
        rank: u32,
        policy: WaitPolicy,
    }

    impl Member<'_> {
        fn own(&self) -> &Rank {
            &self.ranks[self.rank as usize]
        }

        fn wait(&self, flag: &Flag, target: u32) {
            self.policy.wait(flag, target, || {}, |_| Ok::<(), ()>(())).unwrap();
        }

        /// Arrives with a payload and waits for all; returns the sum of all payloads.
        fn enter(&self, sequence: u32, payload: u64) -> u64 {
            let own = &self.own().lines;
            // SAFETY: what the tests verify: nobody reads the payload now.
            unsafe { own.arrival(sequence).payload().cast::<u64>().write(payload) };
            own.arrive(sequence, &call(), self.policy);
            let payload_of = |peer: &Rank| {
                let line = peer.lines.arrival(sequence);
                self.wait(&line.flag, sequence);
                assert_eq!(line.digest(), Signature::digest(call().encode()));
                // SAFETY: as above: nobody writes the payload now.
                unsafe { line.payload().cast::<u64>().read() }
            };
            self.ranks.iter().map(payload_of).sum()
        }

        /// Processes all queues, its own first.
        fn work(&self, begin: u32, blocks: u32, mut each: impl FnMut(u32, u32)) {
            for queue in (self.rank..RANKS).chain(0..self.rank) {
                let lines = &self.ranks[queue as usize].lines;
                lines.process((&self.own().lines, queue), begin, blocks, |block| each(queue, block));
            }
        }

        fn wait_for_work(&self, target: u32) {
            self.ranks.iter().for_each(|peer| self.wait(peer.lines.completed(), target));
        }
    }

    /// Runs `body` on every rank, first with a core for each, then oversubscribed, which publishes flags differently.
    fn in_threads(body: impl Fn(Member<'_>) + Sync) {
        for cores in [RANKS as usize, 1] {
            let ranks: Vec<Rank> = (0..RANKS).map(|_| Rank::default()).collect();
            let policy = WaitPolicy::for_ranks(RANKS, cores);
            std::thread::scope(|scope| {
                for rank in 0..RANKS {
                    let member = Member { ranks: &ranks, rank, policy };
                    let body = &body;
                    scope.spawn(move || body(member));
                }
            });
        }
    }

    #[test]
    fn lines_have_the_size_of_cache_lines() {
        assert_eq!([size_of::<Arrival>(), size_of::<Tickets>(), size_of::<Flag>()], [128; 3]);
        assert_eq!((size_of::<Diagnostics>(), size_of::<RankLines>()), (640, 3072));
        assert!(std::mem::offset_of!(Flag, words) + FLAG_WORDS * 8 <= 64);
    }

    #[test]
    fn payloads_and_slots_belong_to_their_operation() {
        in_threads(|member| {
            for sequence in 1..=ROUNDS {
                let turn = (sequence % 2) as usize;
                member.own().slots[turn].write(sequence * 10 + member.rank);
                let sum = member.enter(sequence, u64::from(sequence + member.rank));
                let expected: u64 = (0..RANKS).map(|rank| u64::from(sequence + rank)).sum();
                assert_eq!(sum, expected);
                for (peer, number) in member.ranks.iter().zip(0..) {
                    assert_eq!(peer.slots[turn].read(), sequence * 10 + number);
                }
            }
        });
    }

    #[test]
    fn a_root_that_runs_ahead_overwrites_nothing_that_is_still_read() {
        in_threads(|member| {
            // Every rank is the root for a while.
            for sequence in 1..=ROUNDS {
                let await_at = |peer: &Rank, sequence: u32| {
                    member.wait(&peer.lines.arrival(sequence).flag, sequence);
                };
                if let Some(settled) = sequence.checked_sub(AHEAD as u32).filter(|settled| *settled > 0) {
                    for peer in member.ranks {
                        await_at(peer, settled);
                        assert_eq!(peer.lines.arrival(settled).digest(), Signature::digest(call().encode()));
                    }
                }
                let (root, turn) = (sequence / 50 % RANKS, sequence as usize % ARRIVALS);
                if member.rank == root {
                    member.own().ahead[turn].write(sequence * 10);
                }
                // SAFETY: what the tests verify: nobody reads the payload now.
                unsafe { member.own().lines.arrival(sequence).payload().cast::<u32>().write(sequence) };
                member.own().lines.arrive(sequence, &call(), member.policy);
                if member.rank != root {
                    let root = &member.ranks[root as usize];
                    await_at(root, sequence);
                    let payload = root.lines.arrival(sequence).payload();
                    // SAFETY: as above: nobody writes the payload now.
                    assert_eq!(unsafe { payload.cast::<u32>().read() }, sequence);
                    assert_eq!(root.ahead[turn].read(), sequence * 10);
                }
            }
        });
    }

    #[test]
    fn every_block_is_processed_once_and_seen_by_all() {
        in_threads(|member| {
            for round in 0..ROUNDS {
                member.own().buffer.iter().for_each(|element| element.write(member.rank + round));
                member.enter(round + 1, 0);
                let begin = round * BLOCKS as u32;
                member.work(begin, BLOCKS as u32, |queue, block| {
                    let element = queue as usize * BLOCKS + block as usize;
                    let sum = member.ranks.iter().map(|peer| peer.buffer[element].read()).sum();
                    member.ranks.iter().for_each(|peer| peer.buffer[element].write(sum));
                });
                member.wait_for_work(begin + BLOCKS as u32);
                let expected: u32 = (0..RANKS).map(|rank| rank + round).sum();
                assert!(member.own().buffer.iter().all(|element| element.read() == expected));
                assert_eq!(member.own().lines.busy_with(), None);
            }
        });
    }

    #[test]
    fn a_descheduled_rank_does_not_block_the_others() {
        in_threads(|member| {
            member.enter(1, 0);
            if member.rank != 0 {
                member.work(0, 5, |_, _| {});
                member.wait_for_work(5);
            }
        });
    }
}
