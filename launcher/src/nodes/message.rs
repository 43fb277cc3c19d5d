//! What an agent and the coordinator say to each other.
//!
//! A node that joins sends its [`NodeCard`]. From then on the coordinator decides and the agent obeys: it starts ranks
//! when it gets a [`StartOrder`], passes on what happens to them, and carries out [`Order`]s. No message makes an agent
//! run anything but the command that it was started with. Node 0 has an agent too, which speaks to the coordinator
//! within the process.

use std::time::Duration;

use mgpu_control::nccl::NcclTarget;
use mgpu_control::nodes::{Layout, RelayMessage};
use mgpu_control::progress::ProgressEntry;
use mgpu_control::rendezvous::Blame;
use serde::{Deserialize, Serialize};

use super::card::NodeCard;
use super::net::NetChoice;
use crate::supervisor::{Exit, Outcome};

/// Interval between two heartbeats, in both directions.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// Maximum number of relayed messages in one message: each fits a frame of the rendezvous, and together they fit one
/// between nodes.
pub(crate) const MAX_RELAYED: usize = 12;
/// Maximum number of last lines of a failed rank that are sent.
pub(crate) const MAX_LAST_LINES: usize = 32;
/// Maximum length of such a line in bytes.
pub(crate) const MAX_LAST_LINE: usize = 2048;

/// A message of an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "agent", rename_all = "snake_case")]
pub(crate) enum FromAgent {
    /// The first message. Sent again as the answer to [`ToAgent::Reach`], with what was found on the card.
    Join(Box<NodeCard>),
    /// Of its rendezvous server, for those of other nodes.
    Relay { messages: Vec<RelayMessage> },
    /// A rank has said hello.
    Joined { rank: u32 },
    /// A rank is incompatible with the others of its node.
    Incompatible { rank: u32, exit_code: u8, why: String },
    /// A rank has exceeded the progress timeout. The agent of node 0 watches the ranks of all nodes.
    Silent { rank: u32, idle: Duration, doing: String },
    /// A rank has ended. The lines are the last ones that it wrote, if it failed.
    Exited { rank: u32, exit: Exit, blame: Option<Blame>, last_lines: Vec<String> },
    /// The heartbeat: what has changed on the node's progress page, the ranks whose process is stopped, and whether the
    /// node has heard the coordinator since the last heartbeat.
    Progress { entries: Vec<(u32, ProgressEntry)>, stopped: Vec<u32>, has_heard: bool },
    /// The agent got this signal, which ends the run. Its ranks may be able to stop by themselves.
    Signalled { signal: i32, can_stop: bool },
    /// The ranks are to be asked to stop: because of this signal, or of `--stop-after`. The agent's ranks may be unable to
    /// stop by themselves; `None` if no ranks run there.
    StopAsked { signal: Option<i32>, can_stop: Option<bool> },
    /// No process of the ranks is left. The job is not to be restarted if the reader of this node's output has exited.
    Gone { reader_is_gone: bool },
    /// The ranks cannot be started or supervised any more.
    Failed { why: String },
}

/// A message of the coordinator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "coordinator", rename_all = "snake_case")]
pub(crate) enum ToAgent {
    /// The node is not needed, or contradicts the others. The agent exits with this code.
    Refused { exit_code: u8, why: String },
    /// Try to connect to where NCCL of another node is going to listen.
    Reach { targets: Vec<NcclTarget>, tag: String },
    /// The next start: NCCL takes the interface of the connections between the nodes.
    UseControlInterface,
    /// Start the ranks.
    Start(Box<StartOrder>),
    /// For its rendezvous server.
    Relay { messages: Vec<RelayMessage> },
    /// To be carried out in this order.
    Do { orders: Vec<Order> },
    /// A line for the user.
    Say { text: String },
    /// The last lines of a rank on another node. For the agent of node 0.
    LastLines { name: String, lines: Vec<String> },
    /// The progress of ranks on another node. For the agent of node 0, which watches all ranks.
    Progress { node: u32, entries: Vec<(u32, ProgressEntry)>, stopped: Vec<u32> },
    /// The heartbeat.
    Beat,
    /// The job is over.
    End { outcome: Outcome },
}

/// One start of all ranks, as a node needs to know it. It grows with the number of nodes, not with that of the ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StartOrder {
    /// Which ranks are on which node, and which node the receiver is.
    pub(crate) layout: Layout,
    /// The name of each node's host.
    pub(crate) hosts: Vec<String>,
    /// Identifier of the run.
    pub(crate) run_id: String,
    /// What connects ranks of different hosts.
    pub(crate) net: NetChoice,
    /// A TCP port that is free on node 0.
    pub(crate) master_port: u16,
    /// How often the ranks have been restarted.
    pub(crate) restarts: u32,
    /// How often they may be.
    pub(crate) max_restarts: u32,
}

/// A decision of the supervisor for the ranks of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub(crate) enum Order {
    /// Send a signal to a rank's process group.
    Send { rank: u32, signal: i32 },
    /// Ask the ranks to stop because of this signal, if they stop by themselves: the agent that got it runs none.
    PassStop { signal: i32 },
    /// Print the table of what every rank is doing.
    Report,
    /// The outcome is final: print it.
    Settle { outcome: Outcome },
    /// All ranks have ended.
    Finish { outcome: Outcome },
}
