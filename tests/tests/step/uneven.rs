//! Ranks with different numbers of batches: a rank without data takes part with weight 0.

use mgpu::{Compression, Reduction};
use mgpu::{DataParallel, DataParallelConfig, Error, Layout, Reducer, ReducerConfig, Result, World};
use mgpu_tests::models::{model, optimizers};
use mgpu_tests::threads;

use super::{config, exact, host, rough, sgd, shapes, sharded, shared};

/// Number of batches of rank `rank`: the first has none, the last ones have the most.
fn batches(rank: u32) -> u64 {
    [0, 4, 2, 5][rank as usize % 4]
}

/// Makes a step with the mean gradient of these samples.
fn make_step(
    model: &mut DataParallel,
    samples: &[usize],
    gradient: impl Fn(usize, usize, u64) -> f32,
) -> Result<()> {
    let (layout, step) = (model.layout().clone(), model.steps());
    model.step_accumulated(|batch| {
        (0..layout.tensors().len()).rev().try_for_each(|tensor| {
            let mean = |element| {
                let all: f32 =
                    samples.iter().map(|sample| gradient(sample * 4 + batch.index, element, step)).sum();
                all / samples.len() as f32
            };
            batch.gradients.write(tensor, &layout.range(tensor).map(mean).collect::<Vec<_>>())
        })
    })
}

/// The parameters after all ranks' batches, and the `gradients` of the last step.
fn train(
    world: &mut World,
    config: DataParallelConfig,
    gradient: impl Fn(usize, usize, u64) -> f32,
) -> (Vec<f32>, Vec<f32>) {
    let mut model = model(world, &shapes(), config.with_join(true)).unwrap();
    let (rank, ranks) = (world.rank(), world.size());
    for _ in 0..batches(rank) {
        make_step(&mut model, &[rank as usize], &gradient).unwrap();
    }
    let all = (0..ranks).map(batches).max().unwrap();
    assert_eq!(model.join().unwrap(), all - batches(rank));
    assert_eq!(model.steps(), all);
    model.verify().unwrap();
    (model.parameters().to_vec(), model.gradients().unwrap())
}

/// The same on one rank with the data of those ranks in each step.
fn alone(
    config: DataParallelConfig,
    ranks: u32,
    gradient: impl Fn(usize, usize, u64) -> f32,
) -> (Vec<f32>, Vec<f32>) {
    let mut model = model(&mut World::from_env().unwrap(), &shapes(), config).unwrap();
    for step in 0..(0..ranks).map(batches).max().unwrap() {
        let active: Vec<usize> =
            (0..ranks).filter(|rank| batches(*rank) > step).map(|rank| rank as usize).collect();
        make_step(&mut model, &active, &gradient).unwrap();
    }
    let gradients = if model.steps() > 0 { model.gradients().unwrap() } else { Vec::new() };
    (model.parameters().to_vec(), gradients)
}

#[test]
fn uneven_means_cover_only_ranks_with_data() {
    for optimizer in optimizers() {
        for ranks in [2, 3] {
            // At most two ranks have data at a time, so their means are exact.
            for micro_batches in [1, 2] {
                let plain = config(optimizer).with_micro_batches(micro_batches);
                let expected = alone(plain, ranks, exact);
                threads::run(ranks, |mut world| {
                    let shards = sharded(optimizer).with_micro_batches(micro_batches);
                    let shared = shared(optimizer).with_micro_batches(micro_batches);
                    let host = host(optimizer).with_micro_batches(micro_batches);
                    for config in [plain, shards, shards.with_overlap(true), shared, host] {
                        let found = train(&mut world, config, exact);
                        assert!(found == expected, "{ranks} ranks, {config:?}");
                    }
                });
            }
        }
    }
}

/// With other means, clipped, compressed and summed: all ranks have the same weights, close to those of one rank.
#[test]
fn uneven_steps_work_with_every_option() {
    let ranks = 4;
    let plain = config(sgd());
    for config in [plain, plain.with_clip_norm(0.5), plain.with_compression(Compression::Bf16)] {
        let expected = alone(config, ranks, rough);
        for shard_from in [None, Some(0)] {
            let found =
                threads::run(ranks, |mut world| train(&mut world, config.with_shard_from(shard_from), rough));
            assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "the same on all ranks");
            let most = expected.1.iter().fold(0.0f32, |most, value| most.max(value.abs()));
            let rounding = if config.reducer.compression == Compression::Bf16 { 3.0 / 256.0 } else { 1e-5 };
            for (found, expected) in found[0].1.iter().zip(&expected.1) {
                assert!((found - expected).abs() <= most * rounding, "{found}, {expected}");
            }
        }
    }
    let summed = plain.with_reduction(Reduction::Sum);
    threads::run(ranks, |mut world| {
        // In the last step one rank has data, and the sum is its own gradient.
        let (_, gradients) = train(&mut world, summed, exact);
        assert!(gradients.iter().enumerate().all(|(element, value)| *value == exact(12, element, 4)));
    });
}

#[test]
fn ranks_continue_together_after_join() {
    threads::run(3, |mut world| {
        let mut model = model(&mut world, &shapes(), config(sgd()).with_join(true)).unwrap();
        for epoch in 1..=3u32 {
            for _ in 0..batches(world.rank()) {
                // A rank without data uses the learning rate of the others.
                model.set_learning_rate(0.1 / f64::from(epoch));
                make_step(&mut model, &[world.rank() as usize], rough).unwrap();
            }
            model.join().unwrap();
            assert_eq!(model.steps(), 4 * u64::from(epoch));
            model.verify().unwrap();
            assert_eq!(model.learning_rate(), 0.1 / f64::from(epoch));
        }
        assert_eq!(model.join().unwrap(), 0, "nobody has data");
    });
}

#[test]
fn a_joined_rank_sees_errors_and_may_join_again() {
    threads::run(3, |mut world| {
        let mut model = model(&mut world, &shapes(), config(sgd()).with_join(true)).unwrap();
        let bad = world.rank() == 2;
        let expect = |outcome: Result<()>| match outcome.unwrap_err() {
            Error::NotFinite { rank: 2, step: 1, .. } => {}
            other => panic!("{other}"),
        };
        if bad {
            expect(make_step(&mut model, &[0], |_, _, _| f32::NAN));
            make_step(&mut model, &[0], rough).unwrap();
        } else {
            expect(model.join().map(|_| ()));
        }
        assert_eq!(model.join().unwrap(), u64::from(!bad));
        assert_eq!(model.steps(), 1);
        model.verify().unwrap();
    });
}

#[test]
fn a_reducer_joins_one_reduction_at_a_time() {
    let mut layout = Layout::new();
    layout.push("sum", [2]);
    threads::run(3, |mut world| {
        let comm = world.communicator().unwrap();
        let rank = comm.rank();
        let config = ReducerConfig::new().with_join(true);
        let mut reducer = Reducer::new(comm, layout.clone(), config).unwrap();
        let mut seen = Vec::new();
        for _ in 0..=rank {
            reducer.reduce(|gradients| gradients.write(0, &[rank as f32; 2])).unwrap();
            seen.push(reducer.gradient(0).unwrap()[1]);
        }
        while reducer.join().unwrap() {
            seen.push(reducer.gradient(0).unwrap()[1]);
        }
        assert_eq!(seen, [1.0, 1.5, 2.0]);
    });
}

#[test]
fn options_incompatible_with_join_are_errors() {
    let mut world = World::from_env().unwrap();
    let mut refused = model(&mut world, &shapes(), config(sgd())).unwrap();
    let error = refused.join().unwrap_err().to_string();
    assert_eq!(error, "join: ranks can only take part without data if the configuration enables `join`");
    let mut joining = model(&mut world, &shapes(), config(sgd()).with_join(true)).unwrap();
    let error = joining.step(|_, gradients| gradients.sum_over_ranks(&mut [1.0])).unwrap_err().to_string();
    assert!(error.starts_with("sum over ranks: a rank that has run out of data"), "{error}");
    let invariant = config(sgd()).with_join(true).with_world_size_invariant(true);
    let error = model(&mut world, &shapes(), invariant).err().unwrap().to_string();
    assert!(error.contains("`join` is incompatible with a world-size-invariant reduction"), "{error}");
}
