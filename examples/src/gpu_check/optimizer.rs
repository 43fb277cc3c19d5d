//! All update rules, for some steps, from the beginning of a step to the copy in bf16 or f16; and the loss scale.
//!
//! Both sides round each operation separately, so results are bit-equal, except for the powers in Adam's bias
//! correction, which come from different libraries.

use std::ops::Range;

use mgpu_kernels::cuda::{Result, StepState, Stream, View};
use mgpu_kernels::loss_scale::LossScaler;
use mgpu_kernels::optimizer::chunk::{MAX_LEN, chunks};
use mgpu_kernels::optimizer::cuda::{Arenas, UpdatePlan};
use mgpu_kernels::optimizer::{Adam, AdamW, Factors, Optimizer, RmsProp, Sgd, State, cpu, cuda};
use mgpu_kernels::schedule::{Decay, Schedule};
use mgpu_kernels::{DType, digest};

use super::bound;
use super::harness::{Harness, Outcome, Output, Verdict};
use super::values::round_to;

const STEPS: u64 = 5;
const AVERAGE: f64 = 0.9;
const DECAY: f64 = 0.05;
/// The norm that gradients are clipped to; most steps exceed it.
const MOST: f64 = 5.0;
/// Offset of optimizer states relative to parameters, in elements.
const SHIFT: usize = 64;

/// All rules, named after their kernels.
pub(super) fn rules() -> [(&'static str, Optimizer); 7] {
    let sgd = Sgd { lr: 0.05, weight_decay: DECAY, ..Sgd::default() };
    let rmsprop = RmsProp { weight_decay: DECAY, ..RmsProp::default() };
    [
        ("adam", Optimizer::Adam(Adam { weight_decay: DECAY, ..Adam::default() })),
        ("adamw", Optimizer::AdamW(AdamW { weight_decay: DECAY, ..AdamW::default() })),
        ("rmsprop", Optimizer::RmsProp(rmsprop)),
        ("rmsprop momentum", Optimizer::RmsProp(RmsProp { momentum: 0.8, ..rmsprop })),
        ("sgd", Optimizer::Sgd(sgd)),
        ("sgd momentum", Optimizer::Sgd(Sgd { momentum: 0.9, dampening: 0.3, ..sgd })),
        ("sgd nesterov", Optimizer::Sgd(Sgd { momentum: 0.9, nesterov: true, ..sgd })),
    ]
}

pub(super) fn check(harness: &mut Harness) -> Outcome {
    for (name, optimizer) in rules() {
        for (falls, warm_up, decay) in [
            ("", 0, Decay::Constant),
            (", falling", 0, Decay::Linear { steps: 9 }),
            (", rising", 9, Decay::Constant),
            (", as a cosine", 1, Decay::Cosine { steps: 7, floor: 0.1 }),
            (", by steps", 1, Decay::Step { every: 2, factor: 0.3 }),
        ] {
            let plan =
                UpdatePlan { steps_per_epoch: 3, schedule: Schedule { warm_up, decay }, loss_scaler: None };
            let scaled = UpdatePlan { loss_scaler: Some(LossScaler::default()), ..plan };
            harness.check(
                &format!("step begin {name}"),
                format!("{STEPS} steps{falls}"),
                "f64",
                |b, j| begin(b, j, &optimizer, plan),
            )?;
            let sizes: &[usize] = if harness.quick {
                &[5, 100, 4200]
            } else {
                &[1, 130, 10, MAX_LEN, 3 * MAX_LEN + 5, 7, 150_000]
            };
            let text = format!("{} tensors{falls}", sizes.len());
            harness.check(&format!("optimizer {name}"), &text, "f32", |harness, verdict| {
                update(harness, verdict, &optimizer, plan, sizes)
            })?;
            harness.check(
                &format!("optimizer {name}"),
                format!("{text}, scaled"),
                "f32",
                |harness, verdict| update(harness, verdict, &optimizer, scaled, sizes),
            )?;
        }
        harness.check(&format!("step begin {name}"), "skipped steps", "f64", |harness, verdict| {
            scaling(harness, verdict, &optimizer)
        })?;
    }
    Ok(())
}

/// The loss scale follows the rule after any gradients, and the optimizer does not notice skipped steps.
fn scaling(harness: &mut Harness, verdict: &mut Verdict, optimizer: &Optimizer) -> Result<()> {
    const STEPS: usize = 40;
    // The last one reaches the smallest scale, where a step is not skipped any more.
    let scalers = [
        LossScaler::default().with_growth_interval(3),
        LossScaler::default().with_scale(1e38).with_growth_interval(1),
        LossScaler::default().with_scale(1000.1).with_growth_interval(2),
        LossScaler::default().with_scale(LossScaler::LEAST * 2.5),
    ];
    for scaler in scalers {
        let plan = |loss_scaler| UpdatePlan { steps_per_epoch: 3, schedule: Schedule::CONSTANT, loss_scaler };
        let (state, plain) = (StepState::after(0).with_loss_scale(scaler.initial()), StepState::after(0));
        let (mut state, plain) = (state.upload(&harness.stream)?, plain.upload(&harness.stream)?);
        let mut expected = scaler.initial();
        for step in 0..STEPS as u64 {
            cuda::begin_step(&harness.stream, optimizer, plan(Some(scaler)), state.view())?;
            let overflows = harness.random.below(3) == 0;
            if !overflows {
                cuda::begin_step(&harness.stream, optimizer, plan(None), plain.view())?;
            }
            let found = StepState::download(state.view(), &harness.stream)?;
            let unscaled = StepState::download(plain.view(), &harness.stream)?;
            verdict.equal("loss scale", &[found.loss_scale()], &[expected]);
            verdict.equal(
                "step, non-finite, scale",
                &[(found.step, found.non_finite, found.scale)],
                &[(step, 0, expected.inverse())],
            );
            if !overflows {
                let update = |state: StepState| (state.constants, state.step_size, state.shrink);
                verdict.equal("constants of the update", &[update(found)], &[update(unscaled)]);
            }
            let now = StepState { non_finite: if overflows { 7 } else { 0 }, ..found };
            state = now.upload(&harness.stream)?;
            verdict.equal("skipped", &[now.is_skipped()], &[overflows && expected.may_fall()]);
            if overflows && !expected.may_fall() {
                cuda::begin_step(&harness.stream, optimizer, plan(Some(scaler)), state.view())?;
                let halted = StepState::download(state.view(), &harness.stream)?;
                let what = (halted.halted, halted.step, halted.loss_scale());
                verdict.equal("halted", &[what], &[(1, step, expected)]);
                verdict.equal("scale of a halted step", &[now.next_loss_scale(&scaler)], &[expected]);
                break;
            }
            expected = scaler.after(expected, overflows);
            verdict.equal("next loss scale", &[now.next_loss_scale(&scaler)], &[expected]);
        }
    }
    Ok(())
}

/// The learning rate of step `step`, counted from 0.
fn rate(optimizer: &Optimizer, plan: UpdatePlan, step: u64) -> f64 {
    optimizer.lr() * plan.schedule.factor(step)
}

fn begin(
    harness: &mut Harness,
    verdict: &mut Verdict,
    optimizer: &Optimizer,
    plan: UpdatePlan,
) -> Result<()> {
    let start = StepState::after(0);
    let found =
        harness.twice(verdict, &[Output::holding(bytemuck::bytes_of(&start))], |stream, outputs| {
            (0..STEPS).try_for_each(|_| cuda::begin_step(stream, optimizer, plan, outputs[0]))
        })?;
    let state: StepState = bytemuck::pod_read_unaligned(found.bytes(0));
    let step = STEPS - 1;
    verdict.equal("step and position", &[state.step, state.position], &[step, step % plan.steps_per_epoch]);
    let expected = [rate(optimizer, plan, step)];
    verdict.close("learning rate", [state.learning_rate], &expected, |_| expected[0], 2.0 * f64::EPSILON);
    Ok(())
}

/// Tensors one after another, each at a multiple of 64 elements, with alternating factors.
fn tensors(sizes: &[usize]) -> (Vec<(Range<usize>, Factors)>, usize) {
    let slower = Factors { learning_rate: 0.3, weight_decay: 0.7 };
    let mut begin = 0;
    let mut tensors = Vec::new();
    for (i, len) in sizes.iter().enumerate() {
        tensors.push((begin..begin + len, [Factors::ONE, Factors::NO_DECAY, slower][i % 3]));
        begin = (begin + len).next_multiple_of(64);
    }
    (tensors, begin)
}

fn update(
    harness: &mut Harness,
    verdict: &mut Verdict,
    optimizer: &Optimizer,
    plan: UpdatePlan,
    sizes: &[usize],
) -> Result<()> {
    let (tensors, len) = tensors(sizes);
    let mut gradients = harness.random.floats(len * STEPS as usize);
    // Some are so small that their squares are subnormal or zero.
    for (exponent, gradient) in gradients.iter_mut().step_by(5).enumerate() {
        *gradient *= 0.5f32.powi((exponent % 100) as i32);
    }
    // Gradients may be scaled, so that dividing them by the scale is exact.
    let scale = if plan.loss_scaler.is_some() { 4096.0 } else { 1.0 };
    let scaled: Vec<f32> = gradients.iter().map(|gradient| gradient * scale).collect();
    let mut params = harness.random.floats(len);
    // Kernels skip the padding.
    let mut states = [vec![0.0f32; SHIFT + len], vec![0.0f32; SHIFT + len]];
    let mut average = [vec![0.0; SHIFT], params.clone()].concat();
    let gradients_memory = harness.input(&scaled)?;
    let mut table = chunks(tensors.iter().cloned());
    table.iter_mut().for_each(|chunk| chunk.state += SHIFT as u32);
    let sums_memory = harness.input(&vec![0.0f64; table.len()])?;
    let table_memory = harness.input(bytemuck::cast_slice::<_, u8>(&table))?;
    let copied = [DType::Bf16, DType::F16][harness.random.below(2)];
    let scaler = LossScaler::default().with_scale(scale);
    let outputs = [
        Output::holding(bytemuck::bytes_of(&StepState::after(0).with_loss_scale(scaler.initial()))),
        Output::holding(&params),
        Output::holding(&states[0]),
        Output::holding(&states[1]),
        Output::holding(&average),
        Output::activations(copied, &params),
    ];
    let used = optimizer.states();
    let found = harness.twice(verdict, &outputs, |stream, outputs| {
        for step in 0..STEPS as usize {
            let gradients = gradients_memory.view().slice(step * len..(step + 1) * len);
            let (table, sums) = (table_memory.view(), sums_memory.view());
            one_step(stream, optimizer, plan, (table, sums), gradients, outputs)?;
        }
        Ok(())
    })?;
    for step in 0..STEPS {
        let gradients = &gradients[step as usize * len..][..len];
        let squares = tensors.iter().map(|(range, _)| digest::cpu::sum_of_squares(&gradients[range.clone()]));
        let norm = squares.sum::<f64>().sqrt();
        let scale = if norm > MOST { (MOST / (norm + 1e-6)) as f32 } else { 1.0 };
        let gradients: Vec<f32> = gradients.iter().map(|gradient| gradient * scale).collect();
        if step + 1 == STEPS {
            let state: StepState = bytemuck::pod_read_unaligned(found.bytes(0));
            verdict.close("norm", [state.norm], &[norm], |_| norm, 1e-12);
        }
        let now = optimizer.with_lr(rate(optimizer, plan, step));
        for (range, factors) in &tensors {
            let [first, second] = &mut states;
            let own = SHIFT + range.start..SHIFT + range.end;
            let state = State {
                first: if used > 0 { &mut first[own.clone()] } else { &mut [] },
                second: if used > 1 { &mut second[own.clone()] } else { &mut [] },
            };
            let (params, gradients) = (&mut params[range.clone()], &gradients[range.clone()]);
            cpu::update(&harness.threads, &now, *factors, step + 1, params, gradients, state);
            cpu::average(&harness.threads, AVERAGE, params, &mut average[own]);
        }
    }
    let bound = bound::chain(2 * STEPS as u32, DType::F32);
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|value| f64::from(*value)).collect() };
    for (output, what, expected) in [
        (1, "parameter", &params),
        (2, "first state", &states[0]),
        (3, "second state", &states[1]),
        (4, "average", &average),
    ] {
        let expected = wide(expected);
        verdict.close(what, found.floats(output), &expected, |i| expected[i].abs() + 1e-2, bound);
    }
    // The copy must match the GPU's own parameters.
    let copy: Vec<f32> = found.floats(1).iter().map(|value| round_to(copied, *value)).collect();
    verdict.same("copy", &found.floats(5), &copy);
    Ok(())
}

/// Begins a step and applies it with clipped gradients. Takes the table of chunks and memory for a sum of each.
/// `outputs` are state, parameters, first and second state, average and copy.
pub(super) fn one_step(
    stream: &Stream,
    optimizer: &Optimizer,
    plan: UpdatePlan,
    (table, sums): (View<'_>, View<'_>),
    gradients: View<'_>,
    outputs: &[View<'_>],
) -> Result<()> {
    cuda::begin_step(stream, optimizer, plan, outputs[0])?;
    cuda::squares(stream, gradients, table, sums)?;
    cuda::total_squares(stream, sums, outputs[0])?;
    cuda::clip(stream, outputs[0], MOST)?;
    let used = optimizer.states();
    let arenas = Arenas {
        gradients,
        params: outputs[1],
        first: (used > 0).then_some(outputs[2]),
        second: (used > 1).then_some(outputs[3]),
        average: Some((outputs[4], AVERAGE)),
        copy: Some(outputs[5]),
    };
    cuda::update(stream, optimizer, outputs[0], table, &arenas)
}
