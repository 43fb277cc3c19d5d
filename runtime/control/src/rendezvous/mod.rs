//! How ranks find each other: a small key/value store with deadlines over a Unix socket.
//!
//! The launcher runs the [`Server`]; if another launcher started the ranks, rank 0 runs it. Each rank has a [`Store`].
//! The server accepts connections only from processes of the same user (SO_PEERCRED) that present the token of the run.
//! Ranks exchange small values: the descriptor of a shared-memory region, an NCCL unique id. Bulk data goes through the
//! communicator. Every wait has a deadline, and its error says which rank waited for which, in what operation and how
//! long.
//!
//! On several hosts each node has a server for its own ranks, and the servers are joined by a
//! [`Hub`](crate::nodes::Hub). A rank does not notice: its store, its barriers and its progress page are those of its own
//! node, and they speak of all ranks of the world. Only descriptors cannot be read on another host.
//!
//! ```
//! # fn main() -> mgpu_control::Result<()> {
//! # use std::time::Duration;
//! let run_id = mgpu_control::protocol::new_run_id()?;
//! let ranks = mgpu_control::rendezvous::in_process(2, &run_id)?;
//! let [(first, _), (second, _)] = &ranks[..] else { unreachable!() };
//! first.set("greeting", b"hello", &[], 1)?;
//! let (value, _descriptors) = second.get("greeting", 0, Duration::from_secs(1))?;
//! assert_eq!(value, b"hello");
//! # Ok(())
//! # }
//! ```

mod client;
mod directory;
mod entries;
mod hosted;
mod listener;
pub mod message;
mod peer;
mod preflight;
pub(crate) mod rank_list;
mod read_budget;
pub(crate) mod rejections;
mod remote_readers;
mod rights;
mod server;
mod several_hosts;
mod socket;
pub(crate) mod threads;
mod waits;

pub use crate::progress::Blame;
pub use client::Store;
pub use client::{PendingJoin, ServedBy};
pub use directory::remove_abandoned;
pub use hosted::{HostedRun, HostedServer, RunningServer};
pub use preflight::PreflightFault;
pub use server::{ProcessEnd, Server, ServerEvent};
pub use several_hosts::{NcclUse, OwnHost};
pub use threads::{in_process, in_process_on_nodes};
