//! Copies between the host and GPUs and from GPU to GPU, and access of GPUs to each other's memory.
//!
//! `gpu_check --links` measures, because this program opens no driver. Its output is read here, and a slow or missing
//! connection is explained by what PCI Express tells.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::super::report::{Item, Mark};
use super::super::system::Host;
use super::command::{End, Run, last_line};
use super::pci;

/// A copy between host and GPU should reach this share of its link's rate.
const USUAL_SHARE: f64 = 0.6;
/// At most this many pairs are listed.
const MOST_LISTED: usize = 8;

/// A line of the probe.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Line {
    Step {
        step: String,
        gpus: Vec<u32>,
    },
    Gpu {
        gpu: u32,
        bus: String,
        to_device_gbps: f64,
        to_host_gbps: f64,
        on_device_gbps: f64,
    },
    Unusable {
        gpu: u32,
        error: String,
    },
    Pair {
        from: u32,
        to: u32,
        can: bool,
        atomics: bool,
        refused: Option<String>,
        intact: Option<bool>,
        gbps: Option<f64>,
    },
}

/// The connection of two GPUs, in the order of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Connection {
    Access,
    NoAccess,
    Refused,
    Damaged,
}

/// What is known of two GPUs, in both directions.
#[derive(Debug)]
struct Pair {
    connection: Connection,
    atomics: bool,
    why: Option<String>,
    slowest: f64,
    fastest: f64,
}

/// A pair with the numbers of its GPUs.
type NumberedPair = ((u32, u32), Pair);

/// The findings, and the number of GPUs that can be used.
pub(super) struct Found {
    pub(super) items: Vec<Item>,
    pub(super) gpus: usize,
    /// Whether each pair of them has access.
    pub(super) all_access: bool,
}

/// Reads what the probe has printed. `listed`: the number of GPUs that the driver lists in `/proc`.
pub(super) fn read(host: &Host, run: &Run, listed: usize) -> Found {
    let lines: Vec<Line> = run.out.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut items = Vec::new();
    let (mut buses, mut pairs) = (BTreeMap::new(), BTreeMap::new());
    for line in &lines {
        match line {
            Line::Step { .. } => {}
            Line::Gpu { gpu, bus, to_device_gbps, to_host_gbps, on_device_gbps } => {
                buses.insert(*gpu, bus.clone());
                let rates = [*to_device_gbps, *to_host_gbps, *on_device_gbps];
                items.push(copies(host, *gpu, bus, rates));
            }
            Line::Unusable { gpu, error } => {
                let text = format!("{error}; look for Xid errors in dmesg, and at nvidia-smi");
                items.push(Item::new(Mark::Failed, format!("GPU {gpu}"), text));
            }
            Line::Pair { from, to, can, atomics, refused, intact, gbps } => {
                let connection = match (can, refused, intact) {
                    (_, _, Some(false)) => Connection::Damaged,
                    (true, Some(_), _) => Connection::Refused,
                    (true, None, _) => Connection::Access,
                    (false, ..) => Connection::NoAccess,
                };
                let rate = gbps.unwrap_or(f64::NAN);
                let pair = pairs.entry((*from.min(to), *from.max(to))).or_insert(Pair {
                    connection,
                    atomics: *atomics,
                    why: None,
                    slowest: rate,
                    fastest: rate,
                });
                pair.connection = pair.connection.max(connection);
                pair.atomics &= atomics;
                pair.why = pair.why.take().or(refused.clone());
                // A direction that was not copied is not a number, which these leave out.
                (pair.slowest, pair.fastest) = (pair.slowest.min(rate), pair.fastest.max(rate));
            }
        }
    }
    let all_access = pairs.values().all(|pair| pair.connection == Connection::Access);
    items.extend(connections(host, &buses, pairs));
    items.extend(failure(host, &buses, &lines, (run, listed)));
    Found { items, gpus: buses.len(), all_access }
}

/// The finding on one GPU; `rates` to it, to the host and within it, in GB/s.
fn copies(host: &Host, gpu: u32, bus: &str, [to_device, to_host, within]: [f64; 3]) -> Item {
    let name = format!("GPU {gpu}");
    let text = format!("{to_device:.1} GB/s from the host, {to_host:.1} GB/s to it, {within:.0} GB/s within");
    let Some(link) = pci::link(host, bus) else { return Item::new(Mark::Ok, name, text) };
    if link.lanes < link.most_lanes {
        let (lanes, most) = (link.lanes, link.most_lanes);
        let text =
            format!("{text}; its link has {lanes} of {most} lanes: put it into another slot, or reseat it");
        return Item::new(Mark::Note, name, text);
    }
    if to_device.min(to_host) < USUAL_SHARE * link.gbps {
        let text = format!(
            "{text}; its link could carry {:.0} GB/s: other programs may copy, or the host's memory is on another NUMA node \
             (start mgpurun with --bind)",
            link.gbps
        );
        return Item::new(Mark::Note, name, text);
    }
    Item::new(Mark::Ok, name, text)
}

/// The findings on all pairs: one for those that have the same connection, for the same reason.
fn connections(host: &Host, buses: &BTreeMap<u32, String>, pairs: BTreeMap<(u32, u32), Pair>) -> Vec<Item> {
    let count = pairs.len();
    let mut groups: BTreeMap<(Connection, bool, String), Vec<NumberedPair>> = BTreeMap::new();
    for ((one, other), pair) in pairs {
        let bus = |gpu| buses.get(&gpu).map_or("", String::as_str);
        let mut why = pair.why.clone().unwrap_or_default();
        if pair.connection != Connection::Access {
            let separator = if why.is_empty() { "" } else { "; " };
            why += &format!("{separator}{}", pci::obstacle(host, bus(one), bus(other)));
        }
        groups.entry((pair.connection, pair.atomics, why)).or_default().push(((one, other), pair));
    }
    let item = |((connection, atomics, why), pairs): (_, Vec<NumberedPair>)| {
        let slowest = pairs.iter().map(|(_, pair)| pair.slowest).fold(f64::NAN, f64::min);
        let fastest = pairs.iter().map(|(_, pair)| pair.fastest).fold(f64::NAN, f64::max);
        let rate = match slowest.round() == fastest.round() {
            true => format!("{slowest:.0} GB/s"),
            false => format!("{slowest:.0} to {fastest:.0} GB/s"),
        };
        let names = listed(pairs.iter().map(|(pair, _)| *pair).collect(), count);
        let (mark, text) = match connection {
            Connection::Access => {
                let how = if atomics { ", with atomics (NVLink)" } else { "" };
                (Mark::Ok, format!("{names}: {rate}{how}"))
            }
            Connection::NoAccess => (Mark::Note, format!("{names}: none, {rate} through host memory; {why}")),
            Connection::Refused => (Mark::Failed, format!("{names}: the driver promised it, but {why}")),
            Connection::Damaged => (Mark::Failed, format!("{names}: copies deliver wrong bytes; {why}")),
        };
        Item::new(mark, "peer access", text)
    };
    groups.into_iter().map(item).collect()
}

/// The names of pairs, of `count` in all.
fn listed(pairs: Vec<(u32, u32)>, count: usize) -> String {
    if pairs.len() == count && count > 1 {
        return format!("all {count} pairs");
    }
    let names: Vec<String> =
        pairs.iter().take(MOST_LISTED).map(|(one, other)| format!("{one}-{other}")).collect();
    let more = pairs.len().saturating_sub(MOST_LISTED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("GPUs {}{more}", names.join(", "))
}

/// The finding on a probe that did not end well.
fn failure(
    host: &Host,
    buses: &BTreeMap<u32, String>,
    lines: &[Line],
    (run, listed): (&Run, usize),
) -> Option<Item> {
    let last = lines.iter().rev().find_map(|line| match line {
        Line::Step { step, gpus } => Some((step.as_str(), gpus.as_slice())),
        _ => None,
    });
    let (step, gpus) = last.unwrap_or(("starting", &[]));
    let mut text = match run.end {
        End::Exited(_) if run.is_success() => return None,
        // Each GPU that cannot be used has its own finding.
        End::Exited(_) if lines.iter().any(|line| matches!(line, Line::Unusable { .. })) => return None,
        End::Exited(status) => {
            let why = last_line(&run.errors);
            if listed == 0 && buses.is_empty() {
                // The driver's library may be installed on a machine without GPUs.
                return Some(Item::new(Mark::Note, "GPUs", format!("none can be used: {why}")));
            }
            return Some(Item::new(Mark::Failed, "copies", format!("failed ({status}) when {step}: {why}")));
        }
        End::Killed => format!("hung when {step}, and was killed"),
        End::Stuck => format!(
            "hung in the driver when {step}, and cannot be killed: look for Xid errors in dmesg; a reset of the GPU \
             (nvidia-smi --gpu-reset) or of the machine ends it"
        ),
    };
    if let [one, other] = gpus {
        let bus = |gpu| buses.get(gpu).map_or("", String::as_str);
        text += &format!("; {}", pci::obstacle(host, bus(one), bus(other)));
    } else if run.end == End::Killed {
        text += ": other programs may use the GPUs (nvidia-smi); if not, look for Xid errors in dmesg";
    }
    Some(Item::new(Mark::Failed, "copies", text))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::super::super::tests::{host, write};
    use super::*;

    fn gpu(gpu: u32) -> String {
        format!(
            "{{\"gpu\":{gpu},\"name\":\"H\",\"bus\":\"0000:0{gpu}:00.0\",\"to_device_gbps\":24.5,\"to_host_gbps\":25.25,\
             \"on_device_gbps\":1500}}\n"
        )
    }

    fn pair(from: u32, to: u32, rest: &str) -> String {
        format!("{{\"from\":{from},\"to\":{to},{rest}}}\n")
    }

    const FAST: &str = "\"can\":true,\"atomics\":true,\"refused\":null,\"intact\":true,\"gbps\":240.5";

    fn found(end: End, out: String) -> (Vec<(Mark, String, String)>, usize, bool) {
        found_of(end, out, 2)
    }

    fn found_of(end: End, out: String, listed: usize) -> (Vec<(Mark, String, String)>, usize, bool) {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "proc/cpuinfo", "flags\t\t: hypervisor\n");
        let run = Run { end, out, errors: "gpu_check: why\n".into() };
        let found = read(&host(root.path()), &run, listed);
        let items = found.items.into_iter().map(|item| (item.mark, item.name, item.text));
        (items.collect(), found.gpus, found.all_access)
    }

    fn exited(code: i32) -> End {
        End::Exited(ExitStatus::from_raw(code << 8))
    }

    #[test]
    fn pairs_with_the_same_connection_are_one_finding() {
        let mut out = gpu(0) + &gpu(1) + "a notice\n" + &gpu(2);
        for (from, to) in [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)] {
            out += &pair(from, to, FAST);
        }
        let (items, gpus, all_access) = found(exited(0), out.clone());
        assert_eq!((gpus, all_access), (3, true));
        let copies = "24.5 GB/s from the host, 25.2 GB/s to it, 1500 GB/s within";
        assert_eq!(items[0], (Mark::Ok, "GPU 0".into(), copies.into()));
        assert_eq!(
            items[3..],
            [(Mark::Ok, "peer access".into(), "all 3 pairs: 240 GB/s, with atomics (NVLink)".into())]
        );
        // One direction is enough to lose it.
        out += &pair(2, 1, "\"can\":false,\"atomics\":false,\"refused\":null,\"intact\":true,\"gbps\":9");
        out += &pair(
            0,
            1,
            "\"can\":true,\"atomics\":true,\"refused\":\"it said no\",\"intact\":true,\"gbps\":9",
        );
        let (items, _, all_access) = found(exited(0), out);
        assert!(!all_access);
        let texts: Vec<&str> = items[3..].iter().map(|(_, _, text)| text.as_str()).collect();
        assert_eq!(texts[0], "GPUs 0-2: 240 GB/s, with atomics (NVLink)");
        assert!(
            texts[1].starts_with("GPUs 1-2: none, 9 to 240 GB/s through host memory; in a virtual machine"),
            "{texts:?}"
        );
        assert!(texts[2].starts_with("GPUs 0-1: the driver promised it, but it said no; in a "), "{texts:?}");
    }

    #[test]
    fn damaged_copies_and_directions_that_were_not_copied() {
        let damaged = "\"can\":true,\"atomics\":false,\"refused\":null,\"intact\":false,\"gbps\":20";
        let unknown = "\"can\":true,\"atomics\":false,\"refused\":null,\"intact\":null,\"gbps\":null";
        let (items, ..) = found(exited(0), gpu(0) + &gpu(1) + &pair(0, 1, damaged) + &pair(1, 0, unknown));
        let (mark, _, text) = &items[2];
        assert!(
            *mark == Mark::Failed && text.starts_with("GPUs 0-1: copies deliver wrong bytes; "),
            "{text}"
        );
        let (items, ..) = found(exited(0), gpu(0) + &gpu(1) + &pair(0, 1, FAST) + &pair(1, 0, unknown));
        assert_eq!(items[2].2, "GPUs 0-1: 240 GB/s");
    }

    #[test]
    fn what_hung_or_failed_is_named() {
        let step = "{\"step\":\"copying from GPU 0 to GPU 1\",\"gpus\":[0,1]}\n";
        let (items, ..) = found(End::Killed, gpu(0) + &gpu(1) + step);
        let (mark, name, text) = items.last().unwrap();
        assert_eq!((*mark, name.as_str()), (Mark::Failed, "copies"));
        assert!(
            text.starts_with("hung when copying from GPU 0 to GPU 1, and was killed; in a virtual"),
            "{text}"
        );
        let (items, ..) = found(End::Stuck, "{\"step\":\"opening GPU 0\",\"gpus\":[0]}\n".into());
        assert!(
            items[0].2.contains("hung in the driver when opening GPU 0, and cannot be killed"),
            "{items:?}"
        );
        let (items, gpus, _) = found(exited(1), "{\"step\":\"opening the driver\",\"gpus\":[]}\n".into());
        assert_eq!(items[0].2, "failed (exit status: 1) when opening the driver: gpu_check: why");
        assert_eq!(gpus, 0);
        let (items, ..) = found_of(exited(1), String::new(), 0);
        let none = "none can be used: gpu_check: why".to_owned();
        assert_eq!(items, [(Mark::Note, "GPUs".to_owned(), none)]);
        let (items, ..) = found(exited(1), gpu(0) + "{\"gpu\":1,\"error\":\"lost\"}\n");
        assert_eq!(items.len(), 2, "{items:?}");
        assert!(items[1].0 == Mark::Failed && items[1].2.starts_with("lost; "), "{items:?}");
        let (items, ..) = found(exited(1), "{\"gpu\":-1}\nnull\n[]\n{".into());
        assert!(items[0].2.contains("when starting"), "{items:?}");
    }

    #[test]
    fn a_slow_or_narrow_link_is_noted() {
        let root = tempfile::tempdir().unwrap();
        let host = host(root.path());
        let put = |name: &str, text: &str| write(root.path(), &format!("sys/bus/pci/devices/b/{name}"), text);
        put("max_link_speed", "16.0 GT/s PCIe\n");
        put("max_link_width", "16\n");
        put("current_link_width", "16\n");
        let item = |rate| copies(&host, 0, "b", [rate, 25.0, 900.0]);
        assert_eq!(item(24.0).mark, Mark::Ok);
        assert!(item(12.0).text.contains("its link could carry 32 GB/s"), "{:?}", item(12.0));
        put("current_link_width", "4\n");
        assert!(item(6.0).mark == Mark::Note && item(6.0).text.contains("4 of 16 lanes"), "{:?}", item(6.0));
    }
}
