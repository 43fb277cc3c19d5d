//! Ranks as threads of one process, for tests and for programs that prefer threads.

use std::sync::{Arc, Mutex};

use super::{Identity, Membership, World};
use crate::Result;
use crate::rendezvous;

/// The worlds of `size` ranks, served by a thread that ends with the last of them.
pub(super) fn worlds(size: u32) -> Result<Vec<World>> {
    assert!(size > 0, "a world has at least one rank");
    let run_id = crate::protocol::new_run_id()?;
    let ranks = rendezvous::in_process(size, &run_id)?;
    let worlds = ranks.into_iter().zip(0..).map(|((store, page), rank)| {
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
            split_parent: Mutex::default(),
            #[cfg(feature = "cuda")]
            gpu: None,
        })
    });
    worlds.collect()
}
