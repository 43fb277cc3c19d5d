//! The numbers of the runs as OpenMetrics text, version 1.0. Pure.
//!
//! Totals of times are counters, so that a query chooses the time over which it forms a rate. They begin again at zero
//! when ranks are restarted, as counters of a restarted process do.

use std::fmt::Write;

use crate::status::gpus::GpuSnapshot;
use crate::status::snapshot::{RankSnapshot, RunSnapshot};

/// The content type of this text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A value of each rank; `None` where it is not known.
type OfRank = fn(&RankSnapshot) -> Option<f64>;

/// Name, type, unit and help of a family, and its value.
type RankFamily = (&'static str, &'static str, &'static str, &'static str, OfRank);

const RANK_FAMILIES: [RankFamily; 10] = [
    ("mgpurun_rank_up", "gauge", "", "1 while the process of the rank runs.", |rank| {
        Some(f64::from(u8::from(rank.is_up)))
    }),
    ("mgpurun_rank_joined", "gauge", "", "1 once the rank has joined the run.", |rank| {
        Some(f64::from(u8::from(rank.has_joined)))
    }),
    ("mgpurun_rank_step", "gauge", "", "Current training step of the rank.", |rank| {
        joined(rank, rank.step as f64)
    }),
    ("mgpurun_rank_steps", "counter", "", "Training steps that the rank has begun.", |rank| {
        joined(rank, rank.totals.steps as f64)
    }),
    ("mgpurun_rank_samples", "counter", "", "Samples that the rank has reported as processed.", |rank| {
        joined(rank, rank.totals.samples as f64)
    }),
    (
        "mgpurun_rank_collectives",
        "counter",
        "",
        "Collectives and messages that the rank has begun.",
        |rank| joined(rank, rank.totals.collectives as f64),
    ),
    (
        "mgpurun_rank_communication_seconds",
        "counter",
        "seconds",
        "Time of the rank in collectives, sampled.",
        |rank| joined(rank, rank.totals.communicating),
    ),
    (
        "mgpurun_rank_waited_for_seconds",
        "counter",
        "seconds",
        "Time that other ranks have waited for the rank, added over them, sampled.",
        |rank| joined(rank, rank.totals.waited_for),
    ),
    (
        "mgpurun_rank_resident_memory_bytes",
        "gauge",
        "bytes",
        "Resident memory of the process of the rank.",
        |rank| rank.resident_bytes.map(|bytes| bytes as f64),
    ),
    ("mgpurun_rank_cpu_seconds", "counter", "seconds", "Time of cores that the rank has used.", |rank| {
        rank.cpu_s
    }),
];

fn joined(rank: &RankSnapshot, value: f64) -> Option<f64> {
    rank.has_joined.then_some(value)
}

type OfGpu = fn(&GpuSnapshot) -> Option<f64>;

const GPU_FAMILIES: [(&str, &str, &str, OfGpu); 4] = [
    ("mgpurun_gpu_utilization_ratio", "ratio", "Share of time in which kernels ran.", |gpu| gpu.utilization),
    ("mgpurun_gpu_memory_used_bytes", "bytes", "Memory of the GPU in use.", |gpu| {
        gpu.used_bytes.map(|bytes| bytes as f64)
    }),
    ("mgpurun_gpu_memory_total_bytes", "bytes", "Memory of the GPU.", |gpu| {
        gpu.total_bytes.map(|bytes| bytes as f64)
    }),
    ("mgpurun_gpu_temperature_celsius", "celsius", "Temperature of the GPU.", |gpu| {
        gpu.temperature_c.map(f64::from)
    }),
];

/// The text.
pub(super) fn text(runs: &[RunSnapshot], gpus: &[GpuSnapshot]) -> String {
    let mut text = String::new();
    begin(&mut text, "mgpurun_run", "info", "", "The command of a run.");
    for run in runs {
        let launcher = run.launcher.to_string();
        let labels = [("mgpurun_job", job(run)), ("launcher", launcher), ("program", run.program.clone())];
        sample(&mut text, "mgpurun_run_info", &labels, 1.0);
    }
    begin(&mut text, "mgpurun_ranks", "gauge", "", "Number of ranks of the run.");
    for run in runs {
        sample(&mut text, "mgpurun_ranks", &[("mgpurun_job", job(run))], run.ranks.len() as f64);
    }
    begin(&mut text, "mgpurun_restarts", "counter", "", "How often the ranks have been restarted.");
    for run in runs {
        sample(&mut text, "mgpurun_restarts_total", &[("mgpurun_job", job(run))], f64::from(run.restarts));
    }
    for (name, kind, unit, help, value) in RANK_FAMILIES {
        begin(&mut text, name, kind, unit, help);
        let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
        for (run, rank) in runs.iter().flat_map(|run| run.ranks.iter().map(move |rank| (run, rank))) {
            if let Some(value) = value(rank) {
                let host = rank.host.clone().unwrap_or_default();
                let labels = [("mgpurun_job", job(run)), ("rank", rank.rank.to_string()), ("host", host)];
                sample(&mut text, &name, &labels, value);
            }
        }
    }
    for (name, unit, help, value) in GPU_FAMILIES {
        begin(&mut text, name, "gauge", unit, help);
        for gpu in gpus {
            if let Some(value) = value(gpu) {
                let labels = [("gpu", gpu.index.to_string()), ("uuid", gpu.uuid.clone())];
                sample(&mut text, name, &labels, value);
            }
        }
    }
    text + "# EOF\n"
}

fn job(run: &RunSnapshot) -> String {
    run.job.map_or_else(|| "0".into(), |job| job.to_string())
}

fn begin(text: &mut String, name: &str, kind: &str, unit: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "# TYPE {name} {kind}");
    if !unit.is_empty() {
        let _ = writeln!(text, "# UNIT {name} {unit}");
    }
    let _ = writeln!(text, "# HELP {name} {help}");
}

fn sample(text: &mut String, name: &str, labels: &[(&str, String)], value: f64) {
    let labels = labels.iter().filter(|(_, value)| !value.is_empty());
    let labels: Vec<String> = labels.map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
    let _ = writeln!(text, "{name}{{{}}} {value}", labels.join(","));
}

/// A label's value between quotes.
fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for character in value.chars() {
        match character {
            '\\' => escaped += "\\\\",
            '"' => escaped += "\\\"",
            '\n' => escaped += "\\n",
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::totals::{RankRates, RankTotals};

    #[test]
    fn the_text_is_openmetrics() {
        let rank = |rank, host: Option<&str>, has_joined| RankSnapshot {
            rank,
            pid: 100 + rank,
            host: host.map(str::to_owned),
            state: "running".into(),
            is_up: true,
            has_joined,
            doing: "in step 7".into(),
            step: 7,
            idle_s: 0.1,
            waits_for: None,
            resident_bytes: host.is_none().then_some(4096),
            cpu_s: host.is_none().then_some(1.25),
            totals: RankTotals {
                steps: 6,
                samples: 192,
                collectives: 18,
                communicating: 0.5,
                waited_for: 0.25,
            },
            rates: RankRates::default(),
        };
        let run = RunSnapshot {
            job: None,
            launcher: 42,
            program: "train \"a\\b\"\nc".into(),
            restarts: 1,
            age_s: 3.0,
            ranks: vec![rank(0, None, true), rank(1, Some("node1"), true), rank(2, None, false)],
        };
        let gpu = GpuSnapshot {
            index: 0,
            uuid: "GPU-1".into(),
            name: "GPU".into(),
            utilization: Some(0.5),
            used_bytes: Some(1 << 30),
            total_bytes: Some(2 << 30),
            temperature_c: None,
            ranks: vec![0],
        };
        insta::assert_snapshot!(text(&[run], &[gpu]));
    }
}
