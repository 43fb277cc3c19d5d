//! Ranks on several hosts: collectives and training have the bits of one host.

use mgpu::comm::Net;
use mgpu::optimizer::OptimizerConfig;
use mgpu::{
    Compression, DataParallel, DataParallelConfig, Layout, Placement, Reducer, ReducerConfig, Reduction,
    Result, ShardFrom, World,
};
use mgpu_tests::hosts::has_ucx;
use mgpu_tests::models::{Outcome, layout, model, optimizers, outcome};
use mgpu_tests::{collectives, threads};

/// The wires that can be used here.
fn nets() -> Vec<Net> {
    if has_ucx() { vec![Net::Tcp, Net::Ucx] } else { vec![Net::Tcp] }
}

/// Runs `body` on the ranks of these hosts, over each wire.
fn on_hosts(hosts: &[u32], body: impl Fn(World) -> Result<()> + Sync) {
    for net in nets() {
        let results = threads::run_on_hosts(hosts, |mut world| {
            world.set_net(net);
            body(world)
        });
        for (rank, result) in results.into_iter().enumerate() {
            result.unwrap_or_else(|error| panic!("rank {rank} of {hosts:?} over {net:?}: {error}"));
        }
    }
}

/// Every result is compared with the fold in rank order, bit for bit.
#[test]
fn collectives_of_several_hosts() {
    for hosts in [&[1, 2][..], &[2, 1, 1]] {
        on_hosts(hosts, collectives::all_kinds);
    }
}

#[test]
#[ignore = "takes minutes"]
fn collectives_of_more_hosts() {
    for hosts in [&[2, 2][..], &[1, 3], &[3, 2], &[2, 1, 2], &[1, 1, 1, 1]] {
        on_hosts(hosts, collectives::all_kinds);
    }
}

#[test]
fn groups_of_several_hosts() {
    for hosts in [&[1, 1][..], &[2, 2], &[3, 2], &[1, 3, 2]] {
        on_hosts(hosts, collectives::groups);
    }
}

/// Makes four steps, with gradients that depend on the parameters, the rank and the step.
fn train(model: &mut DataParallel) -> Result<()> {
    let rank = model.comm().rank() as f32;
    let ranges: Vec<_> = model.layout().tensors().iter().map(mgpu::TensorSpec::range).collect();
    for step in 0..4 {
        model.step_accumulated(|batch| {
            for (tensor, range) in ranges.iter().enumerate().rev() {
                let values = batch.parameters[range.clone()].iter().zip(range.clone());
                for (gradient, (value, index)) in batch.gradients.gradient(tensor).iter_mut().zip(values) {
                    *gradient = value * 0.3 + (index % 29) as f32 * 0.01 + rank * 0.07 - step as f32 * 0.02;
                }
                batch.gradients.ready(tensor)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// What four ranks have trained, on hosts with this many each, over this wire.
fn trained(hosts: &[u32], net: Net, layout: &Layout, config: DataParallelConfig) -> Vec<Outcome> {
    let results = threads::run_on_hosts(hosts, |mut world| {
        world.set_net(net);
        let mut model = model(&mut world, layout, config)?;
        train(&mut model)?;
        outcome(&mut model)
    });
    results.into_iter().map(|result| result.unwrap_or_else(|error| panic!("{config:?}: {error}"))).collect()
}

#[test]
fn training_has_the_bits_of_one_host() {
    let layout = layout(&[&[331, 401], &[401], &[19, 23], &[23]]);
    let plain = |optimizer: OptimizerConfig| DataParallelConfig::new(optimizer, 1).with_bucket(1 << 18);
    let [first, second] = [optimizers()[1], optimizers()[3]];
    for config in [
        plain(first).with_shard_from(None),
        plain(second).with_shard_from(Some(0)).with_clip_norm(0.5),
        plain(first).with_shard_from(None).with_placement(Placement::Shared),
        plain(second).with_shard_from(ShardFrom::Auto).with_placement(Placement::Host),
        plain(first).with_overlap(true).with_micro_batches(2),
        plain(second).with_compression(Compression::Bf16),
        plain(first).with_world_size_invariant(true),
    ] {
        let expected = trained(&[4], Net::Tcp, &layout, config);
        for net in nets() {
            for hosts in [&[2, 2][..], &[1, 1, 1, 1]] {
                assert!(
                    trained(hosts, net, &layout, config) == expected,
                    "{hosts:?} over {net:?}: {config:?}"
                );
            }
        }
    }
}

/// Over hosts buckets are larger by default, but not those whose norms decide how far gradients are clipped.
#[test]
fn default_buckets_have_the_bits_of_one_host() {
    let layout = layout(&[&[300, 1000], &[331, 1000], &[290, 1000], &[41]]);
    let plain = || DataParallelConfig::new(optimizers()[1], 1);
    for config in
        [plain(), plain().with_clip_norm(0.5), plain().with_world_size_invariant(true).with_clip_norm(0.5)]
    {
        let expected = trained(&[4], Net::Tcp, &layout, config);
        for hosts in [&[2, 2][..], &[1, 1, 1, 1]] {
            assert!(trained(hosts, Net::Tcp, &layout, config) == expected, "{hosts:?}: {config:?}");
        }
    }
}

/// The value that `rank` contributes to element `index`: of very different sizes, so that the order of sums matters.
fn contribution(rank: u32, index: usize) -> f32 {
    let mixed = (index as u64 * 4 + u64::from(rank) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as f32 * [1.0, 1e-3, 1e3, 1e-6][(mixed >> 30) as usize % 4]
}

#[test]
fn world_size_invariant_sums_are_a_balanced_tree() {
    let config = ReducerConfig::new().with_reduction(Reduction::Sum).with_world_size_invariant(true);
    // One bucket each: small, with an odd length, shorter than ranks, and one whose halves are all equal.
    for (len, is_counted) in [(1, false), (1001, false), (99_999, false), (1 << 17, true)] {
        let expected = |index| {
            let [a, b, c, d] = [0, 1, 2, 3].map(|rank| contribution(rank, index));
            ((a + b) + (c + d)).to_bits()
        };
        for hosts in [&[4][..], &[2, 2], &[1, 1, 1, 1]] {
            on_hosts(hosts, |mut world| {
                let mut reducer = Reducer::new(world.communicator()?, layout(&[&[len]]), config)?;
                let rank = reducer.rank();
                let before = reducer.comm().traffic().unwrap();
                reducer.reduce(|gradients| {
                    let values: Vec<f32> = (0..len).map(|index| contribution(rank, index)).collect();
                    gradients.write(0, &values)
                })?;
                let bytes = reducer.comm().traffic().unwrap() - before;
                let found = reducer.gradient(0)?.iter().map(|sum| sum.to_bits());
                assert!(found.eq((0..len).map(expected)), "{len} elements on {hosts:?}");
                // Besides the gradients, ranks compare how the step went.
                let least = 2 * 3 * (4 * len as u64) / 4;
                assert!(!is_counted || (least..least + 1000).contains(&bytes), "{bytes} bytes on {hosts:?}");
                Ok(())
            });
        }
    }
}

/// Each rank holds the optimizer's state of its shards only.
#[test]
fn the_optimizer_is_sharded_over_hosts() {
    let layout = layout(&[&[300, 401], &[7], &[1001]]);
    let config = DataParallelConfig::new(optimizers()[1], 1).with_shard_from(Some(0));
    let lens = threads::run_on_hosts(&[1, 2], |mut world| {
        model(&mut world, &layout, config).unwrap().optimizer_len()
    });
    let whole = threads::run(1, |mut world| model(&mut world, &layout, config).unwrap().optimizer_len());
    assert_eq!(lens.iter().sum::<usize>(), whole[0]);
    assert!(lens.iter().all(|len| *len < whole[0] / 2), "{lens:?} of {whole:?}");
}
