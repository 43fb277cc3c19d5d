//! Kernel, cores, memory and limits.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use nvidia_libraries::SearchEnv;

use super::loader;
use super::report::{Item, Mark, Section};
use crate::nodes::net::ucx_version;
use crate::placement::Topology;

/// The inputs of the report: the root of the files, and results of system calls.
#[derive(Debug)]
pub(crate) struct Host {
    /// The root of its file system.
    pub(super) root: PathBuf,
    /// Its processor's architecture: `x86_64`, `aarch64`.
    pub(super) architecture: &'static str,
    /// Its cores.
    pub(super) topology: Topology,
    /// Bytes of `/dev/shm`: total and free.
    pub(super) shm: Option<(u64, u64)>,
    /// Soft limits of open files and of locked memory.
    pub(super) open_files: Option<u64>,
    pub(super) locked_memory: Option<u64>,
    /// Whether the kernel gives tile registers to this process, or why not.
    pub(super) tile_registers: Result<(), String>,
    /// Checks of what the CPU backend needs.
    pub(super) probes: Vec<Probe>,
    /// The environment variables that determine where libraries are searched.
    pub(super) search: SearchEnv,
    /// The version of UCX, or why it cannot be used.
    pub(super) ucx: Result<String, String>,
    /// `MGPU_NVML_LIBRARY`, if it is set.
    pub(super) nvml: Option<PathBuf>,
    /// `LD_LIBRARY_PATH`, if it is set.
    pub(super) loader_path: Option<Vec<PathBuf>>,
    /// The files in the loader's cache, if there is one.
    pub(super) loader_cache: Option<Vec<PathBuf>>,
}

/// A check of a feature of the kernel.
#[derive(Debug)]
pub(super) struct Probe {
    pub(super) name: &'static str,
    pub(super) purpose: &'static str,
    pub(super) outcome: Result<(), String>,
    pub(super) remedy: &'static str,
}

impl Host {
    /// This machine.
    pub(super) fn detect() -> Self {
        let shm = statvfs("/dev/shm").ok();
        let limit = |resource| getrlimit(resource).ok().map(|(soft, _)| soft);
        let loader_path = std::env::var_os("LD_LIBRARY_PATH").filter(|value| !value.is_empty());
        Host {
            root: "/".into(),
            architecture: std::env::consts::ARCH,
            topology: Topology::detect(),
            shm: shm.map(|shm| {
                let block = shm.fragment_size();
                (shm.blocks() * block, shm.blocks_available() * block)
            }),
            open_files: limit(Resource::RLIMIT_NOFILE),
            locked_memory: limit(Resource::RLIMIT_MEMLOCK),
            tile_registers: mgpu_control::tile_registers::request().map_err(|error| error.to_string()),
            probes: probes(),
            search: SearchEnv::from_process(
                nccl_sys::LIBRARY_NAME,
                nccl_sys::LIBRARY_VARIABLE,
                nccl_sys::LIBRARY_WHEELS,
            ),
            ucx: ucx_version(),
            nvml: SearchEnv::from_process(nvml::LIBRARY_NAME, nvml::LIBRARY_VARIABLE, &[]).explicit,
            loader_path: loader_path.map(|value| std::env::split_paths(&value).collect()),
            loader_cache: loader::cache(),
        }
    }

    /// The text of a file below the root.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.path(Path::new(path))).ok()
    }

    /// The location of an absolute path of the machine. A path below the root is returned unchanged.
    pub(super) fn path(&self, path: &Path) -> PathBuf {
        if path.starts_with(&self.root) {
            return path.to_owned();
        }
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

/// Tries the operations of the start of a run.
fn probes() -> Vec<Probe> {
    let sealed = || {
        let memory = memfd_create(c"mgpurun-doctor", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?;
        fcntl(memory.as_fd(), FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).map(drop)
    };
    let rendezvous = mgpu_control::protocol::new_run_id()
        .and_then(|run_id| mgpu_control::rendezvous::Server::bind(1, &run_id));
    let threads = fs::read_dir("/proc/self/task").map(drop);
    vec![
        Probe {
            name: "/proc",
            purpose: "the kernel's view of processes, to find leftover processes of ranks",
            outcome: threads.map_err(|error| error.to_string()),
            remedy: "in a container or chroot, mount it: mount -t proc proc /proc",
        },
        Probe {
            name: "shared memory",
            purpose: "sealed anonymous memory (memfd), for the collectives",
            outcome: sealed().map_err(|error: nix::Error| error.to_string()),
            remedy: "Linux 3.17 or newer is needed, and a sandbox that allows memfd_create",
        },
        Probe {
            name: "rendezvous",
            purpose: "a private folder with a socket, in XDG_RUNTIME_DIR or the folder for temporary files",
            outcome: rendezvous.map(drop).map_err(|error| error.to_string()),
            remedy: "set TMPDIR to a writable folder",
        },
        Probe {
            name: "pidfd",
            purpose: "descriptors of processes, to notice their end",
            outcome: mgpu_control::process::pidfd_open(std::process::id())
                .map(drop)
                .map_err(|error| error.to_string()),
            remedy: "Linux 5.3 or newer is needed, and a sandbox that allows pidfd_open",
        },
    ]
}

/// What the CPU backend needs.
pub(super) fn needs(host: &Host) -> Section {
    let item = |probe: &Probe| match &probe.outcome {
        Ok(()) => Item::new(Mark::Ok, probe.name, probe.purpose),
        Err(error) => {
            Item::new(Mark::Missing, probe.name, format!("{}: {error}; {}", probe.purpose, probe.remedy))
        }
    };
    Section { title: "Needed by every run", items: host.probes.iter().map(item).collect() }
}

/// The machine.
pub(super) fn section(host: &Host) -> Section {
    let kernel = host.read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "of an unknown version".into());
    let mut items = vec![Item::new(Mark::Ok, "kernel", format!("Linux {}", kernel.trim()))];
    items.extend(processor(host));
    items.extend(cores(&host.topology));
    items.push(memory(host));
    items.extend(group_limit(host));
    items.push(match host.shm {
        None => Item::new(Mark::Note, "/dev/shm", "not there; NCCL and PyTorch's data loaders use it, mgpurun does not"),
        Some((all, free)) if all < 256 << 20 => {
            let text = format!(
                "{}, {} free: little for NCCL and PyTorch's data loaders (mgpurun does not use it); in a container raise it \
                 with --shm-size",
                size(all),
                size(free)
            );
            Item::new(Mark::Note, "/dev/shm", text)
        }
        Some((all, free)) => Item::new(Mark::Ok, "/dev/shm", format!("{}, {} free", size(all), size(free))),
    });
    items.extend(host.open_files.map(|files| {
        // The launcher needs four descriptors for each rank, and its own.
        let (mark, hint) =
            if files < 128 { (Mark::Note, "; raise it with ulimit -n") } else { (Mark::Ok, "") };
        let ranks = files.saturating_sub(32) / 4;
        Item::new(mark, "open files", format!("{}, enough for {} ranks{hint}", limit(files), limit(ranks)))
    }));
    items.extend(host.locked_memory.map(|bytes| {
        let text = if bytes == u64::MAX { "no limit".to_owned() } else { size(bytes) };
        Item::new(Mark::Ok, "locked memory", format!("{text}; matters to network adapters only"))
    }));
    Section { title: "Machine", items }
}

fn limit(number: u64) -> String {
    if number >= u64::MAX / 8 { "any number of".into() } else { number.to_string() }
}

fn processor(host: &Host) -> Vec<Item> {
    let Some(text) = host.read("/proc/cpuinfo") else { return Vec::new() };
    let field = |name| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim())
    };
    let flags = field("flags").unwrap_or_default();
    let has = |flag| flags.split_whitespace().any(|word| word == flag);
    let (mark, vectors) = match () {
        () if has("avx512f") => (Mark::Ok, "AVX-512"),
        () if has("avx2") && has("fma") => (Mark::Ok, "AVX2"),
        () => (Mark::Note, "neither AVX2 nor AVX-512: computation is slow"),
    };
    let model = field("model name").unwrap_or("unknown");
    let mut items = vec![Item::new(mark, "processor", format!("{model}, {vectors}"))];
    if has("amx_tile") && has("amx_bf16") {
        items.push(match &host.tile_registers {
            Ok(()) => Item::new(Mark::Ok, "AMX", "products of bf16 with --precision bf16"),
            Err(error) => {
                let text = format!(
                    "the kernel refuses the tile registers: {error}; training works without them. Linux 5.16 or newer is \
                     needed, and a sandbox that allows arch_prctl"
                );
                Item::new(Mark::Note, "AMX", text)
            }
        });
    }
    items
}

fn cores(topology: &Topology) -> Vec<Item> {
    let (all, physical) = (topology.all(), topology.physical());
    let mut text = format!("{} may be used: {all}", all.len());
    if physical != all.len() {
        text += &format!(" ({physical} physical, with hyper-threads)");
    }
    let mut items = vec![match all.len() {
        0 => Item::new(Mark::Note, "cores", format!("{}, of unknown numbers", topology.usable)),
        _ => Item::new(Mark::Ok, "cores", text),
    }];
    if topology.usable < all.len() {
        let text = format!(
            "a control group limits CPU time to {} cores; more threads than that slow each other down",
            topology.usable
        );
        items.push(Item::new(Mark::Note, "quota", text));
    }
    let node = |node: &crate::placement::Node| format!("node {} with cores {}", node.number, node.all());
    let nodes: Vec<String> = topology.nodes.iter().map(node).collect();
    let text = match nodes.len() {
        0 => "unknown".to_owned(),
        1 => nodes.concat(),
        count => format!("{count} nodes: {}", nodes.join("; ")),
    };
    items.push(Item::new(Mark::Ok, "NUMA", text));
    items
}

fn memory(host: &Host) -> Item {
    let text = host.read("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?.checked_mul(1024)
    };
    match (field("MemTotal:"), field("MemAvailable:")) {
        (Some(total), Some(free)) => {
            Item::new(Mark::Ok, "memory", format!("{}, {} available", size(total), size(free)))
        }
        _ => Item::new(Mark::Note, "memory", "unknown"),
    }
}

/// The smallest limit of the control groups this process is in.
fn group_limit(host: &Host) -> Option<Item> {
    let folders = host
        .read("/proc/self/cgroup")
        .map(|text| mgpu_control::control_group::folders_of(&text, "memory"))?;
    let number = |path: PathBuf| host.read(path.to_str()?)?.trim().parse::<u64>().ok();
    let limit = |folder: &PathBuf| {
        number(folder.join("memory.max")).or_else(|| number(folder.join("memory.limit_in_bytes")))
    };
    // Cgroup v1 represents "no limit" as the largest number of whole pages.
    let limit = folders.iter().filter_map(limit).filter(|bytes| *bytes < 1 << 60).min()?;
    Some(Item::new(
        Mark::Note,
        "memory limit",
        format!("{} for the control group of this process", size(limit)),
    ))
}

/// Formats a number of bytes for people.
pub(super) fn size(bytes: u64) -> String {
    let scaled = |unit: u64, name: &str| format!("{:.1} {name}", bytes as f64 / unit as f64);
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => scaled(1 << 10, "KiB"),
        1_048_576..1_073_741_824 => scaled(1 << 20, "MiB"),
        _ => scaled(1 << 30, "GiB"),
    }
}
