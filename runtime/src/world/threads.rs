//! Ranks as threads of one process, for tests and for programs that prefer threads.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use super::{Identity, Membership, World};
use crate::Result;
use crate::progress::ProgressPage;
use crate::rendezvous::{self, Store};

/// The worlds of `size` ranks, served by a thread that ends with the last of them.
pub(super) fn worlds(size: u32) -> Result<Vec<World>> {
    assert!(size > 0, "a world has at least one rank");
    let run_id = crate::protocol::new_run_id()?;
    let ranks = rendezvous::in_process(size, &run_id)?;
    Ok(worlds_of(ranks, &run_id))
}

/// The same as if they were on several hosts.
pub(super) fn worlds_on_hosts(first_ranks: &[u32], size: u32) -> Result<Vec<World>> {
    let run_id = crate::protocol::new_run_id()?;
    let ranks = rendezvous::in_process_on_nodes(first_ranks, size, &run_id)?;
    Ok(worlds_of(ranks, &run_id))
}

/// The worlds of ranks that have joined.
fn worlds_of(ranks: Vec<(Store, ProgressPage)>, run_id: &str) -> Vec<World> {
    let world_size = ranks.len() as u32;
    let worlds = ranks.into_iter().zip(0..).map(|((store, page), rank)| {
        let local_ranks = store.layout().map_or(0..world_size, |layout| layout.local_ranks());
        let identity = Identity {
            rank,
            world_size,
            local_rank: rank - local_ranks.start,
            local_world_size: local_ranks.len() as u32,
            run_id: run_id.to_owned(),
            launch_id: Some(run_id.to_owned()),
            ..Identity::alone()
        };
        World {
            identity,
            membership: Some(Arc::new(Membership::new(rank, store, page, Vec::new()))),
            communicators: 0,
            split_parent: Mutex::default(),
            wants_stop: AtomicBool::new(false),
            handles_signals: false,
            #[cfg(feature = "cuda")]
            gpu: None,
        }
    });
    worlds.collect()
}
