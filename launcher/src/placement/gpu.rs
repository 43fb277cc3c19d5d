//! The GPUs that the driver lists, and the NUMA node of each. Opens no NVIDIA library.
//!
//! The driver has a folder for each GPU, named by its PCI address. CUDA numbers GPUs from 0, in the order of their
//! addresses if all GPUs are of one model or `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set. With mixed models CUDA puts the
//! fastest first, and a rank may be placed near another GPU than its own: that costs some speed, nothing else.

use std::fs;
use std::path::Path;

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// The name that `CUDA_VISIBLE_DEVICES` takes.
    pub name: String,
    /// PCI address, such as `0000:3b:00.0`.
    pub bus: Option<String>,
    /// NUMA node, if the machine tells.
    pub node: Option<u32>,
    /// Its identifier, if it is known.
    pub uuid: Option<String>,
    /// The launch that has reserved it, as a phrase.
    pub holder: Option<String>,
    /// A process that computes on it, as a phrase.
    pub user: Option<String>,
}

impl Gpu {
    /// A name that means this GPU in whatever order CUDA numbers GPUs: its UUID if it is known.
    pub(crate) fn lasting_name(&self) -> &str {
        self.uuid.as_deref().unwrap_or(&self.name)
    }
}

/// The driver's information about a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Listed {
    /// PCI address.
    pub(crate) bus: String,
    /// Its identifier, `GPU-` and hexadecimal digits.
    pub(crate) uuid: Option<String>,
    /// Product name.
    pub(crate) model: Option<String>,
    /// NUMA node, if the machine tells.
    pub(crate) node: Option<u32>,
    /// Whether its device file exists: a container sees all GPUs of the machine in `/proc`, but may have access to some
    /// or none of them.
    pub(crate) reachable: bool,
}

/// All GPUs of the machine whose root folder is `root`, in the order of their addresses.
pub(crate) fn list(root: &Path) -> Vec<Listed> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut buses: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    buses.sort_unstable();
    let listed = |bus: String| {
        let information = fs::read_to_string(folder.join(&bus).join("information")).unwrap_or_default();
        let field = |name: &str| {
            let value = information.lines().find_map(|line| line.strip_prefix(name))?;
            Some(value.trim_start_matches(':').trim().to_owned()).filter(|value| !value.is_empty())
        };
        let device = root.join("sys/bus/pci/devices").join(bus.to_ascii_lowercase());
        // -1 if the firmware does not tell.
        let node =
            fs::read_to_string(device.join("numa_node")).ok().and_then(|text| text.trim().parse().ok());
        // If the driver does not tell the minor number, the GPU counts as reachable.
        let file = field("Device Minor").map(|minor| root.join(format!("dev/nvidia{minor}")));
        let reachable = file.is_none_or(|file| file.exists());
        Listed { uuid: field("GPU UUID"), model: field("Model"), node, reachable, bus }
    };
    buses.into_iter().map(listed).collect()
}

/// The GPUs that a program may use, in CUDA's order. As in the CUDA runtime, the list in `CUDA_VISIBLE_DEVICES` ends at
/// the first invalid entry.
pub(crate) fn visible(present: &[Listed], visible: Option<&str>) -> Vec<Gpu> {
    let gpu = |name: &str, listed: Option<&Listed>| Gpu {
        name: name.to_owned(),
        bus: listed.map(|listed| listed.bus.clone()),
        node: listed.and_then(|listed| listed.node),
        uuid: listed.and_then(|listed| listed.uuid.clone()),
        ..Gpu::default()
    };
    let Some(visible) = visible else {
        let all = present.iter().enumerate();
        return all.map(|(index, listed)| gpu(&index.to_string(), Some(listed))).collect();
    };
    let known = |name: &str| match name.parse::<i64>() {
        Ok(index) => {
            let listed = usize::try_from(index).ok().and_then(|index| present.get(index));
            listed.map(|listed| gpu(name, Some(listed)))
        }
        Err(_) if name.is_empty() || present.is_empty() => None,
        Err(_) => {
            // CUDA accepts an abbreviated UUID. A MIG instance (`MIG-…`) has its own name.
            let is = |listed: &&Listed| listed.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(name));
            Some(gpu(name, present.iter().find(is)))
        }
    };
    visible.split(',').map(str::trim).map_while(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn present(count: usize) -> Vec<Listed> {
        let listed = |index: usize| Listed {
            bus: format!("0000:{index:02x}:00.0"),
            uuid: Some(format!("GPU-{index}abc")),
            model: None,
            node: Some(index as u32 / 2),
            reachable: true,
        };
        (0..count).map(listed).collect()
    }

    #[test]
    fn cuda_visible_devices_narrows_the_list() {
        let names = |count, list| -> Vec<String> {
            visible(&present(count), list).into_iter().map(|gpu| gpu.name).collect()
        };
        assert_eq!(names(2, None), ["0", "1"]);
        assert_eq!(names(4, Some("3,1")), ["3", "1"]);
        assert_eq!(names(4, Some("2,-1,0")), ["2"]);
        assert_eq!(names(1, Some("GPU-ab12")), ["GPU-ab12"]);
        assert!(names(4, Some("")).is_empty());
        assert!(names(0, Some("0")).is_empty());
        assert!(names(0, Some("GPU-0")).is_empty());
    }

    #[test]
    fn names_are_resolved_to_bus_and_node() {
        let gpus = visible(&present(4), Some("3, GPU-1,MIG-77"));
        let places: Vec<_> = gpus.iter().map(|gpu| (gpu.bus.as_deref(), gpu.node)).collect();
        assert_eq!(places, [(Some("0000:03:00.0"), Some(1)), (Some("0000:01:00.0"), Some(0)), (None, None)]);
    }

    #[test]
    fn the_driver_files_are_read() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        assert_eq!(list(root.path()), []);
        let information = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 16\nGPU UUID: \t GPU-ab12\n";
        write("proc/driver/nvidia/gpus/0000:AF:00.0/information", information);
        write("proc/driver/nvidia/gpus/0000:3b:00.0/information", "GPU UUID\u{0}:\n?");
        write("sys/bus/pci/devices/0000:af:00.0/numa_node", "1\n");
        write("sys/bus/pci/devices/0000:3b:00.0/numa_node", "-1\n");
        let gpus = list(root.path());
        assert_eq!((gpus[0].bus.as_str(), gpus[0].node, &gpus[0].model), ("0000:3b:00.0", None, &None));
        assert_eq!((gpus[1].uuid.as_deref(), gpus[1].node), (Some("GPU-ab12"), Some(1)));
        assert_eq!(gpus[1].model.as_deref(), Some("NVIDIA H100 80GB HBM3"));
        assert!(gpus.iter().all(|gpu| gpu.reachable));
        write("proc/driver/nvidia/gpus/0000:3b:00.0/information", "Device Minor: \t 1\n");
        write("proc/driver/nvidia/gpus/0000:AF:00.0/information", "Device Minor: \t 0\n");
        write("dev/nvidia0", "");
        let reachable: Vec<bool> = list(root.path()).iter().map(|gpu| gpu.reachable).collect();
        assert_eq!(reachable, [false, true]);
    }
}
