//! Ranks as threads of one process, for tests and for programs that prefer threads.

use std::sync::Arc;

use super::{Identity, Membership, World};
use crate::Result;
use crate::rendezvous::message::Manifest;
use crate::rendezvous::{self, Host, Server, Store};

/// The worlds of `size` ranks, served by a thread that ends with the last of them.
pub(super) fn worlds(size: u32) -> Result<Vec<World>> {
    assert!(size > 0, "a world has at least one rank");
    let run_id = crate::protocol::new_run_id()?;
    let (server, streams) = Server::in_process(size, &run_id)?;
    rendezvous::spawn(server, None)?;
    let apply =
        |(stream, rank)| Store::apply(stream, Host::Launcher, &run_id, rank, size, Manifest::default());
    let applications: Vec<_> = streams.into_iter().zip(0..).map(apply).collect::<Result<_>>()?;
    let worlds = applications.into_iter().zip(0..).map(|(application, rank)| {
        let (store, page) = application.admission()?;
        let identity = Identity {
            rank,
            world_size: size,
            local_rank: rank,
            local_world_size: size,
            run_id: run_id.clone(),
            launch_id: Some(run_id.clone()),
            ..Identity::alone()
        };
        let membership = Some(Arc::new(Membership::new(rank, store, page, Vec::new())));
        Ok(World {
            identity,
            membership,
            communicators: 0,
            #[cfg(feature = "cuda")]
            gpu: None,
        })
    });
    worlds.collect()
}
