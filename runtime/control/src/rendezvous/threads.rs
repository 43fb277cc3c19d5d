//! The rendezvous of ranks that are threads of one process.

use super::client::{ServedBy, Store};
use super::hosted::spawn;
use super::message::Manifest;
use super::server::Server;
use crate::Result;
use crate::progress::ProgressPage;

/// Connects `world_size` ranks of this process. A thread runs the server and ends with the last connection.
///
/// # Errors
/// If there are no ranks or too many, or the system cannot provide a socket, memory or a thread.
pub fn in_process(world_size: u32, run_id: &str) -> Result<Vec<(Store, ProgressPage)>> {
    let (server, streams) = Server::in_process(world_size, run_id)?;
    spawn(server, None)?;
    let apply = |(stream, rank)| {
        Store::send_hello(stream, ServedBy::Launcher, run_id, rank, world_size, Manifest::default())
    };
    // All ranks say hello before the first one waits: none is admitted before all have.
    let pending: Vec<_> = streams.into_iter().zip(0..).map(apply).collect::<Result<_>>()?;
    pending.into_iter().map(|pending| pending.wait()).collect()
}
