//! Optimizers, parameter groups, schedules, clipping, unused parameters and uneven inputs match PyTorch, as recorded
//! in double precision by fixtures/pytorch.py; loss scaling matches its GradScaler, as recorded by
//! fixtures/loss_scaling.py.

use mgpu::optimizer::{Adam, AdamW, Decay, LossScaler, OptimizerConfig, RmsProp, Rule, Schedule, Sgd};
use mgpu::{DataParallel, DataParallelConfig, Layout, ParameterGroup, Unused, World};
use mgpu_tests::threads;
use serde::Deserialize;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Recorded {
    start: Vec<f64>,
    /// Per step.
    gradients: Vec<Vec<f64>>,
    /// Parameters per step.
    optimizers: BTreeMap<String, Vec<Vec<f64>>>,
    /// Learning rates per step.
    schedules: BTreeMap<String, Vec<f64>>,
    clipped: Vec<Clipped>,
    /// Parameters per step and tensor.
    groups: BTreeMap<String, Vec<Vec<Vec<f64>>>>,
    unused: Vec<Vec<Vec<f64>>>,
    /// Number of steps of each rank.
    batches: Vec<usize>,
    /// Parameters per tensor, after the last step.
    joined: Vec<Vec<f64>>,
}

#[derive(Deserialize)]
struct Clipped {
    most: f64,
    norm: f64,
    gradients: Vec<Vec<f64>>,
}

fn recorded() -> Recorded {
    serde_json::from_str(include_str!("../fixtures/pytorch.json")).expect("fixtures/pytorch.json")
}

#[derive(Deserialize)]
struct LossScaling {
    start: Vec<f64>,
    cases: BTreeMap<String, ScaledTraining>,
}

#[derive(Deserialize)]
struct ScaledTraining {
    scaler: ScalerOptions,
    /// By step: `inf`, `-inf` or `nan`.
    overflows: BTreeMap<usize, String>,
    steps: Vec<ScaledStep>,
}

#[derive(Deserialize)]
struct ScalerOptions {
    init_scale: f32,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
}

/// The state after a step.
#[derive(Deserialize)]
struct ScaledStep {
    scale: f64,
    good_steps: u32,
    parameters: Vec<f64>,
}

/// Scale and growth tracker are equal; Adam does not count the steps that are skipped.
#[test]
fn loss_scaling_matches_pytorch() {
    let text = include_str!("../fixtures/loss_scaling.json");
    let LossScaling { start, cases } = serde_json::from_str(text).expect("fixtures/loss_scaling.json");
    assert_eq!(cases.len(), 3);
    for (name, case) in cases {
        let mut scaler = LossScaler::default()
            .with_scale(case.scaler.init_scale)
            .with_growth_interval(case.scaler.growth_interval);
        (scaler.growth, scaler.backoff) = (case.scaler.growth_factor, case.scaler.backoff_factor);
        let adam = OptimizerConfig::new(Rule::Adam(Adam { lr: 0.01, ..Adam::default() }));
        let config = DataParallelConfig::new(adam, 1).with_loss_scaler(scaler);
        let mut model = model(&[&start], config);
        for (step, expected) in case.steps.iter().enumerate() {
            let scale = model.loss_scale().unwrap().scale;
            let gradient =
                |index: usize| (1.3 * index as f64 + 0.7 * step as f64).sin() * 10f64.powi(index as i32 - 2);
            let mut gradients: Vec<f32> =
                (0..start.len()).map(|index| gradient(index) as f32 * scale).collect();
            if let Some(overflow) = case.overflows.get(&step) {
                gradients[step % start.len()] = overflow.parse().unwrap();
            }
            model.step(|_, sink| sink.write(0, &gradients)).unwrap();
            let state = model.loss_scale().unwrap();
            assert_eq!(
                (f64::from(state.scale), state.good_steps),
                (expected.scale, expected.good_steps),
                "{name}, step {step}"
            );
            let skipped = case.overflows.keys().filter(|at| **at <= step).count();
            assert_eq!(state.skipped, skipped as u64);
            for (found, expected) in model.parameters().iter().zip(&expected.parameters) {
                let deviation = (f64::from(*found) - expected).abs();
                assert!(
                    deviation <= 2e-6 * expected.abs().max(0.1),
                    "{name}, step {step}: {found}, {expected}"
                );
            }
        }
    }
}

fn rules() -> [(&'static str, Rule); 9] {
    let sgd = Sgd { lr: 0.1, weight_decay: 0.1, ..Sgd::default() };
    let adam = Adam { lr: 0.01, ..Adam::default() };
    let rms_prop = RmsProp { lr: 0.01, rho: 0.95, ..RmsProp::default() };
    [
        ("sgd", Rule::Sgd(Sgd { weight_decay: 0.0, ..sgd })),
        ("sgd, decay", Rule::Sgd(Sgd { weight_decay: 0.3, ..sgd })),
        ("sgd, momentum", Rule::Sgd(Sgd { momentum: 0.9, dampening: 0.25, ..sgd })),
        ("sgd, nesterov", Rule::Sgd(Sgd { momentum: 0.8, nesterov: true, ..sgd })),
        ("adam", Rule::Adam(adam)),
        ("adam, decay", Rule::Adam(Adam { beta1: 0.8, beta2: 0.99, eps: 1e-4, weight_decay: 0.2, ..adam })),
        ("adamw", Rule::AdamW(AdamW { lr: 0.01, beta1: 0.8, beta2: 0.99, eps: 1e-8, weight_decay: 0.3 })),
        ("rmsprop", Rule::RmsProp(rms_prop)),
        (
            "rmsprop, momentum",
            Rule::RmsProp(RmsProp { rho: 0.9, eps: 1e-3, momentum: 0.7, weight_decay: 0.1, ..rms_prop }),
        ),
    ]
}

/// A model with one tensor for each list.
fn model(values: &[&[f64]], config: DataParallelConfig) -> DataParallel {
    let mut layout = Layout::new();
    for (index, values) in values.iter().enumerate() {
        layout.push(index.to_string(), [values.len()]);
    }
    let parameters = values.iter().flat_map(|values| values.iter().map(|value| *value as f32)).collect();
    let comm = World::from_env().unwrap().communicator().unwrap();
    DataParallel::with_config(comm, layout, parameters, config).unwrap()
}

fn floats(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

#[test]
fn optimizers_match_pytorch() {
    let recorded = recorded();
    assert_eq!(recorded.optimizers.len(), rules().len());
    for (name, rule) in rules() {
        let config = DataParallelConfig::new(OptimizerConfig::new(rule), 1);
        let mut model = model(&[&recorded.start], config);
        let steps = recorded.gradients.iter().zip(&recorded.optimizers[name]);
        for (step, (gradient, expected)) in steps.enumerate() {
            model.step(|_, sink| sink.write(0, &floats(gradient))).unwrap();
            for (found, expected) in model.parameters().iter().zip(expected) {
                let deviation = (f64::from(*found) - expected).abs();
                assert!(
                    deviation <= 2e-6 * expected.abs().max(0.1),
                    "{name}, step {step}: {found}, {expected}"
                );
            }
        }
    }
}

#[test]
fn schedules_match_pytorch() {
    let recorded = recorded();
    let schedules = [
        ("constant", Schedule::CONSTANT),
        ("linear", Schedule { warm_up: 0, decay: Decay::Linear { steps: 7 } }),
        ("cosine", Schedule { warm_up: 0, decay: Decay::Cosine { steps: 11, floor: 0.2 } }),
        ("step", Schedule { warm_up: 0, decay: Decay::Step { every: 3, factor: 0.3 } }),
        ("warm-up, cosine", Schedule { warm_up: 5, decay: Decay::Cosine { steps: 7, floor: 0.0 } }),
    ];
    assert_eq!(recorded.schedules.len(), schedules.len());
    for (name, schedule) in schedules {
        for (step, expected) in (0..).zip(&recorded.schedules[name]) {
            let deviation = (schedule.factor(step) - expected).abs();
            assert!(deviation < 1e-14, "{name}, step {step}: {deviation}");
        }
    }
}

#[test]
fn gradient_clipping_matches_pytorch() {
    for Clipped { most, norm, gradients } in recorded().clipped {
        let optimizer = OptimizerConfig::new(Rule::Sgd(Sgd { lr: 0.0, ..Sgd::default() }));
        let config = DataParallelConfig::new(optimizer, 1).with_clip_norm(Some(most));
        let mut model = model(&[&[0.0; 3], &[0.0; 3]], config);
        let raw = recorded().gradients;
        model
            .step(|_, sink| {
                [1, 0].into_iter().try_for_each(|tensor| sink.write(tensor, &floats(&raw[tensor][..3])))
            })
            .unwrap();
        assert!((model.gradient_norm().unwrap() / norm - 1.0).abs() < 1e-6);
        for (tensor, expected) in gradients.iter().enumerate() {
            for (found, expected) in model.gradient(tensor).unwrap().iter().zip(expected) {
                assert!((f64::from(*found) - expected).abs() <= 1e-6 * expected.abs(), "{found}, {expected}");
            }
        }
    }
}

/// Asserts that `found` has these values, relative to `scale` or larger.
fn assert_close(what: &str, found: &[f32], expected: &[f64], scale: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let deviation = (f64::from(*found) - expected).abs();
        assert!(deviation <= 2e-6 * expected.abs().max(scale), "{what}: {found}, {expected}");
    }
}

#[test]
fn parameter_groups_match_pytorch() {
    let recorded = recorded();
    let start = &recorded.start;
    for (name, rule) in rules().into_iter().filter(|(name, _)| recorded.groups.contains_key(*name)) {
        let mut layout = Layout::new();
        let tensors = [0, 1, 2, 3].map(|tensor: usize| layout.push(tensor.to_string(), [start.len()]));
        layout.assign([1], ParameterGroup::new().with_learning_rate(2.5).with_weight_decay(0.5));
        layout.assign([2], ParameterGroup::FROZEN);
        layout.assign([3], ParameterGroup::new().with_learning_rate(0.25).with_weight_decay(0.0));
        let comm = World::from_env().unwrap().communicator().unwrap();
        let parameters = floats(start).repeat(tensors.len());
        let config = DataParallelConfig::new(OptimizerConfig::new(rule), 1);
        let mut model = DataParallel::with_config(comm, layout.clone(), parameters, config).unwrap();
        for (step, expected) in recorded.groups[name].iter().enumerate() {
            let gradient = |tensor: usize| floats(&recorded.gradients[step + tensor]);
            model
                .step(|_, sink| {
                    [3, 1, 0].into_iter().try_for_each(|tensor| sink.write(tensor, &gradient(tensor)))
                })
                .unwrap();
            for tensor in tensors {
                let what = format!("{name}, step {step}, tensor {tensor}");
                assert_close(&what, &model.parameters()[layout.range(tensor)], &expected[tensor], LARGE);
            }
        }
    }
    assert_eq!(recorded.groups.len(), 6);
}

/// A rank of a model with two tensors, with the recorded gradients of DistributedDataParallel's ranks.
fn rank_of(
    world: &mut World,
    recorded: &Recorded,
    change: fn(DataParallelConfig) -> DataParallelConfig,
) -> DataParallel {
    let mut layout = Layout::new();
    (0..2).for_each(|tensor: usize| _ = layout.push(tensor.to_string(), [recorded.start.len()]));
    let sgd = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.1, ..Sgd::default() };
    let config = change(DataParallelConfig::new(OptimizerConfig::new(Rule::Sgd(sgd)), 1));
    let parameters = floats(&recorded.start).repeat(2);
    DataParallel::with_config(world.communicator().unwrap(), layout, parameters, config).unwrap()
}

/// Gradients are up to 100, and so are parameters afterwards.
const LARGE: f64 = 10.0;

#[test]
fn unused_parameters_match_distributed_data_parallel() {
    let recorded = recorded();
    threads::run(2, |mut world| {
        let mut model = rank_of(&mut world, &recorded, |config| config.with_unused(Unused::Zero));
        let rank = model.rank() as usize;
        for (step, expected) in recorded.unused.iter().enumerate() {
            let used = |tensor: &usize| rank == 0 || *tensor == 0 || step.is_multiple_of(2);
            let gradient = |tensor: usize| floats(&recorded.gradients[step + 2 * rank + tensor]);
            let write = |tensor, sink: &mut dyn mgpu::GradientSink| sink.write(tensor, &gradient(tensor));
            model
                .step(|_, sink| [1, 0].into_iter().filter(used).try_for_each(|tensor| write(tensor, sink)))
                .unwrap();
            assert_close(&format!("step {step}"), model.parameters(), &expected.concat(), LARGE);
        }
    });
}

#[test]
fn uneven_inputs_match_pytorch_join() {
    let recorded = recorded();
    threads::run(recorded.batches.len() as u32, |mut world| {
        let mut model = rank_of(&mut world, &recorded, |config| config.with_join(true));
        let rank = model.rank() as usize;
        for step in 0..recorded.batches[rank] {
            let gradient = |tensor: usize| floats(&recorded.gradients[step + 2 * rank + tensor]);
            model
                .step(|_, sink| {
                    [1, 0].into_iter().try_for_each(|tensor| sink.write(tensor, &gradient(tensor)))
                })
                .unwrap();
        }
        model.join().unwrap();
        assert_close("joined", model.parameters(), &recorded.joined.concat(), LARGE);
    });
}
