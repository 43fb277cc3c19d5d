//! Parameter groups with factors, frozen tensors, unused tensors, gradients in any order; and the reducer alone, for
//! custom optimizers.

use mgpu::optimizer::{OptimizerConfig, Rule, Schedule, Sgd};
use mgpu::{
    DataParallel, DataParallelConfig, Layout, ParameterGroup, Reducer, ReducerConfig, Result, Unused, World,
};
use mgpu_tests::models::{model, optimizers, outcome};
use mgpu_tests::threads;
use proptest::prelude::*;

use super::{config, host, rough, sgd, shapes, sharded, shared};

/// The tensors of [`shapes`]: two with factors, a frozen one between others.
fn grouped() -> Layout {
    let mut layout = shapes();
    layout.assign([0], ParameterGroup::new().with_learning_rate(2.0).with_weight_decay(0.5));
    layout.assign([1, 3], ParameterGroup::FROZEN);
    layout.assign([4], ParameterGroup::new().with_weight_decay(0.0));
    layout
}

/// The trained tensors, last one first.
fn trained(layout: &Layout) -> Vec<usize> {
    (0..layout.tensors().len()).rev().filter(|tensor| !layout.tensors()[*tensor].group.frozen).collect()
}

/// Makes `steps` steps with this rank's gradients of `tensors`, in their order.
fn train(model: &mut DataParallel, steps: u64, tensors: &[usize]) -> Result<()> {
    let (layout, rank) = (model.layout().clone(), model.rank() as usize);
    for _ in 0..steps {
        let step = model.steps();
        model.step_accumulated(|batch| {
            let sample = rank * 10 + batch.index;
            tensors.iter().try_for_each(|tensor| {
                let gradient: Vec<f32> =
                    layout.range(*tensor).map(|element| rough(sample, element, step)).collect();
                batch.gradients.write(*tensor, &gradient)
            })
        })?;
    }
    Ok(())
}

#[test]
fn parameter_groups_are_bit_equal_in_all_placements_and_after_a_checkpoint() {
    let layout = grouped();
    for optimizer in optimizers() {
        for ranks in [1, 2, 3] {
            threads::run(ranks, |mut world| {
                let mut run = |config: DataParallelConfig| {
                    let mut model = model(&mut world, &layout, config).unwrap();
                    let initial = model.parameters().to_vec();
                    train(&mut model, 3, &trained(&layout)).unwrap();
                    let saved: Vec<_> = model
                        .arenas()
                        .unwrap()
                        .into_iter()
                        .map(|(name, values)| (name, values.into_owned()))
                        .collect();
                    train(&mut model, 2, &trained(&layout)).unwrap();
                    let weights = model.parameters().to_vec();
                    let average = model.averaged_parameters().unwrap();
                    for frozen in [1, 3] {
                        let range = layout.range(frozen);
                        assert_eq!(weights[range.clone()], initial[range.clone()], "frozen");
                        if let Some(average) = &average {
                            assert_eq!(average[range.clone()], initial[range], "the average of a frozen one");
                        }
                    }
                    assert!((0..layout.len()).any(|element| weights[element] != initial[element]));

                    let mut resumed = mgpu_tests::models::model(&mut world, &layout, config).unwrap();
                    train(&mut resumed, 1, &trained(&layout)).unwrap();
                    let read = |name: &str, layout: &Layout| {
                        let found = saved.iter().find(|(known, _)| *known == name);
                        let values = &found.expect("an arena of that name").1;
                        Ok(if values.is_empty() { vec![7.0; layout.len()] } else { values.clone() })
                    };
                    resumed.restore(3, read).unwrap();
                    train(&mut resumed, 2, &trained(&layout)).unwrap();
                    assert!(resumed.parameters() == weights, "a resumed training has other bits");
                    assert!(resumed.averaged_parameters().unwrap() == average, "or another average");
                    (weights, average, model.gradients().unwrap(), model.optimizer_len())
                };
                let expected = run(config(optimizer));
                for config in [sharded(optimizer), shared(optimizer), host(optimizer)] {
                    let found = run(config);
                    let same = (&found.0, &found.1, &found.2) == (&expected.0, &expected.1, &expected.2);
                    assert!(same, "{config:?}");
                }
                let states = optimizer.rule.states() + usize::from(optimizer.average.is_some());
                let frozen = layout.tensors()[1].len();
                assert_eq!(expected.3, states * (layout.len() - frozen), "a frozen tensor has no state");
            });
        }
    }
}

#[test]
fn a_frozen_tensor_takes_no_gradient() {
    let mut world = World::from_env().unwrap();
    let mut model = model(&mut world, &grouped(), config(sgd())).unwrap();
    let frozen = "tensor `1` is frozen";
    let error = model.step(|_, gradients| {
        assert!((0..6).map(|tensor| gradients.wants(tensor)).eq([true, false, true, false, true, false]));
        gradients.ready(1)
    });
    assert_eq!(error.unwrap_err().to_string(), format!("step: {frozen}: it has no gradient"));
    let error = model.step(|_, gradients| gradients.write(1, &[0.0; 13])).unwrap_err().to_string();
    assert_eq!(error, format!("step: {frozen}: it has no gradient"));
    assert_eq!(model.gradient(1).unwrap_err().to_string(), format!("gradient: {frozen}: it has no gradient"));
    let everything = 0..shapes().tensors().len();
    let mut all = shapes();
    all.assign(everything, ParameterGroup::FROZEN);
    let mut still = mgpu_tests::models::model(&mut world, &all, config(sgd())).unwrap();
    let before = still.parameters().to_vec();
    still.step(|_, _| Ok(())).unwrap();
    assert_eq!(still.parameters(), before);
}

#[test]
fn different_or_invalid_groups_are_named() {
    let errors = threads::run(3, |mut world| {
        let layout = if world.rank() == 1 { grouped() } else { shapes() };
        model(&mut world, &layout, config(sgd())).err().unwrap().to_string()
    });
    let groups = "learning rate × 2, weight decay × 0.5 on rank 1 and as learning rate × 1, weight decay × 1 on rank 0";
    assert!(
        errors.iter().all(|error| error.contains(&format!("tensor `0` is trained as {groups}"))),
        "{errors:?}"
    );
    for factor in [f32::NAN, f32::INFINITY, -1.0] {
        let mut layout = shapes();
        layout.assign([2], ParameterGroup::new().with_learning_rate(factor));
        let error = model(&mut World::from_env().unwrap(), &layout, config(sgd())).err().unwrap().to_string();
        let problem = "tensor `2`: a factor of the learning rate is a finite number from 0, not";
        assert!(error.contains(problem), "{error}");
    }
}

/// Missing gradients count as 0, on any rank and in any micro-batch; buckets still match.
#[test]
fn tensors_that_are_not_used_count_as_zeros() {
    let layout = shapes();
    for optimizer in optimizers() {
        for ranks in [1, 2, 3] {
            threads::run(ranks, |mut world| {
                let uses = |rank: usize, micro_batch: usize, step: u64, tensor: usize| {
                    !(rank + micro_batch + step as usize + tensor).is_multiple_of(3)
                };
                let mut run = |config: DataParallelConfig, explicit: bool| {
                    let mut model = model(&mut world, &layout, config.with_micro_batches(2)).unwrap();
                    let rank = model.rank() as usize;
                    for step in 0..4 {
                        model
                            .step_accumulated(|batch| {
                                for tensor in (0..layout.tensors().len()).rev() {
                                    let gradient = batch.gradients.gradient(tensor);
                                    let elements = layout.range(tensor);
                                    if uses(rank, batch.index, step, tensor) {
                                        for (value, element) in gradient.iter_mut().zip(elements) {
                                            *value = rough(rank * 2 + batch.index, element, step);
                                        }
                                    } else if explicit {
                                        gradient.fill(0.0);
                                    } else {
                                        gradient.fill(f32::NAN);
                                        continue;
                                    }
                                    batch.gradients.ready(tensor)?;
                                }
                                Ok(())
                            })
                            .unwrap();
                    }
                    outcome(&mut model).unwrap()
                };
                for config in [config(optimizer), sharded(optimizer), sharded(optimizer).with_overlap(true)] {
                    let expected = run(config, true);
                    assert!(run(config.with_unused(Unused::Zero), false) == expected, "{ranks} ranks");
                }
            });
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// The tracking in host memory: each rank announces gradients in its own order, different in each micro-batch;
    /// results are bit-equal.
    #[test]
    fn gradients_come_in_any_order_on_each_rank(
        orders in prop::collection::vec(Just(vec![0usize, 1, 2, 3, 4]).prop_shuffle(), 8),
        frozen in 0usize..6, bucket in 1usize..4000, shard: bool, overlap: bool,
    ) {
        let mut layout = shapes();
        layout.assign([frozen].into_iter().filter(|tensor| *tensor < 5), ParameterGroup::FROZEN);
        let config = if shard { sharded(sgd()) } else { config(sgd()) };
        let config = config.with_bucket(bucket).with_micro_batches(2);
        let run = |overlap: bool, order: &(dyn Fn(usize, u64, usize) -> Vec<usize> + Sync)| {
            threads::run(2, |mut world| {
                let mut model = model(&mut world, &layout, config.with_overlap(overlap)).unwrap();
                let rank = model.rank() as usize;
                for step in 0..2 {
                    model.step_accumulated(|batch| {
                        for tensor in order(rank, step, batch.index) {
                            if batch.gradients.wants(tensor) {
                                let gradient: Vec<f32> = layout
                                    .range(tensor)
                                    .map(|element| rough(rank * 2 + batch.index, element, step))
                                    .collect();
                                batch.gradients.write(tensor, &gradient)?;
                            }
                        }
                        Ok(())
                    }).unwrap();
                }
                (model.parameters().to_vec(), model.gradients().unwrap())
            })
        };
        let expected = run(false, &|_, _, _| vec![4, 3, 2, 1, 0]);
        let found = run(overlap, &|rank, step, index| orders[rank * 4 + step as usize * 2 + index].clone());
        prop_assert!(found == expected);
    }
}

#[test]
fn a_reducer_serves_a_custom_optimizer() {
    let layout = grouped();
    let lr = 0.1f32;
    let plain = OptimizerConfig::new(Rule::Sgd(Sgd { lr: f64::from(lr), ..Sgd::default() }));
    let mut ungrouped = shapes();
    ungrouped.assign([1, 3], ParameterGroup::FROZEN);
    for ranks in [1, 2, 3] {
        for change in [
            |config: ReducerConfig| config,
            |config: ReducerConfig| config.with_clip_norm(0.5),
            |config: ReducerConfig| config.with_overlap(true),
            |config: ReducerConfig| config.with_compression(mgpu::Compression::Bf16),
        ] {
            threads::run(ranks, |mut world| {
                let reducing = change(ReducerConfig::new().with_bucket(400).with_micro_batches(2));
                let mut expected = config(plain);
                expected.reducer = reducing;
                let mut parallel = model(&mut world, &ungrouped, expected).unwrap();
                let mut parameters = parallel.parameters().to_vec();
                train(&mut parallel, 4, &[0, 4, 2]).unwrap();

                let comm = world.communicator().unwrap();
                let mut reducer = Reducer::new(comm, layout_without_factors(&layout), reducing).unwrap();
                let rank = reducer.rank() as usize;
                for step in 0..4 {
                    reducer
                        .reduce_accumulated(&mut [], |index, _, gradients| {
                            [0, 4, 2].into_iter().try_for_each(|tensor| {
                                let gradient: Vec<f32> = layout
                                    .range(tensor)
                                    .map(|element| rough(rank * 10 + index, element, step))
                                    .collect();
                                gradients.write(tensor, &gradient)
                            })
                        })
                        .unwrap();
                    for tensor in [0, 2, 4] {
                        let moves = reducer.gradient(tensor).unwrap().iter();
                        for (parameter, gradient) in parameters[layout.range(tensor)].iter_mut().zip(moves) {
                            *parameter -= lr * gradient;
                        }
                    }
                }
                assert!(parameters == parallel.parameters(), "{reducing:?} on {ranks} ranks");
                assert_eq!(reducer.gradient_norm(), parallel.gradient_norm());
                assert_eq!(reducer.gradients().unwrap(), parallel.gradients().unwrap());
                assert!(reducer.gradient(1).is_err());
            });
        }
    }
}

/// The same tensors, with the same ones frozen.
fn layout_without_factors(layout: &Layout) -> Layout {
    let mut plain = layout.clone();
    plain.assign([0, 4], ParameterGroup::new());
    plain
}

#[test]
fn a_closure_handles_one_micro_batch() {
    let mut world = World::from_env().unwrap();
    let mut model = model(&mut world, &shapes(), config(sgd()).with_micro_batches(2)).unwrap();
    let error = model.step(|_, _| Ok(())).unwrap_err().to_string();
    assert_eq!(error, "step: there are 2 micro-batches: call step_accumulated");
    let config = ReducerConfig::new().with_micro_batches(3);
    let mut reducer = Reducer::new(world.communicator().unwrap(), shapes(), config).unwrap();
    let error = reducer.reduce(|_| Ok(())).unwrap_err().to_string();
    assert_eq!(error, "reduce: there are 3 micro-batches: call reduce_accumulated");
}

#[test]
fn a_schedule_equals_setting_the_learning_rate() {
    use mgpu::optimizer::Decay;
    let schedule = Schedule { warm_up: 2, decay: Decay::Cosine { steps: 3, floor: 0.1 } };
    for optimizer in optimizers() {
        let mut world = World::from_env().unwrap();
        let mut by_hand = model(&mut world, &shapes(), config(optimizer)).unwrap();
        let mut scheduled = model(&mut world, &shapes(), config(optimizer.with_schedule(schedule))).unwrap();
        let all = [4, 3, 2, 1, 0];
        for step in 0..6 {
            let lr = optimizer.rule.lr() * schedule.factor(step);
            by_hand.set_learning_rate(lr);
            assert_eq!((by_hand.learning_rate(), scheduled.learning_rate()), (lr, lr));
            train(&mut by_hand, 1, &all).unwrap();
            train(&mut scheduled, 1, &all).unwrap();
            assert!(by_hand.parameters() == scheduled.parameters(), "step {step}, {optimizer:?}");
        }
    }
    let never = Schedule { warm_up: 0, decay: Decay::Linear { steps: 0 } };
    let config = config(sgd().with_schedule(never));
    let error = model(&mut World::from_env().unwrap(), &shapes(), config).err().unwrap().to_string();
    assert_eq!(error, "data parallel: a schedule's learning rate falls over at least one step");
}

#[test]
fn buffers_that_differ_are_named() {
    let errors = threads::run(2, |mut world| {
        let model = model(&mut world, &shapes(), config(sgd())).unwrap();
        model.with_buffers(vec![world.rank() as f32; 3]).err().unwrap().to_string()
    });
    assert!(errors[0].contains("has buffers 3 elements with checksum "), "{errors:?}");
}
