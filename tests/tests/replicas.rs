//! Replicas start equal and stay equal; errors name the differences.

use mgpu::optimizer::{Adam, OptimizerConfig, RmsProp, Rule, Sgd};
use mgpu::replicate::{replicate, verify_equal};
use mgpu::{DataParallel, Layout, Result, World};
use mgpu_tests::threads;

/// Two tensors, large enough for several buckets.
fn layout() -> Layout {
    let mut layout = Layout::new();
    layout.push("weight", [700, 1000]);
    layout.push("bias", [1000]);
    layout
}

fn adam() -> OptimizerConfig {
    let rule = Rule::Adam(Adam { lr: 0.01, weight_decay: 0.1, ..Adam::default() });
    OptimizerConfig::new(rule).with_decay_weights_only().with_average(0.9)
}

/// Five steps with gradients that depend on rank and parameters; their mean over `ranks` ranks does not depend on the
/// number of ranks.
fn train(mut world: World, config: OptimizerConfig) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
    let (rank, ranks) = (world.rank(), world.size());
    let layout = layout();
    // Only the parameters of rank 0 count.
    let parameters = vec![rank as f32 + 1.0; layout.len()];
    let mut model = DataParallel::new(world.communicator()?, layout, parameters, config, 1)?;
    let offset = rank as f32 - (ranks - 1) as f32 / 2.0;
    for _ in 0..5 {
        model.step(|parameters, gradients| {
            for tensor in [1, 0] {
                let begin = [0, 700_000][tensor];
                let gradient = gradients.gradient(tensor);
                for (index, value) in gradient.iter_mut().enumerate() {
                    *value = parameters[begin + index] + index as f32 / 1e6 + offset;
                }
                gradients.ready(tensor)?;
            }
            Ok(())
        })?;
    }
    model.verify()?;
    let average = model.averaged_parameters()?;
    Ok((model.parameters().to_vec(), average))
}

#[test]
fn replicas_follow_one_rank_with_every_optimizer() {
    let sgd = Sgd { lr: 0.1, momentum: 0.9, nesterov: true, ..Sgd::default() };
    let rmsprop = RmsProp { lr: 0.01, ..RmsProp::default() };
    for config in [adam(), OptimizerConfig::new(Rule::Sgd(sgd)), OptimizerConfig::new(Rule::RmsProp(rmsprop))]
    {
        let alone = train(World::from_env().unwrap(), config).unwrap();
        for ranks in [2, 3] {
            let replicas = threads::run(ranks, |world| train(world, config).unwrap());
            assert!(replicas.iter().all(|replica| *replica == replicas[0]), "bit-equal");
            let close = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-5);
            assert!(close(&replicas[0].0, &alone.0), "{ranks} ranks with {}", config.rule.name());
            match (&replicas[0].1, &alone.1) {
                (Some(average), Some(expected)) => assert!(close(average, expected)),
                (average, expected) => assert_eq!(average, expected),
            }
        }
    }
}

#[test]
fn different_models_are_named_on_every_rank() {
    let errors = threads::run(3, |mut world| {
        let mut layout = Layout::new();
        layout.push("fc.weight", if world.rank() == 2 { [10, 20] } else { [20, 10] });
        let mut values = vec![0.0; 200];
        replicate(&mut world.communicator().unwrap(), &layout, &mut values).unwrap_err().to_string()
    });
    for error in errors {
        assert_eq!(
            error,
            "rank 0 and rank 2 hold different models: tensor `fc.weight` has shape [10, 20] on rank 2 and [20, 10] on rank 0"
        );
    }
}

/// Otherwise, gradients of different tensors would be averaged.
#[test]
fn tensors_in_different_places_are_named_on_every_rank() {
    let errors = threads::run(4, |mut world| {
        let mut layout = Layout::new();
        layout.push("a", [60]);
        // Rank 0 is the one that differs.
        let alignment = if world.rank() == 0 { 64 } else { 1 };
        layout.push_aligned("b", [10], alignment);
        let comm = world.communicator().unwrap();
        let values = vec![1.0; layout.len()];
        let error = DataParallel::new(comm, layout, values, adam(), 1).err().expect("different models");
        (error.culprit(), error.to_string())
    });
    for error in errors {
        let text = "rank 1 and rank 0 hold different models: tensor `b` begins at element 64 on rank 0 and at 60 on rank 1";
        assert_eq!(error, (Some(0), text.to_owned()));
    }
}

#[test]
fn shapes_too_large_for_memory_are_refused() {
    let mut layout = Layout::new();
    layout.push("huge", [1 << 32, 1 << 32]);
    let mut world = World::from_env().unwrap();
    let error = DataParallel::new(world.communicator().unwrap(), layout, Vec::new(), adam(), 1).err();
    let error = error.expect("no memory holds it").to_string();
    assert_eq!(error, "replicate: tensor `huge` of shape [4294967296, 4294967296] is larger than any memory");
}

#[test]
fn a_flipped_bit_is_found() {
    let errors = threads::run(3, |mut world| {
        let layout = layout();
        let mut values = vec![1.0f32; layout.len()];
        if world.rank() == 1 {
            values[700_500] = f32::from_bits(values[700_500].to_bits() ^ 1);
        }
        verify_equal(&mut world.communicator().unwrap(), &layout, &values).unwrap_err().to_string()
    });
    for error in errors {
        assert_eq!(error, "rank 1 holds other weights than rank 0 in tensor `bias`");
    }
}

#[test]
fn a_missing_gradient_is_named_and_changes_nothing() {
    let mut world = World::from_env().unwrap();
    let comm = world.communicator().unwrap();
    let len = layout().len();
    let mut model = DataParallel::new(comm, layout(), vec![1.0; len], adam(), 1).unwrap();
    for _ in 0..2 {
        let error = model.step(|_, gradients| gradients.ready(1)).unwrap_err().to_string();
        assert_eq!(error, "step: the gradient of tensor `weight` was not handed over");
        assert!(model.parameters().iter().all(|value| *value == 1.0) && model.steps() == 0);
    }
    model.step(|_, gradients| [1, 0].into_iter().try_for_each(|tensor| gradients.ready(tensor))).unwrap();
    assert_eq!(model.steps(), 1);
}
