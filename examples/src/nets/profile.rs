//! Where the time of a step goes: kept for each stage of a network, where it is asked for.

use std::time::{Duration, Instant};

use mgpu_kernels::conv::Padding;

use super::plan::{Op, Plan, Stage};

/// Times of a network's stages, summed over steps.
#[derive(Debug, Clone)]
pub struct Profile {
    last: Instant,
    pub(super) forward: Vec<Duration>,
    pub(super) backward: Vec<Duration>,
    pub(super) other: Duration,
    pub(super) communication: Duration,
    pub(super) steps: u32,
    pub(super) images: usize,
}

/// What one stage took on average.
#[derive(Debug, Clone, PartialEq)]
pub struct StageTimes {
    /// Index in the spec of its first layer, and what it does.
    pub name: String,
    /// What computes it.
    pub kernel: String,
    /// Seconds a step for the forward pass.
    pub forward: f64,
    /// Seconds a step for the backward pass.
    pub backward: f64,
    /// Multiplications and additions of its definition a step: none but those of convolutions and dense layers count.
    pub operations: f64,
}

impl Profile {
    pub(super) fn new(stages: usize) -> Self {
        Profile {
            last: Instant::now(),
            forward: vec![Duration::ZERO; stages],
            backward: vec![Duration::ZERO; stages],
            other: Duration::ZERO,
            communication: Duration::ZERO,
            steps: 0,
            images: 0,
        }
    }

    /// Steps that were measured.
    pub fn steps(&self) -> u32 {
        self.steps
    }

    /// Seconds a step that were spent on the loss, and on bringing images to the first layer.
    pub fn loss(&self) -> f64 {
        self.mean(self.other)
    }

    /// Seconds a step for which communication held the passes up.
    pub fn communication(&self) -> f64 {
        self.mean(self.communication)
    }

    fn mean(&self, sum: Duration) -> f64 {
        sum.as_secs_f64() / f64::from(self.steps.max(1))
    }

    pub(super) fn stages(&self, plan: &Plan, kernels: impl IntoIterator<Item = String>) -> Vec<StageTimes> {
        let first = plan.first_with_parameters();
        let stages = plan.stages.iter().zip(kernels).enumerate();
        let images = self.images as f64 / f64::from(self.steps.max(1));
        let times = stages.map(|(place, (stage, kernel))| {
            let forward = operations(stage.op) * images;
            StageTimes {
                name: format!("{} {}", stage.layer, describe(stage)),
                kernel,
                forward: self.mean(self.forward[place]),
                backward: self.mean(self.backward[place]),
                // The gradients of weights and input take as many each.
                operations: forward * if place > first { 3.0 } else { 2.0 },
            }
        });
        times.collect()
    }
}

/// Starts the clock, where there is one.
pub(super) fn start(profile: &mut Option<Profile>) {
    if let Some(profile) = profile {
        profile.last = Instant::now();
    }
}

/// Adds the time since the last call to what `part` names.
pub(super) fn lap(profile: &mut Option<Profile>, part: impl FnOnce(&mut Profile) -> &mut Duration) {
    if let Some(profile) = profile {
        let now = Instant::now();
        let took = now - profile.last;
        profile.last = now;
        *part(profile) += took;
    }
}

/// What a stage does, in words.
pub(super) fn describe(stage: &Stage) -> String {
    let activation = |slope: Option<f32>| match slope {
        None => "",
        Some(0.0) => ", relu",
        Some(_) => ", leaky relu",
    };
    match stage.op {
        Op::Conv { shape, slope, pool, .. } => {
            let padding = if shape.padding == Padding::Same { "same" } else { "valid" };
            let pool = if pool.is_some() { ", pool" } else { "" };
            format!(
                "conv {} {k}x{k} {padding} of {}x{}x{}{}{pool}",
                shape.filters,
                shape.channels,
                shape.height,
                shape.width,
                activation(slope),
                k = shape.kernel
            )
        }
        Op::Dense { shape, slope, .. } => {
            format!("dense {} of {}{}", shape.outputs, shape.inputs, activation(slope))
        }
        Op::Norm { .. } => "batch norm".to_owned(),
        Op::Activation { slope } => activation(Some(slope)).trim_start_matches(", ").to_owned(),
        Op::Pool(pool) => format!("pool of {}x{}x{}", pool.channels, pool.shape.height, pool.shape.width),
        Op::Dropout { probability, .. } => format!("dropout {probability}"),
    }
}

/// Multiplications and additions of the forward pass of one image.
fn operations(op: Op) -> f64 {
    let products = match op {
        Op::Conv { shape, .. } => shape.output_len() * shape.filter_len(),
        Op::Dense { shape, .. } => shape.inputs * shape.outputs,
        _ => 0,
    };
    2.0 * products as f64
}
