//! The sharded optimizer, and the placements: bit-equal to the replicated one, a shard of the state on each rank or all of
//! it on rank 0, checkpoints for any number of ranks.

use std::collections::BTreeMap;

use mgpu::checkpoint::{self, Checkpoint, Snapshot, Writer};
use mgpu::optimizer::{Adam, AdamW, OptimizerConfig, Rule, Sgd};
use mgpu::{Compression, Placement, ShardFrom};
use mgpu::{DType, DataParallel, DataParallelConfig, Layout, Pending, Result, World};
use mgpu_tests::models::{layout, model, optimizers, outcome};
use mgpu_tests::{cores, threads};

/// From fewer elements than ranks, over odd lengths, to buckets that are reduced in place and in several blocks.
fn layouts() -> Vec<Layout> {
    let mut gaps = Layout::new();
    gaps.push_aligned("bias", [5], 64);
    gaps.push_aligned("weight", [3, 7], 64);
    vec![
        layout(&[&[1]]),
        layout(&[&[3], &[0], &[2, 1]]),
        layout(&[&[7, 5], &[13], &[2, 3, 11], &[1], &[101, 7]]),
        layout(&[&[331, 401], &[401], &[19, 23], &[23]]),
        gaps,
    ]
}

fn sharded(optimizer: OptimizerConfig, bucket: usize) -> DataParallelConfig {
    DataParallelConfig::new(optimizer, 1).with_bucket(bucket).with_shard_from(Some(0))
}

fn replicated(optimizer: OptimizerConfig, bucket: usize) -> DataParallelConfig {
    sharded(optimizer, bucket).with_shard_from(None)
}

fn shared(optimizer: OptimizerConfig, bucket: usize) -> DataParallelConfig {
    replicated(optimizer, bucket).with_placement(Placement::Shared)
}

fn host(optimizer: OptimizerConfig, bucket: usize) -> DataParallelConfig {
    replicated(optimizer, bucket).with_shard_from(ShardFrom::Auto).with_placement(Placement::Host)
}

/// Makes `steps` steps with gradients that depend on the parameters, the rank and the step.
fn train(model: &mut DataParallel, steps: u64) -> Result<()> {
    let rank = model.comm().rank() as f32;
    let ranges: Vec<_> = model.layout().tensors().iter().map(mgpu::TensorSpec::range).collect();
    for _ in 0..steps {
        let step = model.steps() as f32;
        model.step(|parameters, sink| {
            for (tensor, range) in ranges.iter().enumerate().rev() {
                let values = parameters[range.clone()].iter().zip(range.clone());
                for (gradient, (value, index)) in sink.gradient(tensor).iter_mut().zip(values) {
                    *gradient = value * 0.3 + (index % 29) as f32 * 0.01 + rank * 0.07 - step * 0.02;
                }
                sink.ready(tensor)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// All arenas that rank 0 would save, by name.
type Saved = BTreeMap<&'static str, Vec<f32>>;

fn saved(model: &mut DataParallel) -> Result<Saved> {
    Ok(model.arenas()?.into_iter().map(|(name, values)| (name, values.into_owned())).collect())
}

#[test]
fn all_placements_train_the_same_bits() {
    for ranks in 1..=4 {
        threads::run(ranks, |mut world| {
            for (layout, bucket) in layouts().iter().zip([1 << 20, 8, 200, 1 << 18, 1 << 20]) {
                for optimizer in optimizers() {
                    let run = |world: &mut World, config| {
                        let mut model = model(world, layout, config)?;
                        train(&mut model, 4)?;
                        Ok::<_, mgpu::Error>((outcome(&mut model)?, saved(&mut model)?))
                    };
                    let expected = run(&mut world, replicated(optimizer, bucket)).unwrap();
                    for other in [sharded, shared, host] {
                        let config = other(optimizer, bucket);
                        let found = run(&mut world, config).unwrap();
                        assert!(found == expected, "{ranks} ranks, {config:?}, {:?}", layout.tensors());
                    }
                    let states = optimizer.rule.states() + usize::from(optimizer.average.is_some());
                    assert_eq!(expected.1.len(), 1 + states);
                }
            }
        });
    }
}

#[test]
fn every_rank_holds_its_shard_of_the_optimizer_state() {
    let layout = layout(&[&[300, 401], &[7], &[1001]]);
    let adam = OptimizerConfig::new(Rule::Adam(Adam::default())).with_average(0.9);
    for ranks in 2..=4u32 {
        let lens = threads::run(ranks, |mut world| {
            let whole = model(&mut world, &layout, replicated(adam, 1 << 10)).unwrap();
            assert_eq!(whole.optimizer_len(), 3 * layout.len());
            model(&mut world, &layout, sharded(adam, 1 << 10)).unwrap().optimizer_len()
        });
        assert_eq!(lens.iter().sum::<usize>(), 3 * layout.len());
        // There are two buckets, so a rank may have one more element of each.
        assert!(lens.iter().all(|len| *len <= 3 * (layout.len() / ranks as usize + 2)), "{lens:?}");
    }
}

#[test]
fn rank_0_holds_all_of_the_optimizer_state_of_shared_parameters() {
    let layout = layout(&[&[300, 401], &[7], &[1001]]);
    let adam = OptimizerConfig::new(Rule::Adam(Adam::default())).with_average(0.9);
    for ranks in 1..=3 {
        let lens = threads::run(ranks, |mut world| {
            model(&mut world, &layout, shared(adam, 1 << 10)).unwrap().optimizer_len()
        });
        let mut expected = vec![0; ranks as usize];
        expected[0] = 3 * layout.len();
        assert_eq!(lens, expected);
    }
}

/// Bytes that all ranks together move in a step, by the formulas of [`Placement`].
#[test]
fn each_placement_moves_the_bytes_of_its_formula() {
    let layout = layout(&[&[331, 401], &[401], &[191, 230], &[23]]);
    let (len, steps) = (layout.len() as u64, 3);
    let adam = OptimizerConfig::new(Rule::Adam(Adam::default()));
    // How often gradients and parameters cross between rank 0 and each of the others.
    let bucket = 1 << 18;
    let cases = [
        (replicated(adam, bucket), 2, 0),
        (sharded(adam, bucket), 1, 1),
        (shared(adam, bucket), 1, 1),
        (host(adam, bucket), 1, 1),
    ];
    for ranks in 1..=4u32 {
        for (config, gradients, parameters) in cases {
            for (compression, element) in [(Compression::None, 4), (Compression::Bf16, 2)] {
                for overlap in [false, true] {
                    let config = config.with_compression(compression).with_overlap(overlap);
                    let moved = threads::run(ranks, |mut world| {
                        let mut model = model(&mut world, &layout, config).unwrap();
                        let before = model.comm().traffic().unwrap();
                        train(&mut model, steps).unwrap();
                        model.comm().traffic().unwrap() - before
                    });
                    let formula = u64::from(ranks - 1) * len * (gradients * element + parameters * 4);
                    let found = moved.iter().sum::<u64>() / steps;
                    // What is checked in a step, and the last small bucket, move a little more.
                    assert!(
                        (formula..=formula + formula / 100).contains(&found),
                        "{found} bytes a step on {ranks} ranks, not {formula}: {config:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn small_buckets_stay_replicated() {
    let layout = layout(&[&[100], &[10, 100]]);
    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { momentum: 0.9, ..Sgd::default() }));
    let lens = threads::run(2, |mut world| {
        let config = sharded(sgd, 400).with_shard_from(Some(4000));
        let mut mixed = model(&mut world, &layout, config).unwrap();
        let mut whole = model(&mut world, &layout, replicated(sgd, 400)).unwrap();
        train(&mut mixed, 3).unwrap();
        train(&mut whole, 3).unwrap();
        assert_eq!(outcome(&mut mixed).unwrap(), outcome(&mut whole).unwrap());
        mixed.optimizer_len()
    });
    // The first bucket holds the weight of 4000 bytes alone, the second the bias of 400 bytes.
    assert_eq!(lens, [100 + 1000 / 2; 2]);
}

#[test]
fn buckets_of_medium_size_are_sharded_if_ranks_share_a_core() {
    // Ranks are threads that this one starts.
    cores::bind_to_first();
    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd { momentum: 0.9, ..Sgd::default() }));
    for (elements, held) in [(31 << 10, 31 << 10), (33 << 10, 33 << 9), (129 << 10, 129 << 9)] {
        let layout = layout(&[&[elements]]);
        let lens = threads::run(2, |mut world| {
            let config = sharded(sgd, 1 << 20).with_shard_from(ShardFrom::Auto);
            let mut model = model(&mut world, &layout, config).unwrap();
            assert!(model.comm().capabilities().shares_cores);
            model.optimizer_len()
        });
        assert_eq!(lens, [held; 2], "of {elements} elements");
    }
}

/// A run of 3 + 2 steps, saved in between by n ranks, continues on m ranks, sharded or not.
#[test]
fn a_checkpoint_loads_on_any_number_of_ranks() {
    let layout = layout(&[&[31, 41], &[41], &[5, 3]]);
    let rule = Rule::AdamW(AdamW { lr: 0.01, ..AdamW::default() });
    let optimizer = OptimizerConfig::new(rule).with_decay_weights_only().with_average(0.8);
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let after = threads::run(ranks, |mut world| {
            let mut model = model(&mut world, &layout, sharded(optimizer, 500)).unwrap();
            train(&mut model, 3).unwrap();
            let snapshot = Snapshot::of(&mut model).unwrap();
            assert_eq!(snapshot.is_some(), world.rank() == 0);
            if let Some(snapshot) = snapshot {
                let mut writer = Writer::new(folder.path(), 1).unwrap();
                writer.save(snapshot).unwrap();
                writer.finish().unwrap();
            }
            let here = saved(&mut model).unwrap();
            train(&mut model, 2).unwrap();
            (here, outcome(&mut model).unwrap())
        });
        for again in [1, 2, 4] {
            for config in [
                sharded(optimizer, 500),
                replicated(optimizer, 500),
                sharded(optimizer, 1 << 20),
                shared(optimizer, 500),
                host(optimizer, 500),
            ] {
                threads::run(again, |mut world| {
                    let path = checkpoint::latest(folder.path()).unwrap().unwrap();
                    let checkpoint = Checkpoint::open(path).unwrap();
                    let mut model = model(&mut world, &layout, config).unwrap();
                    let read = |name: &str, layout: &Layout| checkpoint.load(name, layout);
                    model.restore(checkpoint.manifest().step, read).unwrap();
                    let here = saved(&mut model).unwrap();
                    if world.rank() == 0 {
                        assert_eq!(here, after[0].0);
                    }
                    if again == ranks {
                        train(&mut model, 2).unwrap();
                        assert!(
                            outcome(&mut model).unwrap() == after[0].1,
                            "not the run that was not interrupted"
                        );
                    }
                });
            }
        }
    }
}

#[test]
fn different_sharding_is_an_error() {
    let layout = layout(&[&[100, 100]]);
    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd::default()));
    let errors = threads::run(2, |mut world| {
        let config = if world.rank() == 0 { sharded(sgd, 1 << 20) } else { replicated(sgd, 1 << 20) };
        let result = model(&mut world, &layout, config).and_then(|mut model| train(&mut model, 1));
        result.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0") && error.contains("rank 1"), "{error}");
    }
}

#[test]
fn gathering_different_segments_is_an_error() {
    let errors = threads::run(2, |mut world| {
        let mut comm = world.communicator().unwrap();
        let buffer = comm.allocate(DType::F32, 100).unwrap();
        let segment = world.rank() as usize * 10..100;
        let made = comm.update_all_gather(buffer, std::slice::from_ref(&segment), 50, &mut |_, _, _| ());
        made.and_then(Pending::wait).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("segments"), "{error}");
    }
}

#[test]
fn an_unreduced_gradient_cannot_be_read() {
    let layout = layout(&[&[3]]);
    let mut world = World::from_env().unwrap();
    let sgd = OptimizerConfig::new(Rule::Sgd(Sgd::default()));
    let mut model = model(&mut world, &layout, sharded(sgd, 1 << 20)).unwrap();
    assert!(model.gradient(0).unwrap_err().to_string().contains("not been averaged"));
    train(&mut model, 1).unwrap();
    assert_eq!(model.gradient(0).unwrap().len(), 3);
}

#[test]
fn a_rank_that_leaves_is_named_and_nobody_hangs() {
    let layout = layout(&[&[300, 400]]);
    let adam = OptimizerConfig::new(Rule::Adam(Adam::default()));
    for (config, leaver) in
        [(sharded(adam, 1 << 20), 1), (shared(adam, 1 << 20), 1), (shared(adam, 1 << 20), 0)]
    {
        let errors = threads::run(3, |mut world| {
            let mut model = model(&mut world, &layout, config).unwrap();
            train(&mut model, 1).unwrap();
            if world.rank() == leaver {
                return None;
            }
            let error = train(&mut model, 1).unwrap_err().to_string();
            assert!(train(&mut model, 1).is_err());
            assert!(model.arenas().is_err() || config.placement == Placement::Shared);
            Some(error)
        });
        for error in errors.into_iter().flatten() {
            assert!(error.contains(&format!("rank {leaver}")), "{error}");
        }
    }
}
