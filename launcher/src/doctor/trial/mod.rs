//! `mgpurun doctor --test`: ranks and copies really run on this machine.
//!
//! This program opens no driver: programs beside it do the work, each in processes of its own and with a time limit, so
//! that a driver that hangs or crashes is a finding like any other.
//!
//! | module | test |
//! |---|---|
//! | `cpu` | two ranks of `allreduce_perf` on the CPU, compared with what this machine needs for the memory traffic |
//! | `copies` | copies between host and GPUs and between GPUs, by `gpu_check --links` |
//! | `all_reduce` | NCCL's all-reduce over all GPUs by `allreduce_perf`, and its transport |
//! | `limits` | limits of the system that made one of them fail or slow |
//! | `pci` | what PCI Express tells: links, ACS, IOMMU |
//! | `command` | a program with a time limit |

mod all_reduce;
mod command;
mod copies;
mod cpu;
mod limits;
mod pci;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use mgpu_control::process::start_failure;

use super::report::{Item, Mark, Section};
use super::system::Host;
use crate::program::find;
use command::Run;
use limits::{Enforced, Happened, causes};

/// All tests end within this time, unless the user says otherwise, so that the whole report takes less than 20 s.
pub(super) const TIME: Duration = Duration::from_secs(18);
/// The ranks on the CPU and the copies are killed after this share of the time. NCCL gets what is left.
const CPU_SHARE: f64 = 0.45;
const COPIES_SHARE: f64 = 0.4;
/// Ranks give up a collective this long before they are killed, so that they can say in which one.
const REPORTING: Duration = Duration::from_secs(2);

/// The ranks' program, and that of the copies.
const RANKS: &str = "allreduce_perf";
const LINKS: &str = "gpu_check";
/// Where to get them.
const WHERE_FROM: &str = "install it beside mgpurun; it is in the .deb, in the package for Python, and in target/release of a \
     checkout after `cargo build --release`";

/// What is tested.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    /// The cores that this process may use.
    pub(super) cores: usize,
    /// Whether CUDA's driver was found, and NCCL.
    pub(super) driver: bool,
    pub(super) nccl: bool,
    /// The GPUs that the driver lists in `/proc`.
    pub(super) gpus: usize,
    /// All tests end within it.
    pub(super) time: Duration,
}

/// Runs the tests. `executable` is this program.
pub(super) fn sections(host: &Host, executable: &Path, parts: Parts) -> Vec<Section> {
    let tests = Tests { host, executable, deadline: Instant::now() + parts.time };
    let limit = if parts.driver { parts.time.mul_f64(CPU_SHARE) } else { parts.time };
    let mut sections =
        vec![Section { title: "Test on the CPU", items: tests.on_the_cpu(parts.cores, limit) }];
    if parts.driver {
        let mut items = tests.on_gpus(parts);
        if items.is_empty() {
            items.push(Item::new(Mark::Note, "GPUs", "there is none"));
        }
        sections.push(Section { title: "Test on GPUs", items });
    }
    sections
}

struct Tests<'a> {
    host: &'a Host,
    executable: &'a Path,
    deadline: Instant,
}

impl Tests<'_> {
    fn on_the_cpu(&self, cores: usize, limit: Duration) -> Vec<Item> {
        let ranks = |limit| {
            let mut command = self.ranks(2, "cpu", limit)?;
            command.arg("--bound");
            Ok(command)
        };
        self.test("two ranks", limit, ranks, |run| cpu::read(run, cores))
            .unwrap_or_else(|failed| vec![failed])
    }

    fn on_gpus(&self, parts: Parts) -> Vec<Item> {
        let (mut gpus, mut all_access) = (0, false);
        let links = |_| {
            let mut command = Command::new(self.beside(LINKS)?);
            command.arg("--links");
            Ok(command)
        };
        let copies = self.test("copies", parts.time.mul_f64(COPIES_SHARE), links, |run| {
            let found = copies::read(self.host, run, parts.gpus);
            (gpus, all_access) = (found.gpus, found.all_access);
            found.items
        });
        let mut items = match copies {
            Ok(items) => items,
            Err(failed) => return vec![failed],
        };
        let failed = items.iter().any(|item| item.mark == Mark::Failed && item.name != "peer access");
        if gpus == 0 || failed {
            return items;
        }
        if !parts.nccl {
            items.push(Item::new(Mark::Note, "NCCL", "not tested, because it was not found (see below)"));
            return items;
        }
        let ranks = |limit| {
            let mut command = self.ranks(gpus, "nccl", limit)?;
            // The transports are in messages of the first part; NVLS has its own.
            command
                .env("NCCL_DEBUG", "INFO")
                .env("NCCL_DEBUG_SUBSYS", "INIT,NVLS")
                .env_remove("NCCL_DEBUG_FILE");
            // A single rank needs no NCCL, but should test it.
            command.env("MGPU_NCCL", "always");
            Ok(command)
        };
        let variable = |name: &str| std::env::var(name).ok();
        let tested =
            self.test("NCCL", parts.time, ranks, |run| all_reduce::read(gpus, all_access, run, variable));
        items.extend(tested.unwrap_or_else(|failed| vec![failed]));
        items
    }

    /// Runs the program that `command` returns for a time limit, of at most `limit`. `read` makes findings of it; the
    /// limits of the system that were reached are added.
    fn test(
        &self,
        name: &str,
        limit: Duration,
        command: impl FnOnce(Duration) -> Result<Command, String>,
        read: impl FnOnce(&Run) -> Vec<Item>,
    ) -> Result<Vec<Item>, Item> {
        let failed = |why: String| Item::new(Mark::Failed, name, why);
        let limit = limit.min(self.deadline.saturating_duration_since(Instant::now()));
        let command = command(limit).map_err(failed)?;
        let (before, started) = (Enforced::read(self.host), Instant::now());
        let run = command::run(command, limit)
            .map_err(|error| failed(format!("cannot be started: {}", start_failure(&error))))?;
        let took = started.elapsed();
        let mut items = read(&run);
        let is_good = items.iter().all(|item| item.mark == Mark::Ok);
        let messages = if run.is_success() { String::new() } else { run.text() };
        let causes = causes(self.host, Happened { before, took, messages: &messages });
        if !is_good {
            items.extend(causes);
        }
        Ok(items)
    }

    /// A launch of `ranks` ranks that verify and time all-reduces.
    fn ranks(&self, ranks: usize, backend: &str, limit: Duration) -> Result<Command, String> {
        let program = self.beside(RANKS)?;
        let mut command = Command::new(self.executable);
        command.args(["-n", &ranks.to_string(), "--standalone", "--backend", backend]);
        command.args(["--no-prefix", "--color", "never", "--"]).arg(program);
        for (flag, number) in [("--min", cpu::SMALL), ("--max", cpu::LARGE), ("--factor", 1024)] {
            command.arg(flag).arg(number.to_string());
        }
        command.arg("--check");
        let patience = limit.saturating_sub(REPORTING).max(Duration::from_secs(1));
        command.env("MGPU_TIMEOUT", patience.as_secs_f64().to_string());
        Ok(command)
    }

    /// A program in the folder of this one.
    fn beside(&self, name: &str) -> Result<PathBuf, String> {
        let folder = self.executable.parent().unwrap_or(Path::new("."));
        find(name.as_ref(), &[], Some(folder))
            .map_err(|_| format!("no {name} in {}: {WHERE_FROM}", folder.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::host;
    use super::*;

    #[test]
    fn missing_programs_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let parts = Parts { cores: 2, driver: true, nccl: true, gpus: 1, time: TIME };
        let host = host(folder.path());
        let sections = sections(&host, &folder.path().join("mgpurun"), parts);
        let items: Vec<&Item> = sections.iter().flat_map(|section| &section.items).collect();
        let [ranks, copies] = items[..] else { panic!("{items:?}") };
        for (item, name, program) in [(ranks, "two ranks", RANKS), (copies, "copies", LINKS)] {
            assert_eq!((item.mark, item.name.as_str()), (Mark::Failed, name));
            assert!(item.text.starts_with(&format!("no {program} in ")), "{item:?}");
            assert!(item.text.ends_with(WHERE_FROM), "{item:?}");
        }
    }
}
