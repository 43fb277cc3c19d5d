//! n ranks with batches of b/n images train like one rank with b images: networks with every option, and a small network
//! with every optimizer.

use mgpu::optimizer::OptimizerConfig;
use mgpu::{Compression, Placement, ShardFrom};
use mgpu::{DataParallel, DataParallelConfig, MicroBatch, Result, World};
use mgpu_examples::nets::{DropoutKey, LossReport, Mode, Net, Spec, names};
use mgpu_tests::models::optimizers;
use mgpu_tests::threads;

const STEPS: u64 = 2;
/// Between them they have every kind of layer: batch normalisation, dropout, GELU, an L2 penalty, pooling that rounds up.
const SMALL: [&str; 4] = ["lenet5", "keras", "deep", "mlp-gelu"];
/// A norm that clips: the gradients of all networks exceed it in the first step.
const SHORT: f64 = 0.05;

/// The compared results.
struct Trained {
    /// Loss of each step, mean over all images.
    losses: Vec<f64>,
    /// Gradient of each tensor in the first step.
    gradients: Vec<Vec<f32>>,
    /// Norm of all parameters after the last step.
    norm: f64,
    checksum: u64,
    has_batch_norm: bool,
    /// Bytes that this rank has moved in a step.
    bytes: u64,
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

fn label(sample: usize) -> u8 {
    (sample * 7 % 10) as u8
}

/// A pattern that depends on the label, plus noise.
fn fill(image: &mut [f32], sample: usize) {
    for (pixel, value) in image.iter_mut().enumerate() {
        let noise = (sample * 7919 + pixel * 104_729) % 1009;
        let stripe = (pixel / 28 + usize::from(label(sample))) % 10 < 3;
        *value = noise as f32 / 2018.0 + if stripe { 0.5 } else { 0.0 };
    }
}

/// Trains a network on this rank's part of each batch, with dropout and synchronised batch normalisation.
fn train(
    world: &mut World,
    name: &str,
    config: DataParallelConfig,
    (images_a_step, micro_batches): (usize, usize),
) -> Result<Trained> {
    let (rank, ranks) = (world.rank() as usize, world.size() as usize);
    let size = images_a_step / ranks / micro_batches;
    let mut net = Net::new(&Spec::named(name).expect("a network"), size, 1);
    let (layout, parameters) = (net.layout().clone(), net.initial_parameters(1));
    let config = config.with_micro_batches(micro_batches);
    let model = DataParallel::with_config(world.communicator()?, layout.clone(), parameters, config)?;
    let mut model = model.with_buffers(net.initial_buffers())?;
    let mut images = vec![0.0; size * net.image_len()];
    let (mut losses, mut gradients, mut bytes) = (Vec::new(), Vec::new(), 0);
    for step in 0..STEPS {
        let before = model.comm().traffic();
        let mut report = LossReport::default();
        model.step_accumulated(|batch| {
            let MicroBatch { index, parameters, buffers, gradients } = batch;
            let first = (rank * micro_batches + index) * size;
            let samples = (first..first + size).map(|sample| step as usize * images_a_step + sample);
            for (image, sample) in images.chunks_mut(net.image_len()).zip(samples.clone()) {
                fill(image, sample);
            }
            let labels: Vec<u8> = samples.map(label).collect();
            let key = DropoutKey { seed: 1, step, first_sample: first as u64 };
            net.forward(parameters, buffers, &images, Mode::Train { dropout: Some(key) }, gradients)?;
            report += net.backward(parameters, &labels, gradients)?;
            Ok(())
        })?;
        bytes += model.comm().traffic().zip(before).map_or(0, |(now, before)| now - before);
        let mut sums = [report.loss_sum];
        mgpu::replicate::sum_over_ranks(model.comm(), &mut sums)?;
        losses.push(sums[0] / images_a_step as f64);
        if step == 0 {
            let tensors = 0..layout.tensors().len();
            gradients = tensors.map(|tensor| Ok(model.gradient(tensor)?.to_vec())).collect::<Result<_>>()?;
        }
    }
    let (norm, checksum) = (norm(model.parameters().iter().copied()), model.verify()?);
    let has_batch_norm = !model.buffers().is_empty();
    Ok(Trained { losses, gradients, norm, checksum, has_batch_norm, bytes: bytes / STEPS })
}

/// Asserts that both are equal within the relative `bound`. (A gradient that is only rounding error, like that of a
/// bias before batch normalisation, is measured relative to the others.)
fn assert_close(found: &Trained, expected: &Trained, bound: f64, what: &str) {
    let pairs = found.losses.iter().zip(&expected.losses).chain([(&found.norm, &expected.norm)]);
    for (index, (found, expected)) in pairs.enumerate() {
        let deviation = (found - expected).abs() / expected;
        assert!(deviation <= bound, "{what}: loss {index}, or norm, is {found}, not {expected}");
    }
    let total = norm(expected.gradients.iter().flatten().copied());
    for (tensor, (found, expected)) in found.gradients.iter().zip(&expected.gradients).enumerate() {
        let distance = norm(found.iter().zip(expected).map(|(a, b)| a - b));
        let len = norm(expected.iter().copied()).max(total / 100.0);
        assert!(distance <= bound * len, "{what}: gradient {tensor} is off by {distance} of {len}");
    }
}

fn config(optimizer: OptimizerConfig) -> DataParallelConfig {
    DataParallelConfig::new(optimizer, 1).with_shard_from(None)
}

/// All options of a step on `ranks` ranks, compared with one rank.
fn check(name: &str, optimizer: OptimizerConfig, ranks: u32) {
    let plain = config(optimizer);
    let sharded = plain.with_shard_from(Some(0));
    let clipped = sharded.with_clip_norm(Some(SHORT));
    let compressed = sharded.with_compression(Compression::Bf16);
    let invariant = plain.with_world_size_invariant(true);
    // One image per micro-batch.
    let batch = 2 * ranks as usize;
    let alone = |config, count| train(&mut World::from_env().unwrap(), name, config, (batch, count)).unwrap();
    let (whole, short) = (alone(plain, 1), alone(plain.with_clip_norm(Some(SHORT)), 1));
    let length = norm(short.gradients.iter().flatten().copied());
    assert!((length / SHORT - 1.0).abs() < 1e-4, "{name} is not clipped: {length}");
    // Statistics of a micro-batch differ from those of the batch.
    let parts = if whole.has_batch_norm { 1 } else { 2 };
    let exact = 1e-4;
    // Rounded to 8 bits on each rank, and once more after the sum.
    let rounded = 1.0 / 64.0;
    let cases = [
        ("replicated", plain, 1, &whole, exact),
        ("sharded", sharded, 1, &whole, exact),
        ("clipped", clipped, 1, &short, exact),
        ("accumulated", sharded, parts, &whole, exact),
        ("accumulated and clipped", clipped, parts, &short, exact),
        ("compressed", compressed, 1, &whole, rounded),
    ];
    for (what, config, micro_batches, expected, bound) in cases {
        let found =
            threads::run(ranks, |mut world| train(&mut world, name, config, (batch, micro_batches)).unwrap());
        for found in &found {
            assert_close(found, expected, bound, &format!("{name} on {ranks} ranks, {what}"));
        }
    }
    let expected = alone(invariant, 2 * ranks as usize);
    for found in threads::run(ranks, |mut world| train(&mut world, name, invariant, (batch, 2)).unwrap()) {
        let same = found.gradients == expected.gradients && found.checksum == expected.checksum;
        assert!(same, "{name} on {ranks} ranks is not what it is on one, to the bit");
    }
}

/// The networks that are not [`SMALL`].
fn large() -> Vec<&'static str> {
    names().iter().copied().filter(|name| !SMALL.contains(name)).collect()
}

#[test]
fn networks_train_on_two_ranks_as_on_one() {
    check_networks(&SMALL);
}

#[test]
#[ignore = "takes minutes"]
fn large_networks_train_on_two_ranks_as_on_one() {
    check_networks(&large());
}

fn check_networks(networks: &[&str]) {
    for name in networks {
        check(name, Spec::named(name).unwrap().optimizer, 2);
    }
}

#[test]
fn networks_train_the_same_in_every_placement() {
    check_placements(&SMALL);
}

#[test]
#[ignore = "takes minutes"]
fn large_networks_train_the_same_in_every_placement() {
    check_placements(&large());
}

/// To the bit, with and without all options, and moving the bytes of its formula (see [`Placement`]).
fn check_placements(networks: &[&str]) {
    let options = |config: DataParallelConfig| {
        config.with_overlap(true).with_clip_norm(Some(SHORT)).with_compression(Compression::Bf16)
    };
    for name in networks {
        let plain = config(Spec::named(name).unwrap().optimizer);
        let parameters = 4 * Net::new(&Spec::named(name).unwrap(), 1, 1).layout().len() as u64;
        for (ranks, plain, micro_batches) in [(1, plain, 1), (2, options(plain), 2), (3, plain, 1)] {
            let run = |config: DataParallelConfig| {
                let batches = (ranks as usize * micro_batches, micro_batches);
                threads::run(ranks, |mut world| train(&mut world, name, config, batches).unwrap())
            };
            let others = [Placement::Shared, Placement::Host]
                .map(|placement| plain.with_shard_from(ShardFrom::Auto).with_placement(placement));
            let expected = run(plain);
            let gradients = if plain.reducer.compression == Compression::Bf16 { 2 } else { 1 };
            for (config, crossing) in [
                (plain, 2 * parameters / gradients),
                (others[0], parameters / gradients + parameters),
                (others[1], parameters / gradients + parameters),
            ] {
                let found = if config == plain { &expected } else { &run(config) };
                let what = format!("{name} on {ranks} ranks, {:?}", config.placement);
                for (found, expected) in found.iter().zip(&expected) {
                    let same = found.losses == expected.losses
                        && found.gradients == expected.gradients
                        && found.checksum == expected.checksum;
                    assert!(same, "{what}");
                }
                let (moved, formula) =
                    (found.iter().map(|rank| rank.bytes).sum::<u64>(), u64::from(ranks - 1) * crossing);
                let bounds = formula - formula / 20..=formula + formula / 20;
                assert!(bounds.contains(&moved), "{what}: {moved} bytes a step, not {formula}");
            }
        }
    }
}

#[test]
fn every_optimizer_trains_on_four_ranks_as_on_one() {
    for optimizer in optimizers() {
        check("lenet5", optimizer, 4);
    }
}
