//! The NVIDIA driver and its GPUs, from the files of the driver's kernel module.

use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use super::report::{Item, Mark, Section};
use super::system::Host;
use crate::placement::{Listed, list_gpus};

/// The section, and the number of GPUs.
pub(super) fn section(host: &Host) -> (Section, usize) {
    let gpus = list_gpus(&host.root);
    let mut items = vec![driver(host)];
    if gpus.is_empty() {
        let text = "the driver lists none; in a container, start it with GPUs (docker run --gpus all)";
        items.push(Item::new(Mark::Missing, "GPUs", text));
    } else {
        items.extend(gpus.iter().enumerate().map(|(index, gpu)| describe(index, gpu)));
        items.push(device_files(host));
    }
    (Section { title: "NVIDIA driver and GPUs", items }, gpus.len())
}

fn driver(host: &Host) -> Item {
    let Some(text) = host.read("/proc/driver/nvidia/version") else {
        let text = "no /proc/driver/nvidia/version: on a machine with a GPU, install the package of your distribution \
                    (nvidia-driver) or the one from nvidia.com";
        return Item::new(Mark::Missing, "driver", text);
    };
    let line = text.lines().next().unwrap_or_default();
    let version = driver_version(line);
    let kind = if line.contains("Open Kernel Module") { " (open kernel module)" } else { "" };
    Item::new(Mark::Ok, "driver", version.map_or(line.to_owned(), |version| format!("{version}{kind}")))
}

/// The version in `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 …`. The line of the open kernel
/// module has more words.
fn driver_version(line: &str) -> Option<&str> {
    let number =
        |word: &&str| word.split('.').count() > 1 && word.split('.').all(|part| part.parse::<u32>().is_ok());
    line.split_whitespace().find(number)
}

/// The driver's version, if there is a driver.
pub(super) fn version(host: &Host) -> Option<String> {
    let text = host.read("/proc/driver/nvidia/version")?;
    driver_version(text.lines().next()?).map(str::to_owned)
}

/// The newest major version of CUDA that the driver supports, if there is a driver: 13 from branch 580 on (CUDA Toolkit
/// release notes, table of driver versions).
pub(super) fn driver_cuda(host: &Host) -> Option<u32> {
    let text = host.read("/proc/driver/nvidia/version")?;
    let branch: u32 = driver_version(text.lines().next()?)?.split('.').next()?.parse().ok()?;
    Some(if branch >= 580 { 13 } else { 12 })
}

fn describe(index: usize, gpu: &Listed) -> Item {
    let model = gpu.model.as_deref().unwrap_or("unknown model");
    let node = gpu.node.map_or("NUMA node unknown".to_owned(), |node| format!("NUMA node {node}"));
    let uuid = gpu.uuid.as_deref().unwrap_or("no UUID");
    Item::new(Mark::Ok, format!("GPU {index}"), format!("{model}, at {}, {node}, {uuid}", gpu.bus))
}

/// The device files that programs open; in a container, or without udev rules, some may be missing.
fn device_files(host: &Host) -> Item {
    let folder = host.path(Path::new("/dev"));
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let gpu = |name: &String| {
        let number = name.strip_prefix("nvidia").unwrap_or_default();
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    };
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(gpu).collect();
    names.sort_unstable();
    if names.is_empty() {
        let text = "no /dev/nvidia0: run nvidia-modprobe, or start the container with GPUs (--gpus all)";
        return Item::new(Mark::Missing, "device files", text);
    }
    names.extend(["nvidiactl".to_owned(), "nvidia-uvm".to_owned()]);
    let path = |name: &String| -> PathBuf { folder.join(name) };
    let shown = |names: Vec<&String>| -> String {
        names.iter().map(|name| format!("/dev/{name}")).collect::<Vec<_>>().join(" ")
    };
    let absent: Vec<&String> = names.iter().filter(|name| !path(name).exists()).collect();
    if !absent.is_empty() {
        let text = format!("no {}: run nvidia-modprobe -u -c 0", shown(absent));
        return Item::new(Mark::Missing, "device files", text);
    }
    let usable = |name: &String| access(&path(name), AccessFlags::R_OK | AccessFlags::W_OK).is_ok();
    let closed: Vec<&String> = names.iter().filter(|name| !usable(name)).collect();
    if !closed.is_empty() {
        let text = format!("cannot be opened: {}; ask to be added to their group (see ls -l)", shown(closed));
        return Item::new(Mark::Missing, "device files", text);
    }
    Item::new(Mark::Ok, "device files", shown(names.iter().collect()))
}
