//! The rendezvous of ranks that are threads of one process.

use super::client::{ServedBy, Store};
use super::hosted::spawn;
use super::message::Manifest;
use super::server::Server;
use crate::Result;
use crate::progress::ProgressPage;

/// The connections of `world_size` ranks, served by a thread that ends with the last of them.
///
/// # Errors
/// If there are no ranks or too many, or the system refuses a socket, memory or a thread.
pub fn in_process(world_size: u32, run_id: &str) -> Result<Vec<(Store, ProgressPage)>> {
    let (server, streams) = Server::in_process(world_size, run_id)?;
    spawn(server, None)?;
    let apply = |(stream, rank)| {
        Store::send_hello(stream, ServedBy::Launcher, run_id, rank, world_size, Manifest::default())
    };
    // All apply before the first one is let in, which is when all have.
    let pending: Vec<_> = streams.into_iter().zip(0..).map(apply).collect::<Result<_>>()?;
    pending.into_iter().map(|pending| pending.wait()).collect()
}
