//! Detects cores, GPUs and environment of this machine. Opens NVML only to list or choose GPUs, and no other NVIDIA library.

use std::collections::BTreeSet;
use std::path::Path;

use mgpu_control::protocol::{MGPU_RENDEZVOUS, MGPU_THREADS, OMP_NUM_THREADS};
use nvml::Nvml;

use crate::error::LaunchError;
use crate::group::name_of;
use crate::nccl;
use crate::placement::{Listed, Topology, list_gpus, visible_gpus};
use crate::plan::{ERROR_HANDLING, Machine, PYTHONUNBUFFERED};
use crate::reservation::Register;

impl Machine {
    /// This machine. `CUDA_VISIBLE_DEVICES` narrows its GPUs as in the CUDA runtime.
    pub fn detect() -> Self {
        Self::new(Topology::detect(), |name| Some(std::env::var_os(name)?.to_string_lossy().into_owned()))
    }

    fn new(mut topology: Topology, variable: impl Fn(&str) -> Option<String>) -> Self {
        let mut present = list_gpus(Path::new("/"));
        // CUDA, too, counts only the GPUs that it can open.
        present.retain(|gpu| gpu.reachable);
        let gpus = visible_gpus(&present, variable("CUDA_VISIBLE_DEVICES").as_deref());
        let set = |name: &&str| variable(name).is_some_and(|value| !value.is_empty());
        let mut thread_variables: Vec<&'static str> =
            [MGPU_THREADS, OMP_NUM_THREADS].into_iter().filter(set).collect();
        let mut nccl_variables: Vec<&'static str> = nccl::NAMES.into_iter().filter(set).collect();
        if set(&MGPU_RENDEZVOUS) {
            // This launcher is a rank of another launcher, which has set them: they give the share to divide.
            thread_variables.clear();
            nccl_variables.clear();
            let share = variable(MGPU_THREADS).and_then(|text| text.trim().parse().ok());
            topology.usable = topology.usable.min(share.unwrap_or(usize::MAX).max(1));
        }
        let python_unbuffered_is_set = variable(PYTHONUNBUFFERED).is_some();
        let error_handling_is_set = variable(ERROR_HANDLING).is_some();
        Machine {
            gpus,
            topology,
            thread_variables,
            nccl_variables,
            python_unbuffered_is_set,
            error_handling_is_set,
            nccl: None,
        }
    }
}

impl Machine {
    /// This machine, and the UUIDs of all of its GPUs, whether visible or not, that the driver lists and NVML, if there is
    /// one, can open; `None` if neither knows any. A GPU that has fallen off the bus may be listed until the next boot, but
    /// NVML cannot open it.
    pub(crate) fn detect_present() -> (Self, Option<BTreeSet<String>>) {
        let listed = list_gpus(Path::new("/")).into_iter().filter(|gpu| gpu.reachable);
        let mut present: BTreeSet<String> = listed.filter_map(|gpu| gpu.uuid).collect();
        let opened = Nvml::open().and_then(|nvml| nvml.uuids()).unwrap_or_default();
        if present.is_empty() {
            present.extend(opened);
        } else if !opened.is_empty() {
            present.retain(|uuid| opened.contains(uuid));
        }
        (Self::detect(), Some(present).filter(|present| !present.is_empty()))
    }

    /// Lists the GPUs by NVML if the driver lists none in `/proc`, as in some containers.
    pub(crate) fn list_gpus_by_nvml(&mut self) {
        if !self.gpus.is_empty() {
            return;
        }
        let uuids = Nvml::open().and_then(|nvml| nvml.uuids()).unwrap_or_default();
        let listed = |uuid| Listed { uuid: Some(uuid), ..Listed::default() };
        let present: Vec<Listed> = uuids.into_iter().map(listed).collect();
        let visible =
            std::env::var_os("CUDA_VISIBLE_DEVICES").map(|list| list.to_string_lossy().into_owned());
        self.gpus = visible_gpus(&present, visible.as_deref());
        self.gpus.iter_mut().for_each(|gpu| gpu.bus = None);
    }

    /// Finds out which GPUs are reserved or used. Without NVML only reservations are known, which is an error if GPUs
    /// that nobody uses are wanted.
    ///
    /// # Errors
    /// If reservations cannot be read, or NVML is needed and fails.
    pub(crate) fn find_users(&mut self, register: &Register, needs_nvml: bool) -> Result<(), LaunchError> {
        let nvml = match Nvml::open() {
            Err(error) if needs_nvml => return Err(error.into()),
            opened => opened.ok(),
        };
        for gpu in &mut self.gpus {
            gpu.holder = register.holder(gpu)?;
            let processes = nvml.as_ref().map(|nvml| nvml.processes(gpu.lasting_name()));
            gpu.user = match processes.transpose() {
                Err(error) if needs_nvml => return Err(error.into()),
                processes => describe(processes.ok().flatten().unwrap_or_default()),
            };
        }
        Ok(())
    }
}

/// "python (pid 4711)", of the first of these processes.
fn describe(processes: Vec<u32>) -> Option<String> {
    let first = processes.first()?;
    let more = match processes.len() {
        1 => String::new(),
        several => format!(" and {} more", several - 1),
    };
    Some(format!("{} (pid {first}){more}", name_of(*first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_set_by_the_user_are_kept_and_those_set_by_a_launcher_are_divided() {
        let machine = |pairs: &[(&str, &str)]| {
            let topology = Topology { usable: 8, ..Topology::default() };
            Machine::new(topology, |name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(machine(&[(MGPU_THREADS, "")]).thread_variables.is_empty());
        let user = machine(&[(MGPU_THREADS, "4"), (OMP_NUM_THREADS, "1")]);
        assert_eq!((user.thread_variables.len(), user.topology.usable), (2, 8));
        let nested = machine(&[(MGPU_THREADS, "4"), (OMP_NUM_THREADS, "4"), (MGPU_RENDEZVOUS, "unix:/x")]);
        assert_eq!((nested.thread_variables.len(), nested.topology.usable), (0, 4));
        let odd = machine(&[(MGPU_THREADS, "no"), (MGPU_RENDEZVOUS, "unix:/x")]);
        assert_eq!(odd.topology.usable, 8);
        // An empty value is how a user asks for buffered output.
        assert!(machine(&[(PYTHONUNBUFFERED, "")]).python_unbuffered_is_set && !odd.python_unbuffered_is_set);
    }
}
