//! torchrun as the starter of the agents: one `mgpurun` in the place of each node's rank.

use super::super::settings::{Ports, Surroundings};
use super::{Engine, Given, Reading, Tasks, Told};

/// torchrun sets `TORCHELASTIC_RUN_ID` for its ranks. Its own store has the port `MASTER_PORT`.
pub(super) fn torchrun(variables: &Surroundings<'_>) -> Reading {
    let Some(run_id) = variables.text("TORCHELASTIC_RUN_ID") else { return Ok(None) };
    let mut told = Told::by(Engine::Torchrun);
    let rank = variables.number("RANK")?;
    let size = variables.number("WORLD_SIZE")?;
    let local_size = variables.number("LOCAL_WORLD_SIZE")?;
    if let (Some(rank), Some(size), Some(local_size)) = (rank, size, local_size) {
        let advice = "start torchrun with --nproc-per-node 1, and mgpurun with -n";
        Tasks { rank, size, local_size }.describe(&mut told, advice);
    }
    told.endpoint = variables.given("MASTER_ADDR").map(|host| host.map(|host| (host, Ports::OfJob)));
    // Jobs without --rdzv-id have the same identifier, but not the same port on one host.
    let port = variables.text("MASTER_PORT").unwrap_or_default();
    told.run_id = Some(Given::new(format!("{run_id}:{port}"), "TORCHELASTIC_RUN_ID and MASTER_PORT"));
    Ok(Some(told))
}
