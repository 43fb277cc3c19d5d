//! Optimizers on the CPU: one pass over memory, divided among threads.
//!
//! The loops are plain Rust, compiled for each vector instruction set. The compiler neither fuses nor reorders
//! operations, and square roots and quotients are correctly rounded, so every processor gives the same bits.

use super::{Adam, AdamW, Factors, Optimizer, RmsProp, Sgd, State};
use crate::simd::{Simd, Task, dispatch};
use crate::threads::{Rows, Threads};

/// Fewer parameters are not worth another thread.
const GRAIN: usize = 1 << 14;

/// Applies one step to matching slices of parameters, gradients and state, which have the same `factors`. `step` counts
/// from 1.
///
/// # Panics
/// If the slices differ in length, a state that the optimizer needs is missing, or `step` is 0.
pub fn update(
    threads: &Threads,
    optimizer: &Optimizer,
    factors: Factors,
    step: u64,
    params: &mut [f32],
    gradients: &[f32],
    state: State<'_>,
) {
    assert!(step > 0, "steps count from 1");
    assert_eq!(gradients.len(), params.len(), "gradients and parameters");
    let width = |used: bool| usize::from(used);
    let (first, second) = (width(optimizer.states() > 0), width(optimizer.states() > 1));
    assert_eq!(state.first.len(), first * params.len(), "first state");
    assert_eq!(state.second.len(), second * params.len(), "second state");
    let items = params.len();
    let outputs = (Rows::new(params, 1), Rows::new(state.first, first), Rows::new(state.second, second));
    threads.divide(items, GRAIN, outputs, |range, (params, first, second)| {
        let gradients = &gradients[range];
        let (params, first, second) = (params.values, first.values, second.values);
        dispatch(Update { optimizer, factors, step, params, gradients, first, second });
    });
}

/// One step for a part of the parameters.
struct Update<'a> {
    optimizer: &'a Optimizer,
    factors: Factors,
    step: u64,
    params: &'a mut [f32],
    gradients: &'a [f32],
    first: &'a mut [f32],
    second: &'a mut [f32],
}

impl Task for Update<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Update { optimizer, factors, step, params, gradients, first, second } = self;
        match *optimizer {
            Optimizer::Adam(o) => adam(o, factors, step, params, gradients, first, second),
            Optimizer::AdamW(o) => adam_w(o, factors, step, params, gradients, first, second),
            Optimizer::RmsProp(o) => rms_prop(o, factors, params, gradients, first, second),
            Optimizer::Sgd(o) => sgd(o, factors, step, params, gradients, first),
        }
    }
}

/// Updates an exponential moving average of the parameters: `average = decay · average + (1 − decay) · params`.
///
/// # Panics
/// If the slices differ in length.
pub fn average(threads: &Threads, decay: f64, params: &[f32], average: &mut [f32]) {
    assert_eq!(params.len(), average.len());
    let towards = (1.0 - decay) as f32;
    threads.divide(params.len(), GRAIN, Rows::new(average, 1), |range, average| {
        dispatch(Average { towards, params: &params[range], average: average.values });
    });
}

/// A step of the average for a part of the parameters.
struct Average<'a> {
    towards: f32,
    params: &'a [f32],
    average: &'a mut [f32],
}

impl Task for Average<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (average, &param) in self.average.iter_mut().zip(self.params) {
            *average += self.towards * (param - *average);
        }
    }
}

impl Factors {
    /// `rate` with the factor of the learning rate. Multiplied in f64 and rounded once, as on a GPU.
    #[inline(always)]
    fn rate(self, rate: f64) -> f32 {
        (rate * f64::from(self.learning_rate)) as f32
    }

    /// The weight decay λ for gradients, with its factor.
    #[inline(always)]
    fn decay(self, weight_decay: f64) -> f32 {
        weight_decay as f32 * self.weight_decay
    }
}

/// `state`, but zero below the smallest normal number. Where gradients are zero, as behind a ReLU that is never active, states
/// decay and would stay at a few units in the last place for ever: 0.9 times 4 of them rounds to 4. Many processors take a
/// hundred times as long for such numbers. GPUs do the same, for the same bits.
#[inline(always)]
fn normal(state: f32) -> f32 {
    if state.abs() < f32::MIN_POSITIVE { 0.0 } else { state }
}

/// The smallest gradient that counts in a mean of squares to which `towards` times its square is added: smaller ones would
/// add subnormal numbers, which are slow even where they are rounded away.
#[inline(always)]
pub(super) fn least_squared(towards: f32) -> f32 {
    (f32::MIN_POSITIVE / towards).sqrt()
}

/// `towards` times the square of `gradient`, but zero if it would be subnormal.
#[inline(always)]
pub(super) fn scaled_square(gradient: f32, towards: f32, least: f32) -> f32 {
    let gradient = if gradient.abs() < least { 0.0 } else { gradient };
    towards * gradient * gradient
}

#[inline(always)]
fn adam(
    o: Adam,
    factors: Factors,
    step: u64,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    let decay = factors.decay(o.weight_decay);
    adam_pass(o, factors, (1.0, decay), step, params, gradients, first, second);
}

#[inline(always)]
fn adam_w(
    o: AdamW,
    factors: Factors,
    step: u64,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    let share = f64::from(factors.learning_rate) * f64::from(factors.weight_decay);
    let keep = (1.0 - o.lr * o.weight_decay * share) as f32;
    let AdamW { lr, beta1, beta2, eps, .. } = o;
    let o = Adam { lr, beta1, beta2, eps, weight_decay: 0.0 };
    adam_pass(o, factors, (keep, 0.0), step, params, gradients, first, second);
}

/// Adam on parameters that are first multiplied by `keep`, with `decay` times the parameter added to the gradient.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "matching slices, and the constants of the step")]
fn adam_pass(
    o: Adam,
    factors: Factors,
    (keep, decay): (f32, f32),
    step: u64,
    params: &mut [f32],
    gradients: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) {
    let (correction1, correction2) = (1.0 - o.beta1.powf(step as f64), 1.0 - o.beta2.powf(step as f64));
    let rate = factors.rate(o.lr / correction1);
    let root = correction2.sqrt().recip() as f32;
    let (towards1, beta2, towards2) = ((1.0 - o.beta1) as f32, o.beta2 as f32, (1.0 - o.beta2) as f32);
    let (eps, least) = (o.eps as f32, least_squared(towards2));
    let states = first.iter_mut().zip(second);
    for ((param, &gradient), (m, v)) in params.iter_mut().zip(gradients).zip(states) {
        let gradient = gradient + decay * *param;
        *m = normal(*m + towards1 * (gradient - *m));
        *v = normal(beta2 * *v + scaled_square(gradient, towards2, least));
        *param = *param * keep - rate * *m / (v.sqrt() * root + eps);
    }
}

#[inline(always)]
fn rms_prop(
    o: RmsProp,
    factors: Factors,
    params: &mut [f32],
    gradients: &[f32],
    square: &mut [f32],
    buffer: &mut [f32],
) {
    let (rate, rho, towards) = (factors.rate(o.lr), o.rho as f32, (1.0 - o.rho) as f32);
    let (eps, momentum, decay) = (o.eps as f32, o.momentum as f32, factors.decay(o.weight_decay));
    let least = least_squared(towards);
    let step = |param: f32, gradient: f32, mean: &mut f32| {
        let gradient = gradient + decay * param;
        *mean = normal(rho * *mean + scaled_square(gradient, towards, least));
        gradient / (mean.sqrt() + eps)
    };
    let each = params.iter_mut().zip(gradients).zip(square);
    if buffer.is_empty() {
        for ((param, &gradient), square) in each {
            *param -= rate * step(*param, gradient, square);
        }
    } else {
        for (((param, &gradient), square), buffer) in each.zip(buffer) {
            *buffer = normal(momentum * *buffer + step(*param, gradient, square));
            *param -= rate * *buffer;
        }
    }
}

#[inline(always)]
fn sgd(o: Sgd, factors: Factors, step: u64, params: &mut [f32], gradients: &[f32], buffer: &mut [f32]) {
    let (rate, momentum, decay) = (factors.rate(o.lr), o.momentum as f32, factors.decay(o.weight_decay));
    let each = params.iter_mut().zip(gradients);
    if buffer.is_empty() {
        for (param, &gradient) in each {
            *param -= rate * (gradient + decay * *param);
        }
        return;
    }
    let (old, new) = if step == 1 { (0.0, 1.0) } else { (momentum, (1.0 - o.dampening) as f32) };
    let (ahead, along) = if o.nesterov { (1.0, momentum) } else { (0.0, 1.0) };
    for ((param, &gradient), buffer) in each.zip(buffer) {
        let gradient = gradient + decay * *param;
        *buffer = normal(old * *buffer + new * gradient);
        *param -= rate * (ahead * gradient + along * *buffer);
    }
}
