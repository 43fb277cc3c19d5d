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

use mgpu_kernels::Precision;
use mgpu_kernels::conv::benchmark::{self, LayerPass};
use mgpu_kernels::cuda::{AutotuneOptions, Pass, Stream};
use serde::Serialize;

use super::args::{Args, Rate};
use super::bandwidth;
use super::network_layers::{NetworkLayer, layers};
use super::report::{self, Machine};
use super::shapes::Conv;
use crate::print::outln;

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
            // Tensor cores multiply both at the same rate.
            Precision::Bf16 | Precision::F16 => self.bf16_tflops,
        };
        let (compute, memory) = (pass.operations() / tflops / 1e9, pass.bytes() / self.copy_gbs / 1e6);
        if compute > memory { (compute, "operations") } else { (memory, "bytes") }
    }
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
    candidates: Vec<CandidateRow>,
    notes: Vec<String>,
    /// The pass could not be benchmarked at all.
    error: Option<String>,
}

/// One candidate.
#[derive(Debug, Serialize)]
struct CandidateRow {
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
            self.candidates.push(CandidateRow {
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
        for CandidateRow { name, ms, single_run, tflops, gbs, share, fastest, rejected, .. } in
            &self.candidates
        {
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

/// All combinations that `args` select: those of bf16 first, because time may be up before the end.
fn passes<'a>(
    layers: &'a [NetworkLayer],
    args: &Args,
    batches: &[usize],
) -> Vec<(&'a NetworkLayer, LayerPass)> {
    let mut passes = Vec::new();
    for precision in [Precision::Bf16, Precision::Tf32, Precision::F32] {
        // Layers are sorted by their first network.
        for of_network in layers.chunk_by(|a, b| a.networks[0] == b.networks[0]) {
            for &images in batches {
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
    use mgpu_kernels::dense;

    use super::*;

    const PEAKS: Peaks = Peaks { bf16_tflops: 800.0, tf32_tflops: 400.0, f32_tflops: 50.0, copy_gbs: 3000.0 };

    fn pass(inputs: usize, outputs: usize, images: usize) -> LayerPass {
        LayerPass {
            shape: dense::cuda::convolution(&dense::DenseShape { inputs, outputs }),
            images,
            precision: Precision::Bf16,
            slope: 1.0,
            pass: Pass::Forward,
        }
    }

    #[test]
    fn a_row_compares_times_with_the_bound() {
        let candidate = |name: &str, milliseconds: Option<f64>| benchmark::Candidate {
            name: name.to_owned(),
            form: None,
            milliseconds,
            single_run: milliseconds > Some(20.0),
            rejected: milliseconds.is_none().then(|| "results deviate".to_owned()),
            selected: milliseconds == Some(2.0),
        };
        let candidates = vec![
            candidate("built in", Some(4.0)),
            candidate("cuBLASLt 1", Some(2.0)),
            candidate("cuBLASLt 2", Some(30.0)),
            candidate("cuBLASLt 3", None),
        ];
        let pass = pass(8192, 8192, 8192);
        let (networks, shape, slope) = (vec!["a", "b"], pass.shape, pass.slope);
        let layer = NetworkLayer { networks, shape, slope, input_gradient: true };
        let mut row = Row::new(&layer, &pass, Some(&PEAKS));
        row.add(benchmark::PassBenchmark { candidates, notes: vec!["cuBLASLt fused: refused".into()] });
        let fastest: Vec<_> = row.candidates.iter().map(|candidate| candidate.fastest).collect();
        assert_eq!(fastest, [false, true, false, false]);
        assert!(row.candidates[1].selected && row.candidates[1].share.is_some_and(|share| share < 0.7));
        let text = row.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "a, b: 8192x8192 to 8192, bf16, forward: at least 1.3744 ms for its operations");
        assert!(lines[2].starts_with("  * cuBLASLt 1 ") && lines[2].contains(" 69% of the bound"), "{text}");
        assert!(lines[2].contains(" 2.0000 ms   549.8 TFLOP/s    201 GB/s"), "{text}");
        assert!(lines[3].ends_with(", a single run") && lines[4].contains(" rejected: results deviate"));
        assert_eq!(lines[5].trim(), "cuBLASLt fused: refused");
    }

    #[test]
    fn the_bound_is_the_larger_of_two_times() {
        // 2 · 8192^3 operations at 800 TFLOP/s.
        let (ms, by) = PEAKS.bound(&pass(8192, 8192, 8192));
        assert!((ms - 1.374).abs() < 0.001 && by == "operations", "{ms} {by}");
        // One sample reads all weights: 2 · 8192^2 bytes at 3 TB/s.
        let (ms, by) = PEAKS.bound(&pass(8192, 8192, 1));
        assert!((ms - 0.0447).abs() < 0.001 && by == "bytes", "{ms} {by}");
    }
}
