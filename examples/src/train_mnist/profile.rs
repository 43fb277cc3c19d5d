//! Profile of a training step: a table for people, and the same data as JSON.
//!
//! The network measures the passes of its layers, the communicator's timeline measures collectives wherever they are
//! called in a step, and the model and the engine measure the rest. Time that none of them measured is a row of its
//! own, so the rows add up to the step. FLOP/s count the multiplications and additions of the layer's definition
//! (three products of weights and activations), whatever its kernel does. An algorithm that needs fewer
//! multiplications can therefore exceed the processor's peak.
//!
//! On a GPU all times are those of the stream that computes, so communication is only the part that nothing hides.

use std::fmt;
use std::time::Duration;

use mgpu_kernels::{Threads, peak};
use serde::Serialize;

use crate::nets::{Profile, StageTimes};

/// The widest description of a kernel in the table.
const KERNEL_COLUMN: usize = 30;

/// Average times of a step.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StepProfile {
    #[serde(rename = "profile")]
    layers: Vec<LayerProfile>,
    #[serde(rename = "profile_ms")]
    rest: OtherTimes,
    /// Peak FLOP/s of this rank's threads; none on GPUs.
    peak_gflops: Option<f64>,
    #[serde(skip)]
    steps: u32,
    /// How the times were measured, in words.
    #[serde(skip)]
    measured: String,
}

/// How the times of a step were measured.
#[derive(Debug, Clone, Copy)]
pub(super) enum Measured<'a> {
    /// By the clock of the host, with these threads.
    OnHost(&'a Threads),
    /// By events in the graph of a step.
    InGraphs,
    /// By events between separate launches.
    BetweenLaunches,
}

/// One layer, with the layers fused into it.
#[derive(Debug, Clone, Serialize)]
struct LayerProfile {
    layer: String,
    kernel: String,
    forward_ms: f64,
    backward_ms: f64,
    /// From the layer's definition; none if it has no multiplications.
    gflops: Option<f64>,
    peak_share: Option<f64>,
}

/// Milliseconds of everything else in a step.
#[derive(Debug, Clone, Serialize)]
struct OtherTimes {
    gather: f64,
    loss: f64,
    communication: f64,
    optimizer: f64,
    other: f64,
    step: f64,
}

/// Sums over the profiled steps: times of everything except layers and loss.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sums {
    pub(super) gather: Duration,
    pub(super) communication: Duration,
    pub(super) optimizer: Duration,
    pub(super) steps: Duration,
}

impl StepProfile {
    /// On the CPU, measures the processor's peak.
    pub(super) fn new(
        measured: Measured<'_>,
        (net, stages): (&Profile, Vec<StageTimes>),
        sums: Sums,
    ) -> Self {
        let round = |value: f64| (value * 1e4).round() / 1e4;
        let mean = |sum: Duration| sum.as_secs_f64() * 1e3 / f64::from(net.steps().max(1));
        let (peak_gflops, measured) = match measured {
            Measured::OnHost(threads) => {
                let peak = peak::measure(threads);
                (Some(peak), format!("peak of its threads: {peak:.0} GFLOP/s"))
            }
            Measured::InGraphs => (None, "times of events in a CUDA graph".to_owned()),
            Measured::BetweenLaunches => {
                (None, "times of events between launches, which are included".to_owned())
            }
        };
        let layers: Vec<_> = stages
            .into_iter()
            .map(|StageTimes { name, kernel, forward, backward, operations, .. }| {
                let gflops = (operations > 0.0).then(|| operations / (forward + backward).max(1e-9) / 1e9);
                LayerProfile {
                    layer: name,
                    kernel,
                    forward_ms: round(forward * 1e3),
                    backward_ms: round(backward * 1e3),
                    gflops: gflops.map(round),
                    peak_share: gflops.zip(peak_gflops).map(|(gflops, peak)| round(gflops / peak)),
                }
            })
            .collect();
        let of_layers: f64 = layers.iter().map(|layer| layer.forward_ms + layer.backward_ms).sum();
        let loss = net.loss() * 1e3;
        let Sums { gather, communication, optimizer, steps } = sums;
        let [gather, communication, optimizer, step] = [gather, communication, optimizer, steps].map(mean);
        let other = step - of_layers - gather - loss - communication - optimizer;
        let [gather, loss, communication, optimizer, other, step] =
            [gather, loss, communication, optimizer, other, step].map(round);
        let rest = OtherTimes { gather, loss, communication, optimizer, other, step };
        StepProfile { layers, rest, peak_gflops: peak_gflops.map(round), steps: net.steps(), measured }
    }
}

impl fmt::Display for StepProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepProfile { layers, rest, steps, measured, .. } = self;
        let names = layers.iter().map(|layer| layer.layer.len());
        let name = names.chain(["communication".len()]).max().unwrap_or(0);
        // The kernels of all passes of a layer on a GPU do not fit into a column: --show-kernels lists them.
        let short =
            |kernel: &str| if kernel.len() <= KERNEL_COLUMN { kernel.to_owned() } else { "".to_owned() };
        let kernels = layers.iter().map(|layer| short(&layer.kernel).len());
        let kernel = kernels.chain(["kernel".len()]).max().unwrap_or(0);
        writeln!(f, "mean of {steps} steps on rank 0; {measured}")?;
        writeln!(
            f,
            "{:<name$}  {:<kernel$}  {:>10}  {:>11}  {:>7}  {:>5}",
            "layer", "kernel", "forward ms", "backward ms", "GFLOP/s", "peak"
        )?;
        for layer in layers {
            let LayerProfile { layer, kernel: by, forward_ms, backward_ms, gflops, peak_share } = layer;
            let by = short(by);
            write!(f, "{layer:<name$}  {by:<kernel$}  {forward_ms:>10.3}  {backward_ms:>11.3}")?;
            if let Some(gflops) = gflops {
                write!(f, "  {gflops:>7.1}")?;
            }
            if let Some(share) = peak_share {
                write!(f, "  {:>4.0}%", share * 100.0)?;
            }
            writeln!(f)?;
        }
        let OtherTimes { gather, loss, communication, optimizer, other, step } = *rest;
        let rows = [
            ("gather", gather),
            ("loss", loss),
            ("communication", communication),
            ("optimizer", optimizer),
            ("other", other),
            ("step", step),
        ];
        for (what, ms) in rows {
            writeln!(f, "{what:<name$}  {:<kernel$}  {ms:>10.3}", "")?;
        }
        Ok(())
    }
}
