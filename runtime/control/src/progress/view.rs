//! The types that a reader of the progress page gets.

use std::time::Duration;

use nix::libc;
use serde::{Deserialize, Serialize};

/// The state of a rank in the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RankState {
    /// It has not joined.
    Absent,
    /// Member of the run.
    Joined,
    /// Ended normally: it said goodbye or exited with code 0.
    Left,
    /// Ended abnormally.
    Failed,
}

/// How a rank ended. A later variant carries more information and replaces an earlier one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending<'a> {
    /// It said goodbye.
    Left,
    /// Its process exited with code 0.
    Finished,
    /// It failed; how, as a predicate: "exited with code 3".
    Failed(&'a str),
}

/// The phase of its work that a rank has reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Before the first step.
    Start = 0,
    /// In a training step.
    Step = 1,
    /// Evaluating the model.
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

    /// The name, for people.
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

/// A collective operation, the creation of a communicator, or the launch of a CUDA graph with collectives.
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
    SendRecv = 17,
    LaunchGraph = 18,
}

impl Operation {
    /// All operations.
    pub const ALL: [Operation; 18] = [
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
        Operation::SendRecv,
        Operation::LaunchGraph,
    ];

    /// The operation with this number, if there is one.
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
            Operation::SendRecv => "send_recv",
            Operation::LaunchGraph => "launch_graph",
        }
    }
}

/// The last operation that a rank entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastOperation {
    /// The operation.
    pub operation: Operation,
    /// Its number in its communicator, from 1.
    pub sequence: u64,
    /// Its payload in bytes.
    pub bytes: u64,
    /// True while the rank is in it.
    pub running: bool,
    /// The rank it waits for, if the wait takes longer than usual.
    pub waits_for: Option<u32>,
}

/// The last known progress of a rank. The fields are read one by one while the rank may be writing, so they may be
/// inconsistent with each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Its state in the run.
    pub state: RankState,
    /// Its process id, 0 before it joined.
    pub pid: u32,
    /// Its phase.
    pub phase: Phase,
    /// Its current training step, 0 before the first.
    pub step: u64,
    /// Number of steps it has begun since it was started; a resumed run does not begin at step 1.
    pub steps_begun: u64,
    /// The last operation it entered.
    pub operation: Option<LastOperation>,
    /// Time of the last change, as [`now`].
    pub changed: Duration,
}

/// The rank that a failing rank blames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blame {
    /// The blamed rank.
    pub culprit: u32,
    /// True if the culprit was stuck past a deadline, false if it had ended or its calls did not match.
    pub timed_out: bool,
    /// The failing rank's error.
    pub message: String,
}

/// The machine's monotonic clock, the same in all processes, with a resolution of a few milliseconds (the coarse clock):
/// every collective reads it, and the exact clock would cost too much there.
#[inline]
pub fn now() -> Duration {
    // Without the wrapper of `nix`, which copies the result as a whole: that waits until both of its halves are stored.
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes `time`, or leaves it as it is. This clock exists since Linux 2.6.32.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
