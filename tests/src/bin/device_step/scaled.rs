//! Gradients with a loss scale, some of which overflow. Every training is compared with one without a scale that makes
//! the other steps only: scales are powers of two, so all bits are the same.

use mgpu::device::{DeviceConfig, DeviceDataParallel, StatusReadback};
use mgpu::optimizer::{LossScale, LossScaler};
use mgpu::{Compression, Error, Placement, Result, ShardFrom, World};
use mgpu_kernels::arena::cuda as arena;
use mgpu_kernels::cuda::StepState;

use super::{Inputs, STEPS, adam, config, kept_elsewhere, model, sgd};

/// Which attempts at a step overflow, and in which way.
const ATTEMPTS: [Option<Overflow>; 7] =
    [Some(Overflow::OneElement), None, None, Some(Overflow::Sum), Some(Overflow::NanEverywhere), None, None];

#[derive(Debug, Clone, Copy)]
enum Overflow {
    /// Infinite on the last rank.
    OneElement,
    /// Finite, with an infinite sum if there are several ranks; else infinite.
    Sum,
    NanEverywhere,
}

pub(crate) fn check(world: &mut World) -> Result<()> {
    for optimizer in [sgd(), adam()] {
        for micro_batches in [1, 2] {
            let plain = config(optimizer, micro_batches);
            let with = |change: fn(&mut DeviceConfig)| {
                let mut config = plain;
                change(&mut config);
                config
            };
            let mut configs = vec![
                plain,
                with(|config| config.parallel.shard_from = ShardFrom::Bytes(0)),
                with(|config| config.parallel.shard_from = ShardFrom::Bytes(45_000)),
                with(|config| config.parallel.reducer.compression = Compression::Bf16),
                with(|config| config.parallel.reducer.clip_norm = Some(2.0)),
            ];
            if world.size().is_power_of_two() {
                configs.push(with(|config| config.parallel.reducer.world_size_invariant = true));
            }
            configs.extend(kept_elsewhere(plain));
            configs.extend(kept_elsewhere(configs[4]));
            for config in configs {
                skips_and_resumes(world, config)?;
            }
        }
    }
    for config in [[config(sgd(), 1)].as_slice(), &kept_elsewhere(config(sgd(), 1))].concat() {
        gives_up_at_the_smallest_scale(world, config)?;
    }
    Ok(())
}

fn scaler() -> LossScaler {
    LossScaler::default().with_growth_interval(2)
}

/// The factor of the loss's gradient that kernels would read.
fn scale_on_device(model: &DeviceDataParallel, begun: bool) -> Result<f32> {
    model.wait("a step")?;
    let state = StepState::download(model.state(), model.stream())?;
    Ok(if begun { state.loss_scale } else { state.next_loss_scale(&scaler()).scale })
}

/// Makes a step with the gradients of step `number`, which are scaled and may overflow.
fn attempt(
    model: &mut DeviceDataParallel,
    inputs: &Inputs,
    number: usize,
    overflow: Option<Overflow>,
) -> Result<()> {
    let last = model.rank() + 1 == model.ranks();
    let (element, batches) = (inputs.layout.range(4).start + 17, inputs.gradients[number].len());
    for (index, gradients) in inputs.gradients[number].iter().enumerate() {
        if index == 0 { model.begin_step() } else { model.next_micro_batch() }?;
        let scale = scale_on_device(model, true)?;
        for tensor in [6, 5, 0, 1, 3, 2, 4] {
            let range = inputs.layout.range(tensor);
            let to = model.gradient(tensor);
            model.stream().copy(gradients.slice(range.clone()), to)?;
            if !range.is_empty() {
                arena::scale(model.stream(), to, scale)?;
            }
            let bad = match overflow {
                Some(Overflow::OneElement) => last.then_some(f32::INFINITY),
                // Not of micro-batches, which are divided by their number first.
                Some(Overflow::Sum) if model.ranks() > 1 && batches == 1 => Some(f32::MAX * 0.9),
                Some(Overflow::Sum) => Some(f32::NEG_INFINITY),
                Some(Overflow::NanEverywhere) => Some(f32::NAN),
                None => None,
            };
            if let Some(bad) = bad.filter(|_| range.contains(&element) && index + 1 == batches) {
                let at = element - range.start;
                model.stream().upload(&[bad], to.slice(at..at + 1))?;
            }
            model.ready(tensor)?;
        }
    }
    model.finish_step()
}

fn skips_and_resumes(world: &mut World, plain: DeviceConfig) -> Result<()> {
    let what = format!("{plain:?}");
    let mut expected = model(world, plain)?;
    let mut config = plain;
    config.parallel.loss_scaler = Some(scaler());
    let mut found = model(world, config)?;
    let inputs = Inputs::new(&found, found.micro_batches())?;
    let mut status = StatusReadback::new(&found)?;
    assert_eq!((expected.loss_scale(), found.loss_scale()), (None, Some(scaler().initial())));
    let (mut made, mut scale) = (0, scaler().initial());
    for (index, overflow) in ATTEMPTS.into_iter().enumerate() {
        let number = made.min(STEPS as usize - 1);
        if overflow.is_none() {
            inputs.step_with(&mut expected, number)?;
            made += 1;
        }
        attempt(&mut found, &inputs, number, overflow)?;
        scale = scaler().after(scale, overflow.is_some());
        found.enqueue_status_readback(&mut status)?;
        found.read_status(&mut status)?;
        assert_eq!(found.loss_scale(), Some(scale), "{what}, step {index}");
        assert!(found.parameters()? == expected.parameters()?, "{what}, step {index}: other weights");
        assert_eq!(found.steps(), index as u64 + 1);
        // After a model's first step its buckets follow the order of gradients, and with them the shards.
        if overflow.is_none() && made > 1 {
            assert!(found.gradients()? == expected.gradients()?, "{what}, step {index}: other gradients");
            assert_eq!(found.gradient_norm()?, expected.gradient_norm()?, "{what}, step {index}");
        }
    }
    let on_device = scale_on_device(&found, plain.parallel.placement == Placement::Host)?;
    assert_eq!(on_device, scale.scale, "{what}");
    assert_eq!(scale, LossScale { scale: 32768.0, good_steps: 0, skipped: 3 });
    found.verify()?;

    // A model that has trained something else continues with the same bits.
    let arenas = found.arenas()?;
    let mut resumed = model(world, config)?;
    attempt(&mut resumed, &inputs, 0, Some(Overflow::NanEverywhere))?;
    resumed.restore(found.steps(), |name, _| {
        let values = &arenas.iter().find(|(known, _)| *known == name).expect("an arena").1;
        Ok(if values.is_empty() { vec![7.0; inputs.layout.len()] } else { values.to_vec() })
    })?;
    assert_eq!(resumed.loss_scale(), Some(scaler().initial()), "{what}");
    let saved = LossScale { scale: 1.0, ..scale };
    resumed.restore_loss_scale(Some(if world.rank() == 0 { scale } else { saved }))?;
    assert_eq!(resumed.loss_scale(), Some(scale), "{what}");
    for number in [1, 2] {
        for model in [&mut found, &mut resumed] {
            attempt(model, &inputs, number, None)?;
            model.check()?;
        }
    }
    assert!(found.parameters()? == resumed.parameters()?, "{what}: other weights after resuming");
    assert_eq!(found.loss_scale(), resumed.loss_scale(), "{what}");
    let error = resumed.restore_loss_scale(Some(LossScale { scale: 0.0, ..scale })).unwrap_err().to_string();
    assert!(error.contains("is no loss scale after 9 steps"), "{error}");
    Ok(())
}

/// Gradients that no scale makes finite are the error that they are without a scale.
fn gives_up_at_the_smallest_scale(world: &mut World, mut config: DeviceConfig) -> Result<()> {
    config.parallel.loss_scaler = Some(LossScaler::default().with_scale(LossScaler::LEAST * 3.0));
    let mut model = model(world, config)?;
    let inputs = Inputs::new(&model, 1)?;
    let before = model.parameters()?;
    for step in 0..3 {
        let outcome =
            attempt(&mut model, &inputs, 0, Some(Overflow::NanEverywhere)).and_then(|()| model.check());
        match outcome {
            Ok(()) => assert!(step < 2, "step {step}"),
            Err(Error::NotFinite { rank: 0, step: 3, .. }) => assert_eq!(step, 2),
            Err(other) => return Err(other),
        }
    }
    assert!(model.parameters()? == before);
    assert_eq!(model.loss_scale().map(|scale| (scale.scale, scale.skipped)), Some((LossScaler::LEAST, 2)));
    Ok(())
}
