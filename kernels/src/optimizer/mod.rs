//! Optimizers: compute new parameters from gradients and the optimizer's state.
//!
//! Contract: an update reads and writes matching slices of parameters, gradients and up to two arenas of state,
//! element by element, so dividing an arena into ranges does not change the result. `step` counts from 1. The
//! formulas are those of PyTorch's `torch.optim`, in `f32` with the per-step constants computed in `f64`: `g` is the
//! gradient, `p` the parameter, and weight decay λ first adds `λ·p` to `g`, except in AdamW. [`Factors`] multiply
//! `lr` and λ for a part of the parameters, like the options of PyTorch's parameter groups.
//!
//! | optimizer | first state | second state | update |
//! |---|---|---|---|
//! | [`Adam`] | `m += (1−β₁)(g − m)` | `v = β₂v + (1−β₂)g²` | `p −= lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)` |
//! | [`AdamW`] | same | same | `p *= 1 − lr·λ`, then as Adam without decay |
//! | [`RmsProp`] | `s = ρs + (1−ρ)g²` | `b = μb + g/(√s + ε)`, if μ ≠ 0 | `p −= lr · b`, or `lr · g/(√s + ε)` |
//! | [`Sgd`] | `b = μb + (1−δ)g` (`g` in step 1), if μ ≠ 0 | | `p −= lr · b`; Nesterov: `lr · (g + μb)`; μ = 0: `lr · g` |
//!
//! States below the smallest normal number are zero, and so is what a squared gradient adds to a state, because processors
//! are slow with such numbers: the only difference from PyTorch's formulas. (With β₂ = 0.999, gradients below 3.4·10⁻¹⁸ add
//! nothing to Adam's `v`.)
//!
//! Sources: Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW), Tieleman and Hinton 2012 (RMSprop),
//! Sutskever et al. 2013 (momentum).

pub mod chunk;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;

/// Hyper-parameters of Adam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// L2 penalty, λ: added to the gradient as `λ·p`.
    pub weight_decay: f64,
}

impl Default for Adam {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

/// Hyper-parameters of AdamW: Adam with decoupled weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay, λ: every step shrinks the parameters by `lr·λ`.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Hyper-parameters of RMSprop, not centred.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsProp {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the mean square, ρ (PyTorch's `alpha`).
    pub rho: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Momentum, μ.
    pub momentum: f64,
    /// L2 penalty, λ: added to the gradient as `λ·p`.
    pub weight_decay: f64,
}

impl Default for RmsProp {
    fn default() -> Self {
        Self { lr: 1e-3, rho: 0.9, eps: 1e-8, momentum: 0.0, weight_decay: 0.0 }
    }
}

/// Hyper-parameters of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum, μ.
    pub momentum: f64,
    /// Dampening of the gradient in the momentum, δ.
    pub dampening: f64,
    /// Nesterov's form of momentum.
    pub nesterov: bool,
    /// L2 penalty, λ: added to the gradient as `λ·p`.
    pub weight_decay: f64,
}

impl Default for Sgd {
    fn default() -> Self {
        Self { lr: 1e-2, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

/// Any of the optimizers, with its hyper-parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Optimizer {
    /// See [`Adam`].
    Adam(Adam),
    /// See [`AdamW`].
    AdamW(AdamW),
    /// See [`RmsProp`].
    RmsProp(RmsProp),
    /// See [`Sgd`].
    Sgd(Sgd),
}

/// Factors for the learning rate and the weight decay of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// Factor of the learning rate.
    pub learning_rate: f32,
    /// Factor of the weight decay.
    pub weight_decay: f32,
}

impl Factors {
    /// The optimizer's own learning rate and weight decay.
    pub const ONE: Factors = Factors { learning_rate: 1.0, weight_decay: 1.0 };
    /// The optimizer's own learning rate, and no weight decay.
    pub const NO_DECAY: Factors = Factors { weight_decay: 0.0, ..Factors::ONE };
}

/// Matching slices of an optimizer's state arenas; those it does not use are empty.
#[derive(Debug, Default)]
pub struct State<'a> {
    /// First state: Adam's first moment, RMSprop's mean square, SGD's momentum.
    pub first: &'a mut [f32],
    /// Second state: Adam's second moment, RMSprop's momentum.
    pub second: &'a mut [f32],
}

impl Optimizer {
    /// Number of state arenas, each as long as the parameters and zero before the first step.
    pub fn states(&self) -> usize {
        match self {
            Self::Adam(_) | Self::AdamW(_) => 2,
            Self::RmsProp(o) => 1 + usize::from(o.momentum != 0.0),
            Self::Sgd(o) => usize::from(o.momentum != 0.0),
        }
    }

    /// The name of each state arena in a checkpoint, as in PyTorch.
    pub fn state_names(&self) -> &'static [&'static str] {
        let names: &[&str] = match self {
            Self::Adam(_) | Self::AdamW(_) => &["exp_avg", "exp_avg_sq"],
            Self::RmsProp(_) => &["square_avg", "momentum_buffer"],
            Self::Sgd(_) => &["momentum_buffer"],
        };
        &names[..self.states()]
    }

    /// The name: `adam`, `adamw`, `rmsprop` or `sgd`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Adam(_) => "adam",
            Self::AdamW(_) => "adamw",
            Self::RmsProp(_) => "rmsprop",
            Self::Sgd(_) => "sgd",
        }
    }

    /// The learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam(o) => o.lr,
            Self::AdamW(o) => o.lr,
            Self::RmsProp(o) => o.lr,
            Self::Sgd(o) => o.lr,
        }
    }

    /// The same optimizer with another learning rate.
    pub fn with_lr(mut self, lr: f64) -> Self {
        match &mut self {
            Self::Adam(o) => o.lr = lr,
            Self::AdamW(o) => o.lr = lr,
            Self::RmsProp(o) => o.lr = lr,
            Self::Sgd(o) => o.lr = lr,
        }
        self
    }

    /// The weight decay λ.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::Adam(o) => o.weight_decay,
            Self::AdamW(o) => o.weight_decay,
            Self::RmsProp(o) => o.weight_decay,
            Self::Sgd(o) => o.weight_decay,
        }
    }

    /// The L2 penalty λ whose gradient `λ·p` is added to that of the loss; 0 for AdamW, whose weight decay is not the
    /// gradient of a penalty.
    pub fn l2(&self) -> f64 {
        if matches!(self, Self::AdamW(_)) { 0.0 } else { self.weight_decay() }
    }

    /// The optimizer that makes of gradients `scale` times as large the updates that this one makes of the gradients
    /// themselves, such as of a sum over `scale` ranks in place of the mean. The state is scaled with the gradients.
    ///
    /// | optimizer | learning rate | ε | λ |
    /// |---|---|---|---|
    /// | [`Sgd`] | divided by `scale` | | multiplied |
    /// | [`Adam`], [`RmsProp`] | unchanged: a quotient of gradients has no scale | multiplied | multiplied |
    /// | [`AdamW`] | unchanged | multiplied | unchanged: its decay does not pass through the gradient |
    ///
    /// RMSprop's momentum holds such quotients, so it has no scale either. If `scale` is a power of two, every
    /// operation is exact, and the updates have the same bits (unless numbers are so small that they lose digits).
    ///
    /// ```
    /// use mgpu_kernels::optimizer::{Adam, Optimizer, Sgd};
    /// let sgd = Optimizer::Sgd(Sgd { lr: 0.1, weight_decay: 0.5, ..Sgd::default() });
    /// assert_eq!((sgd.with_gradient_scale(2.0).lr(), sgd.with_gradient_scale(2.0).weight_decay()), (0.05, 1.0));
    /// let adam = Optimizer::Adam(Adam { eps: 1e-8, ..Adam::default() });
    /// assert_eq!(adam.with_gradient_scale(2.0), Optimizer::Adam(Adam { eps: 2e-8, ..Adam::default() }));
    /// ```
    #[must_use]
    pub fn with_gradient_scale(mut self, scale: f64) -> Self {
        match &mut self {
            Self::Adam(o) => (o.eps, o.weight_decay) = (o.eps * scale, o.weight_decay * scale),
            Self::AdamW(o) => o.eps *= scale,
            Self::RmsProp(o) => (o.eps, o.weight_decay) = (o.eps * scale, o.weight_decay * scale),
            Self::Sgd(o) => (o.lr, o.weight_decay) = (o.lr / scale, o.weight_decay * scale),
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{assert_close, random};
    use crate::threads::Threads;

    const LEN: usize = 40_000;

    impl Optimizer {
        fn with_weight_decay(mut self, weight_decay: f64) -> Self {
            match &mut self {
                Self::Adam(o) => o.weight_decay = weight_decay,
                Self::AdamW(o) => o.weight_decay = weight_decay,
                Self::RmsProp(o) => o.weight_decay = weight_decay,
                Self::Sgd(o) => o.weight_decay = weight_decay,
            }
            self
        }
    }

    /// Five steps with changing gradients, compared with `reference(t, p, g, first, second)` in `f64`.
    fn check(optimizer: Optimizer, reference: impl Fn(i32, &mut f64, f64, &mut f64, &mut f64)) {
        check_with(optimizer, Factors::ONE, &reference);
        // A tensor with factors is updated like one of an optimizer with multiplied hyper-parameters.
        let factors = Factors { learning_rate: 0.25, weight_decay: 3.0 };
        let (lr, weight_decay) = (optimizer.lr() / 0.25, optimizer.weight_decay() / 3.0);
        check_with(optimizer.with_lr(lr).with_weight_decay(weight_decay), factors, &reference);
    }

    fn check_with(
        optimizer: Optimizer,
        factors: Factors,
        reference: &impl Fn(i32, &mut f64, f64, &mut f64, &mut f64),
    ) {
        let start = random(LEN, 1);
        for count in [1, 3] {
            let threads = Threads::new(count);
            let mut params = start.clone();
            let mut states = [vec![0.0f32; LEN], vec![0.0f32; LEN]];
            let mut exact: Vec<[f64; 3]> = start.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
            for t in 1..=5 {
                let gradients = random(LEN, 10 + t);
                let [first, second] = &mut states;
                let used = optimizer.states();
                let state = State {
                    first: if used > 0 { first } else { &mut [] },
                    second: if used > 1 { second } else { &mut [] },
                };
                cpu::update(&threads, &optimizer, factors, t, &mut params, &gradients, state);
                for ([p, first, second], &g) in exact.iter_mut().zip(&gradients) {
                    reference(t as i32, p, f64::from(g), first, second);
                }
            }
            assert_close(&params, &exact.iter().map(|e| e[0]).collect::<Vec<_>>(), 2e-6);
        }
    }

    #[test]
    fn adam_follows_its_formula() {
        let o = Adam { lr: 0.01, weight_decay: 0.1, ..Adam::default() };
        check(Optimizer::Adam(o), |t, p, g, m, v| {
            let g = g + 0.1 * *p;
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.999 * *v + 0.001 * g * g;
            let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(t)), *v / (1.0 - 0.999f64.powi(t)));
            *p -= 0.01 * m_hat / (v_hat.sqrt() + 1e-8);
        });
    }

    #[test]
    fn adamw_follows_its_formula() {
        let o = AdamW { lr: 0.01, weight_decay: 0.1, ..AdamW::default() };
        check(Optimizer::AdamW(o), |t, p, g, m, v| {
            *p *= 1.0 - 0.01 * 0.1;
            *m = 0.9 * *m + 0.1 * g;
            *v = 0.999 * *v + 0.001 * g * g;
            let (m_hat, v_hat) = (*m / (1.0 - 0.9f64.powi(t)), *v / (1.0 - 0.999f64.powi(t)));
            *p -= 0.01 * m_hat / (v_hat.sqrt() + 1e-8);
        });
    }

    #[test]
    fn rmsprop_follows_its_formula() {
        for momentum in [0.0, 0.8] {
            let o = RmsProp { lr: 0.01, momentum, weight_decay: 0.1, ..RmsProp::default() };
            check(Optimizer::RmsProp(o), |_, p, g, s, b| {
                let g = g + 0.1 * *p;
                *s = 0.9 * *s + 0.1 * g * g;
                *b = momentum * *b + g / (s.sqrt() + 1e-8);
                *p -= 0.01 * *b;
            });
        }
    }

    #[test]
    fn sgd_follows_its_formula() {
        for (momentum, nesterov, dampening) in [(0.0, false, 0.0), (0.9, false, 0.3), (0.9, true, 0.0)] {
            let o = Sgd { lr: 0.05, momentum, dampening, nesterov, weight_decay: 0.1 };
            check(Optimizer::Sgd(o), |t, p, g, b, _| {
                let g = g + 0.1 * *p;
                *b = if t == 1 { g } else { momentum * *b + (1.0 - dampening) * g };
                *p -= 0.05 * if nesterov { g + momentum * *b } else { *b };
            });
        }
    }

    #[test]
    fn states_without_gradients_decay_to_zero() {
        for optimizer in [
            Optimizer::Adam(Adam { beta2: 0.9, ..Adam::default() }),
            Optimizer::AdamW(AdamW { beta2: 0.9, ..AdamW::default() }),
            Optimizer::RmsProp(RmsProp { momentum: 0.9, ..RmsProp::default() }),
            Optimizer::Sgd(Sgd { momentum: 0.9, ..Sgd::default() }),
        ] {
            let (mut params, mut states) = ([1.0; 40], [[0.0f32; 40], [0.0; 40]]);
            let [first, second] = &mut states;
            for step in 1..=1500 {
                let gradients = [if step == 1 { 1.0 } else { 0.0 }; 40];
                let second = if optimizer.states() > 1 { &mut second[..] } else { &mut [] };
                let state = State { first, second };
                cpu::update(&Threads::new(1), &optimizer, Factors::ONE, step, &mut params, &gradients, state);
                assert!(first.iter().chain(&*second).all(|state| !state.is_subnormal()), "{optimizer:?}");
            }
            assert_eq!(states, [[0.0; 40], [0.0; 40]], "{optimizer:?}");
        }
    }

    #[test]
    fn squares_of_gradients_are_zero_or_not_subnormal() {
        for towards in [1.0, 0.1, 0.001, 1e-6] {
            let least = cpu::least_squared(towards);
            for gradient in
                (0..800).map(|i| 1e-25 * 1.1f32.powi(i)).flat_map(|gradient| [gradient, -gradient])
            {
                let exact = f64::from(towards) * f64::from(gradient) * f64::from(gradient);
                let square = f64::from(cpu::scaled_square(gradient, towards, least));
                if exact < f64::from(f32::MIN_POSITIVE) {
                    assert_eq!(square, 0.0, "{towards} times {gradient:e} squared");
                } else {
                    assert!(
                        (square / exact - 1.0).abs() < 2e-7,
                        "{towards} times {gradient:e} squared: {square:e}"
                    );
                }
            }
            assert!(cpu::scaled_square(f32::NAN, towards, least).is_nan());
        }
    }

    /// The parameters after five steps with gradients `scale` times as large, by the optimizer for them.
    fn trained(optimizer: Optimizer, scale: f32) -> Vec<f32> {
        let optimizer = optimizer.with_gradient_scale(f64::from(scale));
        let mut params = random(LEN, 1);
        let mut states: Vec<Vec<f32>> = vec![vec![0.0; LEN]; optimizer.states()];
        for t in 1..=5 {
            let gradients: Vec<f32> = random(LEN, 10 + t).iter().map(|gradient| scale * gradient).collect();
            let mut states = states.iter_mut().map(|state| &mut state[..]);
            let state =
                State { first: states.next().unwrap_or_default(), second: states.next().unwrap_or_default() };
            cpu::update(&Threads::new(1), &optimizer, Factors::ONE, t, &mut params, &gradients, state);
        }
        params
    }

    #[test]
    fn updates_do_not_depend_on_the_scale_of_gradients_with_the_optimizer_for_it() {
        let (lr, weight_decay) = (0.01, 0.1);
        // A large ε, so that it matters.
        let eps = 0.1;
        for optimizer in [
            Optimizer::Adam(Adam { lr, weight_decay, eps, ..Adam::default() }),
            Optimizer::AdamW(AdamW { lr, weight_decay, eps, ..AdamW::default() }),
            Optimizer::RmsProp(RmsProp { lr, weight_decay, eps, ..RmsProp::default() }),
            Optimizer::RmsProp(RmsProp { lr, weight_decay, eps, momentum: 0.8, ..RmsProp::default() }),
            Optimizer::Sgd(Sgd { lr, weight_decay, ..Sgd::default() }),
            Optimizer::Sgd(Sgd { lr, weight_decay, momentum: 0.9, nesterov: true, ..Sgd::default() }),
        ] {
            let expected = trained(optimizer, 1.0);
            assert_eq!(trained(optimizer, 4.0), expected, "{optimizer:?}");
            let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
            assert_close(&trained(optimizer, 3.0), &expected, 2e-6);
        }
    }

    #[test]
    fn the_average_moves_towards_the_parameters() {
        let mut average = [1.0, 2.0];
        cpu::average(&Threads::new(1), 0.75, &[5.0, 2.0], &mut average);
        assert_eq!(average, [2.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "first state")]
    fn a_missing_state_panics() {
        let optimizer = Optimizer::Adam(Adam::default());
        cpu::update(&Threads::new(1), &optimizer, Factors::ONE, 1, &mut [0.0], &[0.0], State::default());
    }
}
