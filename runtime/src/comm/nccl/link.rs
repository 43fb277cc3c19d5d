//! Waiting for what the owner's thread or the GPU does, without ever hanging.
//!
//! NCCL does not tell that a peer on the same machine has died, and a kernel that waits for one never ends. So every wait
//! looks around: at the progress page, where the launcher notes the end of a rank; at what NCCL says of itself; at the
//! clock. Whatever ends a wait early ends the communicator: it is aborted, and says why from then on.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use mgpu_kernels::cuda;

use super::owner::{Ended, Owner, Reply};
use crate::comm::rules::{FailureHandler, ProgressEntry, Rules};
use crate::membership::Membership;
use crate::process;
use crate::progress::{Operation, Place, RankState};
use crate::{Error, Result};

/// How often a wait looks around.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A wait below this is not worth a look, nor a nap.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// Longest nap between two questions whether the GPU is done.
const MAX_SLEEP: Duration = Duration::from_millis(1);

/// How long the end of a communicator may take once all ranks have come to it.
const FINALISE_LIMIT: Duration = Duration::from_secs(5);

/// A communicator's connection to the other ranks.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) membership: Arc<Membership>,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) number: u32,
    pub(super) name: String,
    pub(super) timeout: Duration,
    pub(super) owner: Owner,
    /// Shared with the communicator for host buffers that goes through this one.
    pub(super) rules: Arc<Rules>,
}

/// What a rank waits in, for the page and for errors.
#[derive(Debug, Clone)]
pub(super) struct WaitContext {
    pub(super) operation: Operation,
    /// Its number in the communicator, 0 for what has none.
    pub(super) sequence: u32,
    pub(super) bytes: usize,
    pub(super) text: String,
    /// The ranks without which it does not end; none where it is this rank's own affair.
    pub(super) peers: Vec<u32>,
    /// How many messages were begun with each rank until then, this one included; only for operations on host buffers.
    pub(super) messages: Option<Vec<u32>>,
}

impl WaitContext {
    /// The message and its peer, if that is what it is.
    fn message(&self) -> Option<(u32, u32)> {
        let messages = self.messages.as_ref().filter(|_| !self.is_collective())?;
        let peer = *self.peers.first()?;
        Some((peer, messages[peer as usize]))
    }

    /// What the progress page is told of it.
    fn progress_entry(&self) -> ProgressEntry {
        ProgressEntry { operation: self.operation, number: self.sequence, bytes: self.bytes }
    }

    fn is_collective(&self) -> bool {
        !matches!(self.operation, Operation::Send | Operation::Recv)
    }
}

impl FailureHandler for Link {
    /// No call that is still queued is made once anybody has seen the error: it was lent memory that may be gone.
    fn stop(&self) {
        self.owner.give_up();
    }

    fn abort(&self) {
        self.membership.collectives.fail();
        self.owner.abort();
    }
}

impl Link {
    /// The ranks other than this one.
    pub(super) fn peers(&self) -> Vec<u32> {
        (0..self.size).filter(|peer| *peer != self.rank).collect()
    }

    /// The error of a communicator that had one.
    pub(super) fn check(&self) -> Result<()> {
        self.rules.check_usable()
    }

    /// Runs `operate` as an operation of the communicator. Its error is the end of the communicator.
    pub(super) fn operation<R>(
        &self,
        context: &WaitContext,
        operate: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.rules.begin(context.progress_entry())?;
        self.rules.end(operate(), self)
    }

    /// Runs `wait` with a note on the page for its time. Its error is the end of the communicator.
    pub(super) fn during<R>(&self, context: &WaitContext, wait: impl FnOnce() -> Result<R>) -> Result<R> {
        self.rules.note(context.progress_entry());
        self.rules.end(wait(), self)
    }

    /// Ends the communicator because of `error`.
    pub(super) fn fail(&self, error: Error) -> Error {
        self.rules.fail(error, self)
    }

    /// Ends the communicator at once, without an error to report.
    pub(super) fn force_abort(&self, why: &str) {
        self.rules.force_abort(why, self);
    }

    /// Waits for an answer of the owner.
    pub(super) fn answer<R>(&self, answer: &Receiver<Reply<R>>, context: &WaitContext) -> Result<R> {
        let (began, mut slice) = (Instant::now(), SPIN_TIME);
        loop {
            match answer.recv_timeout(slice) {
                Ok(Ok(value)) => return Ok(value),
                Ok(Err(error)) => return Err(self.refused(context, error)),
                Err(RecvTimeoutError::Disconnected) => {
                    let problem = "the thread that owns the communicator has ended".into();
                    return Err(Error::Nccl { rank: self.rank, operation: self.describe(context), problem });
                }
                Err(RecvTimeoutError::Timeout) => self.check_peers(context, began.elapsed())?,
            }
            slice = (slice * 2).min(POLL_INTERVAL);
        }
    }

    /// Waits until the GPU has come to where `is_done` asks for.
    pub(super) fn device(
        &self,
        is_done: impl Fn() -> cuda::Result<bool>,
        context: &WaitContext,
    ) -> Result<()> {
        let is_over = || is_done().map_err(|error| self.broken(context, error));
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
                // What is done counts, whatever has happened since.
                if matches!(is_done(), Ok(true)) {
                    return Ok(());
                }
                return Err(error);
            }
        }
    }

    /// What a rank does now and then while it waits: it leaves a note whom it waits for, looks whether that is in vain,
    /// and gives up after the deadline.
    #[cold]
    fn check_peers(&self, context: &WaitContext, waited: Duration) -> Result<()> {
        self.check()?;
        if let Some(error) = self.owner.failure() {
            return Err(self.refused(context, error.to_owned()));
        }
        let page = self.membership.page();
        // A rank whose own call does not return waits for nobody; others see that, and know whom to blame.
        let stuck = self.owner.stuck_call(self.timeout.min(Duration::from_secs(1)));
        let suspects = self.suspects(context);
        if let Some(peer) = suspects.first().filter(|_| stuck.is_none()) {
            page.wait(self.rank, *peer);
            page.wait_in(self.rank, self.progress());
            if let Some((_, turns)) = context.message() {
                page.wait_in_message(self.rank, Place { communicator: self.number, turns });
            }
        }
        if let Some(error) = self.unmet_message(context) {
            return Err(error);
        }
        if let Some(error) = self.membership.lost_peer(&context.peers, || self.describe(context)) {
            return Err(error);
        }
        if let Some(peer) = self.departed_peer(&context.peers) {
            let (rank, operation, how) = (self.rank, self.describe(context), "has dropped the communicator");
            return Err(Error::PeerLost { rank, peer, operation, how: how.into(), silent: false });
        }
        if waited < self.timeout {
            return Ok(());
        }
        let (rank, operation) = (self.rank, self.describe(context));
        Err(match stuck {
            None if context.peers.is_empty() => {
                Error::Stuck { rank, operation, call: "the GPU's own work", after: waited }
            }
            Some((call, since)) => Error::Stuck { rank, operation, call, after: since.elapsed() },
            None => Error::Timeout { rank, waited_for: suspects, operation, after: waited },
        })
    }

    /// The error of waiting in a collective on host buffers for a peer that has not begun it, and waits in a message which this
    /// rank has not begun: it does one such operation at a time, so neither of the two can come to its end.
    fn unmet_message(&self, context: &WaitContext) -> Option<Error> {
        let messages = context.messages.as_ref().filter(|_| context.is_collective())?;
        let (page, ours) = (self.membership.page(), self.progress());
        let is_unmet = |peer: &u32| {
            // A peer that is done with this collective may be ahead of a rank that has yet to see that.
            let message = page.waits_in_message(*peer, self.rank).zip(page.waits_in(*peer));
            message.is_some_and(|(message, theirs)| {
                message.communicator == ours.communicator
                    && message.turns > messages[*peer as usize]
                    && theirs.communicator == ours.communicator
                    && theirs.turns < ours.turns
            })
        };
        let peer = context.peers.iter().copied().find(is_unmet)?;
        let theirs = page.progress(peer).operation.map_or_else(
            || "a message".to_owned(),
            |last| format!("{} of {} bytes with rank {}", last.operation.name(), last.bytes, self.rank),
        );
        let (rank, sequence, ours) = (self.rank, context.sequence, context.text.clone());
        Some(Error::Mismatch { rank, peer, sequence, ours, theirs })
    }

    /// Those of the awaited that seem to hold up the others: stopped by somebody, or busy with something else than
    /// waiting, or behind. NCCL does not say who has come to an operation, so all there is to go by is what the ranks
    /// note on the page.
    fn suspects(&self, context: &WaitContext) -> Vec<u32> {
        let page = self.membership.page();
        let those = |is: &dyn Fn(u32) -> bool| -> Vec<u32> {
            context.peers.iter().copied().filter(|peer| is(*peer)).collect()
        };
        let stopped = |peer| page.state(peer) == RankState::Joined && is_stopped(page.progress(peer).pid);
        let busy = |peer| {
            let last = page.progress(peer).operation;
            !last.is_some_and(|last| last.running && last.waits_for.is_some())
        };
        let behind = |peer| {
            let last = page.progress(peer).operation;
            last.is_some_and(|last| last.sequence < u64::from(context.sequence))
        };
        let classes: [&dyn Fn(u32) -> bool; 4] = [&stopped, &busy, &behind, &|_| true];
        classes.into_iter().map(those).find(|suspects| !suspects.is_empty()).unwrap_or_default()
    }

    /// The error of something that NCCL refused.
    fn refused(&self, context: &WaitContext, problem: String) -> Error {
        // A peer that has ended is the better explanation of what NCCL says then.
        let lost = self.membership.lost_peer(&context.peers, || self.describe(context));
        lost.unwrap_or_else(|| Error::Nccl { rank: self.rank, operation: self.describe(context), problem })
    }

    /// The error of the GPU's work. A peer that dies can surface as one, too.
    fn broken(&self, context: &WaitContext, error: cuda::Error) -> Error {
        let lost = self.membership.lost_peer(&context.peers, || self.describe(context));
        let place = || format!("rank {} in {}", self.rank, self.describe(context));
        lost.unwrap_or_else(|| Error::Gpu(error.noticed_in(&place())))
    }

    fn describe(&self, context: &WaitContext) -> String {
        let WaitContext { operation, sequence, text, peers, .. } = context;
        match (operation, sequence) {
            _ if peers.is_empty() => text.clone(),
            (Operation::Connect, _) | (_, 0) => format!("{text}, {}", self.name),
            _ => format!("operation {sequence} of {}, {text}", self.name),
        }
    }
}

/// True if somebody has stopped the process, as with SIGSTOP: what it has noted on the page is then no longer true.
fn is_stopped(pid: u32) -> bool {
    matches!(process::state(pid), Some('T' | 't'))
}

impl Drop for Link {
    /// The proper end needs all ranks: they come together first, so that none is gone while another still works. A rank
    /// that does not come, or has failed, leaves nothing but the abort.
    fn drop(&mut self) {
        // A forked child has a copy of all this, and not the thread that owns the communicator.
        if self.rules.is_poisoned() || self.membership.check_process().is_err() {
            return;
        }
        let _: Ended = if self.shutdown_barrier() {
            self.owner.finalise(FINALISE_LIMIT.min(self.timeout))
        } else {
            self.membership.collectives.fail();
            self.owner.abort()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::is_stopped;

    #[test]
    fn a_process_that_runs_is_not_stopped() {
        assert!(!is_stopped(std::process::id()));
        assert!(!is_stopped(0));
    }
}
