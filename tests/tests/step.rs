//! The options of a step: micro-batches, sums, clipping, compression, world-size-invariant reduction, and checks that
//! name the culprit. `groups` covers parameter groups, `scaled` the loss scale, `uneven` uneven ranks.

#[path = "step/groups.rs"]
mod groups;
#[path = "step/scaled.rs"]
mod scaled;
#[path = "step/uneven.rs"]
mod uneven;

use mgpu::optimizer::{OptimizerConfig, Rule, Sgd};
use mgpu::replicate::verify_same;
use mgpu::timeline::Timeline;
use mgpu::{Compression, Placement, Reduction, ShardFrom};
use mgpu::{DataParallel, DataParallelConfig, Error, Layout, MicroBatch, Result, Unused, World};
use mgpu_tests::models::{Outcome, layout, model, optimizers, outcome};
use mgpu_tests::threads;

/// Two buckets of at least one step, with all kinds of lengths.
fn shapes() -> Layout {
    layout(&[&[7, 5], &[13], &[2, 3, 11], &[0], &[101, 7]])
}

fn sgd() -> OptimizerConfig {
    OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.1, ..Sgd::default() }))
}

fn config(optimizer: OptimizerConfig) -> DataParallelConfig {
    DataParallelConfig::new(optimizer, 1).with_bucket(400).with_shard_from(None)
}

fn sharded(optimizer: OptimizerConfig) -> DataParallelConfig {
    config(optimizer).with_shard_from(Some(0))
}

fn shared(optimizer: OptimizerConfig) -> DataParallelConfig {
    config(optimizer).with_placement(Placement::Shared)
}

fn host(optimizer: OptimizerConfig) -> DataParallelConfig {
    config(optimizer).with_shard_from(ShardFrom::Auto).with_placement(Placement::Host)
}

/// The gradient of sample `sample` for element `index` in step `step`, independent of the parameters: any f32.
fn rough(sample: usize, index: usize, step: u64) -> f32 {
    let bits = (sample * 7919 + index * 104_729 + step as usize * 31) % 10_007;
    (bits as f32 / 10_007.0 - 0.5) * 1.3f32.powi((bits % 40) as i32 - 20)
}

/// As [`rough`], with sums and means that are exact in any order and in bf16.
fn exact(sample: usize, index: usize, step: u64) -> f32 {
    ((sample * 3 + index + step as usize) % 8) as f32 - 4.0
}

/// Makes `steps` steps over `samples` samples, divided over ranks and then over `micro_batches`.
fn train(
    model: &mut DataParallel,
    steps: u64,
    (samples, micro_batches): (usize, usize),
    gradient: impl Fn(usize, usize, u64) -> f32,
) -> Result<Outcome> {
    let (rank, ranks) = (model.comm().rank() as usize, model.ranks() as usize);
    let tensors: Vec<_> = model.layout().tensors().to_vec();
    let size = samples / ranks / micro_batches;
    assert_eq!(size * ranks * micro_batches, samples);
    model.set_micro_batches(micro_batches)?;
    for _ in 0..steps {
        let step = model.steps();
        model.step_accumulated(|MicroBatch { index, gradients, .. }| {
            let first = (rank * micro_batches + index) * size;
            for (tensor, spec) in tensors.iter().enumerate().rev() {
                for (value, element) in gradients.gradient(tensor).iter_mut().zip(spec.range()) {
                    let all: f32 = (first..first + size).map(|sample| gradient(sample, element, step)).sum();
                    *value = all / size as f32;
                }
                gradients.ready(tensor)?;
            }
            Ok(())
        })?;
    }
    outcome(model)
}

fn run(
    world: &mut World,
    config: DataParallelConfig,
    batches: (usize, usize),
    gradient: impl Fn(usize, usize, u64) -> f32,
) -> Outcome {
    train(&mut model(world, &shapes(), config).unwrap(), 4, batches, gradient).unwrap()
}

#[test]
fn micro_batches_make_the_step_of_the_whole_batch() {
    for optimizer in optimizers() {
        let mut alone = World::from_env().unwrap();
        let expected = run(&mut alone, config(optimizer), (16, 1), exact);
        for ranks in [1, 2, 4] {
            threads::run(ranks, |mut world| {
                let overlapped = sharded(optimizer).with_overlap(true);
                let overlapped_shared = shared(optimizer).with_overlap(true);
                for config in [
                    config(optimizer),
                    sharded(optimizer),
                    overlapped,
                    shared(optimizer),
                    overlapped_shared,
                    host(optimizer),
                ] {
                    for micro_batches in [1, 2, 4] {
                        let found = run(&mut world, config, (16, micro_batches), exact);
                        assert!(
                            found == expected,
                            "{ranks} ranks, {micro_batches} micro-batches, {optimizer:?}"
                        );
                    }
                }
            });
        }
    }
}

/// Buckets change after the first step if gradients come in another order than the layout's; results do not.
#[test]
fn buckets_follow_the_order_of_gradients() {
    let layout = shapes();
    let orders = [[0, 1, 2, 3, 4], [2, 3, 1, 0, 4], [4, 0, 3, 1, 2]];
    for optimizer in optimizers() {
        for ranks in [1, 2, 3] {
            threads::run(ranks, |mut world| {
                let mut run = |order: [usize; 5], config| {
                    let mut model = model(&mut world, &layout, config).unwrap();
                    let rank = model.comm().rank() as usize;
                    for step in 0..4 {
                        model
                            .step(|_, sink| {
                                order.into_iter().try_for_each(|tensor| {
                                    let elements = layout.range(tensor);
                                    let gradient: Vec<f32> =
                                        elements.map(|element| rough(rank, element, step)).collect();
                                    sink.write(tensor, &gradient)
                                })
                            })
                            .unwrap();
                    }
                    outcome(&mut model).unwrap()
                };
                let expected = run([4, 3, 2, 1, 0], config(optimizer));
                for order in orders {
                    assert!(run(order, config(optimizer)) == expected, "{order:?}");
                    for config in [sharded(optimizer), shared(optimizer), host(optimizer)] {
                        assert!(run(order, config) == expected, "{order:?}, {config:?}");
                    }
                    let compressed = |config: DataParallelConfig| config.with_compression(Compression::Bf16);
                    run(order, compressed(sharded(optimizer)));
                }
            });
        }
    }
}

#[test]
fn gradients_are_summed_on_request() {
    let mean = config(sgd());
    let sum = mean.with_reduction(Reduction::Sum);
    threads::run(2, |mut world| {
        // 2 ranks with 3 micro-batches of 4 samples, whose means are exact.
        let expected = run(&mut world, mean, (24, 3), exact);
        let found = run(&mut world, sum, (24, 3), exact);
        for (sum, mean) in found.gradients.iter().flatten().zip(expected.gradients.iter().flatten()) {
            assert!((sum - mean * 6.0).abs() < 1e-5 && *sum * 4.0 == (sum * 4.0).round(), "{sum}, {mean}");
        }
        assert!(found != expected);
    });
}

/// With a power of two of summands all bits are equal, and with others nearly all digits.
#[test]
fn summed_gradients_train_what_their_mean_does_with_the_optimizer_for_them() {
    for optimizer in optimizers() {
        for (ranks, micro_batches) in [(1, 4), (2, 1), (2, 2), (3, 2)] {
            let count = ranks as usize * micro_batches;
            let mut adapted = optimizer;
            adapted.rule = adapted.rule.with_gradient_scale(count as f64);
            threads::run(ranks, |mut world| {
                let expected = run(&mut world, config(optimizer), (24, micro_batches), rough);
                for config in [config(adapted), sharded(adapted), shared(adapted)] {
                    let sum = config.with_reduction(Reduction::Sum);
                    let found = run(&mut world, sum, (24, micro_batches), rough);
                    let case = format!("{ranks} ranks of {micro_batches} micro-batches, {optimizer:?}");
                    if count.is_power_of_two() {
                        assert!(
                            found.weights == expected.weights && found.average == expected.average,
                            "{case}"
                        );
                    }
                    let mut pairs = found.weights.iter().zip(&expected.weights);
                    assert!(pairs.all(|(found, expected)| (found - expected).abs() < 1e-5), "{case}");
                }
                // Without it they do not.
                let other = run(&mut world, config(optimizer).with_reduction(Reduction::Sum), (24, 1), rough);
                assert!(ranks == 1 || other.weights != expected.weights);
            });
        }
    }
}

#[test]
fn world_size_invariant_steps_are_bit_equal() {
    let mut differs = 0;
    for optimizer in optimizers() {
        for clip_norm in [None, Some(0.5)] {
            let rest = config(optimizer).with_clip_norm(clip_norm);
            let invariant =
                |config: DataParallelConfig| config.with_world_size_invariant(true).with_clip_norm(clip_norm);
            let mut alone = World::from_env().unwrap();
            let expected = run(&mut alone, invariant(config(optimizer)), (16, 8), rough);
            for ranks in [1, 2, 4, 8] {
                let plain = threads::run(ranks, |mut world| {
                    for config in [config(optimizer), sharded(optimizer)] {
                        let found = run(&mut world, invariant(config), (16, 8 / ranks as usize), rough);
                        assert!(found == expected, "{ranks} ranks, {optimizer:?}, clipped to {clip_norm:?}");
                    }
                    run(&mut world, rest, (16, 8 / ranks as usize), rough) == expected
                });
                differs += u32::from(!plain[0]);
            }
        }
    }
    // Otherwise this test would not detect a different order of summation.
    assert!(differs > 0);
}

/// Running statistics: updated by every micro-batch in turn, or by all from the same values.
#[test]
fn buffers_do_not_depend_on_the_world_size() {
    let invariant = config(sgd()).with_world_size_invariant(true);
    let run = |world: &mut World, micro_batches: usize| {
        let config = invariant.with_micro_batches(micro_batches);
        let model = model(world, &layout(&[&[1]]), config).unwrap();
        let mut model = model.with_buffers(vec![1.0f32, 2.0]).unwrap();
        let first = world.rank() as usize * micro_batches;
        for _ in 0..3 {
            model
                .step_accumulated(|batch| {
                    let statistic = rough(first + batch.index, 3, 0);
                    batch.buffers.iter_mut().for_each(|buffer| *buffer += 0.1 * (statistic - *buffer));
                    let mut sum = [f64::from(statistic)];
                    batch.gradients.sum_over_ranks(&mut sum)?;
                    batch.gradients.write(0, &[sum[0] as f32])
                })
                .unwrap();
        }
        (model.buffers().to_vec(), model.parameters().to_vec())
    };
    let expected = run(&mut World::from_env().unwrap(), 8);
    let mean = (0..8).map(|sample| f64::from(rough(sample, 3, 0))).sum::<f64>() / 8.0;
    let statistic = mean + 0.9f64.powi(3) * (1.0 - mean);
    assert!((f64::from(expected.0[0]) - statistic).abs() < 1e-5, "{expected:?}, not {statistic}");
    for ranks in [2, 4, 8] {
        let found = threads::run(ranks, |mut world| run(&mut world, 8 / ranks as usize));
        assert!(found.iter().all(|found| *found == expected), "{ranks} ranks");
    }
}

#[test]
fn gradients_are_clipped_by_their_global_norm() {
    let norm = |outcome: &Outcome| {
        outcome.gradients.iter().flatten().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt()
    };
    let mut alone = World::from_env().unwrap();
    let free = run(&mut alone, config(sgd()), (12, 1), rough);
    for ranks in [1, 2, 3] {
        threads::run(ranks, |mut world| {
            for most in [norm(&free) / 3.0, norm(&free) * 3.0] {
                let clipped = |config: DataParallelConfig| config.with_clip_norm(Some(most));
                let mut replicated = model(&mut world, &shapes(), clipped(config(sgd()))).unwrap();
                let outcome = train(&mut replicated, 4, (12, 1), rough).unwrap();
                let factor = (most / norm(&free)).min(1.0);
                assert!((norm(&outcome) / (norm(&free) * factor) - 1.0).abs() < 1e-5);
                assert!((replicated.gradient_norm().unwrap() / norm(&free) - 1.0).abs() < 1e-5);
                for config in [sharded(sgd()), shared(sgd()), host(sgd())] {
                    let mut model = model(&mut world, &shapes(), clipped(config)).unwrap();
                    let found = train(&mut model, 4, (12, 1), rough).unwrap();
                    assert!(found == outcome, "clipped to other bits than replicated: {config:?}");
                    assert_eq!(model.gradient_norm(), replicated.gradient_norm());
                }
            }
        });
    }
    assert_eq!(model(&mut alone, &shapes(), config(sgd())).unwrap().gradient_norm(), None);
}

#[test]
fn compressed_gradients_stay_within_rounding_errors() {
    threads::run(3, |mut world| {
        for optimizer in optimizers() {
            let replicated = config(optimizer).with_compression(Compression::Bf16);
            let replicated = run(&mut world, replicated, (9, 1), rough);
            for config in [config(optimizer), sharded(optimizer), shared(optimizer), host(optimizer)] {
                let compressed = config.with_compression(Compression::Bf16);
                // Three times a multiple of 3 is exact in bf16, and so is the mean.
                let threes = |sample, index, step| exact(sample % 3, index, step) * 3.0;
                assert!(
                    run(&mut world, compressed, (9, 1), threes) == run(&mut world, config, (9, 1), threes)
                );
                let (found, expected) =
                    (run(&mut world, compressed, (9, 1), rough), run(&mut world, config, (9, 1), rough));
                assert!(found != expected, "compression rounds");
                assert!(found == replicated, "to the same bits: {config:?}");
                let most =
                    expected.gradients.iter().flatten().fold(0.0, |most: f32, value| most.max(value.abs()));
                let pairs = found.gradients.iter().flatten().zip(expected.gradients.iter().flatten());
                // Each rank's gradient and the mean are rounded to 8 bits.
                assert!(pairs.clone().all(|(a, b)| (a - b).abs() <= most * 3.0 / 256.0));
            }
        }
    });
}

#[test]
fn non_finite_gradients_are_named_and_change_nothing() {
    for config in [config(sgd()), sharded(sgd()), shared(sgd()), host(sgd())] {
        threads::run(3, |mut world| {
            let mut model = model(&mut world, &shapes(), config).unwrap();
            train(&mut model, 2, (3, 1), rough).unwrap();
            let before = model.parameters().to_vec();
            let bad = |sample: usize, index: usize, step| {
                // Only rank 1, in tensors 1 and 2; the backward pass reaches 2 first.
                if sample == 1 && (index == 40 || index == 50) {
                    f32::INFINITY
                } else {
                    rough(sample, index, step)
                }
            };
            let error = train(&mut model, 1, (3, 1), bad).unwrap_err();
            assert_eq!(error.culprit(), Some(1));
            assert_eq!(
                error.to_string(),
                "rank 1 has non-finite gradients (NaN or Inf) in tensor `2`, in step 3"
            );
            assert!(model.parameters() == before && model.steps() == 2);
            train(&mut model, 1, (3, 1), rough).unwrap();
            assert_eq!(model.steps(), 3);
        });
    }
    // Without the check, training continues.
    let mut alone = World::from_env().unwrap();
    let unchecked = config(sgd()).with_check_finite(false);
    let mut model = model(&mut alone, &shapes(), unchecked).unwrap();
    train(&mut model, 1, (1, 1), |_, _, _| f32::NAN).unwrap();
    assert!(model.parameters()[0].is_nan());
}

#[test]
fn settings_incompatible_with_a_placement_are_errors() {
    let mut world = World::from_env().unwrap();
    let mut refused = |config| model(&mut world, &shapes(), config).err().unwrap().to_string();
    for config in [shared(sgd()), host(sgd())] {
        let error = refused(config.with_world_size_invariant(true));
        assert!(
            error.contains("invariant reduction needs placement replicated: its ranks exchange"),
            "{error}"
        );
    }
    let error = refused(shared(sgd()).with_shard_from(Some(0)));
    assert!(error.contains("keeps all of its state on rank 0: disable sharding"), "{error}");
    for shard_from in [None, Some(1)] {
        let error = refused(host(sgd()).with_shard_from(shard_from));
        assert!(error.contains("divided over all ranks, so all of it is sharded: enable"), "{error}");
    }
    model(&mut world, &shapes(), host(sgd()).with_shard_from(Some(0))).unwrap();
}

/// The mean of finite gradients overflows.
#[test]
fn sums_that_overflow_are_named_and_change_nothing() {
    let bf16 = |config: DataParallelConfig| config.with_compression(Compression::Bf16);
    let summed = |config: DataParallelConfig| config.with_reduction(Reduction::Sum);
    let (plain, shards) = (config(sgd()), sharded(sgd()));
    let overlapped = shards.with_overlap(true);
    let invariant = plain.with_world_size_invariant(true);
    let (shared, host) = (shared(sgd()), host(sgd()));
    let replicated = [plain, shards, overlapped, bf16(plain), bf16(shards), summed(plain), invariant];
    for config in replicated.into_iter().chain([shared, bf16(shared), host]) {
        for ranks in [2, 4] {
            threads::run(ranks, |mut world| {
                let mut model = model(&mut world, &shapes(), config).unwrap();
                train(&mut model, 2, (ranks as usize, 1), rough).unwrap();
                let before = model.parameters().to_vec();
                // In any element, and so in any rank's shard. Less than the largest number, to which bf16 rounds it.
                for bad in [0, 34, 40, 55, 114, 400, 820] {
                    let huge = |sample: usize, index: usize, step| {
                        if index == bad { f32::MAX * 0.9 } else { rough(sample, index, step) }
                    };
                    let error = train(&mut model, 1, (ranks as usize, 1), huge).unwrap_err();
                    let name = shapes()
                        .tensors()
                        .iter()
                        .find(|tensor| tensor.range().contains(&bad))
                        .unwrap()
                        .name
                        .clone();
                    assert!(
                        matches!(&error, Error::ReducedNotFinite { tensor, step: 3 } if *tensor == name),
                        "element {bad} on {ranks} ranks, {config:?}: {error}"
                    );
                    assert!(model.parameters() == before && model.steps() == 2);
                }
                train(&mut model, 1, (ranks as usize, 1), rough).unwrap();
                assert_eq!(model.steps(), 3);
            });
        }
    }
}

/// A tensor too large to be checked completely before the reduction.
#[test]
fn one_non_finite_element_of_a_large_tensor_is_found() {
    let large = layout(&[&[3], &[700, 300]]);
    for config in [config(sgd()), sharded(sgd()), shared(sgd())] {
        for ranks in [1, 3] {
            threads::run(ranks, |mut world| {
                let last = world.rank() + 1 == ranks;
                let mut model = model(&mut world, &large, config).unwrap();
                let before = model.parameters().to_vec();
                for bad in [3, 4321, 100_000, 210_002] {
                    let error = model.step(|_, sink| {
                        for tensor in [1, 0] {
                            let gradient = sink.gradient(tensor);
                            gradient.fill(0.5);
                            if tensor == 1 && last {
                                gradient[bad - 3] = f32::NAN;
                            }
                            sink.ready(tensor)?;
                        }
                        Ok(())
                    });
                    match error.unwrap_err() {
                        Error::NotFinite { rank, tensor, step: 1 } if tensor == "1" => {
                            assert_eq!(rank, ranks - 1);
                        }
                        Error::ReducedNotFinite { tensor, step: 1 } if ranks > 1 => assert_eq!(tensor, "1"),
                        other => panic!("element {bad} on {ranks} ranks: {other}"),
                    }
                    assert!(model.parameters() == before && model.steps() == 0);
                }
            });
        }
    }
}

#[test]
fn settings_that_differ_are_named_before_the_first_step() {
    let plain = config(sgd());
    let other = |change: fn(&mut DataParallelConfig)| {
        let mut config = plain;
        change(&mut config);
        config
    };
    for (config, text) in [
        (other(|config| config.reducer.bucket = Some(401)), "bucket 401 where rank 0 has 400"),
        (other(|config| config.shard_from = Some(7).into()), "shard_from 7 where rank 0 has none"),
        (
            other(|config| config.placement = Placement::Shared),
            "placement Shared where rank 0 has Replicated",
        ),
        (other(|config| config.reducer.overlap = true), "overlap true where rank 0 has false"),
        (other(|config| config.reducer.reduction = Reduction::Sum), "reduction Sum where rank 0 has Mean"),
        (
            other(|config| config.reducer.compression = Compression::Bf16),
            "compression Bf16 where rank 0 has None",
        ),
        (other(|config| config.reducer.clip_norm = Some(1.5)), "clip_norm Some(1.5) where rank 0 has None"),
        (other(|config| config.reducer.check_finite = false), "check_finite false where rank 0 has true"),
        (other(|config| config.verify_every = None), "verify_every None where rank 0 has Some(100)"),
        (
            other(|config| config.reducer.world_size_invariant = true),
            "world_size_invariant true where rank 0 has false",
        ),
        (other(|config| config.reducer.micro_batches = 2), "micro_batches 2 where rank 0 has 1"),
        (other(|config| config.reducer.unused = Unused::Zero), "unused Zero where rank 0 has Error"),
        (other(|config| config.reducer.join = true), "join true where rank 0 has false"),
        (
            other(|config| config.optimizer.schedule.warm_up = 3),
            "schedule Schedule { warm_up: 3, decay: Constant } where rank 0 has",
        ),
        (other(|config| config.optimizer.average = Some(0.5)), "average Some(0.5) where rank 0 has None"),
        (
            other(|config| config.optimizer.decay_weights_only = true),
            "decay_weights_only true where rank 0 has false",
        ),
        (
            other(|config| {
                config.optimizer.rule = Rule::Sgd(Sgd { lr: 0.1, momentum: 0.9, ..Sgd::default() });
            }),
            "optimizer Sgd(Sgd { lr: 0.1, momentum: 0.9, ",
        ),
    ] {
        let errors = threads::run(4, |mut world| {
            let config = if world.rank() == 2 { config } else { plain };
            let error = model(&mut world, &shapes(), config).err().expect("settings that differ");
            (error.culprit(), error.to_string())
        });
        for (culprit, error) in errors {
            assert_eq!(culprit, Some(2));
            assert!(error.starts_with(&format!("rank 2 has {text}")), "{error}");
        }
    }
    // Ranks may have different numbers of threads.
    threads::run(2, |mut world| {
        let config = plain.with_threads(1 + world.rank() as usize);
        train(&mut model(&mut world, &shapes(), config).unwrap(), 2, (2, 1), rough).unwrap()
    });
}

#[test]
fn different_steps_are_an_error_before_anything_changes() {
    for check_finite in [true, false] {
        threads::run(3, |mut world| {
            let config = config(sgd()).with_check_finite(check_finite);
            let (is_odd, mut model) = (world.rank() == 1, model(&mut world, &shapes(), config).unwrap());
            let before = model.parameters().to_vec();
            let error = train(&mut model, 1, (6, if is_odd { 2 } else { 1 }), rough).unwrap_err();
            assert_eq!(error.to_string(), "rank 1 has 2 micro-batches in step 1 where rank 0 has 1");
            model.set_learning_rate(if is_odd { 0.2 } else { 0.1 });
            let error = train(&mut model, 1, (6, 1), rough).unwrap_err().to_string();
            assert_eq!(
                error,
                "rank 1 has step 1 learning rate 0.2 where rank 0 has 0.1; all ranks need the same"
            );
            assert!(model.parameters() == before && model.steps() == 0);
        });
    }
}

/// Adam's bias correction, for example, depends on the number of steps.
#[test]
fn restoring_different_steps_is_an_error() {
    threads::run(2, |mut world| {
        let mut model = model(&mut world, &shapes(), config(sgd())).unwrap();
        let steps = 7 + u64::from(world.rank());
        let error = model.restore(steps, |_, layout| Ok(vec![0.0; layout.len()])).unwrap_err();
        assert_eq!(error.to_string(), "rank 1 has 8 steps to resume from where rank 0 has 7");
        model.restore(7, |_, layout| Ok(vec![0.0; layout.len()])).unwrap();
        assert_eq!(model.steps(), 7);
    });
}

#[test]
fn invalid_arguments_are_errors() {
    let mut world = World::from_env().unwrap();
    let none = config(sgd()).with_threads(0);
    let error = model(&mut world, &shapes(), none).err().unwrap().to_string();
    assert_eq!(error, "data parallel: updates run on at least one thread");
    let mut model = model(&mut world, &shapes(), config(sgd())).unwrap();
    let error = model.set_micro_batches(0).unwrap_err().to_string();
    assert_eq!(error, "step: a step has at least one micro-batch");
    for tensor in [5, usize::MAX] {
        let problem = format!("there is no tensor {tensor}: the model has 5");
        let error = model.step(|_, gradients| gradients.ready(tensor)).unwrap_err().to_string();
        assert_eq!(error, format!("step: {problem}"));
        let error = model.step(|_, gradients| gradients.write(tensor, &[1.0])).unwrap_err().to_string();
        assert_eq!(error, format!("step: {problem}"));
        assert_eq!(model.gradient(tensor).unwrap_err().to_string(), format!("gradient: {problem}"));
    }
    let error = Timeline::new(usize::MAX).unwrap_err().to_string();
    assert!(error.starts_with("timeline: no room for 18446744073709551615 spans: "), "{error}");
}

#[test]
fn a_gradient_announced_twice_is_named() {
    let mut world = World::from_env().unwrap();
    let mut model = model(&mut world, &layout(&[&[2], &[3]]), config(sgd())).unwrap();
    let error = model.step(|_, gradients| [1, 1].into_iter().try_for_each(|tensor| gradients.ready(tensor)));
    assert_eq!(error.unwrap_err().to_string(), "step: the gradient of tensor `1` was marked ready twice");
    let error =
        model.step(|_, gradients| (0..2).try_for_each(|_| gradients.write(1, &[1.0; 3]))).unwrap_err();
    assert_eq!(error.to_string(), "step: the gradient of tensor `1` was marked ready twice");
    let error = model.step(|_, gradients| gradients.write(0, &[1.0])).unwrap_err().to_string();
    assert_eq!(error, "step: a gradient of 1 elements for tensor `0`, which has 2");
}

#[test]
fn errors_of_the_step_closure_are_returned() {
    let mut world = World::from_env().unwrap();
    let mut model = model(&mut world, &shapes(), config(sgd())).unwrap();
    let error = model.step(|_, _| -> Result<()> { Err(Error::program("no more images")) }).unwrap_err();
    assert_eq!(error.to_string(), "no more images");
}

#[test]
fn ranks_with_different_weights_are_named() {
    let errors = threads::run(3, |mut world| {
        let steps = if world.rank() == 0 { 11 } else { 10 };
        verify_same(&mut world.communicator().unwrap(), "steps in epoch 3", steps).unwrap_err().to_string()
    });
    assert_eq!(errors, ["rank 0 has 11 steps in epoch 3 where rank 1 has 10"; 3]);
}

#[test]
fn incompatible_options_are_refused() {
    let invariant = config(sgd()).with_world_size_invariant(true);
    let errors = threads::run(3, |mut world| {
        let mut refused = |config| model(&mut world, &shapes(), config).err().unwrap().to_string();
        [refused(invariant), refused(config(sgd()).with_clip_norm(Some(0.0)))]
    });
    assert!(errors[0][0].ends_with("needs 1, 2, 4, 8, … ranks, not 3"), "{errors:?}");
    assert!(errors[0][1].ends_with("clipped to a norm above 0"), "{errors:?}");
    let compressed = invariant.with_compression(Compression::Bf16);
    let error = model(&mut World::from_env().unwrap(), &shapes(), compressed).err().unwrap().to_string();
    assert!(error.contains("compressed gradients"), "{error}");
}
