//! `--steps`: how many kernels a training step of each network has, and how many bytes they move, beside the least that
//! a step has to move and the least time for it.
//!
//! Kernels and bytes are counted as they are launched ([`Launch`]), so nothing has to be computed: a fake GPU that
//! executes nothing gives the same numbers. Only this project's kernels are counted (`--kernels builtin`), in bf16, on
//! one rank.
//!
//! *The least bytes*: each of the three passes of a layer with weights reads its operands and writes its result once,
//! with activations as they are stored, after pooling; a normalisation reads its input twice, because its statistics
//! need all of it, and in the backward pass reads input and gradient twice; the optimizer visits everything once, and
//! gradients are read once more, to find those that are not finite. Bias, activation, pooling and dropout cost nothing.
//!
//! *Sweeps* are the passes that belong to no layer, one launch each: the loss with the counters of the accuracy, the check
//! for gradients that are not finite, and the optimizer. Besides, the hash by which ranks compare their weights.
//!
//! *The least time*: for every pass the longer of its bytes at [`BYTES_PER_SECOND`] and its operations at
//! [`OPERATIONS_PER_SECOND`], one after another.

use std::error::Error;
use std::time::Instant;

use mgpu::device::{DeviceConfig, DeviceDataParallel, StepGraph};
use mgpu::{DataParallelConfig, World};
use mgpu_kernels::cuda::{AutotuneOptions, Launch, Libraries, Memory, Stream};
use mgpu_kernels::digest::cuda as digest;
use mgpu_kernels::{DType, Precision};
use serde::Serialize;

use super::args::Args;
use super::network_layers::ORDER;
use super::report::{self, Machine};
use crate::nets::{DeviceData, DeviceDropout, DeviceNet, Layer, Spec};
use crate::print::outln;

/// What an H200 moves between its memory and its multiprocessors.
const BYTES_PER_SECOND: f64 = 4.3e12;

/// A large product in bf16 on an H200.
const OPERATIONS_PER_SECOND: f64 = 790e12;

/// Steps that are timed together.
const STEPS: u32 = 20;

/// A step of a network.
#[derive(Debug, Serialize)]
struct Step {
    net: &'static str,
    batch: usize,
    kernels: usize,
    layers: usize,
    bytes: u64,
    least_bytes: u64,
    least_us: f64,
    /// On this GPU; `None` on a fake one.
    seen_us: Option<f64>,
    sweeps: Vec<Sweep>,
    /// Every kernel with its bytes.
    launches: Vec<(String, u64)>,
}

/// A pass over all logits, gradients or parameters.
#[derive(Debug, Serialize)]
struct Sweep {
    what: &'static str,
    kernels: usize,
    bytes: u64,
    least_bytes: u64,
}

impl Sweep {
    /// The launches of the kernels whose names begin with `prefix`.
    fn of(what: &'static str, prefix: &str, launches: &[(String, u64)], least: f64) -> Self {
        let own = || launches.iter().filter(|(kernel, _)| kernel.starts_with(prefix));
        let bytes = own().map(|(_, bytes)| bytes).sum();
        Sweep { what, kernels: own().count(), bytes, least_bytes: least as u64 }
    }
}

/// Bytes of the least that each sweep moves.
struct LeastSweeps {
    loss: f64,
    check: f64,
    optimizer: f64,
    hash: f64,
}

impl LeastSweeps {
    fn new(spec: &Spec, batch: usize, parameters: usize) -> Self {
        let (batch, parameters) = (batch as f64, parameters as f64);
        let classes = spec.layers.iter().fold(spec.input, |extents, layer| layer.output(extents));
        let logits = batch * classes.iter().product::<usize>() as f64 * ACTIVATION;
        let states = spec.optimizer.rule.states() + usize::from(spec.optimizer.average.is_some());
        LeastSweeps {
            // Logits and labels read, their gradient written.
            loss: 2.0 * logits + batch,
            check: parameters * PARAMETER,
            // Gradients read, parameters and states read and written, and the copy in bf16 written.
            optimizer: ((1.0 + 2.0 * (1 + states) as f64) * PARAMETER + ACTIVATION) * parameters,
            hash: parameters * PARAMETER,
        }
    }
}

/// The JSON file.
#[derive(Debug, Serialize)]
struct Report<'a> {
    machine: &'a Machine,
    steps: Vec<Step>,
}

/// A pass of a layer: operations and bytes.
#[derive(Debug, Clone, Copy)]
struct Pass {
    operations: f64,
    bytes: f64,
}

impl Pass {
    fn memory(bytes: f64) -> Self {
        Pass { operations: 0.0, bytes }
    }

    fn least_seconds(&self) -> f64 {
        (self.operations / OPERATIONS_PER_SECOND).max(self.bytes / BYTES_PER_SECOND)
    }
}

/// Bytes of an activation, and of a parameter and its gradient.
const ACTIVATION: f64 = 2.0;
const PARAMETER: f64 = 4.0;

/// All passes of a step.
fn passes(spec: &Spec, batch: usize, parameters: usize) -> Vec<Pass> {
    let batch = batch as f64;
    let mut passes = Vec::new();
    let mut extents = spec.input;
    let len = |extents: [usize; 3]| extents.iter().product::<usize>() as f64;
    let mut is_first = true;
    for (at, layer) in spec.layers.iter().enumerate() {
        let inputs = len(extents);
        let output = layer.output(extents);
        let weights = match *layer {
            Layer::Conv { filters, kernel, .. } => filters * extents[0] * kernel * kernel,
            Layer::Dense(outputs) => outputs * extents[0],
            Layer::BatchNorm => {
                let image = batch * inputs * ACTIVATION;
                passes.extend([Pass::memory(3.0 * image), Pass::memory(5.0 * image)]);
                0
            }
            _ => 0,
        };
        if weights > 0 {
            let operations = 2.0 * batch * len(output) * (weights / output[0]) as f64;
            // Pooling follows the activation.
            let pool = spec.layers[at + 1..].iter().take(2).find(|next| matches!(next, Layer::MaxPool(_)));
            let is_pooled = pool.is_some() && !matches!(spec.layers.get(at + 1), Some(Layer::Conv { .. }));
            let stored =
                if is_pooled { len(pool.expect("a pooling layer").output(output)) } else { len(output) };
            let chosen = if is_pooled { batch * stored } else { 0.0 };
            let outputs = batch * stored * ACTIVATION + chosen;
            // Images are read from the data set, as bytes.
            let inputs = batch * inputs * if is_first { 1.0 } else { ACTIVATION };
            let (weights, filters) = (weights as f64, output[0] as f64);
            let pass = |bytes| Pass { operations, bytes };
            passes.push(pass(inputs + weights * ACTIVATION + filters * PARAMETER + outputs));
            passes.push(pass(inputs + outputs + (weights + filters) * PARAMETER));
            if !is_first {
                passes.push(pass(outputs + weights * ACTIVATION + inputs));
            }
            is_first = false;
        }
        extents = output;
    }
    let LeastSweeps { loss, check, optimizer, hash: _ } = LeastSweeps::new(spec, batch as usize, parameters);
    passes.extend([Pass::memory(loss), Pass::memory(check + optimizer)]);
    passes
}

/// Prints the steps of all networks. True if all of them ran.
pub(super) fn run(machine: &Machine, args: &Args, fake: bool) -> Result<bool, Box<dyn Error>> {
    let mut steps = Vec::new();
    outln!(
        "{:<14} {:>6} {:>8} {:>11} {:>11} {:>6} {:>9} {:>9}",
        "network",
        "batch",
        "kernels",
        "MB",
        "least MB",
        "ratio",
        "least µs",
        "seen µs"
    );
    let batches = if args.batch.is_empty() { vec![128, 1024] } else { args.batch.clone() };
    for net in ORDER {
        if args.only.as_ref().is_some_and(|only| only != net) {
            continue;
        }
        for batch in &batches {
            let step = Step::of(net, *batch, fake)?;
            let Step { kernels, bytes, least_bytes, least_us, seen_us, .. } = &step;
            let mega = |bytes: u64| bytes as f64 / 1e6;
            let ratio = *bytes as f64 / *least_bytes as f64;
            let seen = seen_us.map_or("-".to_owned(), |us| format!("{us:.0}"));
            outln!(
                "{net:<14} {batch:>6} {kernels:>8} {:>11.1} {:>11.1} {ratio:>6.2} {least_us:>9.0} {seen:>9}",
                mega(*bytes),
                mega(*least_bytes)
            );
            for Sweep { what, kernels, bytes, least_bytes } in &step.sweeps {
                outln!("  {what:<30} {kernels:>2} {:>11.3} {:>11.3}", mega(*bytes), mega(*least_bytes));
            }
            steps.push(step);
        }
    }
    report::write(args.json.as_deref(), &Report { machine, steps })?;
    Ok(true)
}

impl Step {
    fn of(net_name: &'static str, batch: usize, fake: bool) -> Result<Step, Box<dyn Error>> {
        let spec = Spec::named(net_name)?;
        let mut world = World::from_env()?;
        let (device, host) = world.communicators()?;
        let gpu = device.device().clone();
        let set_up = Stream::new(&gpu)?;
        let options = AutotuneOptions { libraries: Libraries::Builtin, ..AutotuneOptions::default() };
        let mut net = DeviceNet::new(&spec, batch, Precision::Bf16, options, &set_up)?;
        let parameters = net.to_device(&net.initial_parameters(1));
        let config = DeviceConfig::new(DataParallelConfig::new(spec.optimizer, 1)).with_bf16_copy(true);
        let model = DeviceDataParallel::new(device, host, net.layout().clone(), parameters, config)?;
        let mut model = model.with_buffers(&net.initial_buffers())?;
        let pixels = spec.input.iter().product::<usize>();
        let data = DeviceData::new(model.stream(), &vec![0; batch * pixels], &vec![0; batch], batch)?;
        let order: Vec<u32> = (0..batch as u32).collect();
        data.set_order(model.stream(), &order)?;
        let dropout = Some(DeviceDropout { seed: 1, first_sample: 0 });
        // In the first step ranks agree on the order of gradients.
        for _ in 0..2 {
            gpu.record_launches();
            net.step(&mut model, &data, dropout)?;
        }
        let launches: Vec<Launch> = gpu.recorded_launches();
        // Only those of the last step.
        let launches = launches.into_iter().map(|launch| (launch.kernel, launch.bytes)).collect::<Vec<_>>();
        model.check()?;
        let graph = model.capture(|model| net.step(model, &data, dropout))?;
        let seen_us = if fake { None } else { Some(seen(&mut model, &graph)?) };
        let parameters = net.host_layout().len();
        let passes = passes(&spec, batch, parameters);
        let least = LeastSweeps::new(&spec, batch, parameters);
        let hash = hash_launches(model.stream(), net.layout().len())?;
        let sweeps = vec![
            Sweep::of("loss and accuracy", "loss_", &launches, least.loss),
            Sweep::of("check of gradients", "digest_find_non_finite", &launches, least.check),
            Sweep::of("optimizer", "optimizer_", &launches, least.optimizer),
            Sweep::of("hash of the weights", "digest_hash", &hash, least.hash),
        ];
        let sum = |each: fn(&Pass) -> f64| passes.iter().map(each).sum::<f64>();
        Ok(Step {
            net: net_name,
            batch,
            kernels: launches.len(),
            layers: net.host_layout().tensors().len() / 2,
            bytes: launches.iter().map(|(_, bytes)| bytes).sum(),
            least_bytes: sum(|pass| pass.bytes) as u64,
            least_us: sum(Pass::least_seconds) * 1e6,
            seen_us,
            sweeps,
            launches,
        })
    }
}

/// The launches of a hash of so many weights, which is not part of the step of a single rank.
fn hash_launches(stream: &Stream, parameters: usize) -> mgpu::Result<Vec<(String, u64)>> {
    let gpu = stream.device();
    let (weights, hash) = (Memory::zeroed(gpu, DType::F32, parameters)?, Memory::zeroed(gpu, DType::I64, 1)?);
    gpu.record_launches();
    digest::hash(stream, weights.view(), hash.view())?;
    // Before the memory is freed.
    stream.synchronize()?;
    Ok(gpu.recorded_launches().into_iter().map(|launch| (launch.kernel, launch.bytes)).collect())
}

/// Microseconds of a step in a graph.
fn seen(model: &mut DeviceDataParallel, graph: &StepGraph) -> mgpu::Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        model.check()?;
        let begin = Instant::now();
        for _ in 0..STEPS {
            model.replay(graph)?;
        }
        model.check()?;
        best = best.min(begin.elapsed().as_secs_f64() / f64::from(STEPS));
    }
    Ok(best * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_bytes_are_those_of_the_layers() {
        let spec = Spec::named("lenet5").unwrap();
        let passes = passes(&spec, 2, 61_706);
        // Two passes of the first layer and three of each of the others, the loss and the optimizer.
        assert_eq!(passes.len(), 2 + 3 * 4 + 2);
        let pooled = 6.0 * 14.0 * 14.0;
        let expected = 2.0 * (784.0 + pooled * 3.0) + 150.0 * 2.0 + 6.0 * 4.0;
        assert_eq!(passes[0].bytes, expected);
        assert_eq!(passes[0].operations, 2.0 * 2.0 * 6.0 * 784.0 * 25.0);
    }
}
