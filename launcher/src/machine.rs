//! Detects cores, GPUs and environment of this machine. Opens no NVIDIA library.

use std::path::Path;

use mgpu_control::protocol::{MGPU_RENDEZVOUS, MGPU_THREADS, OMP_NUM_THREADS};

use crate::nccl;
use crate::placement::{Topology, list_gpus, visible_gpus};
use crate::plan::{Machine, PYTHONUNBUFFERED};

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
        Machine { gpus, topology, thread_variables, nccl_variables, python_unbuffered_is_set, nccl: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_set_by_the_user_are_kept_and_those_set_by_a_launcher_are_divided() {
        let machine = |pairs: &[(&str, &str)]| {
            let topology = Topology { nodes: Vec::new(), usable: 8 };
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
