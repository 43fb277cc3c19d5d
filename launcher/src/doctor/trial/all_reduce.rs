//! NCCL's all-reduce over all GPUs, and the transport that it took.
//!
//! `allreduce_perf` runs and verifies it. NCCL tells its transports only in its log (`NCCL_DEBUG=INFO`), in lines such as
//! `host:1:1 [0] NCCL INFO Channel 00/04 : 0[0] -> 1[1] via P2P/CUMEM/read`.

use std::collections::{BTreeMap, BTreeSet};

use super::super::report::{Item, Mark};
use super::command::{End, Run, last_line};
use super::cpu::{LARGE, Measured, SMALL, parse};

/// Variables that make NCCL avoid a transport.
const AVOIDING: [&str; 4] = ["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_CUMEM_ENABLE"];

/// What NCCL's log tells.
#[derive(Debug, Default, PartialEq)]
struct Log {
    version: Option<String>,
    /// The pairs of ranks that are connected, by transport.
    transports: BTreeMap<String, BTreeSet<(u32, u32)>>,
    /// NVLink SHARP: the switches reduce.
    nvls: bool,
    warning: Option<String>,
}

impl Log {
    fn read(text: &str) -> Log {
        let mut log = Log::default();
        for line in text.lines() {
            if let Some((_, warning)) = line.split_once(" NCCL WARN ") {
                log.warning.get_or_insert_with(|| warning.trim().to_owned());
            }
            let said = line.split_once(" NCCL INFO ").map_or(line, |(_, said)| said).trim();
            if let Some(version) = said.strip_prefix("NCCL version ") {
                let end = version.find([' ', '+']).unwrap_or(version.len());
                log.version.get_or_insert_with(|| version[..end].to_owned());
            }
            log.nvls |= said.starts_with("Connected NVLS tree") || said.starts_with("NVLS comm ");
            if let Some((pair, transport)) = connection(said) {
                log.transports.entry(transport).or_default().insert(pair);
            }
        }
        log
    }
}

/// The ranks and the transport in `Channel 00/04 : 0[0] -> 1[1] via P2P/CUMEM/read`. Older versions have the GPU's PCI
/// address in brackets, and connections over a network have `[send]` before `via`.
fn connection(said: &str) -> Option<((u32, u32), String)> {
    let (ranks, transport) = said.strip_prefix("Channel ")?.split_once(" : ")?.1.split_once(" via ")?;
    let (from, to) = ranks.split_once(" -> ")?;
    let rank = |text: &str| text.split('[').next()?.trim().parse::<u32>().ok();
    let (from, to) = (rank(from)?, rank(to)?);
    // The kind and its variant; what follows differs from channel to channel. A network also has the number of its
    // device, and says if the adapter accesses GPU memory.
    let mut parts = transport.split_whitespace().next()?.split('/');
    let mut name = parts.next()?.to_owned();
    name += &parts.next().map(|variant| format!("/{variant}")).unwrap_or_default();
    if transport.contains("GDRDMA") {
        name += "/GDRDMA";
    }
    Some(((from.min(to), from.max(to)), name))
}

/// The findings. `all_access`: each GPU can access all others; `variable` reads the environment.
pub(super) fn read(
    gpus: usize,
    all_access: bool,
    run: &Run,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<Item> {
    let log = Log::read(&run.text());
    if let Some(text) = failure(&log, run) {
        return vec![Item::new(Mark::Failed, "NCCL", text)];
    }
    let measured = match parse(&run.out) {
        Ok(measured) => measured,
        Err(why) => return vec![Item::new(Mark::Failed, "NCCL", why)],
    };
    let of = |bytes: u64| measured.iter().find(|line| line.bytes == bytes);
    let small = of(SMALL).map(|line: &Measured| format!(", {SMALL} B in {:.0} us", line.us_p50));
    let large = of(LARGE)
        .map(|line: &Measured| format!(", {} MiB at {:.0} GB/s bus bandwidth", LARGE >> 20, line.busbw_gbps));
    let version = log.version.as_deref().map_or_else(String::new, |version| format!("{version}: "));
    let (small, large) = (small.unwrap_or_default(), large.unwrap_or_default());
    let over = if gpus == 1 { "1 GPU".to_owned() } else { format!("{gpus} GPUs") };
    let mut items = vec![Item::new(
        Mark::Ok,
        "NCCL",
        format!("{version}all-reduce over {over}, sums verified{small}{large}"),
    )];
    if gpus > 1 {
        items.push(transport(&log, all_access, variable));
    }
    items
}

/// Why the ranks failed.
fn failure(log: &Log, run: &Run) -> Option<String> {
    let warning = log.warning.as_ref().map_or_else(String::new, |warning| format!("; NCCL says: {warning}"));
    let why = last_line(&run.errors);
    Some(match run.end {
        End::Exited(_) if run.is_success() => return None,
        End::Exited(status) => format!("the all-reduce failed ({status}): {why}{warning}"),
        End::Killed if log.transports.is_empty() => {
            format!(
                "hung while it connected the GPUs, and was killed{warning}; NCCL_DEBUG=INFO shows the step"
            )
        }
        End::Killed => format!(
            "hung in the all-reduce, after it had connected the GPUs by {}, and was killed{warning}; if NCCL_P2P_DISABLE=1 \
             helps, an IOMMU or ACS breaks peer access",
            names(log)
        ),
        End::Stuck => format!(
            "hung in the driver and cannot be killed{warning}: look for Xid errors in dmesg; a reset of the GPUs (nvidia-smi \
             --gpu-reset) or of the machine ends it"
        ),
    })
}

fn names(log: &Log) -> String {
    log.transports.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}

/// The finding on the transport, which should be peer access where there is some.
fn transport(log: &Log, all_access: bool, variable: impl Fn(&str) -> Option<String>) -> Item {
    let name = "transport";
    if log.transports.is_empty() {
        return Item::new(Mark::Note, name, "NCCL's log names none: see NCCL_DEBUG=INFO");
    }
    let mut text = names(log);
    if log.nvls {
        text += ", and NVLink SHARP";
    }
    if log.transports.keys().all(|transport| transport.starts_with("P2P")) {
        return Item::new(Mark::Ok, name, text);
    }
    let set: Vec<String> =
        AVOIDING.iter().filter_map(|name| Some(format!("{name}={}", variable(name)?))).collect();
    let uses = |kind: &str| log.transports.keys().any(|transport| transport.starts_with(kind));
    text += &match () {
        () if !set.is_empty() => format!("; {} is set: unset it", set.join(" and ")),
        () if uses("NET") => {
            "; a network within one machine is slow: /dev/shm may be missing or too small".to_owned()
        }
        () if all_access => {
            "; peer access would be faster: NCCL judges the GPUs too far apart (NCCL_P2P_LEVEL=SYS forces it)"
                .to_owned()
        }
        () => "; copies go through host memory, because peer access is missing".to_owned(),
    };
    Item::new(Mark::Note, name, text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    fn run(code: i32, out: &str, errors: &str) -> Run {
        let end = End::Exited(ExitStatus::from_raw(code << 8));
        Run { end, out: out.into(), errors: errors.into() }
    }

    const RESULTS: &str = "{\"bytes\":8,\"us_p50\":14.2,\"us_min\":13.0,\"busbw_gbps\":0.0}\n\
                           {\"bytes\":8388608,\"us_p50\":80.0,\"us_min\":70.0,\"busbw_gbps\":181.5}\n";

    fn texts(items: &[Item]) -> Vec<(Mark, &str)> {
        items.iter().map(|item| (item.mark, item.text.as_str())).collect()
    }

    #[test]
    fn transports_are_read_from_lines_of_several_versions() {
        let log = Log::read(
            "NCCL version 2.18.1+cuda12.1\n\
             a:1:2 [0] NCCL INFO Channel 00/04 :    0   1   2\n\
             a:1:2 [0] NCCL INFO Channel 00/0 : 0[1a000] -> 1[1c000] via P2P/IPC/read\n\
             a:1:2 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] via P2P/CUMEM\n\
             a:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 1[1] via P2P/direct pointer/read\n\
             a:1:2 [0] NCCL INFO Channel 00 : 2[2] -> 3[3] via SHM/direct/direct\n\
             a:1:2 [0] NCCL INFO Channel 00/0 : 3[3] -> 0[0] [send] via NET/IB/3/GDRDMA\n\
             a:1:2 [0] NCCL INFO Channel 00/0 : x -> 0[0] via P2P/IPC\n\
             a:1:2 [0] NCCL INFO Channel via : -> via\n\
             a:1:2 [0] NCCL INFO Connected NVLS tree\n\
             a:1:2 [0] p.cc:9 NCCL WARN Call failed: no\n",
        );
        let names: Vec<(&str, usize)> =
            log.transports.iter().map(|(name, pairs)| (name.as_str(), pairs.len())).collect();
        assert_eq!(
            names,
            [("NET/IB/GDRDMA", 1), ("P2P/CUMEM", 1), ("P2P/IPC", 1), ("P2P/direct", 1), ("SHM/direct", 1)]
        );
        assert_eq!((log.version.as_deref(), log.nvls), (Some("2.18.1"), true));
        assert_eq!(log.warning.as_deref(), Some("Call failed: no"));
        let newer = Log::read("a:1:2 [0] NCCL INFO NCCL version 2.32.3 compiled with CUDA 13.4");
        assert_eq!(newer.version.as_deref(), Some("2.32.3"));
    }

    #[test]
    fn a_slow_transport_says_why() {
        let with = |via: &str, all_access, variable: Option<&str>| {
            let line = format!("h:1:1 [0] NCCL INFO Channel 00/01 : 0[0] -> 1[1] via {via}\n{RESULTS}");
            let items = read(2, all_access, &run(0, &line, ""), |name| {
                variable.filter(|_| name == "NCCL_P2P_DISABLE").map(str::to_owned)
            });
            let [(Mark::Ok, nccl), (mark, text)] = texts(&items)[..] else { panic!("{items:?}") };
            assert_eq!(
                nccl,
                "all-reduce over 2 GPUs, sums verified, 8 B in 14 us, 8 MiB at 182 GB/s bus bandwidth"
            );
            (mark, text.to_owned())
        };
        assert_eq!(with("P2P/CUMEM/read", true, None), (Mark::Ok, "P2P/CUMEM".into()));
        let (mark, text) = with("SHM/direct/direct", true, None);
        assert!(mark == Mark::Note && text.contains("NCCL_P2P_LEVEL=SYS"), "{text}");
        assert!(with("SHM/direct/direct", false, None).1.ends_with("because peer access is missing"));
        assert_eq!(with("SHM/direct", true, Some("1")).1, "SHM/direct; NCCL_P2P_DISABLE=1 is set: unset it");
        assert!(with("NET/Socket/0", true, None).1.contains("/dev/shm"));
    }

    #[test]
    fn a_failure_has_nccls_warning() {
        let warning = "h:1:1 [0] s.cc:1 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-1";
        let items = read(2, true, &run(1, warning, "mgpurun: rank 0 failed\n"), |_| None);
        let expected = "the all-reduce failed (exit status: 1): mgpurun: rank 0 failed; NCCL says: Error while creating \
                        shared memory segment /dev/shm/nccl-1";
        assert_eq!(texts(&items), [(Mark::Failed, expected)]);
        let hung = |out: &str| {
            let run = Run { end: End::Killed, out: out.into(), errors: String::new() };
            texts(&read(2, true, &run, |_| None))[0].1.to_owned()
        };
        assert!(hung("").starts_with("hung while it connected the GPUs"));
        let line = "h:1:1 [0] NCCL INFO Channel 00/01 : 0[0] -> 1[1] via P2P/IPC\n";
        assert!(hung(line).starts_with("hung in the all-reduce, after it had connected the GPUs by P2P/IPC"));
        let items = read(2, true, &run(0, "nothing", ""), |_| None);
        assert!(items[0].mark == Mark::Failed && items[0].text.contains("printed no result"), "{items:?}");
        let items = read(1, true, &run(0, RESULTS, ""), |_| None);
        assert_eq!(items.len(), 1, "one GPU has no transport");
    }
}
