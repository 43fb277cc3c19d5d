//! Uneven training: parameter groups, frozen tensors, tensors unused on a rank, different gradient orders on each
//! rank, and ranks that run out of data. All compared with the CPU.

use mgpu::device::{DeviceConfig, DeviceDataParallel};
use mgpu::{DataParallel, Layout, ParameterGroup, Placement, Result, ShardFrom, Unused, World};

use super::{
    Inputs, Outcome, STEPS, adam, communicators, compare, config, gradients, initial, kept_elsewhere, layout,
    sgd,
};

pub(crate) fn check(world: &mut World) -> Result<()> {
    for optimizer in [sgd(), adam()] {
        let (plain, mut sharded) = (config(optimizer, 2), config(optimizer, 2));
        sharded.parallel.shard_from = ShardFrom::Bytes(0);
        let [shared, host] = kept_elsewhere(plain);
        for mut config in [plain, sharded, shared, host] {
            groups(world, config)?;
            config.parallel.reducer.clip_norm = Some(2.0);
            groups(world, config)?;
            config.parallel.reducer.clip_norm = None;
            unused(world, config)?;
            joined(world, config)?;
        }
    }
    let plain = config(sgd(), 1);
    for config in [[plain].as_slice(), &kept_elsewhere(plain)].concat() {
        micro_batches_and_learning_rates(world, config)?;
    }
    mistakes(world)
}

/// Tensors with factors, and frozen tensors at the ends and in between.
fn grouped() -> Layout {
    let mut layout = layout();
    layout.assign([0], ParameterGroup::new().with_learning_rate(0.3).with_weight_decay(2.0));
    layout.assign([5], ParameterGroup::new().with_weight_decay(0.0));
    layout.assign([1, 4, 6], ParameterGroup::FROZEN);
    layout
}

fn model(world: &mut World, layout: &Layout, config: DeviceConfig) -> Result<DeviceDataParallel> {
    let (device, host) = communicators(world, config.parallel.placement)?;
    DeviceDataParallel::new(device, host, layout.clone(), initial(layout), config)?.with_buffers(&[1.0; 3])
}

/// The order of tensors on this rank, different in each micro-batch.
fn order(rank: u32, index: usize) -> Vec<usize> {
    let mut tensors: Vec<usize> = (0..7).collect();
    tensors.sort_by_key(|tensor| (tensor + 1) * (37 * rank as usize + 11 * index + 5) % 17);
    tensors
}

/// Makes the next step with the gradients of the tensors that the model trains and that `uses` selects (by
/// micro-batch and tensor).
fn make_step(
    model: &mut DeviceDataParallel,
    inputs: &Inputs,
    uses: impl Fn(usize, usize) -> bool,
) -> Result<()> {
    for (index, gradients) in inputs.gradients[model.steps() as usize].iter().enumerate() {
        if index == 0 { model.begin_step() } else { model.next_micro_batch() }?;
        for tensor in order(model.rank(), index) {
            if model.wants(tensor) && uses(index, tensor) {
                let values = gradients.slice(inputs.layout.range(tensor));
                model.stream().copy(values, model.gradient(tensor))?;
                model.ready(tensor)?;
            }
        }
    }
    model.finish_step()
}

/// The same on a CPU, by one rank with the micro-batches of all ranks, and the same tensors.
fn on_cpu(
    layout: &Layout,
    config: &DeviceConfig,
    steps: u64,
    batches: impl Fn(u64) -> Vec<usize>,
    uses: impl Fn(usize, usize) -> bool,
) -> Result<Outcome> {
    let mut world = World::threads(1)?.remove(0);
    let config = config.parallel.with_placement(Placement::Replicated).with_shard_from(None);
    let config = config.with_unused(Unused::Zero).with_join(false);
    let mut model =
        DataParallel::with_config(world.communicator()?, layout.clone(), initial(layout), config)?;
    for step in 0..steps {
        let batches = batches(step);
        model.set_micro_batches(batches.len())?;
        model.step_accumulated(|batch| {
            let micro_batch = batches[batch.index];
            for tensor in (0..7).rev().filter(|tensor| uses(micro_batch, *tensor)) {
                if batch.gradients.wants(tensor) {
                    batch.gradients.write(tensor, &gradients(layout, tensor, micro_batch, step))?;
                }
            }
            Ok(())
        })?;
    }
    let (weights, average) = (model.parameters().to_vec(), model.averaged_parameters()?);
    Ok(Outcome { weights, average, gradients: model.gradients()? })
}

/// Asserts that a model equals that of the CPU.
fn expect(what: &str, model: &mut DeviceDataParallel, expected: &Outcome) -> Result<()> {
    model.verify()?;
    let bound = 1e-5;
    compare(what, &model.parameters()?, &expected.weights, bound);
    compare(&format!("{what}, gradients"), &model.gradients()?, &expected.gradients, bound);
    let average = model.averaged_parameters()?;
    assert_eq!((average.is_some(), model.has_average()), (expected.average.is_some(), average.is_some()));
    if let (Some(found), Some(expected)) = (&average, &expected.average) {
        compare(&format!("{what}, average"), found, expected, bound);
    }
    Ok(())
}

fn groups(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (layout, ranks) = (grouped(), world.size() as usize);
    let expected = on_cpu(&layout, &config, STEPS, |_| (0..2 * ranks).collect(), |_, _| true)?;
    let mut model = model(world, &layout, config)?;
    let inputs = Inputs::new(&model, 2)?;
    (0..STEPS - 1).try_for_each(|_| make_step(&mut model, &inputs, |_, _| true))?;
    let arenas = model.arenas()?;
    make_step(&mut model, &inputs, |_, _| true)?;
    expect("groups", &mut model, &expected)?;
    let (weights, average, begin) = (model.parameters()?, model.averaged_parameters()?, initial(&layout));
    for frozen in [1, 4, 6] {
        assert!(weights[layout.range(frozen)] == begin[layout.range(frozen)], "a frozen tensor moved");
    }
    if model.has_average() {
        model.swap_average()?;
        assert!(Some(model.parameters()?) == average, "the average in the parameters' place is another one");
        model.swap_average()?;
    }
    let states = config.parallel.optimizer.rule.states() + usize::from(average.is_some());
    let frozen: usize = [1, 4, 6].iter().map(|tensor| layout.tensors()[*tensor].len()).sum();
    assert!(model.optimizer_len() <= states * (layout.len() + 7 * 64 - frozen), "state of frozen tensors");
    drop(model);

    let mut resumed = self::model(world, &layout, config)?;
    make_step(&mut resumed, &inputs, |_, _| true)?;
    resumed.restore(STEPS - 1, |name, layout| {
        let (_, values) = arenas.iter().find(|(known, _)| *known == name).expect("an arena of that name");
        Ok(if values.is_empty() { vec![7.0; layout.len()] } else { values.to_vec() })
    })?;
    make_step(&mut resumed, &inputs, |_, _| true)?;
    assert!(resumed.parameters()? == weights, "a resumed training has other bits");
    assert!(resumed.averaged_parameters()? == average, "a resumed training has another average");
    Ok(())
}

/// Whether a micro-batch, counted over all ranks, uses a tensor.
fn uses(micro_batch: usize, tensor: usize) -> bool {
    !(micro_batch + tensor).is_multiple_of(3)
}

fn unused(world: &mut World, mut config: DeviceConfig) -> Result<()> {
    config.parallel.reducer.unused = Unused::Zero;
    let (layout, ranks) = (layout(), world.size() as usize);
    let expected = on_cpu(&layout, &config, STEPS, |_| (0..2 * ranks).collect(), uses)?;
    let mut model = model(world, &layout, config)?;
    let inputs = Inputs::new(&model, 2)?;
    let first = 2 * world.rank() as usize;
    (0..STEPS)
        .try_for_each(|_| make_step(&mut model, &inputs, |index, tensor| uses(first + index, tensor)))?;
    expect("unused tensors", &mut model, &expected)
}

/// Number of steps of rank `rank`; there are at most three ranks.
fn batches(rank: usize) -> u64 {
    [1, STEPS, 0][rank]
}

fn joined(world: &mut World, mut config: DeviceConfig) -> Result<()> {
    config.parallel.reducer.join = true;
    let (layout, ranks, rank) = (layout(), world.size() as usize, world.rank() as usize);
    let steps = (0..ranks).map(batches).max().unwrap_or_default();
    let active = |step| (0..2 * ranks).filter(|micro_batch| batches(micro_batch / 2) > step).collect();
    let expected = on_cpu(&layout, &config, steps, active, |_, _| true)?;
    let mut model = model(world, &layout, config)?;
    let inputs = Inputs::new(&model, 2)?;
    (0..batches(rank)).try_for_each(|_| make_step(&mut model, &inputs, |_, _| true))?;
    assert_eq!(model.join()?, steps - batches(rank));
    assert_eq!((model.steps(), model.join()?), (steps, 0));
    expect("ranks that joined", &mut model, &expected)
}

/// Both may change between steps, as on the CPU.
fn micro_batches_and_learning_rates(world: &mut World, config: DeviceConfig) -> Result<()> {
    let (layout, ranks, rank) = (layout(), world.size() as usize, world.rank() as usize);
    let mut host = World::threads(1)?.remove(0);
    let parallel = config.parallel.with_placement(Placement::Replicated).with_shard_from(None);
    let mut expected =
        DataParallel::with_config(host.communicator()?, layout.clone(), initial(&layout), parallel)?;
    let mut model = model(world, &layout, config)?;
    for (step, (count, lr)) in [(1, 0.1), (4, 0.05), (2, 0.2)].into_iter().enumerate() {
        model.set_micro_batches(count)?;
        expected.set_micro_batches(count * ranks)?;
        model.set_learning_rate(lr);
        expected.set_learning_rate(lr);
        assert_eq!((model.learning_rate(), model.micro_batches()), (lr, count));
        let inputs = Inputs::new(&model, count)?;
        make_step(&mut model, &inputs, |_, _| true)?;
        // Wait before the memory that the GPU reads is freed.
        model.check()?;
        expected.step_accumulated(|batch| {
            (0..7).rev().try_for_each(|tensor| {
                batch.gradients.write(tensor, &gradients(&layout, tensor, batch.index, step as u64))
            })
        })?;
    }
    compare("other micro-batches", &model.parameters()?, expected.parameters(), 1e-5);
    let last = rank + 1 == ranks;
    let error = model.set_micro_batches(if last { 3 } else { 2 }).err().map(|error| error.to_string());
    let text = format!("rank {} has 3 micro-batches where rank 0 has 2", ranks - 1);
    assert_eq!(error, (ranks > 1).then_some(text));
    Ok(())
}

fn mistakes(world: &mut World) -> Result<()> {
    let expect_error = |outcome: Result<()>, text: &str| {
        let error = outcome.expect_err("a mistake").to_string();
        assert!(error.contains(text), "{error}");
    };
    let mut model = model(world, &grouped(), config(sgd(), 1))?;
    expect_error(model.join().map(|_| ()), "only take part without data if the configuration enables `join`");
    model.begin_step()?;
    expect_error(model.ready(4), "tensor `4` is frozen: it has no gradient");
    let inputs = Inputs::new(&model, 1)?;
    make_step(&mut model, &inputs, |_, _| true)?;
    let graph = model.capture(|model| {
        model.begin_step()?;
        [5, 3, 2, 0].into_iter().try_for_each(|tensor| model.ready(tensor))?;
        model.finish_step()
    })?;
    model.replay(&graph)?;
    model.set_learning_rate(0.2);
    expect_error(
        model.replay(&graph),
        "the graph was captured with learning rate 0.1, but it is now 0.2: capture again",
    );
    drop(graph);
    drop(model);

    let mut joining = config(sgd(), 1);
    joining.parallel.reducer.join = true;
    let mut model = self::model(world, &layout(), joining)?;
    let captured = model.capture(DeviceDataParallel::begin_step).map(|_| ());
    expect_error(captured, "which cannot be captured");
    expect_error(model.sum_over_ranks(model.buffers()), "takes no part in sums within a step");
    Ok(())
}
