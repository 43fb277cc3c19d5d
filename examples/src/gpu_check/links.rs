//! `--links`: how fast memory is copied between the host and GPUs and from GPU to GPU, and which GPUs really access each
//! other's memory.
//!
//! Prints one JSON object per line. A line before each step names it: whoever ends a probe that hangs reads there what
//! hung.
//!
//! A driver that says "can" has looked at the topology. An IOMMU, or access control of a PCI bridge (ACS), may still
//! break copies between GPUs: they hang or deliver wrong bytes. So bytes are copied and compared.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mgpu_kernels::DType;
use mgpu_kernels::cuda::{Device, Memory, Pinned, Result, Stream};
use serde::Serialize;

use super::FAKE;
use crate::print::outln;

/// Bytes of a copy that is timed, and on a fake GPU.
const BYTES: usize = 64 << 20;
const FAKE_BYTES: usize = 1 << 20;
/// Elements of a copy that is compared.
const COMPARED: usize = 1 << 18;
/// A series of copies takes about this long, and has at most `MOST_COPIES`.
const SERIES: Duration = Duration::from_millis(20);
const MOST_COPIES: u32 = 64;
/// With more GPUs than this, pairs are copied between in one direction only, which bounds the time.
const BOTH_WAYS_UP_TO: usize = 8;

/// A line of output.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Line {
    Step {
        step: String,
        gpus: Vec<u32>,
    },
    /// The copies of one GPU, in GB/s.
    Gpu {
        gpu: u32,
        name: String,
        bus: String,
        to_device_gbps: f64,
        to_host_gbps: f64,
        on_device_gbps: f64,
    },
    /// A GPU that cannot be used.
    Unusable {
        gpu: u32,
        error: String,
    },
    /// What one GPU can do in the memory of another.
    Pair {
        from: u32,
        to: u32,
        /// The driver's answer.
        can: bool,
        atomics: bool,
        /// Why access could not be enabled, although it can.
        refused: Option<String>,
        /// Whether copied bytes arrived unchanged; absent if this direction was not copied.
        intact: Option<bool>,
        gbps: Option<f64>,
    },
}

fn say(line: &Line) {
    // Strings and finite numbers can always be written as JSON.
    outln!("{}", serde_json::to_string(line).unwrap_or_default());
}

/// Names a step, and the GPUs that take part in it.
fn step(text: String, gpus: &[u32]) {
    say(&Line::Step { step: text, gpus: gpus.to_vec() });
}

/// Probes all GPUs that CUDA sees. True if each could be used.
pub(super) fn run() -> Result<bool> {
    step("opening the driver".into(), &[]);
    let count = Device::count()?;
    let mut devices = Vec::new();
    for gpu in 0..count {
        match of_one(gpu) {
            Ok(device) => devices.push(device),
            Err(error) => say(&Line::Unusable { gpu, error: error.to_string() }),
        }
    }
    let both_ways = devices.len() <= BOTH_WAYS_UP_TO;
    for from in &devices {
        for to in devices.iter().filter(|to| to.ordinal() != from.ordinal()) {
            let pair = of_pair(from, to, both_ways || from.ordinal() < to.ordinal())?;
            say(&pair);
        }
    }
    Ok(devices.len() == count as usize)
}

fn bytes_on(device: &Device) -> usize {
    if device.name().contains(FAKE) { FAKE_BYTES } else { BYTES }
}

/// Seconds of one execution of `copies(1)`, measured on a series.
fn time(copies: impl Fn(u32) -> Result<()>) -> Result<f64> {
    copies(1)?;
    let seconds = |times| -> Result<f64> {
        let start = Instant::now();
        copies(times)?;
        Ok(start.elapsed().as_secs_f64().max(1e-9) / f64::from(times))
    };
    let once = seconds(1)?;
    let times = (SERIES.as_secs_f64() / once).clamp(1.0, f64::from(MOST_COPIES)) as u32;
    Ok(seconds(times)?.min(once))
}

/// GB/s.
fn rate(bytes: usize, seconds: f64) -> f64 {
    (bytes as f64 / seconds / 1e8).round() / 10.0
}

/// Opens a GPU and measures its copies.
fn of_one(gpu: u32) -> Result<Arc<Device>> {
    step(format!("opening GPU {gpu}"), &[gpu]);
    let device = Device::open(gpu)?;
    let (bytes, stream) = (bytes_on(&device), Stream::new(&device)?);
    let memory = || Memory::zeroed(&device, DType::U8, bytes);
    let (one, other) = (memory()?, memory()?);
    let host = std::cell::RefCell::new(Pinned::zeroed(&device, bytes)?);
    let series = |what: &str, copy: &dyn Fn() -> Result<()>| -> Result<f64> {
        step(format!("copying {what} GPU {gpu}"), &[gpu]);
        let seconds = time(|times| {
            (0..times).try_for_each(|_| copy())?;
            stream.synchronize()
        })?;
        Ok(rate(bytes, seconds))
    };
    let to_device = || stream.enqueue_upload_part(&host.borrow(), 0, one.view());
    let to_host = || stream.enqueue_download(one.view(), &mut host.borrow_mut());
    let on_device = || stream.copy(one.view(), other.view());
    say(&Line::Gpu {
        gpu,
        name: device.name().to_owned(),
        bus: device.bus()?,
        to_device_gbps: series("from the host to", &to_device)?,
        to_host_gbps: series("to the host from", &to_host)?,
        on_device_gbps: series("within", &on_device)?,
    });
    Ok(device)
}

/// The access of GPU `from` to the memory of GPU `to`, and copies from the former to the latter if `copied`.
fn of_pair(from: &Arc<Device>, to: &Arc<Device>, copied: bool) -> Result<Line> {
    let (a, b) = (from.ordinal(), to.ordinal());
    step(format!("enabling access of GPU {a} to GPU {b}"), &[a, b]);
    let can = from.can_access(to)?;
    let atomics = can && from.has_atomics_on(to)?;
    let refused = if can { from.enable_access(to).err().map(|error| error.to_string()) } else { None };
    let (mut intact, mut gbps) = (None, None);
    if copied {
        // The driver copies directly if either GPU has access. A refusal is reported with the pair in the other direction.
        if to.can_access(from)? {
            let _ = to.enable_access(from);
        }
        step(format!("copying from GPU {a} to GPU {b}"), &[a, b]);
        let (kept, rate) = copy(from, to)?;
        (intact, gbps) = (Some(kept), Some(rate));
    }
    Ok(Line::Pair { from: a, to: b, can, atomics, refused, intact, gbps })
}

/// Whether bytes arrive unchanged, and the rate in GB/s. The destination's stream copies.
fn copy(from: &Arc<Device>, to: &Arc<Device>) -> Result<(bool, f64)> {
    let (source, sink) = (Stream::new(from)?, Stream::new(to)?);
    // Differs in every element and from pair to pair.
    let seed = from.ordinal() * 64 + to.ordinal() + 1;
    let sent: Vec<i32> =
        (0..COMPARED as u32).map(|i| i.wrapping_mul(0x9e37_79b1).wrapping_add(seed) as i32).collect();
    from.bind()?;
    let given = Memory::from_slice(&source, &sent)?;
    to.bind()?;
    let taken = Memory::zeroed(to, DType::I32, COMPARED)?;
    sink.copy_from_peer(&given, &taken, 1)?;
    let intact = taken.to_vec::<i32>(&sink)? == sent;
    let bytes = bytes_on(to);
    let (given, taken) = (Memory::zeroed(from, DType::U8, bytes)?, Memory::zeroed(to, DType::U8, bytes)?);
    to.bind()?;
    let seconds = time(|times| sink.copy_from_peer(&given, &taken, times))?;
    Ok((intact, rate(bytes, seconds)))
}
