//! Loss scaling on the host: steps whose gradients overflow are skipped.

use mgpu::checkpoint::{self, Snapshot, Writer};
use mgpu::optimizer::{Decay, LossScale, LossScaler, Schedule};
use mgpu::{Compression, DataParallel, DataParallelConfig, Error, Result, World};
use mgpu_tests::models::{model, optimizers};
use mgpu_tests::threads;

use super::{config, exact, host, rough, sgd, shapes, sharded, shared, train};

fn scaler() -> LossScaler {
    LossScaler::default().with_scale(1024.0).with_growth_interval(2)
}

/// Makes a step of one sample on each rank, with the gradients of step `number` times the scale.
fn attempt(model: &mut DataParallel, number: u64, bad: Option<(usize, f32)>) -> Result<()> {
    let (scale, ranks) = (model.loss_scale().map_or(1.0, |scale| scale.scale), model.ranks() as usize);
    let last = model.rank() as usize + 1 == ranks;
    let gradient = |sample: usize, index: usize, _| match bad {
        Some((element, value)) if element == index && (last || value.is_finite()) => value,
        _ => rough(sample, index, number) * scale,
    };
    train(model, 1, (ranks, 1), gradient).map(|_| ())
}

/// The scale is a power of two, so the bits are those of a training without scale that makes the other steps only.
#[test]
fn a_skipped_step_changes_nothing_but_the_scale() {
    for optimizer in optimizers() {
        for ranks in [1, 2, 4] {
            threads::run(ranks, |mut world| {
                let plain = config(optimizer);
                for config in [
                    plain,
                    plain.with_clip_norm(0.5),
                    plain.with_compression(Compression::Bf16),
                    plain.with_overlap(true),
                    plain.with_world_size_invariant(true),
                    sharded(optimizer),
                    sharded(optimizer).with_clip_norm(0.5),
                    shared(optimizer),
                    shared(optimizer).with_clip_norm(0.5),
                    host(optimizer),
                ] {
                    let mut expected = model(&mut world, &shapes(), config).unwrap();
                    let scaled = config.with_loss_scaler(scaler());
                    let mut found = model(&mut world, &shapes(), scaled).unwrap();
                    assert_eq!((expected.loss_scale(), found.loss_scale()), (None, Some(scaler().initial())));
                    let mut scale = scaler().initial();
                    // In any element, and so in any rank's shard.
                    let overflow =
                        |element| if ranks > 1 { (element, f32::MAX * 0.9) } else { (element, f32::NAN) };
                    let attempts = [
                        Some((0, f32::INFINITY)),
                        None,
                        None,
                        None,
                        Some(overflow(55)),
                        Some((820, f32::NAN)),
                        None,
                        Some(overflow(400)),
                        None,
                    ];
                    for (index, bad) in (0..).zip(attempts) {
                        attempt(&mut found, index, bad).unwrap();
                        if bad.is_none() {
                            attempt(&mut expected, index, None).unwrap();
                            let norms = [&found, &expected].map(DataParallel::gradient_norm);
                            assert_eq!(norms[0], norms[1], "{config:?}");
                            assert!(
                                found.gradients().unwrap() == expected.gradients().unwrap(),
                                "{config:?}"
                            );
                        }
                        scale = scaler().after(scale, bad.is_some());
                        assert_eq!(found.loss_scale(), Some(scale), "step {index}, {config:?}");
                        assert!(found.parameters() == expected.parameters(), "step {index}, {config:?}");
                        assert_eq!(found.steps(), index + 1);
                    }
                    assert_eq!(scale.skipped, 4);
                    assert!(found.averaged_parameters().unwrap() == expected.averaged_parameters().unwrap());
                    found.verify().unwrap();
                }
            });
        }
    }
}

#[test]
fn a_schedule_counts_skipped_steps() {
    let schedule = Schedule { warm_up: 0, decay: Decay::Linear { steps: 10 } };
    let config = config(sgd().with_schedule(schedule)).with_loss_scaler(scaler());
    let mut model = model(&mut World::from_env().unwrap(), &shapes(), config).unwrap();
    attempt(&mut model, 0, Some((0, f32::NAN))).unwrap();
    assert!((model.learning_rate() - 0.09).abs() < 1e-12);
}

#[test]
fn a_checkpoint_continues_with_its_loss_scale() {
    let folder = tempfile::tempdir().unwrap();
    let optimizer = optimizers()[0];
    let config = config(optimizer).with_loss_scaler(scaler());
    let whole: Vec<f32> = threads::run(2, |mut world| {
        let mut model = model(&mut world, &shapes(), config).unwrap();
        let mut writer = (world.rank() == 0).then(|| Writer::new(folder.path(), 2).unwrap());
        for step in 0..7 {
            attempt(&mut model, step, [0, 2].contains(&step).then_some((40, f32::INFINITY))).unwrap();
            if step == 3 {
                let snapshot = Snapshot::of(&mut model).unwrap();
                if let (Some(writer), Some(snapshot)) = (&mut writer, snapshot) {
                    writer.save(snapshot).unwrap();
                    writer.finish().unwrap();
                }
            }
        }
        model.parameters().to_vec()
    })
    .remove(0);
    let checkpoint = checkpoint::find(folder.path()).unwrap().unwrap().checkpoint;
    let saved = LossScale { scale: 256.0, good_steps: 1, skipped: 2 };
    assert_eq!(checkpoint.manifest().loss_scale(), Some(saved));
    let (whole, checkpoint) = (&whole, &checkpoint);
    let resume = |config: DataParallelConfig, ranks: u32| {
        threads::run(ranks, |mut world| {
            let mut model = model(&mut world, &shapes(), config).unwrap();
            model.restore(4, |name, layout| checkpoint.load(name, layout)).unwrap();
            // The other ranks adopt what rank 0 has.
            let own = (world.rank() == 0).then(|| checkpoint.manifest().loss_scale()).flatten();
            model.restore_loss_scale(own).unwrap();
            let scale = model.loss_scale();
            (4..7).for_each(|step| attempt(&mut model, step, None).unwrap());
            (scale, model.parameters() == &whole[..])
        })
    };
    assert!(resume(config, 2).iter().all(|found| *found == (Some(saved), true)));
    let sharded = sharded(optimizer).with_loss_scaler(scaler());
    assert!(resume(sharded, 2).iter().all(|found| *found == (Some(saved), true)));
    // A model without a scale ignores it.
    assert!(resume(self::config(optimizer), 2).iter().all(|(scale, _)| scale.is_none()));
}

#[test]
fn a_number_that_is_no_loss_scale_is_refused() {
    let config = config(sgd()).with_loss_scaler(scaler());
    let mut model = model(&mut World::from_env().unwrap(), &shapes(), config).unwrap();
    model.restore_loss_scale(None).unwrap();
    assert_eq!(model.loss_scale(), Some(scaler().initial()));
    let good = LossScale { scale: 1.0, good_steps: 0, skipped: 0 };
    for bad in [
        LossScale { scale: f32::NAN, ..good },
        LossScale { scale: 0.0, ..good },
        LossScale { scale: -1.0, ..good },
        LossScale { skipped: 1, ..good },
    ] {
        let error = model.restore_loss_scale(Some(bad)).unwrap_err().to_string();
        assert!(error.contains("is no loss scale after 0 steps"), "{error}");
    }
}

/// Without a scale, or if no scale helps, non-finite gradients are errors.
#[test]
fn gradients_that_no_scale_makes_finite_are_named() {
    for ranks in [1, 2] {
        threads::run(ranks, |mut world| {
            let least = scaler().with_scale(3.0 * LossScaler::LEAST);
            for (config, skipped) in [(config(sgd()), 0), (config(sgd()).with_loss_scaler(least), 2)] {
                let mut model = model(&mut world, &shapes(), config).unwrap();
                let before = model.parameters().to_vec();
                for _ in 0..skipped {
                    attempt(&mut model, 0, Some((40, f32::NAN))).unwrap();
                }
                let error = attempt(&mut model, 0, Some((40, f32::NAN))).unwrap_err();
                assert!(matches!(&error, Error::NotFinite { tensor, .. } if tensor == "1"), "{error}");
                assert!(model.parameters() == before && model.steps() == skipped);
                // The next step may be made.
                attempt(&mut model, 0, None).unwrap();
            }
        });
    }
}

#[test]
fn incompatible_settings_are_named() {
    let mut world = World::from_env().unwrap();
    let mut refused = |config| model(&mut world, &shapes(), config).err().expect("an error").to_string();
    let config = config(sgd()).with_loss_scaler(scaler());
    let error = refused(config.with_check_finite(false));
    assert!(
        error.contains("a loss scale follows the check for non-finite gradients: enable `check_finite`"),
        "{error}"
    );
    let error = refused(config.with_loss_scaler(scaler().with_scale(0.0)));
    assert!(error.contains("a loss scale is a number from"), "{error}");
}

/// Micro-batches are accumulated with the scale, and divided by it once.
#[test]
fn micro_batches_are_scaled_alike() {
    let train_scaled = |scaled: bool| {
        let config = config(sgd()).with_loss_scaler(scaled.then(scaler));
        let mut model = model(&mut World::from_env().unwrap(), &shapes(), config).unwrap();
        let factor = if scaled { 1024.0 } else { 1.0 };
        let gradient = |sample, index, step| exact(sample, index, step) * factor;
        train(&mut model, 1, (8, 4), gradient).unwrap();
        model.parameters().to_vec()
    };
    assert!(train_scaled(true) == train_scaled(false));
}
