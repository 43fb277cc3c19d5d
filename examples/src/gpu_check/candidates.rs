//! `--layers`: the time of every candidate for every pass of every layer, beside the least time that the GPU allows.
//!
//! That bound is the larger of two times: all floating-point operations at the rate of a large matrix product, and
//! all operands moved once at the rate of a copy. Both rates are measured first ([`super::bandwidth`]), unless given.
//!
//! *Cost.* The networks have about 30 distinct layers, so there are about 500 combinations of layer, pass, precision
//! and batch, with up to 16 candidates each and 8 on average. A candidate is run up to four times singly, and in four
//! graphs of 2 ms: about 15 ms with the graph's capture, 60 s together. The plain kernels' sums are 16 TFLOP in all:
//! 16 s at one TFLOP/s. Large f32 products take up to 40 ms a run, some 30 s together. So an H100 should need two to
//! three minutes. Nothing of this has been timed on a GPU.

use std::error::Error;
use std::fmt;
use std::time::{Duration, Instant};

use mgpu_kernels::activation::LEAKY_SLOPE;
use mgpu_kernels::conv::ConvShape;
use mgpu_kernels::conv::benchmark::{self, LayerPass};
use mgpu_kernels::conv::cuda::LINEAR;
use mgpu_kernels::cuda::{AutotuneOptions, Pass, Stream};
use mgpu_kernels::{Precision, dense};
use serde::Serialize;

use super::args::{Args, Rate};
use super::bandwidth;
use super::report::{self, Machine};
use super::shapes::Conv;
use crate::nets::{Layer, Spec, names};
use crate::print::outln;

/// The networks, most important first.
const ORDER: [&str; 7] = ["conv6", "keras", "deep", "layers", "ensemble2400", "ensemble4800", "lenet5"];

/// Rounds of autotuning in which each candidate is timed.
const ROUNDS: usize = 4;

/// What the bound is computed from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Peaks {
    bf16_tflops: f64,
    tf32_tflops: f64,
    f32_tflops: f64,
    copy_gbs: f64,
}

impl Peaks {
    /// The given rates, and measurements of the others.
    fn new(stream: &Stream, given: &[Rate]) -> Result<Self, Box<dyn Error>> {
        let given = |name: &str| given.iter().rev().find(|rate| rate.of == name).map(|rate| rate.value);
        let product = |precision: Precision| -> Result<f64, Box<dyn Error>> {
            match given(precision.name()) {
                Some(value) => Ok(value),
                None => Ok(bandwidth::fastest_product(stream, precision)?),
            }
        };
        Ok(Peaks {
            copy_gbs: given("copy").map_or_else(|| bandwidth::copy(stream), Ok)?,
            bf16_tflops: product(Precision::Bf16)?,
            tf32_tflops: product(Precision::Tf32)?,
            f32_tflops: product(Precision::F32)?,
        })
    }

    /// The least milliseconds, and what limits them.
    fn bound(&self, pass: &LayerPass) -> (f64, &'static str) {
        let tflops = match pass.precision {
            Precision::F32 => self.f32_tflops,
            Precision::Tf32 => self.tf32_tflops,
            Precision::Bf16 => self.bf16_tflops,
        };
        let (compute, memory) = (pass.operations() / tflops / 1e9, pass.bytes() / self.copy_gbs / 1e6);
        if compute > memory { (compute, "operations") } else { (memory, "bytes") }
    }
}

/// A layer with its activation, and the networks that have it.
#[derive(Debug, Clone, PartialEq)]
struct NetworkLayer {
    networks: Vec<&'static str>,
    shape: ConvShape,
    slope: f32,
    /// Whether the gradient of its input is needed.
    input_gradient: bool,
}

/// The distinct layers of all networks, in their order.
fn layers() -> Vec<NetworkLayer> {
    let rest = names().iter().copied().filter(|name| !ORDER.contains(name));
    let mut layers: Vec<NetworkLayer> = Vec::new();
    for name in ORDER.into_iter().chain(rest) {
        for layer in of_network(name) {
            let same = |known: &&mut NetworkLayer| {
                known.shape == layer.shape
                    && known.slope == layer.slope
                    && known.input_gradient == layer.input_gradient
            };
            match layers.iter_mut().find(same) {
                Some(known) if known.networks.contains(&name) => {}
                Some(known) => known.networks.push(name),
                None => layers.push(layer),
            }
        }
    }
    layers
}

fn of_network(name: &'static str) -> Vec<NetworkLayer> {
    let spec = Spec::named(name).expect("a known name");
    let mut layers: Vec<NetworkLayer> = Vec::new();
    let mut extents = spec.input;
    for (at, layer) in spec.layers.iter().enumerate() {
        let [channels, height, width] = extents;
        extents = layer.output(extents);
        let shape = match *layer {
            Layer::Conv { filters, kernel, padding } => {
                ConvShape { channels, height, width, filters, kernel, padding }
            }
            Layer::Dense(outputs) => {
                dense::cuda::convolution(&dense::DenseShape { inputs: channels, outputs })
            }
            _ => continue,
        };
        let slope = match spec.layers.get(at + 1) {
            Some(Layer::Relu) => 0.0,
            Some(Layer::LeakyRelu) => LEAKY_SLOPE,
            _ => LINEAR,
        };
        let input_gradient = !layers.is_empty();
        layers.push(NetworkLayer { networks: vec![name], shape, slope, input_gradient });
    }
    layers
}

/// One combination of layer, batch, precision and pass.
#[derive(Debug, Serialize)]
struct Row {
    networks: Vec<&'static str>,
    layer: String,
    batch: usize,
    slope: f32,
    precision: &'static str,
    pass: &'static str,
    operations: f64,
    bytes: f64,
    /// The least time; `None` on a fake GPU.
    bound_ms: Option<f64>,
    bound_by: Option<&'static str>,
    candidates: Vec<Cell>,
    notes: Vec<String>,
    /// The pass could not be benchmarked at all.
    error: Option<String>,
}

/// One candidate.
#[derive(Debug, Serialize)]
struct Cell {
    name: String,
    form: Option<&'static str>,
    ms: Option<f64>,
    /// The time is that of a single run with its launch.
    single_run: bool,
    tflops: Option<f64>,
    gbs: Option<f64>,
    /// The bound divided by the time.
    share: Option<f64>,
    fastest: bool,
    selected: bool,
    rejected: Option<String>,
}

/// What the file begins with.
#[derive(Debug, Serialize)]
struct Header<'a> {
    #[serde(flatten)]
    machine: &'a Machine,
    fake: bool,
    peaks: Option<Peaks>,
    /// Combinations that were left out because time was up.
    left_out: usize,
}

impl Row {
    fn new(layer: &NetworkLayer, pass: &LayerPass, peaks: Option<&Peaks>) -> Self {
        let bound = peaks.map(|peaks| peaks.bound(pass));
        Row {
            networks: layer.networks.clone(),
            layer: Conv { shape: pass.shape, images: pass.images }.to_string(),
            batch: pass.images,
            slope: pass.slope,
            precision: pass.precision.name(),
            pass: pass.pass.name(),
            operations: pass.operations(),
            bytes: pass.bytes(),
            bound_ms: bound.map(|(ms, _)| ms),
            bound_by: bound.map(|(_, by)| by),
            candidates: Vec::new(),
            notes: Vec::new(),
            error: None,
        }
    }

    /// Adds the candidates, with their times unless the GPU is a fake.
    fn add(&mut self, found: benchmark::PassBenchmark) {
        let times = found.candidates.iter().filter_map(|candidate| candidate.milliseconds);
        let fastest = times.fold(f64::INFINITY, f64::min);
        let timed = self.bound_ms.is_some();
        self.notes = found.notes;
        for candidate in found.candidates {
            let ms = candidate.milliseconds.filter(|_| timed);
            self.candidates.push(Cell {
                ms,
                tflops: ms.map(|ms| self.operations / ms / 1e9),
                gbs: ms.map(|ms| self.bytes / ms / 1e6),
                share: ms.zip(self.bound_ms).map(|(ms, bound)| bound / ms),
                fastest: ms == Some(fastest),
                selected: timed && candidate.selected,
                name: candidate.name,
                form: candidate.form,
                single_run: timed && candidate.single_run,
                rejected: candidate.rejected,
            });
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { networks, layer, precision, pass, .. } = self;
        write!(f, "{}: {layer}, {precision}, {pass}", networks.join(", "))?;
        if let (Some(ms), Some(by)) = (self.bound_ms, self.bound_by) {
            write!(f, ": at least {ms:.4} ms for its {by}")?;
        }
        for Cell { name, ms, single_run, tflops, gbs, share, fastest, rejected, .. } in &self.candidates {
            write!(f, "\n  {} {name:<24}", if *fastest { '*' } else { ' ' })?;
            match (rejected, ms, tflops.zip(*gbs).zip(*share)) {
                (Some(why), ..) => write!(f, " rejected: {why}")?,
                (None, Some(ms), Some(((tflops, gbs), share))) => {
                    let single = if *single_run { ", a single run" } else { "" };
                    let share = share * 100.0;
                    write!(
                        f,
                        " {ms:9.4} ms {tflops:7.1} TFLOP/s {gbs:6.0} GB/s {share:4.0}% of the bound{single}"
                    )?;
                }
                _ => f.write_str(" correct")?,
            }
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n    {note}"))?;
        self.error.iter().try_for_each(|error| write!(f, "\n    FAILED: {error}"))
    }
}

/// All combinations that `args` select.
fn passes<'a>(
    layers: &'a [NetworkLayer],
    args: &Args,
    batches: &[usize],
) -> Vec<(&'a NetworkLayer, LayerPass)> {
    let mut passes = Vec::new();
    // Layers are sorted by their first network.
    for of_network in layers.chunk_by(|a, b| a.networks[0] == b.networks[0]) {
        for &images in batches {
            for precision in [Precision::Bf16, Precision::Tf32, Precision::F32] {
                for layer in of_network {
                    let &NetworkLayer { shape, slope, input_gradient, .. } = layer;
                    let used = Pass::ALL.into_iter();
                    let used = used.filter(|pass| input_gradient || *pass != Pass::BackwardInput);
                    passes.extend(
                        used.map(|pass| (layer, LayerPass { shape, images, precision, slope, pass })),
                    );
                }
            }
        }
    }
    passes.retain(|(layer, pass)| {
        let text = Conv { shape: pass.shape, images: pass.images }.to_string();
        let is_named =
            |only: &String| layer.networks.contains(&only.as_str()) || text.contains(only.as_str());
        args.only.as_ref().is_none_or(is_named)
    });
    passes
}

/// Prints the candidates of each pass, and writes all of them to the file after each pass. True if no pass failed.
pub(super) fn run(
    stream: &Stream,
    machine: &Machine,
    args: &Args,
    fake: bool,
) -> Result<bool, Box<dyn Error>> {
    let deadline = args.budget.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let batches = match args.batch[..] {
        [] if fake => &[2],
        [] => &[1024, 128][..],
        ref given => given,
    };
    if fake {
        outln!("a fake GPU is not timed");
    }
    let peaks = if fake { None } else { Some(Peaks::new(stream, &args.peak)?) };
    let layers = layers();
    let passes = passes(&layers, args, batches);
    let mut rows: Vec<Row> = Vec::new();
    let write = |rows: &[Row]| {
        let header = Header { machine, fake, peaks, left_out: passes.len() - rows.len() };
        report::write(args.json.as_deref(), &(header, rows))
    };
    write(&rows)?;
    for (layer, pass) in &passes {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
        let mut row = Row::new(layer, pass, peaks.as_ref());
        let rounds = if fake { 0 } else { ROUNDS };
        match benchmark::benchmark(stream, pass, AutotuneOptions::default(), rounds) {
            Ok(found) => row.add(found),
            Err(error) => row.error = Some(error.to_string()),
        }
        outln!("{row}");
        rows.push(row);
        write(&rows)?;
        // An error of the GPU ends everything.
        stream.synchronize()?;
    }
    let failed = rows.iter().filter(|row| row.error.is_some()).count();
    let left_out = passes.len() - rows.len();
    outln!("{} passes, {failed} failed, {left_out} left out", rows.len());
    Ok(failed == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_of_every_network_occurs_once() {
        let layers = layers();
        assert_eq!(layers[0].networks[0], "conv6");
        let order: Vec<_> =
            layers.chunk_by(|a, b| a.networks[0] == b.networks[0]).map(|of| of[0].networks[0]).collect();
        assert_eq!(order[..4], ["conv6", "keras", "deep", "layers"]);
        for name in names() {
            let own: Vec<_> = of_network(name);
            assert!(
                !own.is_empty()
                    && !own[0].input_gradient
                    && own.iter().skip(1).all(|layer| layer.input_gradient)
            );
            for layer in own {
                let same =
                    |known: &&NetworkLayer| known.shape == layer.shape && known.networks.contains(name);
                assert!(layers.iter().any(|known| same(&known)), "{layer:?}");
            }
        }
        for (at, layer) in layers.iter().enumerate() {
            let twice = |other: &NetworkLayer| other.shape == layer.shape && other.slope == layer.slope;
            assert!(
                !layers[at + 1..]
                    .iter()
                    .any(|other| twice(other) && other.input_gradient == layer.input_gradient)
            );
        }
    }

    #[test]
    fn the_bound_is_the_larger_of_two_times() {
        let peaks = Peaks { bf16_tflops: 800.0, tf32_tflops: 400.0, f32_tflops: 50.0, copy_gbs: 3000.0 };
        let pass = |inputs, outputs, images| LayerPass {
            shape: dense::cuda::convolution(&dense::DenseShape { inputs, outputs }),
            images,
            precision: Precision::Bf16,
            slope: 1.0,
            pass: Pass::Forward,
        };
        // 2 · 8192^3 operations at 800 TFLOP/s.
        let (ms, by) = peaks.bound(&pass(8192, 8192, 8192));
        assert!((ms - 1.374).abs() < 0.001 && by == "operations", "{ms} {by}");
        // One sample reads all weights: 2 · 8192^2 bytes at 3 TB/s.
        let (ms, by) = peaks.bound(&pass(8192, 8192, 1));
        assert!((ms - 0.0447).abs() < 0.001 && by == "bytes", "{ms} {by}");
    }
}
