//! What a reader of the page is told.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Where a rank is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankState {
    /// Not yet heard of.
    Absent,
    /// Member of the run.
    Joined,
    /// Ended as it should: said goodbye, or exited with code 0.
    Left,
    /// Ended otherwise.
    Failed,
}

/// How a rank ended. A later variant says more than an earlier one and replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending<'a> {
    /// It said goodbye.
    Left,
    /// Its process exited with code 0.
    Finished,
    /// Otherwise, as a predicate: "exited with code 3".
    Failed(&'a str),
}

/// What part of its work a rank is in, as it reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Before the first step.
    Start = 0,
    /// In a training step.
    Step = 1,
    /// Measuring the model.
    Evaluation = 2,
    /// Writing or reading a checkpoint.
    Checkpoint = 3,
    /// Saying goodbye.
    Finalise = 4,
}

impl Phase {
    const ALL: [Phase; 5] =
        [Phase::Start, Phase::Step, Phase::Evaluation, Phase::Checkpoint, Phase::Finalise];

    pub(super) fn from_number(number: u32) -> Self {
        Self::ALL.into_iter().find(|phase| *phase as u32 == number).unwrap_or(Phase::Start)
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Start => "start",
            Phase::Step => "step",
            Phase::Evaluation => "evaluation",
            Phase::Checkpoint => "checkpoint",
            Phase::Finalise => "finalise",
        }
    }
}

/// A collective operation, or the making of a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names of the communicator's methods")]
pub enum Operation {
    Barrier = 1,
    Allocate = 2,
    AllReduce = 3,
    ReduceScatter = 4,
    AllGather = 5,
    Broadcast = 6,
    Reduce = 7,
    Send = 8,
    Connect = 9,
    Recv = 10,
    UpdateAllGather = 11,
    AllToAll = 12,
    Gather = 13,
    Scatter = 14,
    AllGatherV = 15,
    AllToAllV = 16,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 16] = [
        Operation::Barrier,
        Operation::Allocate,
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::Send,
        Operation::Connect,
        Operation::Recv,
        Operation::UpdateAllGather,
        Operation::AllToAll,
        Operation::Gather,
        Operation::Scatter,
        Operation::AllGatherV,
        Operation::AllToAllV,
    ];

    /// The operation of this number, if there is one.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| *operation as u8 == number)
    }

    /// The name of the communicator's method.
    pub fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            Operation::Allocate => "allocate",
            Operation::AllReduce => "all_reduce",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
            Operation::Reduce => "reduce",
            Operation::Send => "send",
            Operation::Connect => "connect",
            Operation::Recv => "recv",
            Operation::UpdateAllGather => "update_all_gather",
            Operation::AllToAll => "all_to_all",
            Operation::Gather => "gather",
            Operation::Scatter => "scatter",
            Operation::AllGatherV => "all_gather_v",
            Operation::AllToAllV => "all_to_all_v",
        }
    }
}

/// The last operation that a rank entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastOperation {
    /// Which.
    pub operation: Operation,
    /// Its number in its communicator, from 1.
    pub sequence: u64,
    /// Its payload in bytes.
    pub bytes: u64,
    /// The rank is still in it.
    pub running: bool,
    /// The rank it waits for, if it has waited for more than a moment.
    pub waits_for: Option<u32>,
}

/// What a rank was last seen doing. The parts are read one by one while the rank may be writing, so they can be of two
/// moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Where the rank is in its life.
    pub state: RankState,
    /// Its process, 0 before it joined.
    pub pid: u32,
    /// What part of its work it is in.
    pub phase: Phase,
    /// Training step it is in, 0 before the first.
    pub step: u64,
    /// Steps it has begun since it was started; a resumed run does not begin at step 1.
    pub steps_begun: u64,
    /// The last operation it entered.
    pub operation: Option<LastOperation>,
    /// When any of this last changed, as [`now`].
    pub changed: Duration,
}

/// Whom a failing rank holds responsible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blame {
    /// The rank held responsible.
    pub culprit: u32,
    /// True when the culprit was silent past a deadline, false when it was gone or at odds.
    pub timed_out: bool,
    /// The failing rank's error.
    pub message: String,
}

/// The machine's monotonic clock, the same in all processes, to a few milliseconds: it is read in every collective, and
/// the exact one would be felt there.
#[inline]
pub fn now() -> Duration {
    // The clock exists since Linux 2.6.32.
    clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::ZERO, Duration::from)
}
