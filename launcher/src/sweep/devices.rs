//! The machine, and how many ranks it has devices for.

use std::fs;
use std::path::Path;

use crate::placement::list_gpus;
use crate::plan::{BackendChoice, Machine, NCCL_IS_BUILT};

/// What each rank should have one of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Devices {
    are_gpus: bool,
    /// `None` if the driver does not list its GPUs: then each launch finds out by itself.
    count: Option<usize>,
    machine: String,
}

impl Devices {
    /// The devices that launches with this backend use.
    pub(super) fn detect(backend: BackendChoice) -> Self {
        let machine = Machine::detect();
        let (gpus, cores) = (machine.gpus.len(), machine.topology.usable);
        let are_gpus = match backend {
            BackendChoice::Cpu => false,
            BackendChoice::Nccl => true,
            BackendChoice::Auto => NCCL_IS_BUILT && gpus > 0,
        };
        let mut text = format!("{}, {}", processor(), plural(cores, "core"));
        if are_gpus && gpus > 0 {
            let models: Vec<String> =
                list_gpus(Path::new("/")).into_iter().filter_map(|gpu| gpu.model).collect();
            text += &format!(", {}", plural(gpus, models.first().map_or("GPU", String::as_str)));
        }
        for name in &machine.thread_variables {
            text += &format!(", {name}={}", std::env::var_os(name).unwrap_or_default().display());
        }
        let count = if are_gpus { Some(gpus).filter(|gpus| *gpus > 0) } else { Some(cores) };
        Devices { are_gpus, count, machine: text }
    }

    pub(super) fn are_gpus(&self) -> bool {
        self.are_gpus
    }

    pub(super) fn are_fewer_than(&self, ranks: u32) -> bool {
        self.count.is_some_and(|count| count < ranks as usize)
    }

    /// In the plural.
    pub(super) fn name(&self) -> &'static str {
        if self.are_gpus { "GPUs" } else { "cores" }
    }

    /// The machine in words.
    pub(super) fn describe(&self) -> String {
        self.machine.clone()
    }

    /// 1, 2, 4, … and the number of devices.
    ///
    /// # Errors
    /// If that is unknown.
    pub(super) fn rank_numbers(&self) -> Result<Vec<u32>, String> {
        let count =
            self.count.ok_or("the driver lists no GPUs; choose the numbers of ranks: -n 1,2,4")? as u32;
        let powers = (0..u32::BITS).map(|power| 1 << power).take_while(|ranks| *ranks < count);
        Ok(powers.chain([count.max(1)]).collect())
    }

    /// Why so many ranks are refused.
    pub(super) fn refusal(&self, ranks: u32) -> String {
        let count = self.count.unwrap_or(0);
        let singular = self.name().trim_end_matches('s');
        format!(
            "{ranks} ranks are more than {} of this machine, and ranks that share one say nothing about scaling; leave {ranks} out \
             of -n, or allow such figures, marked, with --oversubscribe",
            if count == 1 { format!("the 1 {singular}") } else { format!("the {count} {}", self.name()) }
        )
    }
}

fn plural(count: usize, name: &str) -> String {
    match (count, name) {
        (1, _) => format!("1 {name}"),
        (_, "core" | "GPU") => format!("{count} {name}s"),
        _ => format!("{count} × {name}"),
    }
}

/// The name of the processor, or else its architecture.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    name.map_or(std::env::consts::ARCH, |(_, name)| name.trim()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(are_gpus: bool, count: Option<usize>) -> Devices {
        Devices { are_gpus, count, machine: String::new() }
    }

    #[test]
    fn automatic_numbers_of_ranks_end_with_that_of_the_devices() {
        let numbers = |count| devices(false, Some(count)).rank_numbers().unwrap();
        assert_eq!(numbers(0), [1]);
        assert_eq!(numbers(1), [1]);
        assert_eq!(numbers(2), [1, 2]);
        assert_eq!(numbers(6), [1, 2, 4, 6]);
        assert_eq!(numbers(8), [1, 2, 4, 8]);
        assert!(devices(true, None).rank_numbers().unwrap_err().contains("-n 1,2,4"));
    }

    #[test]
    fn too_many_ranks_are_refused() {
        let (cores, gpu) = (devices(false, Some(2)), devices(true, Some(1)));
        assert_eq!([1, 2, 3].map(|ranks| cores.are_fewer_than(ranks)), [false, false, true]);
        assert!(!devices(true, None).are_fewer_than(1000));
        assert!(cores.refusal(4).starts_with("4 ranks are more than the 2 cores of this machine"));
        assert!(gpu.refusal(2).starts_with("2 ranks are more than the 1 GPU of this machine"));
    }
}
