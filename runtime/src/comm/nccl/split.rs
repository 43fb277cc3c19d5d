//! Splitting a communicator into groups, with `ncclCommSplit`.
//!
//! The ranks exchange the arguments of the split first, as on the CPU, so that each knows the members of its group.
//! NCCL gets a color and a key from which it forms the same groups in the same order. It uses the parent for that, so
//! the call is made by the parent's [`owner`](super::owner), and all ranks of the parent make it. The handle is written to
//! the state of a new owner, which takes over from then on. The two communicators share nothing afterwards.
//!
//! A rank without a group gets a communicator of its own, which is freed at once. NCCL could split without one
//! (`NCCL_SPLIT_NOCOLOR`), but then writes to address 0 if a peer dies in the split (seen with NCCL 2.28.3).

use std::sync::Arc;

use mgpu_kernels::cuda::{Device, Memory, Stream};

use super::DeviceCommunicator;
use super::link::{Link, WaitContext};
use super::owner::{Ended, Owner};
use super::remote::Statement;
use super::shutdown::FINALISE_LIMIT;
use crate::Result;
use crate::comm::split::{SplitGroup, agree_on_split, form_group};
use crate::comm::{DType, Rules};
use crate::progress::Operation;

impl DeviceCommunicator {
    /// Splits the communicator into groups: a communicator for the ranks that pass the same `colour`, ordered by `key`,
    /// and by their rank here where keys are equal. A rank that passes no colour is in no group and gets `None`. Waits
    /// for all ranks of this communicator, and for its operations that were enqueued before; other threads must
    /// enqueue none meanwhile, and launch no graph with captured operations.
    ///
    /// Several groups can be in use at once, also overlapping ones. An error in one of them makes all of them unusable,
    /// and this communicator, too. NCCL may run operations of different communicators one after the other: ranks that
    /// enqueue operations of several groups must do so in an order in which every one of them can end.
    ///
    /// # Errors
    /// If NCCL is older than 2.18.1, or as [`all_reduce`](Self::all_reduce): an error of one rank is an error on all.
    pub fn split(&self, colour: Option<u32>, key: i32) -> Result<Option<DeviceCommunicator>> {
        let Some(link) = self.link() else {
            return Ok(colour.map(|_| DeviceCommunicator::alone(self.device())));
        };
        // After this, all earlier operations of this rank have ended.
        let gather = |words: &[i64]| self.gather_words(words, "the arguments of a split");
        let all = agree_on_split(Some(&link.membership), (colour, key), gather)?;
        let group = form_group(&all, &link.members);
        let context = link.split_context(group.as_ref());
        link.during(&context, || match &group {
            Some(group) if group.members.size() > 1 => {
                self.connect_group(group, link.rules.for_group(group)).map(Some)
            }
            // A group of one rank needs no NCCL.
            _ => self
                .connect_no_group()
                .map(|()| group.as_ref().map(|_| DeviceCommunicator::alone(self.device()))),
        })
    }

    /// The words of all ranks, in their order. `what` describes them for errors.
    pub(super) fn gather_words(&self, words: &[i64], what: &str) -> Result<Vec<i64>> {
        let stream = Stream::new(self.device())?;
        let mine = Memory::from_slice(&stream, words)?;
        let all = Memory::zeroed(self.device(), DType::I64, words.len() * self.size() as usize)?;
        self.all_gather(&stream, mine.view(), all.view())?;
        self.wait(&stream, what)?;
        Ok(all.view().to_vec::<i64>(&stream)?)
    }

    /// Connects this rank with the other members of `group`. All ranks of this communicator call it, or
    /// [`connect_no_group`](Self::connect_no_group).
    pub(super) fn connect_group(&self, group: &SplitGroup, rules: Rules) -> Result<DeviceCommunicator> {
        let link = self.parent_link().connect_group(group, rules, self.device())?;
        Ok(DeviceCommunicator::connected(self.device(), link))
    }

    /// Takes part in a split without a group of several ranks.
    pub(super) fn connect_no_group(&self) -> Result<()> {
        self.parent_link().connect_alone(self.device())
    }

    fn parent_link(&self) -> &Link {
        self.link().expect("a split through NCCL has a parent with NCCL")
    }
}

impl Link {
    /// What a rank waits in during a split.
    pub(super) fn split_context(&self, group: Option<&SplitGroup>) -> WaitContext {
        WaitContext {
            operation: Operation::Connect,
            sequence: group.map_or(0, |group| group.number),
            bytes: 0,
            text: match group {
                Some(group) => format!("the connection of {}", group.title()),
                None => "a split without a group for this rank".into(),
            },
            // NCCL needs all ranks for a split.
            peers: self.peers(),
            messages: None,
        }
    }

    /// Connects a group of several ranks. Its errors are errors of this communicator.
    fn connect_group(&self, group: &SplitGroup, rules: Rules, device: &Arc<Device>) -> Result<Link> {
        let number = group_number_of_link(group);
        let context = self.split_context(Some(group));
        let owner = self.split(number, group.parent_ranks[0], group.members.rank(), &context, device)?;
        self.membership.collectives.add_group(number);
        Ok(Link {
            membership: Arc::clone(&self.membership),
            members: group.members.clone(),
            number,
            key: group.key(),
            title: group.title(),
            timeout: self.timeout,
            owner,
            rules: Arc::new(rules),
            family: Arc::clone(&self.family),
            statement: Statement::default(),
            registration: self.registration.clone(),
        })
    }

    /// Takes part in a split without a group of several ranks.
    fn connect_alone(&self, device: &Arc<Device>) -> Result<()> {
        let owner = self.split(UNUSED, self.members.rank(), 0, &self.split_context(None), device)?;
        let _: Ended = owner.finalise(FINALISE_LIMIT);
        self.family.remove(UNUSED);
        Ok(())
    }

    /// Splits off the communicator `number` of all ranks that pass the same `first`, which is the rank here of one of
    /// them; `rank` is this rank's there.
    fn split(
        &self,
        number: u32,
        first: u32,
        rank: u32,
        context: &WaitContext,
        device: &Arc<Device>,
    ) -> Result<Arc<Owner>> {
        let owner = Arc::new(Owner::start(self.owner.library(), device)?);
        // From here on an error aborts the new communicator, too.
        self.family.add(number, &owner);
        // The ranks of a world fit NCCL's types: see `MAX_WORLD_RANKS`.
        self.answer(&self.owner.split(&owner, first as u16, rank as i32), context)?;
        self.answer(&owner.await_split(), context)?;
        Ok(owner)
    }
}

/// Number of a communicator that is freed as soon as it is connected.
const UNUSED: u32 = GROUP - 1;

/// Bit of the numbers of groups, which distinguishes them from those of the world's communicators.
pub(super) const GROUP: u32 = 1 << 31;

/// The number of a group for counters on the progress page: its members have no other group of this number, and no
/// other group of the split has it. (Ranks have 16 bits, see `MAX_WORLD_RANKS`; the groups' own numbers repeat after
/// 32,768.)
fn group_number_of_link(group: &SplitGroup) -> u32 {
    group_number(group.number, group.members.world_rank(0))
}

fn group_number(number: u32, first: u32) -> u32 {
    GROUP | (number & 0x7fff) << 16 | first
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::MAX_WORLD_RANKS;

    #[test]
    fn groups_of_different_splits_or_first_ranks_have_different_numbers() {
        let firsts = [0, 1, 4095, 4096, MAX_WORLD_RANKS - 1];
        let of = |number: u32| firsts.map(|first| group_number(number, first));
        let all: std::collections::HashSet<u32> = (0..9).flat_map(of).collect();
        assert_eq!(all.len(), 9 * firsts.len());
        assert!(all.iter().all(|number| *number >= GROUP));
    }
}
