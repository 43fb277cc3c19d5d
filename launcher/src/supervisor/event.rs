//! Inputs and outputs of the state machine.

use std::ops::Range;
use std::time::Duration;

use mgpu_control::rendezvous::{Blame, ProcessEnd};
use nix::sys::signal::Signal;

use super::{Exit, Outcome, StopCause};

/// An input of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A rank joined the rendezvous.
    Joined(u32),
    /// A rank is incompatible with the run.
    Incompatible {
        /// The rank.
        rank: u32,
        /// Exit code for this kind of incompatibility.
        exit_code: u8,
        /// The difference.
        why: String,
    },
    /// A rank has exceeded the progress timeout.
    Silent {
        /// The rank.
        rank: u32,
        /// For how long.
        idle: Duration,
        /// Its last known action.
        doing: String,
    },
    /// The guardian was killed.
    GuardianEnded,
    /// A rank's process ended.
    Exited {
        /// The rank.
        rank: u32,
        /// How.
        exit: Exit,
        /// The rank that it blamed.
        blame: Option<Blame>,
    },
    /// The launcher got a signal.
    Signalled(Signal),
    /// The ranks, which stop by themselves when they are asked to, are to be asked.
    StopAsked(StopCause),
    /// The time of `--stop-after` has passed, and not all ranks stop by themselves.
    TimePassed,
    /// The ranks have to end because of something outside their world, as the text says.
    Stopped(String),
    /// A host is lost, and with it its ranks.
    NodeLost {
        /// The ranks on it.
        ranks: Range<u32>,
        /// How they ended for their peers, as a predicate.
        how: String,
        /// What happened, as the message of the outcome.
        message: String,
    },
    /// A deadline may have passed.
    Tick,
}

/// An output of the state machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell the peers that a rank has ended or failed.
    Announce(u32, ProcessEnd),
    /// Send a signal to a rank's process group.
    Send(u32, Signal),
    /// Ask all ranks to stop at the same place, if that was not done before.
    AskToStop,
    /// Print a message.
    Say(String),
    /// The outcome is final, though ranks may still run: print it. Occurs once, before the end of a run that did not
    /// succeed.
    Settle(Outcome),
    /// Print the table of what every rank is doing.
    Report,
    /// All ranks have ended.
    Finish(Outcome),
}
