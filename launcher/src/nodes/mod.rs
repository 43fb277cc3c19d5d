//! A job on several nodes: one `mgpurun`, its *agent*, on each host. Whatever started the agents (an engine such as
//! Slurm or Kubernetes, or a user by hand) has also told each of them which of the nodes it is; `settings` finds out.
//!
//! | module | job |
//! |---|---|
//! | `settings` | flags + environment → which node is this, and where is node 0? (pure) |
//! | `engine` | the environment of the innermost engine → what it says about the nodes (pure) |
//! | `pmi` | where is node 0? asks the starter of MPICH and Intel MPI, whose variables do not tell |
//! | `addresses` | which of a host's addresses reaches it? |
//! | `card` | what a node says about itself, and whether two nodes contradict each other (pure) |
//! | `arrangement` | which node has which number (pure) |
//! | `coordinator` | agents + events → one job: epochs, orders, losses (pure) |
//! | `nccl_preflight` | does every node reach the interface that NCCL takes on the one before? (pure) |
//! | `net` | do ranks of different hosts use TCP or UCX? |
//! | `message` | what agents and the coordinator say to each other |
//! | `ssh` | `--hosts a,b`: starts the agents by ssh |
//! | `engine_variables` | which variables of an engine are about the agent, and not about its ranks? (pure) |

mod addresses;
mod arrangement;
mod card;
mod coordinator;
mod engine;
mod engine_variables;
mod message;
mod nccl_preflight;
pub(crate) mod net;
mod pmi;
mod settings;
pub(crate) mod ssh;

pub(crate) use card::NodeCard;
pub(crate) use coordinator::{Config, Coordinator, MemberId, NodeLoss, OWN};
pub(crate) use engine::{Engine, binding_notice};
pub(crate) use engine_variables::variables_to_remove;
pub(crate) use message::{
    FromAgent, HEARTBEAT, MAX_LAST_LINE, MAX_LAST_LINES, MAX_RELAYED, Order, StartOrder, ToAgent,
};
pub(crate) use nccl_preflight::NcclPreflight;
pub(crate) use pmi::complete as complete_by_pmi;
pub(crate) use settings::{
    AuthChoice, NodeSettings, OneNode, Ports, SettingsError, Surroundings, one_node, ranks_variable, settings,
};
