//! A rank with a GPU that trains a model with gradients from formulas. `t-device-step same` compares steps in every
//! configuration with the steps of a single CPU rank; `resume` continues from the state of another configuration;
//! `guards` makes mistakes that must be detected; `groups` trains a model in each of two groups; `uneven` has parameter
//! groups and uneven ranks; `scaled` has a loss scale; `trace` takes times; `access [SHARDS]` prints how NCCL accesses
//! gradients, and the checksum of the weights; `parts PRECISION` trains networks that are cut over ranks.

#[path = "device_step/groups.rs"]
mod groups;
#[path = "device_step/parts.rs"]
mod parts;
#[path = "device_step/scaled.rs"]
mod scaled;
#[path = "device_step/trace.rs"]
mod trace;
#[path = "device_step/uneven.rs"]
mod uneven;

use std::process::ExitCode;
use std::sync::Arc;

use mgpu::device::{ALIGNMENT, DeviceConfig, DeviceDataParallel, StatusReadback};
use mgpu::optimizer::{Adam, OptimizerConfig, Rule, Sgd};
use mgpu::{Communicator, Compression, DeviceCommunicator, Placement, Reduction};
use mgpu::{DataParallel, DataParallelConfig, Error, Layout, Result, ShardFrom, World};
use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::Memory;

/// Number of training steps.
const STEPS: u64 = 4;

fn main() -> ExitCode {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let mut world = World::from_env().expect("a world");
    let outcome = match mode.as_str() {
        "same" => same(&mut world),
        "resume" => resume(&mut world),
        "guards" => guards(&mut world),
        "groups" => groups::check(&mut world),
        "parts" => parts::train(&mut world, &std::env::args().nth(2).unwrap_or_default()),
        "scaled" => scaled::check(&mut world),
        "trace" => trace::check(&mut world),
        "access" => access(&mut world, std::env::args().nth(2).is_some()),
        "uneven" => uneven::check(&mut world),
        other => panic!("unknown body {other}"),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(9)
        }
    }
}

/// Several buckets of 40 KB, a tensor that is checked in parts, one with a single element, an empty one.
fn layout() -> Layout {
    let mut layout = Layout::new();
    let shapes: [&[usize]; 7] = [&[70, 1001], &[5000], &[1], &[0], &[3, 21], &[130, 100], &[129]];
    for (index, shape) in shapes.iter().enumerate() {
        layout.push_aligned(index.to_string(), *shape, ALIGNMENT);
    }
    layout
}

fn initial(layout: &Layout) -> Vec<f32> {
    (0..layout.len()).map(|index| (index % 17) as f32 / 8.0 - 1.0).collect()
}

/// The gradient of an element in a micro-batch, counted over all ranks.
fn gradient(micro_batch: usize, element: usize, step: u64) -> f32 {
    let bits = (micro_batch * 7919 + element * 104_729 + step as usize * 31) % 10_007;
    bits as f32 / 10_007.0 - 0.5
}

fn gradients(layout: &Layout, tensor: usize, micro_batch: usize, step: u64) -> Vec<f32> {
    layout.range(tensor).map(|element| gradient(micro_batch, element, step)).collect()
}

fn sgd() -> OptimizerConfig {
    OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, ..Sgd::default() }))
}

fn adam() -> OptimizerConfig {
    // The large ε prevents the last bits of gradients near 0 from deciding the sign of the update.
    let rule = Rule::Adam(Adam { lr: 0.01, weight_decay: 0.1, eps: 0.1, ..Adam::default() });
    OptimizerConfig::new(rule).with_decay_weights_only().with_average(0.9)
}

fn config(optimizer: OptimizerConfig, micro_batches: usize) -> DeviceConfig {
    let parallel =
        DataParallelConfig::new(optimizer, 1).with_bucket(40_000).with_micro_batches(micro_batches);
    DeviceConfig::new(parallel).with_steps_per_epoch(3)
}

/// Trains steps one by one and in a graph.
fn access(world: &mut World, shards: bool) -> Result<()> {
    let mut config = config(sgd(), 1);
    if shards {
        config.parallel.shard_from = ShardFrom::Bytes(0);
    }
    let mut model = model(world, config)?;
    println!("gradients: {}", model.gradient_access());
    let inputs = Inputs::new(&model, 1)?;
    inputs.step(&mut model)?;
    inputs.step(&mut model)?;
    let graph = model.capture(|model| inputs.step(model))?;
    model.replay(&graph)?;
    println!("weights: {:016x}", model.verify()?);
    Ok(())
}

/// The communicators that a placement needs.
fn communicators(world: &mut World, placement: Placement) -> Result<(Arc<DeviceCommunicator>, Communicator)> {
    match placement {
        Placement::Host => Ok((Arc::new(world.device_communicator()?), world.host_memory_communicator()?)),
        Placement::Replicated | Placement::Shared => world.communicators(),
    }
}

/// Configurations that differ in where parameters and optimizer are kept.
fn kept_elsewhere(config: DeviceConfig) -> [DeviceConfig; 2] {
    [Placement::Shared, Placement::Host].map(|placement| {
        let mut config = config;
        config.parallel.placement = placement;
        config
    })
}

fn model(world: &mut World, config: DeviceConfig) -> Result<DeviceDataParallel> {
    let (device, host) = communicators(world, config.parallel.placement)?;
    let layout = layout();
    let parameters = initial(&layout);
    DeviceDataParallel::new(device, host, layout, parameters, config)?.with_buffers(&[1.0; 3])
}

/// The inputs of a rank's training, on its GPU: no step needs the host, so only streams and events order its parts.
struct Inputs {
    layout: Layout,
    /// The gradients of each micro-batch, for each step.
    gradients: Vec<Vec<Memory>>,
    /// How each micro-batch changes the buffers.
    moves: Vec<Memory>,
}

impl Inputs {
    /// For `micro_batches` micro-batches of this rank per step.
    fn new(model: &DeviceDataParallel, micro_batches: usize) -> Result<Self> {
        let layout = layout();
        let of_all = |index| model.rank() as usize * micro_batches + index;
        let whole = |step, index| -> Result<Memory> {
            let micro_batch = of_all(index);
            let mut values = vec![0.0; layout.len()];
            for (element, value) in values.iter_mut().enumerate() {
                *value = gradient(micro_batch, element, step);
            }
            Ok(Memory::from_slice(model.stream(), &values)?)
        };
        let steps = 0..STEPS;
        let of_step = |step| (0..micro_batches).map(|index| whole(step, index)).collect::<Result<Vec<_>>>();
        let gradients = steps.map(of_step).collect::<Result<Vec<_>>>()?;
        let moves = (0..micro_batches)
            .map(|index| Ok(Memory::from_slice(model.stream(), &[of_all(index) as f32; 3])?))
            .collect::<Result<_>>()?;
        Ok(Inputs { layout, gradients, moves })
    }

    /// Makes the next step of `model`.
    fn step(&self, model: &mut DeviceDataParallel) -> Result<()> {
        self.step_with(model, model.steps() as usize)
    }

    /// Makes a step with the gradients of step `number`.
    fn step_with(&self, model: &mut DeviceDataParallel, number: usize) -> Result<()> {
        for (index, gradients) in self.gradients[number].iter().enumerate() {
            if index == 0 { model.begin_step() } else { model.next_micro_batch() }?;
            // Not the layout's order, so that buckets change after the first step.
            for tensor in [6, 5, 0, 1, 3, 2, 4] {
                let values = gradients.slice(self.layout.range(tensor));
                model.stream().copy(values, model.gradient(tensor))?;
                model.ready(tensor)?;
            }
            // Like a running statistic.
            arena::scale(model.stream(), model.buffers(), 0.5)?;
            arena::add(model.stream(), model.buffers(), self.moves[index].view(), 1.0)?;
        }
        model.finish_step()
    }

    /// Sets an element of tensor 4 to infinity, or resets it, in the last micro-batch of step `number`.
    fn set_infinite(&self, model: &DeviceDataParallel, number: usize, infinite: bool) -> Result<()> {
        let element = self.layout.range(4).start + 17;
        self.set(model, number, element, infinite.then_some(f32::INFINITY))
    }

    /// Sets an element to `value`, or resets it, in the last micro-batch of step `number`.
    fn set(
        &self,
        model: &DeviceDataParallel,
        number: usize,
        element: usize,
        value: Option<f32>,
    ) -> Result<()> {
        let index = self.moves.len() - 1;
        let micro_batch = model.rank() as usize * self.moves.len() + index;
        let value = value.unwrap_or_else(|| gradient(micro_batch, element, number as u64));
        let memory = self.gradients[number][index].slice(element..element + 1);
        Ok(model.stream().upload(&[value], memory)?)
    }
}

/// The results of a training, equal on all ranks.
struct Outcome {
    weights: Vec<f32>,
    average: Option<Vec<f32>>,
    /// The gradients of the last step.
    gradients: Vec<f32>,
}

impl Outcome {
    /// # Panics
    /// Unless both have the same bits.
    fn expect_bits_of(&self, other: &Outcome, what: &str) {
        compare(&format!("{what}, gradients"), &self.gradients, &other.gradients, 0.0);
        compare(what, &self.weights, &other.weights, 0.0);
        assert_eq!(self.average.is_some(), other.average.is_some(), "{what}");
        if let (Some(found), Some(expected)) = (&self.average, &other.average) {
            compare(&format!("{what}, average"), found, expected, 0.0);
        }
    }
}

fn train(world: &mut World, config: DeviceConfig) -> Result<Outcome> {
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, model.micro_batches())?;
    (0..STEPS).try_for_each(|_| inputs.step(&mut model))?;
    model.check()?;
    if config.parallel.reducer.world_size_invariant {
        check_buffers(&model, model.micro_batches())?;
    }
    if let Some(most) = config.parallel.reducer.clip_norm {
        let norm = model.gradient_norm()?.expect("the norm of gradients that are clipped");
        assert!(norm > most, "the norm {norm} is not above {most}");
    }
    let (own, all) = (model.optimizer_len(), layout().len().next_multiple_of(ALIGNMENT));
    let arenas =
        config.parallel.optimizer.rule.states() + usize::from(config.parallel.optimizer.average.is_some());
    // The remainder of each sharded bucket is replicated.
    let (ranks, rests) = (world.size() as usize, 7 * 8 * world.size() as usize);
    let most = if config.parallel.shard_from == ShardFrom::Bytes(0) { all / ranks + rests } else { all };
    assert!(own <= arenas * most, "{own} elements in {arenas} arenas of {all}");
    let is_shared = config.parallel.placement == Placement::Shared && world.size() > 1;
    assert!(!is_shared || (own > 0) == (world.rank() == 0), "{own} elements on rank {}", world.rank());
    let weights = model.parameters()?;
    let average = if model.has_average() {
        model.swap_average()?;
        let average = model.parameters()?;
        let error = model.begin_step().expect_err("the average is in the parameters' place").to_string();
        assert!(error.contains("swap it back first"), "{error}");
        assert!(model.arenas()?[0].1.iter().zip(&weights).all(|(saved, weight)| saved == weight));
        model.swap_average()?;
        assert!(model.parameters()? == weights, "the parameters are not what they were");
        Some(average)
    } else {
        None
    };
    model.verify()?;
    Ok(Outcome { weights, average, gradients: model.gradients()? })
}

/// Each micro-batch changes the buffers from the same initial values; the result is the mean.
fn check_buffers(model: &DeviceDataParallel, micro_batches: usize) -> Result<()> {
    let all = model.ranks() as usize * micro_batches;
    let mut expected = 1.0f32;
    for _ in 0..STEPS {
        expected = (0..all).map(|micro_batch| expected * 0.5 + micro_batch as f32).sum::<f32>() / all as f32;
    }
    let found = model.buffers().to_vec::<f32>(model.stream())?;
    assert_eq!(found, [expected; 3]);
    Ok(())
}

/// The same on a CPU, by one rank with all micro-batches.
fn alone(config: &DeviceConfig, micro_batches: usize) -> Result<Outcome> {
    let world = World::threads(1)?.remove(0);
    on_cpu(world, config.parallel.with_shard_from(None).with_micro_batches(micro_batches))
}

/// The same on CPUs, by as many ranks.
fn on_cpus(config: &DeviceConfig, ranks: u32) -> Result<Outcome> {
    let config = config.parallel;
    let worlds = World::threads(ranks)?;
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || on_cpu(world, config))).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    });
    outcomes.into_iter().next().expect("rank 0")
}

fn on_cpu(mut world: World, config: DataParallelConfig) -> Result<Outcome> {
    let layout = layout();
    let (parameters, first) = (initial(&layout), world.rank() as usize * config.reducer.micro_batches);
    let mut model = DataParallel::with_config(world.communicator()?, layout.clone(), parameters, config)?;
    for step in 0..STEPS {
        model.step_accumulated(|batch| {
            (0..layout.tensors().len()).rev().try_for_each(|tensor| {
                batch.gradients.write(tensor, &gradients(&layout, tensor, first + batch.index, step))
            })
        })?;
    }
    let (weights, average) = (model.parameters().to_vec(), model.averaged_parameters()?);
    let mut gradients = vec![0.0; layout.len()];
    for (tensor, spec) in layout.tensors().iter().enumerate() {
        gradients[spec.range()].copy_from_slice(model.gradient(tensor)?);
    }
    Ok(Outcome { weights, average, gradients })
}

/// # Panics
/// Unless all elements differ by at most `bound`; they are about 1.
fn compare(what: &str, found: &[f32], expected: &[f32], bound: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differs = |index: &usize| (found[*index] - expected[*index]).abs() > bound || found[*index].is_nan();
    if let Some(index) = layout().tensors().iter().flat_map(|tensor| tensor.range()).find(differs) {
        panic!("{what}: element {index} is {}, not {}", found[index], expected[index]);
    }
}

fn same(world: &mut World) -> Result<()> {
    let (rank, ranks) = (world.rank(), world.size());
    type Change = fn(&mut DataParallelConfig);
    let changes: [(&str, Change, f32); 5] = [
        ("plain", |_| {}, 1e-5),
        ("sum", |config| config.reducer.reduction = Reduction::Sum, 1e-4),
        ("clipped", |config| config.reducer.clip_norm = Some(2.0), 1e-5),
        // Gradients of about 0.5, rounded to 8 bits up to ranks + 1 times, in four steps.
        ("compressed", |config| config.reducer.compression = Compression::Bf16, 2e-2),
        ("invariant", |config| config.reducer.world_size_invariant = true, 0.0),
    ];
    for (name, change, bound) in changes {
        if name == "invariant" && !ranks.is_power_of_two() {
            continue;
        }
        for optimizer in [sgd(), adam()] {
            // The powers in Adam's bias correction come from another library.
            let bound = if matches!(optimizer.rule, Rule::Adam(_)) { f32::max(bound, 1e-6) } else { bound };
            for micro_batches in [1, 4] {
                let mut config = config(optimizer, micro_batches);
                change(&mut config.parallel);
                let expected = alone(&config, micro_batches * ranks as usize)?;
                let mut replicated: Option<Outcome> = None;
                for shard_from in [None, Some(0), Some(45_000)] {
                    config.parallel.shard_from = shard_from.into();
                    let found = train(world, config)?;
                    let what = format!("{name}, {micro_batches} micro-batches, sharded from {shard_from:?}");
                    // The sum of two numbers has only one order. (Norms are summed over shards, if there are any.)
                    if (ranks <= 2 || name == "invariant") && name != "clipped" {
                        let is_same = replicated.as_ref().is_none_or(|other| found.weights == other.weights);
                        assert!(is_same, "{what}: not the bits of a replicated optimizer");
                    }
                    compare(&what, &found.weights, &expected.weights, bound);
                    compare(&format!("{what}, gradients"), &found.gradients, &expected.gradients, bound);
                    assert_eq!(found.average.is_some(), expected.average.is_some(), "{what}");
                    if let (Some(found), Some(expected)) = (&found.average, &expected.average) {
                        compare(&format!("{what}, average"), found, expected, bound);
                    }
                    replicated.get_or_insert(found);
                }
                let replicated = replicated.expect("it was trained");
                config.parallel.shard_from = ShardFrom::Auto;
                let [shared, host] = kept_elsewhere(config);
                let what = format!("{name}, {micro_batches} micro-batches");
                if name != "invariant" {
                    train(world, shared)?.expect_bits_of(&replicated, &format!("{what}, shared"));
                    train(world, host)?.expect_bits_of(&on_cpus(&host, ranks)?, &format!("{what}, host"));
                }
            }
        }
    }
    if rank == 0 {
        println!("the same on {ranks} ranks");
    }
    Ok(())
}

/// Resumes with another placement or sharding.
fn resume(world: &mut World) -> Result<()> {
    let parallel = config(adam(), 2).parallel;
    let (replicated, sharded) = (parallel.with_shard_from(None), parallel.with_shard_from(Some(0)));
    let [shared, host] =
        [Placement::Shared, Placement::Host].map(|placement| parallel.with_placement(placement));
    for (before, after) in [
        (replicated, sharded),
        (sharded, replicated),
        (sharded, sharded),
        (replicated, shared),
        (shared, host),
        (host, host),
        (host, replicated),
    ] {
        let mut config = config(adam(), 2);
        config.parallel = before;
        let mut first = model(world, config)?;
        let inputs = Inputs::new(&first, 2)?;
        (0..3).try_for_each(|_| inputs.step(&mut first))?;
        let arenas = first.arenas()?;
        let whole = if world.rank() == 0 { layout().len() } else { 0 };
        assert!(arenas.iter().all(|(_, values)| values.len() == whole), "arenas whole on rank 0 alone");
        assert_eq!(arenas.len(), 4);
        inputs.step(&mut first)?;
        let expected = first.parameters()?;
        drop(first);

        config.parallel = after;
        let mut second = model(world, config)?;
        inputs.step(&mut second)?;
        second.restore(3, |name, _| {
            let found = arenas.iter().find(|(known, _)| *known == name);
            let values = &found.unwrap_or_else(|| panic!("no arena {name}")).1;
            // Ranks other than 0 may hold anything.
            Ok(if values.is_empty() { vec![7.0; layout().len()] } else { values.to_vec() })
        })?;
        inputs.step(&mut second)?;
        // Powers and roots of the CPU's optimizer may differ in their last bits.
        let same_device = (before.placement == Placement::Host) == (after.placement == Placement::Host);
        let bound = if same_device { 0.0 } else { 1e-6 };
        compare(&format!("from {before:?} to {after:?}"), &second.parameters()?, &expected, bound);
        assert_eq!(second.steps(), 4);
    }
    Ok(())
}

fn guards(world: &mut World) -> Result<()> {
    let plain = config(sgd(), 2);
    let mut sharded = plain;
    sharded.parallel.shard_from = ShardFrom::Bytes(0);
    let mut invariant = plain;
    invariant.parallel.reducer.world_size_invariant = world.size().is_power_of_two();
    let [shared, host] = kept_elsewhere(plain);
    for config in [plain, sharded, invariant, shared] {
        bad_gradients(world, config)?;
        bad_gradients_in_a_graph(world, config)?;
        sums_that_overflow(world, config)?;
        a_single_bad_element(world, config)?;
    }
    bad_gradients_for_the_host(world, host)?;
    sums_that_overflow(world, host)?;
    a_single_bad_element(world, host)?;
    placements_that_are_refused(world, plain)?;
    settings_that_differ(world, plain)?;
    weights_that_differ(world, plain)?;
    let mut wrong = plain;
    wrong.parallel.reducer.micro_batches = 0;
    let error = model(world, wrong).err().expect("no micro-batches").to_string();
    assert!(error.contains("at least one micro-batch"), "{error}");
    (wrong.parallel.reducer.micro_batches, wrong.parallel.verify_every) = (1, Some(0));
    let error = model(world, wrong).err().expect("every 0 steps").to_string();
    assert!(error.contains("not every 0 steps"), "{error}");
    Ok(())
}

/// # Panics
/// Unless `outcome` reports non-finite gradients of tensor 4 on the last rank in step `step`.
fn expect_non_finite(outcome: Result<()>, ranks: u32, step: u64) {
    match outcome {
        Err(Error::NotFinite { rank, tensor, step: found }) => {
            assert_eq!((rank, tensor.as_str(), found), (ranks - 1, "4", step));
        }
        other => panic!("non-finite gradients: {other:?}"),
    }
}

/// Non-finite gradients are detected in their step, which can be repeated. So can a step that was abandoned.
fn bad_gradients(world: &mut World, config: DeviceConfig) -> Result<()> {
    let expected = train(world, config)?;
    let (is_culprit, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, 2)?;
    (0..2).try_for_each(|_| inputs.step(&mut model))?;
    let before = model.parameters()?;
    let mut stale = StatusReadback::new(&model)?;
    for later in 0..2 {
        inputs.set_infinite(&model, 2, is_culprit)?;
        inputs.step(&mut model)?;
        model.enqueue_status_readback(&mut stale)?;
        // In the second round the host continues without checking.
        (0..later).try_for_each(|_| inputs.step(&mut model))?;
        expect_non_finite(model.check(), ranks, 3);
        // An earlier status read-back is stale.
        model.read_status(&mut stale)?;
        assert!(model.parameters()? == before, "parameters have changed");
        assert_eq!(model.steps(), 2);
        inputs.set_infinite(&model, 2, false)?;
    }

    // A gradient announced twice or never; one micro-batch too few or too many.
    model.begin_step()?;
    model.ready(6)?;
    let expect_error = |outcome: Result<()>, text: &str| {
        let error = outcome.expect_err("a mistake").to_string();
        assert!(error.contains(text), "{error}");
    };
    expect_error(model.ready(6), "the gradient of tensor `6` was marked ready twice");
    expect_error(model.next_micro_batch(), "was not marked ready");
    expect_error(model.finish_step(), "a step of 2 micro-batches ends after 1");
    model.begin_step()?;
    (0..7).try_for_each(|tensor| model.ready(tensor))?;
    model.next_micro_batch()?;
    expect_error(model.next_micro_batch(), "the step has only 2 micro-batches");

    (2..STEPS).try_for_each(|_| inputs.step(&mut model))?;
    assert!(model.parameters()? == expected.weights, "the training continues with other bits");
    Ok(())
}

/// Finite gradients can have an infinite sum.
fn sums_that_overflow(world: &mut World, mut config: DeviceConfig) -> Result<()> {
    config.parallel.reducer.reduction = Reduction::Sum;
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, 2)?;
    inputs.step(&mut model)?;
    let before = model.parameters()?;
    for tensor in [0, 2, 4, 6] {
        let element = layout().range(tensor).end - 1;
        inputs.set(&model, 1, element, Some(f32::MAX * 0.9))?;
        match inputs.step(&mut model).and_then(|()| model.check()) {
            Err(Error::ReducedNotFinite { tensor: found, step: 2 }) if found == tensor.to_string() => {}
            // A single rank has nothing to sum.
            Ok(()) if world.size() == 1 => return Ok(()),
            other => panic!("a sum that overflows in tensor {tensor}: {other:?}"),
        }
        assert!(model.parameters()? == before && model.steps() == 1, "parameters have changed");
        inputs.set(&model, 1, element, None)?;
    }
    inputs.step(&mut model)?;
    model.check()
}

/// In a tensor too large to be checked completely before the reduction.
fn a_single_bad_element(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (is_culprit, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, 2)?;
    for element in [0, 12_345, 70_069] {
        inputs.set(&model, 0, element, is_culprit.then_some(f32::NAN))?;
        match inputs.step(&mut model).and_then(|()| model.check()) {
            Err(Error::NotFinite { rank, tensor, step: 1 }) if tensor == "0" => assert_eq!(rank, ranks - 1),
            Err(Error::ReducedNotFinite { tensor, step: 1 }) if tensor == "0" && ranks > 1 => {}
            other => panic!("element {element} is not finite: {other:?}"),
        }
        inputs.set(&model, 0, element, None)?;
    }
    inputs.step(&mut model)?;
    model.check()
}

fn settings_that_differ(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (last, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut other = config;
    type Change = fn(&mut DeviceConfig);
    let changes: [(Change, &str); 5] = [
        (|config| config.parallel.reducer.bucket = Some(50_000), "bucket 50000 where rank 0 has 40000"),
        (|config| config.parallel.reducer.micro_batches = 3, "micro_batches 3 where rank 0 has 2"),
        (|config| config.steps_per_epoch = 7, "steps_per_epoch 7 where rank 0 has 3"),
        (|config| config.bf16_copy = true, "bf16_copy true where rank 0 has false"),
        (|config| config.f16_copy = true, "f16_copy true where rank 0 has false"),
    ];
    for (change, text) in changes {
        change(&mut other);
        let error = model(world, if last { other } else { config }).err().map(|error| error.to_string());
        let expected = format!("rank {} has {text}; all ranks need the same", ranks - 1);
        assert_eq!(error, (ranks > 1).then_some(expected));
        other = config;
    }
    Ok(())
}

/// As [`bad_gradients`], with replayed steps.
fn bad_gradients_in_a_graph(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (is_culprit, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut eager = model(world, config)?;
    let inputs = Inputs::new(&eager, 2)?;
    (0..5).try_for_each(|_| inputs.step_with(&mut eager, 0))?;
    let expected = eager.parameters()?;
    drop(eager);

    let mut model = model(world, config)?;
    inputs.step_with(&mut model, 0)?;
    let two = model.capture(|model| (0..2).try_for_each(|_| inputs.step_with(model, 0)))?;
    // A step abandoned after a capture, whose events remain, and before a replay.
    model.begin_step()?;
    model.ready(6)?;
    model.replay(&two)?;
    let before = model.parameters()?;
    inputs.set_infinite(&model, 0, is_culprit)?;
    (0..2).try_for_each(|_| model.replay(&two))?;
    expect_non_finite(model.check(), ranks, 4);
    assert!(model.parameters()? == before, "parameters have changed");
    assert_eq!(model.steps(), 3);
    inputs.set_infinite(&model, 0, false)?;
    model.replay(&two)?;
    assert!(model.parameters()? == expected, "the training continues with other bits");
    Ok(())
}

/// With [`Placement::Host`] a step returns the error itself, launched or replayed, and can be repeated.
fn bad_gradients_for_the_host(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (is_culprit, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut eager = model(world, config)?;
    let inputs = Inputs::new(&eager, 2)?;
    (0..4).try_for_each(|_| inputs.step_with(&mut eager, 0))?;
    let expected = eager.parameters()?;
    drop(eager);

    let mut model = model(world, config)?;
    inputs.step_with(&mut model, 0)?;
    let two = model.capture(|model| (0..2).try_for_each(|_| inputs.step_with(model, 0)));
    let error = two.expect_err("the host has its part in each step").to_string();
    assert!(error.contains("capture one step, not 2"), "{error}");
    let one = model.capture(|model| inputs.step_with(model, 0))?;
    model.replay(&one)?;
    let before = model.parameters()?;
    for is_replayed in [true, false, true] {
        inputs.set_infinite(&model, 0, is_culprit)?;
        let outcome = if is_replayed { model.replay(&one) } else { inputs.step_with(&mut model, 0) };
        expect_non_finite(outcome, ranks, 3);
        model.check()?;
        assert!(model.parameters()? == before && model.steps() == 2, "parameters have changed");
        inputs.set_infinite(&model, 0, false)?;
    }
    model.replay(&one)?;
    inputs.step_with(&mut model, 0)?;
    assert!(model.parameters()? == expected, "the training continues with other bits");
    Ok(())
}

fn placements_that_are_refused(world: &mut World, config: DeviceConfig) -> Result<()> {
    let [shared, host] = kept_elsewhere(config);
    for (mut config, shard_from) in [(shared, ShardFrom::Bytes(0)), (host, ShardFrom::Never)] {
        config.parallel.shard_from = shard_from;
        let error = model(world, config).err().expect("settings that contradict each other").to_string();
        assert!(error.contains("or use placement replicated"), "{error}");
    }
    let (device, through_nccl) = world.communicators()?;
    let layout = layout();
    let parameters = initial(&layout);
    let outcome = DeviceDataParallel::new(device, through_nccl, layout, parameters, host);
    let error = outcome.err().map(|error| error.to_string());
    let names_method = |error: String| error.contains("`World::host_memory_communicator`");
    assert_eq!(error.map(names_method), (world.size() > 1).then_some(true));
    Ok(())
}

/// Detected at the next comparison. (Weights that a rank receives from another one in every step cannot differ.)
fn weights_that_differ(world: &mut World, mut config: DeviceConfig) -> Result<()> {
    config.parallel.verify_every = Some(2);
    let (is_culprit, ranks) = (world.rank() + 1 == world.size(), world.size());
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, 2)?;
    (0..2).try_for_each(|_| inputs.step(&mut model))?;
    model.check()?;
    if is_culprit {
        model.stream().upload(&[5.0f32], model.parameter(2))?;
    }
    inputs.step(&mut model)?;
    model.check()?;
    inputs.step(&mut model)?;
    match model.check() {
        Ok(()) if ranks == 1 => Ok(()),
        Err(Error::Diverged { tensor, .. }) if tensor == "2" => Ok(()),
        other => panic!("weights that differ: {other:?}"),
    }
}
