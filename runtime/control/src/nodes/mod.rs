//! What lies between the hosts of one job.
//!
//! A *node* is one host of the job, with its agent and its ranks.

pub mod layout;
pub mod relay;

pub use layout::Layout;
pub use relay::{Hub, HubAction, NodeManifest, RankEnd, RelayMessage};
