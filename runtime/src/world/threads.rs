//! Ranks as threads of one process, for tests and for programs that prefer threads.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Identity, Membership, World};
use crate::rendezvous::message::Manifest;
use crate::rendezvous::{Server, Store};
use crate::{Error, Result};

/// The worlds of `size` ranks, served by a thread that ends with the last of them.
pub(super) fn worlds(size: u32) -> Result<Vec<World>> {
    assert!(size > 0, "a world has at least one rank");
    let run_id = crate::protocol::new_run_id()?;
    let (server, streams) = Server::in_process(size, &run_id)?;
    std::thread::Builder::new()
        .name("mgpu-rendezvous".into())
        .spawn(move || serve(server))
        .map_err(|error| Error::system("start the rendezvous thread", error))?;
    let apply = |(stream, rank)| Store::apply(stream, &run_id, rank, size, Manifest::default());
    let applications: Vec<_> = streams.into_iter().zip(0..).map(apply).collect::<Result<_>>()?;
    let worlds = applications.into_iter().zip(0..).map(|(application, rank)| {
        let (store, page) = application.admission()?;
        let identity = Identity {
            rank,
            world_size: size,
            local_rank: rank,
            local_world_size: size,
            run_id: run_id.clone(),
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

fn serve(mut server: Server) {
    while server.has_peers() {
        let timeout = match server.next_deadline() {
            None => PollTimeout::NONE,
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                // Rounded up: waking before the deadline would only mean another turn.
                PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
            }
        };
        let mut fds: Vec<PollFd<'_>> =
            server.fds().into_iter().map(|fd: BorrowedFd<'_>| PollFd::new(fd, PollFlags::POLLIN)).collect();
        // An interrupted poll is as good as a timeout: `service` looks at everything anyway.
        let _ = poll(&mut fds, timeout);
        drop(fds);
        let _ = server.service();
    }
}
