//! What PCI Express tells about a GPU and about the way between two: the link, bridges with access control (ACS), IOMMUs.
//!
//! Copies between GPUs take the shortest way through the bridges above them. A bridge port with ACS redirects them to the
//! root complex, and an IOMMU may not let them pass there: then the driver reports no peer access, or copies hang or
//! deliver wrong bytes.

use std::fs;
use std::path::PathBuf;

use super::super::system::Host;

/// Number of an extended capability, its register of control and the bits that redirect requests and completions between
/// devices (PCI Express Base Specification, chapter on Access Control Services).
const ACS: u32 = 0x0d;
const CONTROL: usize = 6;
const REDIRECTS: u16 = 1 << 2 | 1 << 3;
/// Where extended capabilities begin, and how many of them fit into the space.
const EXTENDED: usize = 0x100;
const MOST_CAPABILITIES: usize = 960;

/// A PCI Express link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Link {
    pub(super) lanes: u32,
    /// The lanes that the GPU has.
    pub(super) most_lanes: u32,
    /// The rate of these lanes at the GPU's highest speed, in GB/s. (An idle link may be slower.)
    pub(super) gbps: f64,
}

/// The link of the GPU at this PCI address.
pub(super) fn link(host: &Host, bus: &str) -> Option<Link> {
    let read = |name: &str| host.read(&format!("/sys/bus/pci/devices/{bus}/{name}"));
    let number = |name| read(name)?.trim().parse::<u32>().ok().filter(|lanes| (1..=32).contains(lanes));
    let speed = read("max_link_speed")?.split_whitespace().next()?.parse::<f64>().ok()?;
    let lanes = number("current_link_width")?;
    // From 8 GT/s on, 128 of 130 bits are payload; below, 8 of 10.
    let coding = if speed >= 8.0 { 128.0 / 130.0 } else { 0.8 };
    let gbps = speed * coding / 8.0 * f64::from(lanes);
    (gbps > 0.0).then_some(Link { lanes, most_lanes: number("max_link_width")?, gbps })
}

/// Why two GPUs may have no access to each other's memory, and what to do.
pub(super) fn obstacle(host: &Host, one: &str, other: &str) -> String {
    let ways = [way(host, one), way(host, other)];
    let is_virtual = host.read("/proc/cpuinfo").is_some_and(|text| {
        let flags = text.lines().find(|line| line.starts_with("flags"));
        flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
    });
    if is_virtual {
        return "in a virtual machine the host decides: ask for GPUs of one NVSwitch or NVLink domain, or for ACS to be off \
                on the host's bridges"
            .to_owned();
    }
    if let Some(kind) = [one, other].iter().find_map(|bus| translation(host, bus)) {
        return format!(
            "an IOMMU translates the GPUs' addresses ({kind}): boot with iommu=pt, or turn it off in the firmware (VT-d, \
             AMD-Vi)"
        );
    }
    let [of_one, of_other] = ways.each_ref().map(|way| way.bridges.as_slice());
    let apart = of_one.iter().filter(|bridge| !of_other.contains(bridge));
    let apart = apart.chain(of_other.iter().filter(|bridge| !of_one.contains(bridge)));
    let states: Vec<(&String, Option<bool>)> =
        apart.map(|bridge| (bridge, redirects(host, bridge))).collect();
    let on: Vec<&str> =
        states.iter().filter(|(_, state)| *state == Some(true)).map(|(bridge, _)| bridge.as_str()).collect();
    if let [first, ..] = on.as_slice() {
        return format!(
            "ACS of the PCI bridges {} redirects copies between them: turn it off in the firmware, or at each boot by setpci \
             -s {first} ECAP_ACS+6.w=0 for each",
            on.join(", ")
        );
    }
    if ways[0].root != ways[1].root {
        return "they are below different sockets or root complexes: place ranks that exchange much on GPUs of one"
            .to_owned();
    }
    if states.iter().any(|(_, state)| state.is_none()) {
        return "ACS of the PCI bridges may redirect copies between them: run doctor --test as root to read it".to_owned();
    }
    "GPUs of this kind may not support it (MIG instances and most consumer GPUs do not): nothing to do"
        .to_owned()
}

/// The bridges above a device, and its root complex.
#[derive(Debug, Default)]
struct Way {
    root: String,
    bridges: Vec<String>,
}

fn way(host: &Host, bus: &str) -> Way {
    let link = host.path(&PathBuf::from(format!("/sys/bus/pci/devices/{bus}")));
    let Ok(path) = fs::canonicalize(link) else { return Way::default() };
    let names = path.iter().filter_map(|name| name.to_str());
    let mut names = names.skip_while(|name| !name.starts_with("pci"));
    let root = names.next().unwrap_or_default().to_owned();
    let is_address = |name: &&str| name.split(':').count() == 3 && name.contains('.');
    let bridges = names.filter(is_address).filter(|name| !name.eq_ignore_ascii_case(bus));
    Way { root, bridges: bridges.map(str::to_owned).collect() }
}

/// The kind of the IOMMU's translation for a device, if there is one.
fn translation(host: &Host, bus: &str) -> Option<String> {
    let kind = host.read(&format!("/sys/bus/pci/devices/{bus}/iommu_group/type"))?;
    let kind = kind.trim();
    kind.starts_with("DMA").then(|| format!("type {kind}"))
}

/// Whether ACS of a bridge redirects; `None` if its registers cannot be read, which only root can.
fn redirects(host: &Host, bridge: &str) -> Option<bool> {
    let file = host.path(&PathBuf::from(format!("/sys/bus/pci/devices/{bridge}/config")));
    acs_redirects(&fs::read(file).ok()?)
}

/// The same from a configuration space.
fn acs_redirects(space: &[u8]) -> Option<bool> {
    let word = |at: usize| Some(u16::from_le_bytes(space.get(at..at + 2)?.try_into().ok()?));
    let mut at = EXTENDED;
    // The chain may be broken: it is followed for as many capabilities as fit.
    for _ in 0..MOST_CAPABILITIES {
        let header = u32::from(word(at)?) | u32::from(word(at + 2)?) << 16;
        if header & 0xffff == ACS {
            return word(at + CONTROL).map(|control| control & REDIRECTS != 0);
        }
        at = (header >> 20) as usize;
        if at < EXTENDED {
            return Some(false);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::super::super::tests::{host, write};
    use super::*;

    /// A device below bridges, as in sysfs.
    fn device(root: &Path, path: &str) {
        fs::create_dir_all(root.join("sys/bus/pci/devices")).unwrap();
        let mut folder = root.join("sys/devices");
        for name in path.split('/') {
            folder.push(name);
            fs::create_dir_all(&folder).unwrap();
            let link = root.join("sys/bus/pci/devices").join(name);
            if !name.starts_with("pci") && !link.exists() {
                symlink(&folder, link).unwrap();
            }
        }
    }

    /// A configuration space with ACS behind another capability.
    fn space(control: u16) -> Vec<u8> {
        let mut space = vec![0; 4096];
        space[0x100..0x104].copy_from_slice(&(0x148 << 20 | 1 << 16 | 1u32).to_le_bytes());
        space[0x148..0x14c].copy_from_slice(&(1 << 16 | ACS).to_le_bytes());
        space[0x148 + CONTROL..0x148 + CONTROL + 2].copy_from_slice(&control.to_le_bytes());
        space
    }

    #[test]
    fn access_control_is_read_from_the_configuration_space() {
        assert_eq!(acs_redirects(&space(0x1d)), Some(true));
        assert_eq!(acs_redirects(&space(0x11)), Some(false));
        assert_eq!(acs_redirects(&[0; 64]), None, "a user reads 64 bytes");
        assert_eq!(acs_redirects(&vec![0; 4096]), Some(false));
        assert_eq!(acs_redirects(&vec![0xff; 4096]), None);
        // A capability that is followed by itself.
        let mut circle = vec![0; 4096];
        circle[0x100..0x104].copy_from_slice(&(0x100 << 20 | 1u32).to_le_bytes());
        assert_eq!(acs_redirects(&circle), Some(false));
    }

    #[test]
    fn the_obstacle_between_two_gpus_is_named() {
        let root = tempfile::tempdir().unwrap();
        let (one, other, far) = ("0000:03:00.0", "0000:04:00.0", "0000:83:00.0");
        device(root.path(), "pci0000:00/0000:00:01.0/0000:02:00.0/0000:03:00.0");
        device(root.path(), "pci0000:00/0000:00:01.0/0000:02:01.0/0000:04:00.0");
        device(root.path(), "pci0000:80/0000:80:01.0/0000:83:00.0");
        let host = host(root.path());
        let starts = |one: &str, other: &str, beginning: &str| {
            let text = obstacle(&host, one, other);
            assert!(text.starts_with(beginning), "{text}");
            text
        };
        let bridge = |name: &str, space: &[u8]| {
            fs::write(root.path().join("sys/bus/pci/devices").join(name).join("config"), space).unwrap();
        };
        starts(one, other, "ACS of the PCI bridges may redirect");
        for name in ["0000:00:01.0", "0000:02:00.0", "0000:02:01.0", "0000:80:01.0"] {
            bridge(name, &space(0));
        }
        starts(one, other, "GPUs of this kind may not support it");
        starts(one, far, "they are below different sockets");
        // The port above both is not on the way between them.
        bridge("0000:00:01.0", &space(0x1d));
        starts(one, other, "GPUs of this kind may not support it");
        bridge("0000:02:01.0", &space(0x1d));
        let text = starts(one, other, "ACS of the PCI bridges 0000:02:01.0 redirects");
        assert!(text.contains("setpci -s 0000:02:01.0 ECAP_ACS+6.w=0"), "{text}");
        write(root.path(), "sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "identity\n");
        starts(one, other, "ACS of");
        write(root.path(), "sys/bus/pci/devices/0000:04:00.0/iommu_group/type", "DMA-FQ\n");
        let text = starts(one, other, "an IOMMU translates the GPUs' addresses (type DMA-FQ): ");
        assert!(text.contains("iommu=pt"), "{text}");
        write(root.path(), "proc/cpuinfo", "flags\t\t: fpu hypervisor\n");
        starts(one, other, "in a virtual machine");
        obstacle(&host, "../..", "");
    }

    #[test]
    fn the_rate_of_a_link_is_computed() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        assert_eq!(link(&host, "0000:03:00.0"), None);
        let put = |name: &str, text: &str| {
            write(root.path(), &format!("sys/bus/pci/devices/0000:03:00.0/{name}"), text);
        };
        put("max_link_speed", "32.0 GT/s PCIe\n");
        put("max_link_width", "16\n");
        put("current_link_width", "8\n");
        let link = |host| link(host, "0000:03:00.0");
        let found = link(&host).unwrap();
        assert_eq!((found.lanes, found.most_lanes, found.gbps.round()), (8, 16, 32.0));
        for (name, text) in
            [("max_link_speed", "Unknown"), ("current_link_width", "0"), ("max_link_width", "")]
        {
            put(name, text);
        }
        assert_eq!(link(&host), None);
    }
}
