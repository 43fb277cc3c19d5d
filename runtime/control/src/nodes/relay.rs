//! What the rendezvous servers of different nodes say to each other.
//!
//! Each node has a server for its own ranks, and values stay on the node of the rank that set them. What concerns other
//! nodes is a [`RelayMessage`]. All of them go through the [`Hub`] on node 0, which admits the ranks of all nodes
//! together, completes barriers, and tells everybody how ranks ended. Servers and hub do no I/O between hosts: whoever
//! drives them carries their messages, in order, and carries those of node 0 as well.
//!
//! | message | from → to | purpose |
//! |---|---|---|
//! | `joined`, `ready`, `admit`, `refused`, `gave_up` | node ↔ hub | admission |
//! | `get`, `cancelled`, `got` | node → hub → node | the key/value store |
//! | `arrived`, `released`, `expired`, `not_released` | node ↔ hub | barriers |
//! | `left`, `ended`, `finished` | node → hub → nodes | how ranks ended |
//! | `ask_to_stop`, `propose_stop`, `stop_bound`, `stop_at` | node ↔ hub | where all ranks stop |
//!
//! **Bounds.** Every message of a server or the hub fits a frame of
//! [`MAX_FRAME`](crate::rendezvous::message::MAX_FRAME) bytes. A rank has one request at a time, so:
//!
//! - a node holds at most one wait for each rank of the world that reads one of its values, and a progress page with
//!   less than 1 KiB for each rank;
//! - the hub holds two bytes for each rank, one barrier for each rank that waits in one, and there at most one place for
//!   each participant.
//!
//! The hub tells every failure of a rank to the rank's own node and to node 0. It tells the first [`MAX_FAILURES_TOLD`]
//! failures to all nodes, because every wait fails with the first one.

mod admission;
mod barriers;
mod hub;
mod stop;

use serde::{Deserialize, Serialize};

pub use hub::Hub;

use crate::progress::{Blame, ProgressPage};
use crate::rendezvous::message::Reply;
use crate::rendezvous::{PreflightFault, ProcessEnd, rank_list};

/// A message between the servers of two nodes, or between one and the hub.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "relay", rename_all = "snake_case")]
pub enum RelayMessage {
    /// Node → hub: these ranks of the node have said hello. Without a launcher only, which counts them otherwise.
    Joined {
        /// The ranks.
        #[serde(with = "rank_list")]
        ranks: Vec<u32>,
    },
    /// Node → hub: all ranks of the node have said hello and are compatible with each other.
    Ready {
        /// What the hub compares between nodes.
        manifest: NodeManifest,
    },
    /// Hub → nodes: all nodes are ready and compatible.
    Admit,
    /// Hub → node: a rank of the node is incompatible with another node.
    Refused {
        /// The rank.
        rank: u32,
        /// The difference, naming both sides.
        why: String,
    },
    /// Node → hub: the time to join has passed. Hub → nodes: the run does not start. Without a launcher only.
    GaveUp {
        /// The ranks that did not join: of the node, or of the world.
        #[serde(with = "rank_list")]
        missing: Vec<u32>,
    },
    /// Node of the reader → hub → node of `from`: a rank waits for a value. Its own server keeps the deadline.
    Get {
        /// The rank that waits.
        reader: u32,
        /// Number of the wait: the server of the reader never uses it again.
        number: u64,
        /// Name of the value.
        key: String,
        /// The rank that will set it.
        from: u32,
    },
    /// Node of the reader → hub → node of `from`: the rank does not wait any more.
    Cancelled {
        /// The rank that waited.
        reader: u32,
        /// Number of the wait.
        number: u64,
        /// Name of the value.
        key: String,
        /// The rank that would have set it.
        from: u32,
    },
    /// The answer to a `Get`: a value without descriptors, or why there is none.
    Got {
        /// The rank that waits.
        reader: u32,
        /// Number of the wait.
        number: u64,
        /// Name of the value.
        key: String,
        /// The reply for the rank.
        reply: Reply,
    },
    /// Node → hub: ranks of the node wait in a barrier that has participants on other nodes.
    Arrived {
        /// Name of the barrier.
        barrier: String,
        /// Its participants; `None` for all ranks.
        #[serde(with = "rank_list::option")]
        ranks: Option<Vec<u32>>,
        /// The ranks that have arrived since the last message.
        #[serde(with = "rank_list")]
        arrived: Vec<u32>,
    },
    /// Hub → nodes of the participants: all have arrived.
    Released {
        /// Name of the barrier.
        barrier: String,
    },
    /// Hub → node: a rank waits in vain in a barrier.
    NotReleased {
        /// The rank that waits.
        reader: u32,
        /// Name of the barrier.
        barrier: String,
        /// The reply for the rank.
        reply: Reply,
    },
    /// Node → hub: the deadline of a rank in a barrier has passed. Answered by the missing ranks, unless the barrier has
    /// ended in the meantime.
    Expired {
        /// Name of the barrier.
        barrier: String,
        /// The rank that waited.
        reader: u32,
    },
    /// Node → hub → other nodes: ranks have said goodbye.
    Left {
        /// The ranks.
        #[serde(with = "rank_list")]
        ranks: Vec<u32>,
    },
    /// Hub → nodes: the processes of ranks have ended. Node → hub: its own ranks have, as its server saw it.
    Ended {
        /// How they ended, in the order in which it was seen.
        ends: Vec<RankEnd>,
    },
    /// Node → hub: a rank asks that all ranks stop.
    AskToStop,
    /// Hub → nodes: a stop is proposed; how far are your ranks?
    ProposeStop,
    /// Node → hub: the answer to that. Ranks of the node wait from now on until they are told where to stop.
    StopBound {
        /// The first stop check that none of its ranks can pass without knowing of the stop.
        check: u64,
    },
    /// Hub → nodes: where all ranks stop.
    StopAt {
        /// The number of the stop check.
        check: u64,
    },
    /// Hub → nodes: the processes of these ranks have exited with code 0. After a goodbye only their own nodes are told.
    Finished {
        /// The ranks.
        #[serde(with = "rank_list")]
        ranks: Vec<u32>,
    },
}

/// How the process of a rank ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEnd {
    /// The rank.
    pub rank: u32,
    /// How it ended.
    pub end: ProcessEnd,
    /// The rank that it blamed, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blame: Option<Blame>,
}

impl RankEnd {
    /// The end of a rank of this node, with the blame that it has left on the node's progress page.
    pub fn of(page: &ProgressPage, rank: u32, end: ProcessEnd) -> Self {
        RankEnd { rank, end, blame: page.blame_of(rank) }
    }
}

/// What the hub compares between nodes. The ranks of one node have been compared by their server: they agree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeManifest {
    /// Version of the messages between ranks and servers.
    pub version: u32,
    /// Version of the NVIDIA driver; `None` if the ranks use no GPU.
    pub driver: Option<String>,
    /// Version of NCCL; `None` if the ranks do not use it.
    pub nccl: Option<String>,
    /// The programs of its ranks: one, unless ranks may run different ones.
    pub programs: Vec<NodeProgram>,
}

/// A program that ranks of a node run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeProgram {
    /// Number of the program: ranks with the same number run the same program.
    pub number: u32,
    /// The first rank of the node that runs it.
    pub rank: u32,
    /// Path of the executable file.
    pub path: String,
    /// Hash of its content (XXH3); `None` if it could not be read.
    pub digest: Option<u64>,
}

/// Number of failed ranks that are told to all nodes.
pub const MAX_FAILURES_TOLD: usize = 16;

/// What the driver of a [`Hub`] has to do.
#[derive(Debug, Clone, PartialEq)]
pub enum HubAction {
    /// Carry a message to a node; for node 0, [deliver](crate::rendezvous::Server::deliver) it to its server.
    Send {
        /// The node.
        node: u32,
        /// The message.
        message: RelayMessage,
    },
    /// Two nodes are incompatible: the run cannot start. The rank that is refused has been sent the reason.
    Incompatible {
        /// The node of the rank that was refused.
        node: u32,
        /// The kind of incompatibility.
        fault: PreflightFault,
        /// The difference, naming ranks and hosts of both sides.
        why: String,
    },
    /// The ranks of all nodes are admitted.
    Admitted,
    /// A rank of this node asks that all ranks stop. Reported once, and not if the driver has asked before.
    StopAsked {
        /// The node.
        node: u32,
    },
}

#[cfg(test)]
mod tests;
