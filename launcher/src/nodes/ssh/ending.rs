//! When all agents have to end because one has, and the exit code of the job. Pure.
//!
//! Agents that have found each other end together and say why, so there is nothing to do but to wait. But an agent that
//! was never started, or whose ssh has lost its connection, may leave others behind that still wait for it. So when that of
//! node 0 ends, or so many have failed that the job cannot go on, the others have a moment; then their standard input is
//! closed, which ends their ranks, and whoever is still there after that is killed.

use std::time::{Duration, Instant};

use crate::exit_code;

/// Time for agents to end by themselves after one has.
const OWN_TIME: Duration = Duration::from_secs(2);
/// Time beyond the ranks' own for an agent to end.
const MARGIN: Duration = Duration::from_secs(3);
/// The code of ssh's own failures.
pub(super) const SSH_FAILED: u8 = 255;

/// What to do with the agents that are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Close their standard input.
    Release,
    /// Kill them.
    Kill,
}

/// How far the end has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Running,
    /// Until then the others may end by themselves.
    Waiting(Instant),
    /// Their standard input is closed, and then they are killed.
    Released(Instant),
    Killed,
}

/// The end of all agents.
pub(super) struct Ending {
    stage: Stage,
    grace: Duration,
    /// Number of agents that may fail while the job goes on.
    spare: usize,
    /// The code of node 0, if it has ended by itself.
    own_code: Option<u8>,
    /// The code of the first agent that failed.
    first_failure: Option<u8>,
}

impl Ending {
    /// The time that agents give their ranks.
    pub(super) fn grace(&self) -> Duration {
        self.grace
    }

    /// `grace` is the time that agents give their ranks; the job goes on with `least` of `agents` agents.
    pub(super) fn new(grace: Duration, agents: usize, least: usize) -> Self {
        let spare = agents.saturating_sub(least);
        Ending { stage: Stage::Running, grace, spare, own_code: None, first_failure: None }
    }

    /// The agent of `node` has exited with `code`.
    pub(super) fn ended(&mut self, node: usize, code: u8, now: Instant) {
        if node == 0 && matches!(self.stage, Stage::Running | Stage::Waiting(_)) {
            self.own_code = Some(code);
        }
        let mut ends_the_job = node == 0;
        if code != exit_code::SUCCESS {
            self.first_failure.get_or_insert(code);
            ends_the_job |= self.spare == 0;
            self.spare = self.spare.saturating_sub(1);
        }
        if self.stage == Stage::Running && ends_the_job {
            self.stage = Stage::Waiting(now + OWN_TIME);
        }
    }

    /// The user does not want to wait any longer.
    pub(super) fn hurry(&mut self, now: Instant) {
        match self.stage {
            Stage::Running | Stage::Waiting(_) => self.stage = Stage::Waiting(now),
            Stage::Released(_) => self.stage = Stage::Released(now),
            Stage::Killed => {}
        }
    }

    /// When [`act`](Self::act) has to be called.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match self.stage {
            Stage::Waiting(at) | Stage::Released(at) => Some(at),
            Stage::Running | Stage::Killed => None,
        }
    }

    /// What is due.
    pub(super) fn act(&mut self, now: Instant) -> Option<Action> {
        match self.stage {
            Stage::Waiting(at) if at <= now => {
                self.stage = Stage::Released(now + self.grace + MARGIN);
                Some(Action::Release)
            }
            Stage::Released(at) if at <= now => {
                self.stage = Stage::Killed;
                Some(Action::Kill)
            }
            _ => None,
        }
    }

    /// The exit code: node 0's, which all agents of a job have in common, or, if node 0 had to be ended, that of the agent
    /// that failed first.
    pub(super) fn exit_code(&self) -> u8 {
        match self.own_code.or(self.first_failure) {
            Some(SSH_FAILED) if self.own_code.is_none() => exit_code::LAUNCHER,
            Some(code) => code,
            None => exit_code::SUCCESS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(5);

    #[test]
    fn agents_that_end_together_are_left_alone() {
        let (mut ending, now) = (Ending::new(GRACE, 3, 3), Instant::now());
        ending.ended(1, 0, now);
        assert_eq!(ending.next_deadline(), None);
        ending.ended(2, 3, now);
        ending.ended(0, 3, now + OWN_TIME / 2);
        assert_eq!((ending.act(now + OWN_TIME / 2), ending.exit_code()), (None, 3));
        let mut ending = Ending::new(GRACE, 3, 3);
        ending.ended(1, 137, now);
        ending.ended(0, exit_code::NODE_LOST, now);
        assert_eq!(ending.exit_code(), exit_code::NODE_LOST);
    }

    #[test]
    fn agents_that_wait_for_one_that_is_missing_are_ended() {
        let (mut ending, now) = (Ending::new(GRACE, 3, 3), Instant::now());
        ending.ended(1, SSH_FAILED, now);
        assert_eq!(ending.act(now), None);
        let released = ending.next_deadline().unwrap();
        assert_eq!(ending.act(released), Some(Action::Release));
        ending.ended(0, 143, released);
        assert_eq!(ending.exit_code(), exit_code::LAUNCHER);
        let killed = ending.next_deadline().unwrap();
        assert!(killed >= released + GRACE);
        assert_eq!((ending.act(killed), ending.act(killed)), (Some(Action::Kill), None));
        // A node that was refused says why by its code.
        let mut ending = Ending::new(GRACE, 3, 3);
        ending.ended(1, exit_code::AUTHENTICATION, now);
        ending.act(now + OWN_TIME);
        ending.ended(0, 143, now + OWN_TIME);
        assert_eq!(ending.exit_code(), exit_code::AUTHENTICATION);
    }

    #[test]
    fn a_job_goes_on_while_enough_agents_are_left() {
        let (mut ending, now) = (Ending::new(GRACE, 4, 2), Instant::now());
        ending.ended(3, SSH_FAILED, now);
        ending.ended(1, 137, now);
        assert_eq!(ending.next_deadline(), None);
        ending.ended(2, 137, now);
        assert!(ending.next_deadline().is_some());
        let mut ending = Ending::new(GRACE, 3, 1);
        ending.ended(2, SSH_FAILED, now);
        ending.ended(0, 0, now);
        assert!(ending.next_deadline().is_some());
        assert_eq!(ending.exit_code(), 0);
    }

    #[test]
    fn a_user_in_a_hurry_does_not_wait() {
        let (mut ending, now) = (Ending::new(GRACE, 3, 3), Instant::now());
        ending.hurry(now);
        assert_eq!(ending.act(now), Some(Action::Release));
        ending.hurry(now);
        assert_eq!(ending.act(now), Some(Action::Kill));
        ending.hurry(now);
        assert_eq!(ending.act(now), None);
    }
}
