//! Waiting for the owner's thread or the GPU, without ever hanging.
//!
//! NCCL does not report the death of a peer on the same machine, and a kernel that waits for one never ends. So every
//! wait also checks the progress page, where the launcher records the end of a rank; NCCL's asynchronous error; and
//! the timeout. An error of a wait aborts the communicator, which then returns that error from every call.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda;

use super::family::Family;
use super::owner::{Owner, Reply};
use super::registration::RegistrationPolicy;
use super::remote::Statement;
use crate::comm::Members;
use crate::comm::rules::{Begun, FailureHandler, ProgressEntry, Rules};
use crate::membership::Membership;
use crate::process;
use crate::progress::{CollectiveCounter, Operation, RankState};
use crate::{Error, Result};

/// Interval between two checks of peers, NCCL and the timeout.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Waits below this spin and do not check anything.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// Longest sleep between two polls of the GPU.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// A communicator's connection to the other ranks.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) membership: Arc<Membership>,
    pub(super) members: Members,
    /// Number of the communicator, for counters on the progress page.
    pub(super) number: u32,
    /// Names it at the rendezvous.
    pub(super) key: String,
    /// Names it in messages.
    pub(super) title: String,
    pub(super) timeout: Duration,
    pub(super) owner: Arc<Owner>,
    /// Shared with the communicator for host buffers that uses this one.
    pub(super) rules: Arc<Rules>,
    pub(super) family: Arc<Family>,
    pub(super) statement: Statement,
    pub(super) registration: RegistrationPolicy,
}

/// What a rank waits in, for the progress page and for errors.
#[derive(Debug, Clone)]
pub(super) struct WaitContext {
    pub(super) operation: Operation,
    /// Sequence number within the communicator; 0 if it has none.
    pub(super) sequence: u32,
    pub(super) bytes: usize,
    pub(super) text: String,
    /// The ranks of the world that it depends on; none for the rank's own work.
    pub(super) peers: Vec<u32>,
    /// Number of messages begun with each rank of the world, including this one; only for operations on host buffers.
    pub(super) messages: Option<Vec<u32>>,
}

impl WaitContext {
    /// The peer and its number of messages, if this is a message.
    fn message(&self) -> Option<(u32, u32)> {
        let messages = self.messages.as_ref().filter(|_| !self.is_collective())?;
        let peer = *self.peers.first()?;
        Some((peer, messages[peer as usize]))
    }

    /// The entry of the progress page.
    fn progress_entry(&self) -> ProgressEntry {
        ProgressEntry {
            operation: self.operation,
            number: self.sequence,
            bytes: self.bytes,
            tag: None,
            on_device: true,
        }
    }

    pub(super) fn is_collective(&self) -> bool {
        !matches!(self.operation, Operation::Send | Operation::Recv | Operation::SendRecv)
    }
}

impl FailureHandler for Link {
    /// After the error is visible, queued calls must not run: the memory that was lent to them may be gone.
    fn stop(&self) {
        self.family.stop();
    }

    fn abort(&self) {
        self.membership.collectives.fail();
        // Peers may wait for this rank in any communicator of the family.
        self.membership.page().note_aborted(self.rank(), self.family.number());
        self.family.abort();
    }
}

impl Link {
    /// This rank, in the world.
    pub(super) fn rank(&self) -> u32 {
        self.membership.rank()
    }

    /// The members other than this rank, by their ranks in the world.
    pub(super) fn peers(&self) -> Vec<u32> {
        self.members.world_ranks().iter().copied().filter(|peer| *peer != self.rank()).collect()
    }

    /// Whether it was split from another communicator.
    pub(super) fn is_group(&self) -> bool {
        self.number != self.family.number()
    }

    /// Returns an error if the communicator is poisoned.
    pub(super) fn check(&self) -> Result<()> {
        self.rules.check_usable()
    }

    /// Runs `operate` as an operation of the communicator. Its error poisons the communicator.
    pub(super) fn operation<R>(
        &self,
        context: &WaitContext,
        operate: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let begun = self.rules.begin(context.progress_entry())?;
        self.rules.end(begun, operate(), self)
    }

    /// Runs `wait` with an entry on the progress page. Its error poisons the communicator.
    pub(super) fn during<R>(&self, context: &WaitContext, wait: impl FnOnce() -> Result<R>) -> Result<R> {
        self.rules.note(context.progress_entry());
        self.rules.end(Begun::NOTED, wait(), self)
    }

    /// Aborts the communicator because of `error`.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.rules.fail(error, self)
    }

    /// Aborts the communicator without an error to report.
    pub(super) fn force_abort(&self, why: &str) {
        self.rules.force_abort(why, self);
    }

    /// Waits for a reply of the owner.
    pub(super) fn answer<R>(&self, answer: &Receiver<Reply<R>>, context: &WaitContext) -> Result<R> {
        let (began, mut slice) = (Instant::now(), SPIN_TIME);
        loop {
            match answer.recv_timeout(slice) {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => return Err(self.nccl_error(context, error)),
                Err(RecvTimeoutError::Disconnected) => {
                    let problem = "the thread that owns the communicator has ended".into();
                    return Err(Error::Nccl {
                        rank: self.rank(),
                        operation: self.describe(context),
                        problem,
                    });
                }
                Err(RecvTimeoutError::Timeout) => self.check_peers(context, began.elapsed())?,
            }
            slice = (slice * 2).min(POLL_INTERVAL);
        }
    }

    /// Waits until `is_done` returns true.
    pub(super) fn device(
        &self,
        is_done: impl Fn() -> cuda::Result<bool>,
        context: &WaitContext,
    ) -> Result<()> {
        let is_over = || is_done().map_err(|error| self.gpu_error(context, error));
        if is_over()? {
            return Ok(());
        }
        let began = Instant::now();
        let mut next_look = POLL_INTERVAL;
        let mut watcher = None;
        loop {
            if is_over()? {
                return Ok(());
            }
            let waited = began.elapsed();
            if waited < SPIN_TIME {
                std::thread::yield_now();
                continue;
            }
            std::thread::park_timeout((waited / 16).min(MAX_SLEEP));
            if waited < next_look {
                continue;
            }
            next_look = waited + POLL_INTERVAL;
            watcher.get_or_insert_with(|| self.owner.watch());
            if let Err(error) = self.check_peers(context, waited) {
                // If the work is done, the wait has succeeded, whatever has failed since.
                if matches!(is_done(), Ok(true)) {
                    return Ok(());
                }
                return Err(error);
            }
        }
    }

    /// Runs periodically during a wait: records whom this rank waits for, checks whether the wait can still succeed,
    /// and times out.
    #[cold]
    fn check_peers(&self, context: &WaitContext, waited: Duration) -> Result<()> {
        self.check()?;
        if let Some(error) = self.owner.failure() {
            return Err(self.nccl_error(context, error.to_owned()));
        }
        let page = self.membership.page();
        // If this rank's own NCCL call does not return, it records no wait, so that others see it as the cause.
        let stuck = self.owner.stuck_call(self.timeout.min(Duration::from_secs(1)));
        let suspects = self.suspects(context);
        if stuck.is_some() {
            page.stop_waiting(self.rank());
        } else if let Some(peer) = suspects.first() {
            // In this order: who sees the wait should also see in which communicator.
            page.note_waiting_collective(self.rank(), self.progress());
            page.wait(self.rank(), *peer);
            if let Some((_, turns)) = context.message() {
                page.note_waiting_message(
                    self.rank(),
                    CollectiveCounter { communicator: self.number, count: turns },
                );
            }
        }
        if let Some(error) = self.unmet_message(context) {
            return Err(error);
        }
        if let Some(error) = self.membership.lost_peer(&context.peers, || self.describe(context)) {
            return Err(error);
        }
        if let Some(peer) = context.peers.iter().find(|peer| page.has_aborted(**peer, self.family.number())) {
            return Err(self.membership.lost_error(*peer, self.describe(context)));
        }
        if let Some(peer) = self.departed_peer(&context.peers) {
            let (rank, operation, how) =
                (self.rank(), self.describe(context), "has dropped the communicator");
            return Err(Error::PeerLost { rank, peer, operation, how: how.into(), silent: false });
        }
        self.state_wait(context, waited);
        if waited < self.timeout {
            return Ok(());
        }
        let (rank, operation) = (self.rank(), self.describe(context));
        Err(match stuck {
            None if context.peers.is_empty() => {
                Error::Stuck { rank, operation, call: "the GPU's own work", after: waited }
            }
            Some((call, since)) => Error::Stuck { rank, operation, call, after: since.elapsed() },
            None => {
                let absent = self.absent_members(context);
                // Meanwhile a rank may have ended, which explains more.
                if let Some(error) = self.membership.lost_peer(&context.peers, || operation.clone()) {
                    return Err(error);
                }
                let waited_for = absent.unwrap_or_else(|| self.causes_of_wait(suspects));
                Error::Timeout { rank, waited_for, operation, after: waited }
            }
        })
    }

    /// Detects that this rank waits in a collective on host buffers for a peer that has not begun it and waits in a
    /// message that this rank has not begun. A rank has one such operation at a time, so neither of the two can end.
    fn unmet_message(&self, context: &WaitContext) -> Option<Error> {
        let messages = context.messages.as_ref().filter(|_| context.is_collective())?;
        let (page, ours) = (self.membership.page(), self.progress());
        let is_unmet = |peer: &u32| {
            // A peer may have finished this collective already, and be ahead of this rank.
            let message = page.waiting_message(*peer, self.rank()).zip(page.waiting_collective(*peer));
            message.is_some_and(|(message, theirs)| {
                message.communicator == ours.communicator
                    && message.count > messages[*peer as usize]
                    && theirs.communicator == ours.communicator
                    && theirs.count < ours.count
            })
        };
        let peer = context.peers.iter().copied().find(is_unmet)?;
        let theirs = page.progress(peer).operation.map_or_else(
            || "a message".to_owned(),
            |last| format!("{} of {} bytes with rank {}", last.operation.name(), last.bytes, self.rank()),
        );
        Some(self.mismatch(peer, context.sequence, context.text.clone(), theirs))
    }

    /// The error of calls that differ.
    pub(super) fn mismatch(&self, peer: u32, sequence: u32, ours: String, mut theirs: String) -> Error {
        if self.is_group() {
            theirs = format!("{theirs}, in {}", self.title);
        }
        Error::Mismatch { rank: self.rank(), peer, sequence, ours, theirs }
    }

    /// The ranks that seem to block the others: stopped (SIGSTOP), or busy with something other than waiting, or
    /// waiting in another communicator, or behind. NCCL does not tell which ranks have arrived at an operation, so this
    /// relies on the progress page.
    fn suspects(&self, context: &WaitContext) -> Vec<u32> {
        let page = self.membership.page();
        let those = |is: &dyn Fn(u32) -> bool| -> Vec<u32> {
            context.peers.iter().copied().filter(|peer| is(*peer)).collect()
        };
        let stopped = |peer| {
            !self.is_remote(peer)
                && page.state(peer) == RankState::Joined
                && is_stopped(page.progress(peer).pid)
        };
        let busy = |peer| self.is_busy(peer);
        let behind = |peer| {
            let last = page.progress(peer).operation;
            last.is_some_and(|last| last.sequence < u64::from(context.sequence))
        };
        let elsewhere = |peer| self.waits_elsewhere(peer);
        let classes: [&dyn Fn(u32) -> bool; 5] = [&stopped, &busy, &elsewhere, &behind, &|_| true];
        classes.into_iter().map(those).find(|suspects| !suspects.is_empty()).unwrap_or_default()
    }

    /// Whether `peer` waits in another communicator.
    fn waits_elsewhere(&self, peer: u32) -> bool {
        let theirs = self.membership.page().waiting_collective(peer);
        theirs.is_some_and(|theirs| theirs.communicator != self.number)
    }

    /// The ranks that block `suspects`: for those that wait in another communicator, the ranks they wait for.
    fn causes_of_wait(&self, suspects: Vec<u32>) -> Vec<u32> {
        let cause = |peer| match self.waits_elsewhere(peer) {
            true => self.membership.end_of_wait_chain(peer),
            false => peer,
        };
        let mut causes: Vec<u32> = suspects.into_iter().map(cause).collect();
        causes.sort_unstable();
        causes.dedup();
        causes
    }

    /// The error of an NCCL call.
    fn nccl_error(&self, context: &WaitContext, problem: String) -> Error {
        // If a peer has ended, that is the better explanation of NCCL's error.
        let lost = self.membership.lost_peer(&context.peers, || self.describe(context));
        lost.unwrap_or_else(|| Error::Nccl { rank: self.rank(), operation: self.describe(context), problem })
    }

    /// The error of the GPU's work, which may also be caused by a lost peer.
    fn gpu_error(&self, context: &WaitContext, error: cuda::Error) -> Error {
        let lost = self.membership.lost_peer(&context.peers, || self.describe(context));
        let location = || format!("rank {} in {}", self.rank(), self.describe(context));
        lost.unwrap_or_else(|| Error::Gpu(error.detected_by(&location())))
    }

    pub(super) fn describe(&self, context: &WaitContext) -> String {
        let WaitContext { operation, sequence, text, peers, .. } = context;
        match (operation, sequence) {
            _ if peers.is_empty() => text.clone(),
            (Operation::Connect, _) | (_, 0) => format!("{text}, {}", self.title),
            _ => format!("operation {sequence} of {}, {text}", self.title),
        }
    }
}

/// True if the process is stopped, as by SIGSTOP: its records on the progress page are then outdated.
fn is_stopped(pid: u32) -> bool {
    matches!(process::state(pid), Some('T' | 't'))
}

impl Drop for Link {
    fn drop(&mut self) {
        // A forked child has a copy of all this, but not the owner's thread.
        if self.rules.is_poisoned() || self.membership.check_process().is_err() {
            return;
        }
        self.shut_down();
    }
}

#[cfg(test)]
mod tests {
    use super::is_stopped;

    #[test]
    fn a_running_process_is_not_stopped() {
        assert!(!is_stopped(std::process::id()));
        assert!(!is_stopped(0));
    }
}
