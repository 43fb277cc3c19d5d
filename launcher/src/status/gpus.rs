//! What NVML tells about the GPUs of this machine, and which ranks compute on them.

use nvml::{GpuReading, Nvml};
use serde::Serialize;

use super::snapshot::RunSnapshot;

/// A GPU at one moment. Values that NVML does not tell are `None`.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GpuSnapshot {
    /// Its number in the order of PCI addresses.
    pub(crate) index: usize,
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// Share of the last time, up to a second, in which kernels ran: from 0 to 1.
    pub(crate) utilization: Option<f64>,
    pub(crate) used_bytes: Option<u64>,
    pub(crate) total_bytes: Option<u64>,
    pub(crate) temperature_c: Option<u32>,
    /// The ranks that compute on it.
    pub(crate) ranks: Vec<u32>,
}

/// NVML, if this machine has it.
pub(crate) struct Gpus {
    nvml: Option<(Nvml, Vec<String>)>,
}

impl Gpus {
    /// Opens NVML, which may take long if a GPU has failed.
    pub(crate) fn open() -> Self {
        let nvml = Nvml::open().ok().and_then(|nvml| {
            let uuids = nvml.uuids().ok()?;
            Some((nvml, uuids))
        });
        Gpus { nvml }
    }

    /// The GPUs on which ranks of these runs compute; all of them if that is not known.
    pub(crate) fn read(&self, runs: &[RunSnapshot]) -> Vec<GpuSnapshot> {
        let Some((nvml, uuids)) = &self.nvml else { return Vec::new() };
        let read = |(index, uuid): (usize, &String)| {
            let GpuReading { name, utilization_percent, memory, temperature_c } = nvml.read(uuid).ok()?;
            let processes = nvml.processes(uuid).unwrap_or_default();
            let ranks = runs.iter().flat_map(|run| &run.ranks);
            let ranks = ranks.filter(|rank| rank.host.is_none() && processes.contains(&rank.pid));
            Some(GpuSnapshot {
                index,
                uuid: uuid.clone(),
                name,
                utilization: utilization_percent.map(|percent| f64::from(percent) / 100.0),
                used_bytes: memory.map(|(used, _)| used),
                total_bytes: memory.map(|(_, total)| total),
                temperature_c,
                ranks: ranks.map(|rank| rank.rank).collect(),
            })
        };
        let gpus: Vec<GpuSnapshot> = uuids.iter().enumerate().filter_map(read).collect();
        let used: Vec<GpuSnapshot> = gpus.iter().filter(|gpu| !gpu.ranks.is_empty()).cloned().collect();
        if used.is_empty() { gpus } else { used }
    }
}
