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
//! after it publishes, fetched those up to j − 2F. The slot was used last by block j + F − K of a ring of K slots: with
//! K ≥ 3F, nobody reads that any more. Blocks are numbered across operations, so the same holds from one operation
//! to the next.
//!
//! Slots are small enough for a few of all ranks to stay in the second-level cache: a payload of any size then passes
//! through the same lines again and again, and reaches memory only in the ranks' own buffers.

use super::CpuTransport;
use super::direct::Addresses;
use super::wait::Flag;
use crate::Result;
use crate::comm::signature::Signature;

/// Blocks that are filled ahead of the one that is worked on.
const FILLED_AHEAD: usize = 2;

/// Slots of a rank. A power of two, since the numbers of blocks wrap.
pub(super) const SLOTS: usize = 8;

const _: () = assert!(SLOTS >= 3 * FILLED_AHEAD && SLOTS.is_power_of_two());

/// What an operation does with block `usize` in each stage. Fill gets this rank's slot, the others get those of all ranks.
pub(super) struct Stages<Fill, Work, Fetch> {
    pub(super) fill: Fill,
    pub(super) work: Work,
    /// `None`: the operation is over when all have worked.
    pub(super) fetch: Option<Fetch>,
}

/// The fetch of operations without one.
pub(super) type NoFetch = fn(&CpuTransport, usize, &Addresses);

impl CpuTransport {
    /// Arrives at the next operation and passes its `blocks` blocks, at least one, through the stages.
    pub(super) fn stream<Fill, Work, Fetch>(
        &mut self,
        call: &Signature,
        blocks: usize,
        stages: &Stages<Fill, Work, Fetch>,
    ) -> Result<()>
    where
        Fill: Fn(&Self, usize, *mut u8),
        Work: Fn(&Self, usize, &Addresses),
        Fetch: Fn(&Self, usize, &Addresses),
    {
        self.region.reserve_stream(self.rank)?;
        let begin = self.streamed;
        let fill = |comm: &Self, block: usize| {
            (stages.fill)(comm, block, comm.region.slot(comm.rank, begin.wrapping_add(block as u32)));
        };
        (0..blocks.min(FILLED_AHEAD)).for_each(|block| fill(self, block));
        self.enter(call)?;
        let mut fetched = 0;
        for block in 0..blocks {
            (stages.work)(self, block, &self.slots_of(begin, block));
            if block + FILLED_AHEAD < blocks {
                fill(self, block + FILLED_AHEAD);
            }
            let is_last = block + 1 == blocks;
            // Nobody waits for the last step of an operation without fetch; the next one begins with an arrival.
            if is_last && stages.fetch.is_none() {
                break;
            }
            let done = block + 1;
            self.region.lines(self.rank).steps().publish(step(begin, done), self.policy);
            // The next block must be filled, or at the end all blocks worked on.
            let needed = if is_last { blocks } else { (block + 2).saturating_sub(FILLED_AHEAD) };
            if let Some(fetch) = &stages.fetch {
                while fetched < needed {
                    self.await_steps(step(begin, fetched + 1), call)?;
                    fetch(self, fetched, &self.slots_of(begin, fetched));
                    fetched += 1;
                }
            } else if needed > 0 {
                self.await_steps(step(begin, needed), call)?;
            }
        }
        self.streamed = step(begin, blocks);
        Ok(())
    }

    /// The slots of all ranks for a block of the operation that began with block `begin`.
    fn slots_of(&self, begin: u32, block: usize) -> Addresses {
        (0..self.size).map(|rank| self.region.slot(rank, step(begin, block))).collect()
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
