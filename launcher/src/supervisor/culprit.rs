//! Which rank caused a failure: the first one to fail, or a running one that it blames and that fails soon after.

use std::time::Instant;

use mgpu_control::rendezvous::Blame;

use super::{Exit, Outcome, RankStatus, Supervisor};
use crate::exit_code;

/// The end of a rank, and the rank that it blamed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) rank: u32,
    pub(super) exit: Exit,
    pub(super) blame: Option<Blame>,
}

impl Supervisor {
    /// Determines the outcome from a failure; provisional if the failure blames a rank that is still running.
    pub(super) fn decide(&mut self, failure: Failure, now: Instant) {
        let accused = self.running_culprit(&failure);
        self.outcome = Some(self.outcome_of(&failure, accused, now));
        self.accusation = accused.is_some().then_some(failure);
    }

    /// Handles the end of a rank soon after the first failure, before any rank was asked to end.
    ///
    /// Processes may end in another order than they fail: a rank that panics tells its peers before it has unwound and
    /// exited, and a peer may exit earlier. If the blamed rank fails by itself within [`ERROR_TIME`], it was the cause.
    pub(super) fn reconsider(&mut self, ended: Failure, now: Instant) {
        let is_accused =
            |accusation: &Failure| accusation.blame.as_ref().map(|blame| blame.culprit) == Some(ended.rank);
        if !self.accusation.as_ref().is_some_and(is_accused) {
            return;
        }
        let Some(accusation) = self.accusation.take() else { return };
        // A rank that blames a rank that had failed before is a victim, too.
        let is_victim = ended.blame.as_ref().is_some_and(|blame| {
            !blame.timed_out
                && self.ranks.get(blame.culprit as usize).map(|rank| rank.status) == Some(RankStatus::Failed)
        });
        if self.finished(ended.rank).is_some() {
            self.decide(accusation, now);
        } else if !is_victim {
            self.decide(ended, now);
        }
    }

    /// The rank that a failure blames, if it is still running.
    fn running_culprit(&self, failure: &Failure) -> Option<u32> {
        let blame = failure.blame.as_ref().filter(|blame| !blame.timed_out)?;
        self.running().find(|rank| *rank == blame.culprit)
    }

    /// The outcome if this is the first failure, and the rank `accused` still runs.
    fn outcome_of(&self, failure: &Failure, accused: Option<u32>, now: Instant) -> Outcome {
        let Failure { rank, exit, blame } = failure;
        let others = if self.running().next().is_some() { "; the other ranks are stopped" } else { "" };
        let after = (now - self.started).as_secs_f64();
        // Shared memory may contain anything: a rank that does not exist cannot be the culprit.
        let blame = blame.as_ref().filter(|blame| (blame.culprit as usize) < self.ranks.len());
        let finish = blame.and_then(|blame| self.finished(blame.culprit));
        match (blame, finish) {
            (Some(blame), _) if blame.timed_out => Outcome::failure(
                exit_code::NO_PROGRESS,
                blame.culprit,
                format!("{} made no progress: {}{others}", self.hosts.name(blame.culprit), blame.message),
            ),
            (Some(blame), Some(finish)) => Outcome::failure(
                exit.code(),
                blame.culprit,
                format!(
                    "{} {} while others needed it: {}{others}",
                    self.hosts.name(blame.culprit),
                    finish.describe(),
                    blame.message
                ),
            ),
            _ => {
                let blames = accused.map(|accused| format!("; it blames {}", self.hosts.name(accused)));
                let (name, end, blames) =
                    (self.hosts.name(*rank), exit.describe(), blames.unwrap_or_default());
                Outcome::failure(
                    exit.code(),
                    *rank,
                    format!("{name} {end} after {after:.1} s{blames}{others}"),
                )
            }
        }
    }

    /// How a rank ended, if it has not failed.
    fn finished(&self, rank: u32) -> Option<Exit> {
        let rank = self.ranks.get(rank as usize)?;
        rank.exit.filter(|_| rank.status == RankStatus::Finished)
    }
}
